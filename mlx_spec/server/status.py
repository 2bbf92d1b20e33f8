"""What the server says of itself: /health and /v1/spec/status."""

import os
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.lookup import Lookup
from mlx_spec.load import Pairing, pairing_of
from mlx_spec.options import DraftKind
from mlx_spec.server.generation import SpecResponseGenerator
from mlx_spec.server.record import Record, ratio

SCHEMA_VERSION = 1
NAME = "mlx-spec"


@dataclass
class Status:
    """A running server.

    Attributes:
        launch_id: tells this start of the server from others.
        started_at: seconds since 1970.
        phase: "starting", "loading", "serving", "stopping" or "failed".
        draft_kind: of requests that do not say.
    """

    responses: SpecResponseGenerator
    launch_id: str
    started_at: float = field(default_factory=time.time)
    phase: str = "starting"
    draft_kind: DraftKind = "auto"

    def identity(self) -> dict[str, Any]:
        return {
            "server": NAME,
            "version": version("mlx-spec"),
            "pid": os.getpid(),
            "launch_id": self.launch_id,
        }

    def health(self) -> tuple[int, dict[str, Any]]:
        """HTTP status and body of /health."""
        phase, progress = self._phase_and_progress()
        status = {"starting": "loading", "loading": "loading"}.get(phase, "ok")
        if phase in ("failed", "stopping"):
            status = "unavailable"
        body = {
            "status": status,
            **self.identity(),
            "phase": phase,
            "progress": progress,
            "started_at": self.started_at,
            "model": self.model,
            "drafter": self.drafter,
            "spec": self.spec(),
        }
        return 200 if status == "ok" else 503, body

    def as_dict(self) -> dict[str, Any]:
        """The body of /v1/spec/status. Keys are added, never changed, within a schema version."""
        ledger = self.responses.ledger
        totals, active = ledger.totals(), ledger.active()
        served = [record for record in active if record.context is not None]
        spec = self.spec()
        phase, _ = self._phase_and_progress()
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity(),
            "uptime_s": time.time() - self.started_at,
            "phase": phase,
            "model": self.model,
            "drafter": self.drafter,
            "requests_total": totals.requests,
            "requests_active": len(served),
            "requests_waiting": len(active) - len(served),
            "prompt_done": sum(record.prompt_done for record in served),
            "prompt_total": sum(record.prompt_tokens for record in served),
            "tokens": sum(record.tokens for record in served),
            "tokens_per_second": ledger.tokens_per_second() if served else None,
            "tokens_per_second_average": ratio(totals.tokens_after_first, totals.predicted_s),
            "draft_n": totals.drafted,
            "draft_n_accepted": totals.accepted,
            "acceptance": ratio(totals.accepted, totals.drafted),
            "tokens_per_round": 1 + totals.accepted / totals.rounds if totals.rounds else None,
            "depth": spec["depth"],
            "parked": spec["state"] in ("parked", "standing-down"),
            "spec_state": spec["state"],
            "spec_reason": spec["reason"],
            "memory_active_bytes": mx.get_active_memory(),
            "memory_peak_bytes": mx.get_peak_memory(),
            "last_error": ledger.last_error,
        }

    def progress(self) -> dict[str, int] | None:
        return self._phase_and_progress()[1]

    def spec(self) -> dict[str, Any]:
        """Whether drafts are being made now, and if not, why.

        state: "off" without a drafter (unless a request has asked for lookup), "idle" without
        requests, "drafting", "parked" while drafts do not pay, or "standing-down" while something
        else keeps it from drafting.
        """
        pairing = self._pairing()
        state: str = "idle"
        reason: str | None = None
        detail: str | None = None
        decoding = [r for r in self.responses.ledger.active() if r.context is not None]
        if pairing is None:
            state = "off"
        elif self.drafter is None and not any(record.stats.kind for record in decoding):
            state, reason, detail = "off", pairing.reason, pairing.detail
        elif decoding:
            state, reason, detail = state_of(decoding)
        depth = decoding[0].stats.depth if state == "drafting" else 0
        return {
            "engaged": state == "drafting",
            "state": state,
            "reason": reason,
            "detail": detail,
            "depth": depth,
        }

    @property
    def model(self) -> str | None:
        """The one that is loaded, before that the one to be loaded."""
        provider = self.responses.model_provider
        key = provider.model_key  # which the decoding thread may reset at any time
        name = key[0] if key else provider.cli_args.model
        return None if name is None else str(name)

    @property
    def drafter(self) -> str | None:
        pairing = self._pairing()
        if pairing is None or (pairing.drafter is None and self.draft_kind == "auto"):
            return None
        if pairing.path is None or self.draft_kind == "lookup":
            return Lookup.kind
        return str(pairing.path)

    def _pairing(self) -> Pairing | None:
        provider = self.responses.model_provider
        model = provider.model
        return None if model is None or provider.loading is not None else pairing_of(model)

    def _phase_and_progress(self) -> tuple[str, dict[str, int] | None]:
        if self.phase != "stopping" and not self.responses.is_healthy:
            return "failed", None
        loading = self.responses.model_provider.loading
        if loading is not None and self.phase in ("starting", "loading", "serving"):
            done, total = loading
            return "loading", {"done": done, "total": total}
        if self.phase != "serving":
            return self.phase, None
        active = [r for r in self.responses.ledger.active() if r.context is not None]
        if not active:
            return "idle", None
        if any(record.tokens for record in active):
            return "decode", None
        done = sum(record.prompt_done for record in active)
        return "prefill", {"done": done, "total": sum(record.prompt_tokens for record in active)}


def state_of(decoding: list[Record]) -> tuple[str, str | None, str | None]:
    """State, reason and detail of a server that has a drafter."""
    if len(decoding) > 1:
        return "standing-down", "batch", None
    stats = decoding[0].stats
    if stats.reason is not None:
        return "standing-down", stats.reason, stats.detail
    if stats.state == "parked":
        return "parked", "parked", stats.state_reason
    return ("drafting" if stats.engaged else "idle"), None, None
