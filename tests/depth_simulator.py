"""Adaptive depth against made-up acceptance and costs as they are claimed or inferred for Macs.

    python -m tests.depth_simulator

prints, for each cost curve and kind of text: the time of adaptive depth over that of the best
fixed depth (chosen afterwards, on the same text) and over that of plain decoding, the worst 500
tokens in a row against plain decoding, and the share of tokens that were made while parked. Then,
for a machine that is busy with other things now and then: of many requests in a row, the time over
that of the best fixed depth, and how many of a hundred took a quarter more.

A round with n drafts costs rows(n + 1) + n * drafter plain steps, and more with the context. A
round after a change of depth costs extra, and very much so the first at a depth. What `Adaptive`
is told of a round's duration has noise; what is reported is without noise. The noise and what a
change costs are assumed, as is how costs grow with the context; none was measured on a Mac.
Whether a draft is right depends on the place in the text alone, so that all depths meet the same
luck.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from mlx_spec.costs import Knowledge
from mlx_spec.depth import Adaptive, Depth, Fixed

MAX = 8
STEP_S = 0.03  # a plain step at context 0
NOISE, OUTLIERS = 0.04, 0.01  # standard deviation of the logarithm; share of rounds that take 3x
CHANGE = 0.3  # plain steps that the first round after a change of depth costs on top
FIRST = 2.0  # plain steps that the first round at a depth costs on top: kernels are compiled


@dataclass(frozen=True)
class Curve:
    """rows: cost of a verify pass over 1, 2, ... 9 rows, in plain steps.
    drafter: cost of one draft, in plain steps.
    context: by how much a step becomes dearer with each token of context, relative.
    reread: the same for each row from the sixth on, as mlx then reads keys and values per row.
    """

    rows: tuple[float, ...]
    drafter: float
    context: float = 1 / 40_000
    reread: float = 0.0

    def cost(self, depth: int, context: int) -> float:
        """Of a round, in plain steps at context 0."""
        reread = self.reread * max(0, depth + 1 - 5) * context
        return self.rows[depth] + depth * self.drafter + self.context * context + reread


def steady(row: float) -> tuple[float, ...]:
    return tuple(1 + row * n for n in range(MAX + 1))


CURVES = {
    # Published claim, not checked: a row costs 0.2 of a step on M4 Pro, 4-bit dense; drafter: the
    # 0.05 that is claimed for the Gemma-4 assistant.
    "m4-pro": Curve(steady(0.2), 0.05, reread=1 / 80_000),
    # Published claim, not checked: 0.45 to 0.7 on M2 Pro. The drafter's cost is assumed.
    "m2-pro-low": Curve(steady(0.45), 0.07),
    "m2-pro-high": Curve(steady(0.7), 0.07),
    # Inferred: no figure is published; less compute per byte than M4 Pro, more than M2 Pro.
    "m1-max": Curve(steady(0.35), 0.07),
    # Inferred from a claimed speed-up of 1.89: about 1.4 for four rows.
    "m5-max": Curve(steady(0.4 / 3), 0.05),
    # Published claim, not checked: 1.36 for two rows of a mixture of experts. More rows: assumed.
    "moe": Curve((1.0, 1.36, 1.68, 1.97, 2.24, 2.5, 2.74, 2.97, 3.2), 0.07),
    # A blog's sweep of Qwen3.6-35B-A3B at 32k (published claim, not checked): plain 18 tokens a
    # second; 27.2 with 1 draft at acceptance 0.748, 26.2 with 2 at 0.627, 21.5 with 3, 11.5 with 4.
    # Costs are tokens a round / speed-up. Assumed: acceptance 0.53 with 3 and 0.45 with 4, and the
    # costs of more.
    "qwen-35b-32k": Curve((1.0, 1.157, 1.548, 2.167, 4.383, 5.0, 5.6, 6.2, 6.8), 0.0, 0.0),
    # Assumed. Small target with 248k words: the drafter's output matrix is much of the model.
    "big-vocabulary": Curve(steady(0.15), 0.3),
    # Assumed. Packed weights are read again for each of 2 to 12 rows: no pass is much cheaper.
    "reread": Curve(steady(0.9), 0.05),
    # Made up, jagged: kernels differ by row count.
    "jagged": Curve((1.0, 1.10, 1.44, 1.26, 1.54, 2.3, 2.0, 2.1, 1.9), 0.05),
    "jagged-late": Curve((1.0, 1.75, 1.80, 1.30, 1.40, 2.4, 2.5, 2.6, 2.7), 0.02),
}


Text = Callable[[random.Random], Callable[[int, int], float]]
"""Of a seed: acceptance of draft i (0, 1, ...) after so many tokens, if all before it are right."""


def stationary(first: float, falling: float = 0.95) -> Text:
    return lambda seed: lambda place, i: first * falling**i


def wave(low: float, high: float, period: int) -> Text:
    """Linear up and down."""

    def text(seed: random.Random) -> Callable[[int, int], float]:
        offset = seed.random()

        def rate(place: int, i: int) -> float:
            height = abs(2 * ((place / period + offset) % 1) - 1)
            return (low + (high - low) * height) * 0.97**i

        return rate

    return text


def switching(a: float, b: float, shortest: int, longest: int) -> Text:
    def text(seed: random.Random) -> Callable[[int, int], float]:
        rates: list[float] = []
        now, other = (a, b) if seed.random() < 0.5 else (b, a)
        while len(rates) < 8000:
            rates += [now] * seed.randint(shortest, longest)
            now, other = other, now
        return lambda place, i: rates[place] * 0.97**i

    return text


def bursts(low: float, high: float, mean: int) -> Text:
    """Markov: each token, the rate changes with a chance of 1 / mean."""

    def text(seed: random.Random) -> Callable[[int, int], float]:
        rates = []
        now, other = low, high
        for _ in range(8000):
            if seed.random() < 1 / mean:
                now, other = other, now
            rates.append(now)
        return lambda place, i: rates[place]

    return text


TEXTS: dict[str, Text] = {
    "0.00": stationary(0.0),
    "0.20": stationary(0.2),
    "0.40": stationary(0.4),
    "0.60": stationary(0.6),
    "0.75": stationary(0.75),
    "0.80": stationary(0.8),
    "0.95": stationary(0.95, 0.99),
    "0.3-0.9 drift": wave(0.3, 0.9, 1500),
    "0.9/0.1 switch": switching(0.9, 0.1, 150, 400),
    "0.8/0.2 bursts": bursts(0.2, 0.8, 25),
}


class Busy:
    """A machine that does other things now and then: all rounds take longer then, 1.3 to 3 times,
    and what is lost by those with drafts is half to one and a half times as much. Assumed: for 3 s,
    every 9 s, in the mean."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"busy {seed}")
        self.now = 0.0  # seconds
        self.begin = self.end = 0.0
        self.slow = self.slow_drafts = 1.0
        self._next()

    def _next(self) -> None:
        self.begin = self.end + self.random.expovariate(1 / 6)
        self.end = self.begin + self.random.expovariate(1 / 3)
        self.slow = self.random.uniform(1.3, 3)
        self.slow_drafts = 1 + (self.slow - 1) * self.random.uniform(0.5, 1.5)

    def takes(self, n: int, seconds: float) -> float:
        """A round with n drafts that would take so long, now."""
        while self.now >= self.end:
            self._next()
        if self.now >= self.begin:
            seconds *= self.slow_drafts if n else self.slow
        self.now += seconds
        return seconds


@dataclass
class Run:
    """Of one text. steps[i], plain[i]: time of the first i tokens, in plain steps at context 0."""

    depths: list[int]  # by round
    states: list[str]  # by token, as the round was chosen
    steps: list[float]
    plain: list[float]

    def worst_window(self, tokens: int = 500) -> float:
        """The highest ratio of time to plain decoding's, of so many tokens in a row."""
        ends = range(tokens, len(self.steps))
        return max(
            (self.steps[end] - self.steps[end - tokens])
            / (self.plain[end] - self.plain[end - tokens])
            for end in ends
        )

    def time(self, begin: int = 0) -> float:
        return self.steps[-1] - self.steps[begin]

    def plain_time(self, begin: int = 0) -> float:
        return self.plain[-1] - self.plain[begin]

    def parked(self) -> float:
        return self.states.count("parked") / len(self.states)


def simulate(
    depth: Depth,
    curve: Curve,
    text: Text,
    tokens: int,
    seed: int,
    context: int = 500,
    busy: Busy | None = None,
) -> Run:
    rate = text(random.Random(f"text {seed}"))
    luck = random.Random(f"luck {seed}")
    draws = [luck.random() for _ in range(tokens + MAX + 1)]
    noise = random.Random(f"noise {seed}")
    run = Run([], [], [0.0], [0.0])
    last: int | None = None
    tried: set[int] = set()
    made = 0
    # While nothing is drafted, the next round is chosen before this one is observed.
    chosen = [depth.choose(context)]
    while made < tokens:
        n = min(chosen.pop(0), tokens - made - 1)
        state = depth.state
        if n == 0:
            chosen.append(depth.choose(context + made))
        accepted = 0
        while accepted < n and draws[made + accepted] < rate(made, accepted):
            accepted += 1
        cost = curve.cost(n, context + made)
        cost += CHANGE * (last is not None and n != last)
        cost += 0 if isinstance(depth, Fixed) or n == 0 or n in tried else FIRST
        tried.add(n)
        seconds = cost * STEP_S * noise.lognormvariate(0, NOISE)
        seconds *= 3 if noise.random() < OUTLIERS else 1
        seconds = busy.takes(n, seconds) if busy else seconds
        depth.observe(n, accepted, context + made, None if last is None else seconds)
        last = n
        run.depths.append(n)
        begin = run.steps[-1]
        for i in range(accepted + 1):
            run.states.append(state)
            run.steps.append(begin + cost * (i + 1) / (accepted + 1))
            run.plain.append(run.plain[-1] + curve.cost(0, context + made))
        made += accepted + 1
        if n > 0:
            chosen.append(depth.choose(context + made))
    return run


@dataclass(frozen=True)
class Result:
    """regret: time of adaptive depth over that of the best fixed depth, after `warm_up` tokens.
    best: that depth. plain: time over plain decoding's. worst: of any 500 tokens. parked: share.
    """

    regret: float
    best: int
    plain: float
    worst: float
    parked: float


def compare(
    curve: Curve, text: Text, tokens: int = 2000, warm_up: int = 200, seeds: range = range(3)
) -> Result:
    """Sums over the seeds; the worst window is of any one of them."""
    runs = [simulate(Adaptive(Knowledge(), MAX), curve, text, tokens, seed) for seed in seeds]
    fixed = [
        sum(simulate(Fixed(n), curve, text, tokens, seed).time(warm_up) for seed in seeds)
        for n in range(MAX + 1)
    ]
    time = sum(run.time(warm_up) for run in runs)
    return Result(
        time / min(fixed),
        fixed.index(min(fixed)),
        sum(run.time() for run in runs) / sum(run.plain_time() for run in runs),
        max(run.worst_window() for run in runs),
        sum(run.parked() for run in runs) / len(runs),
    )


def regrets_when_busy(
    curve: Curve, text: Text, requests: int = 20, tokens: int = 256, seeds: range = range(10)
) -> list[float]:
    """Requests to one loaded model, up to 6 s apart: their times as they would be on a machine that
    is not busy, over those of the best fixed depth."""
    regrets = []
    for seed in seeds:
        busy, knowledge = Busy(seed), Knowledge()
        for request in range(seed * requests, (seed + 1) * requests):
            depth = Adaptive(knowledge, MAX)
            time = simulate(depth, curve, text, tokens, request, busy=busy).time()
            fixed = [
                simulate(Fixed(n), curve, text, tokens, request).time() for n in range(MAX + 1)
            ]
            regrets.append(time / min(fixed))
            busy.now += busy.random.uniform(0, 6)
    return regrets


def main() -> None:
    print(
        f"{'curve':15}{'acceptance':16}{'best':>5}{'/best':>8}{'/plain':>8}{'worst':>7}{'parked':>8}"
    )
    for curve_name, curve in CURVES.items():
        for text_name, text in TEXTS.items():
            result = compare(curve, text)
            print(
                f"{curve_name:15}{text_name:16}{result.best:5}{result.regret:8.3f}"
                f"{result.plain:8.3f}{result.worst:7.3f}{result.parked:8.2f}"
            )
    print(f"\n{'busy machine':15}{'acceptance':16}{'/best':>8}{'> 1.25':>8}")
    for curve_name in CURVES:
        for text_name in ("0.20", "0.75", "0.95"):
            regrets = regrets_when_busy(CURVES[curve_name], TEXTS[text_name])
            bad = sum(regret > 1.25 for regret in regrets) / len(regrets)
            print(f"{curve_name:15}{text_name:16}{median(regrets):8.3f}{bad:8.1%}")


if __name__ == "__main__":
    main()
