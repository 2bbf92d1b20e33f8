"""/metrics: Prometheus text, with the names of vLLM and llama.cpp.

vLLM's `spec_decode_*` counters (https://docs.vllm.ai, "Production Metrics") are given with the
prefix `mlx_spec:` and, as llama.cpp's server does since its pull request 26389, with `llamacpp:`.
The other `llamacpp:` names are those of llama.cpp's server.
"""

from collections.abc import Iterator
from typing import Any

from mlx_spec.errors import SpecError
from mlx_spec.server.status import Status

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError:  # it comes with the extra "server"
    AVAILABLE = False
else:
    AVAILABLE = True

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(status: Status) -> bytes:
    """Raises: SpecError where prometheus_client is missing."""
    if not AVAILABLE:
        raise SpecError("/metrics needs prometheus_client; run pip install 'mlx-spec[server]'.")
    registry = CollectorRegistry()
    registry.register(Collector(status))
    return generate_latest(registry)


class Collector:
    def __init__(self, status: Status):
        self.status = status

    def collect(self) -> Iterator[Any]:
        values = self.status.as_dict()
        totals = self.status.responses.ledger.totals()
        drafting_rounds = totals.drafted_by_position[0]
        counters = {
            "spec_decode_num_drafts": (drafting_rounds, "Rounds in which drafts were made."),
            "spec_decode_num_draft_tokens": (totals.drafted, "Drafts that were made."),
            "spec_decode_num_accepted_tokens": (totals.accepted, "Drafts that were accepted."),
            "prompt_tokens": (
                totals.prompt_tokens,
                "Processed prompt tokens, without cached ones.",
            ),
            "tokens_predicted": (totals.tokens, "Generated tokens."),
            "prompt_seconds": (totals.prompt_s, "Time to the first token, in seconds."),
            "tokens_predicted_seconds": (totals.predicted_s, "Time after the first token."),
        }
        gauges = {
            "requests_processing": (values["requests_active"], "Requests being decoded."),
            "requests_deferred": (values["requests_waiting"], "Requests that wait."),
            "prompt_tokens_seconds": (
                totals.prompt_tokens / totals.prompt_s if totals.prompt_s else 0,
                "Average prompt tokens per second.",
            ),
            "predicted_tokens_seconds": (
                values["tokens_per_second_average"] or 0,
                "Average generated tokens per second.",
            ),
        }
        for prefix in ("mlx_spec:", "llamacpp:"):
            for name, (value, text) in counters.items():
                yield CounterMetricFamily(prefix + name, text, value=value)
            for name, (value, text) in gauges.items():
                yield GaugeMetricFamily(prefix + name, text, value=value)
            by_position = CounterMetricFamily(
                f"{prefix}spec_decode_num_accepted_tokens_per_pos",
                "Drafts that were accepted, by their position in the round, from 0.",
                labels=["position"],
            )
            for position in sorted(totals.drafted_by_position):
                accepted = totals.accepted_by_position[position]
                by_position.add_metric([str(position)], accepted)
            yield by_position
        requests = CounterMetricFamily(
            "mlx_spec:requests", "Requests that have ended.", labels=["outcome"]
        )
        for outcome, count in sorted(totals.outcomes.items()):
            requests.add_metric([outcome], count)
        yield requests
        for name in ("memory_active_bytes", "memory_peak_bytes"):
            yield GaugeMetricFamily(f"mlx_spec:{name}", "Of mlx.", value=values[name])
