"""The result of a benchmark: objects, their JSON (schema.json), what follows from the figures."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_spec.options import DraftTokens

SCHEMA = "mlx-spec/bench/1"

RowDepth = DraftTokens | Literal["stock"]


@dataclass(frozen=True)
class Setting:
    """What was measured, and on what.

    Attributes:
        target_quantization: bits and group size of the model's weights, or their dtype.
        drafter_quantization: the same of the drafter.
        sampling: the law of the drafted runs: greedy, seed, stock or ratio.
        max_tokens: length of each text; end-of-text tokens do not end one.
        cooldown_s: pause before each run, in seconds.
    """

    model: str
    target_quantization: str | None
    drafter: str | None
    drafter_kind: str | None
    drafter_quantization: str | None
    device: str | None
    mlx: str | None
    mlx_lm: str | None
    mlx_spec: str | None
    sampling: str
    temp: float
    max_tokens: int
    repeats: int
    cooldown_s: float


@dataclass(frozen=True)
class FirstDifference:
    """Where a text leaves the one that it should equal.

    Attributes:
        token: index of the first other token; the text's first one has index 0.
        margin: between the two largest of the model's logits there; None where tokens are
            sampled, as the noise decides as well.
        depth: drafts in the round that the other token comes from, if known.
    """

    token: int
    margin: float | None
    depth: int | None


@dataclass(frozen=True)
class Row:
    """One prompt class at one depth; medians over the repeats. None: not known, not applicable.

    Attributes:
        prompt_tps: prompt tokens but the last per second of prefill, the drafter's included.
        generation_tps: tokens per second from the end of the prefill to the last token, with the
            lowest and the highest of the repeats.
        ratio: generation speed over stock's in the same repeat.
        acceptance: accepted / drafted.
        drafted_by_position: how often a first, second, ... draft was made, over all repeats.
        accepted_by_position: how often it was accepted.
        tokens_per_round: 1 + accepted / rounds.
        step_s: T(1), stock's time per token in its own loop, in seconds.
        verify_ratio: T(n+1) / T(1), where T(n+1) is verifying n drafts and bringing the caches to
            what was accepted, and T(1) is measured beside it (parts.py).
        draft_steps: making n drafts, in units of that T(1).
        break_even: the acceptance at which this depth is as fast as stock; see `break_even`.
        peak_memory_bytes: the highest of the repeats.
        identical: whether all repeats gave the text that they should: stock's, or with the law
            "seed" that of a run without drafts. None where the law does not promise a text.
        state: of speculation at the end of the last repeat.
        why: of that state.
    """

    prompt_class: str
    depth: RowDepth
    prompt_tokens: int
    prompt_tps: float | None = None
    generation_tps: float | None = None
    generation_tps_low: float | None = None
    generation_tps_high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    acceptance: float | None = None
    drafted_by_position: list[int] | None = None
    accepted_by_position: list[int] | None = None
    tokens_per_round: float | None = None
    step_s: float | None = None
    verify_ratio: float | None = None
    draft_steps: float | None = None
    break_even: float | None = None
    peak_memory_bytes: int | None = None
    identical: bool | None = None
    first_difference: FirstDifference | None = None
    state: str | None = None
    why: str | None = None

    @property
    def ideal_ratio(self) -> float | None:
        """The ratio that the forwards alone would allow, without any work of the host."""
        if self.tokens_per_round is None or self.verify_ratio is None or self.draft_steps is None:
            return None
        return self.tokens_per_round / (self.verify_ratio + self.draft_steps)

    @property
    def overhead(self) -> float | None:
        """What the loop adds to its forwards: 1 - ratio / ideal ratio."""
        if self.ratio is None or self.ideal_ratio is None:
            return None
        return 1 - self.ratio / self.ideal_ratio


@dataclass(frozen=True)
class Result:
    setting: Setting
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; see schema.json."""
        return {
            "schema": SCHEMA,
            "setting": asdict(self.setting),
            "rows": [asdict(row) for row in self.rows],
        }


def write_json(path: Path, value: Any) -> None:
    """Written beside, then renamed."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written beside, then renamed."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def break_even(n: int, round_steps: float) -> float | None:
    """The acceptance, the same at each of n positions, at which a round is worth its cost.

    Args:
        n: drafts in a round, at least 1.
        round_steps: what the round costs, in steps of plain decoding.

    Returns: a in [0, 1] with 1 + a + ... + a^n = round_steps; 0 where a round costs no more than
        a step; None where no acceptance is enough.
    """
    if round_steps > n + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if sum(middle**k for k in range(n + 1)) < round_steps:
            low = middle
        else:
            high = middle
    return high if low > 0 else 0.0


def add_positions(counts: Sequence[Sequence[int]]) -> list[int]:
    """Counts by position, added up; positions that are missing count nothing."""
    longest = max(map(len, counts), default=0)
    return [sum(c[i] for c in counts if i < len(c)) for i in range(longest)]
