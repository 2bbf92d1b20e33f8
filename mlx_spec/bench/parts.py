"""What the parts of a round cost: drafting, verifying, bringing the caches to what was accepted.

Each part is waited for before the next one begins, from a ready graph to its result: what the
device needs. `round_times` waits for nothing but the host read: it gives the loop's own pace.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_PREFILL_STEP_SIZE, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.accept import Acceptance, Draws, Greedy
from mlx_spec.depth import Fixed
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.wrapped import Wrapped
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.randomness import integers
from mlx_spec.round import Pairs, Request, speculate
from mlx_spec.sliding_window import in_time_order
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for

CALIBRATED = range(9)  # depths


@dataclass(frozen=True)
class Parts:
    """Seconds that the parts of a round at one depth take, each the median of several rounds, and
    what a step of plain decoding takes beside them."""

    step_s: float
    draft_s: float
    verify_s: float
    commit_s: float

    @property
    def verify_ratio(self) -> float:
        """Verifying, with the caches brought to what was accepted, in steps."""
        return (self.verify_s + self.commit_s) / self.step_s

    @property
    def draft_steps(self) -> float:
        return self.draft_s / self.step_s


@dataclass
class Stopwatch:
    """Times in seconds of each part, by its name."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.samples.setdefault(part, []).append(time.perf_counter() - began)

    def parts(self, step_s: float) -> Parts:
        draft, verify, commit = (median(self.samples[p]) for p in ("draft", "verify", "commit"))
        return Parts(step_s, draft, verify, commit)


class TimedLaw:
    """Waits for the draws of each verify forward."""

    def __init__(self, inner: Acceptance, watch: Stopwatch):
        self.watch = watch
        self.inner = inner
        self.name = inner.name
        self.begin = inner.begin
        self.pick = inner.pick
        self.committed = inner.committed
        self.leave = inner.leave

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        draws = self.inner.draw(logits, drafts)
        with self.watch.of("verify"):
            integers(draws.tokens)
        return draws


class TimedDrafter(Wrapped):
    """Waits for the caches of the round before, then for the drafts."""

    def __init__(self, inner: Drafter, law: Acceptance, watch: Stopwatch):
        super().__init__(inner)
        self.watch = watch
        self.law = law

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        """`pick` is not used: it starts the device on each draft before the graph is ready."""
        states = [cache.state for cache in target_caches]
        with self.watch.of("commit"):
            mx.eval(states)
        drafts = self.inner.draft(tokens, hidden, n, self.law.pick, caches, target_caches)
        with self.watch.of("draft"):
            mx.eval(drafts)
        return drafts


def time_parts(
    model: nn.Module,
    drafter: Drafter,
    law: Acceptance,
    prompt: list[int],
    depths: Sequence[int],
    rounds: int,
) -> dict[int, Parts]:
    """The parts of a round at each depth, at least 1, from `rounds` rounds after one prefill, and
    as many again with the depths in reverse order. Plain steps come before, between and after."""
    watches = {n: Stopwatch() for n in depths}
    request = prefilled(model, drafter, law, prompt)
    plain: list[float] = []
    for n in [0, *depths, 0, *reversed(depths), 0]:
        if n == 0:
            request.drafter, request.law = drafter, law
            plain += round_times(request, 0, rounds)
        else:
            request.drafter = TimedDrafter(drafter, law, watches[n])
            request.law = TimedLaw(law, watches[n])
            round_times(request, n, rounds)
    return {n: watch.parts(median(plain)) for n, watch in watches.items()}


def calibrate(
    model: nn.Module,
    drafter: Drafter,
    prompt: list[int],
    depths: Sequence[int] = CALIBRATED,
    rounds: int = 12,
) -> dict[int, float]:
    """Seconds of a round at each depth, in a context of `prompt` and what follows it.

    Returns: the median over `rounds` rounds of the time from one host read to the next; depth 0
    is a round without drafts. Greedy.
    """
    request = prefilled(model, drafter, Greedy(), prompt)
    times: dict[int, float] = {}
    for n in sorted(depths, reverse=True):  # 0 comes last: the drafter does not follow it
        times[n] = median(round_times(request, n, rounds))
    return dict(sorted(times.items()))


def prefilled(model: nn.Module, drafter: Drafter, law: Acceptance, prompt: list[int]) -> Request:
    request = Request(
        target_for(model),
        drafter,
        law,
        in_time_order(make_prompt_cache(model)),
        in_time_order(drafter.make_cache()),
        [Fixed(0)],
        mx.array(prompt, mx.uint32),
        KVQuantization(),
    )
    with mx.stream(generation_stream):
        request.prefill(DEFAULT_PREFILL_STEP_SIZE, lambda done, total: None)
    return request


def round_times(request: Request, n: int, rounds: int) -> list[float]:
    """Go on with a request for `rounds` rounds of n drafts, and two before them.

    Returns: seconds from the read of a round to that of the next, of the last `rounds`.
    """
    request.depths = [Fixed(n)]
    if request.drawn is not None:  # by the rounds before
        request.pending = request.drawn.token
        hidden = request.drawn.hidden
        if n > 0 and (hidden is not None or not request.drafter.needs_hidden):
            request.unlearnt = Pairs(request.drawn.token, hidden)
    stats = SpecStats()
    reads: list[float] = []
    with closing(speculate(request, generation_stream, -1, stats)) as tokens:
        for _ in tokens:
            if stats.rounds > len(reads):
                reads.append(time.perf_counter())
            if stats.rounds == rounds + 2:
                break
    return [later - earlier for earlier, later in pairwise(reads[1:])]
