"""What is known of a loaded model: what a round costs at each depth, and what drafting may lose.

Costs do not depend on the text, so all requests share what was measured. Whether drafts are right
does (rates.py), so a request takes over little of that.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.rates import LONG_WINDOW, Rates

NOISE = 0.05  # of one timed round, relative
PACE_DRIFT = 0.01  # of all depths together, in a round, relative
OWN_DRIFT = 0.003  # of a depth against the others, in a round, relative
SURPRISE = 3.0  # standard deviations; what is beyond them counts less
VERSION = 1  # of the saved form
LEAST = 0.1  # plain steps of a draft and its row; the cheapest that was reported is 0.18
SLOPE = -1  # the index of the slope, beside the depths


@dataclass
class Costs:
    """Seconds of a round with n drafts, of which `context` tokens are read:
    seconds(n, context) = mean[n] + mean[SLOPE] * context, by a Kalman filter.

    A depth that is not measured moves with those that are, as the machine's pace is common to all
    of them; its own part becomes less certain with each round. No shape over n is assumed.

    Attributes:
        mean: seconds by depth, of those depths that were measured; the slope in seconds a token.
        covariance: of these, its rows by key.
    """

    mean: dict[int, float] = field(default_factory=dict)
    covariance: dict[int, dict[int, float]] = field(default_factory=dict)
    _first: dict[int, float] = field(default_factory=dict)
    _run: tuple[int, int] = (0, 0)  # depth of the last samples, how many in a row
    _surprises: int = 0  # in a row, negative where rounds were quicker than expected

    @classmethod
    def remembered(cls, seconds: dict[int, float], slope: float) -> "Costs":
        """Of another day: the machine's pace may be another, the ratios will be similar."""
        costs = cls()
        if seconds:
            least = min(seconds.values())
            costs._insert(SLOPE, slope, slope / 2 + least / 100_000)
            for depth in sorted(seconds):
                costs._insert(depth, seconds[depth], 0.1 * seconds[depth])
            costs.drift(0.5, 0.0)
        return costs

    def __contains__(self, depth: int) -> bool:
        return depth in self.mean

    @property
    def depths(self) -> list[int]:
        return sorted(key for key in self.mean if key != SLOPE)

    def seconds(self, depth: int, context: int) -> float:
        """Of one round. Raises KeyError where the depth was not measured."""
        return self.mean[depth] + self.mean[SLOPE] * context

    def ratio(self, depth: int, context: int) -> float:
        """A round with `depth` drafts over one with none. It is dearer, whatever a machine that is
        busy with other things has made of a few measurements."""
        measured = self.seconds(depth, context) / self.seconds(0, context)
        return max(measured, 1 + LEAST * depth)

    def doubt(self, depth: int, other: int, context: int) -> float:
        """Standard deviation of the ratio of two depths' costs, relative."""
        terms: dict[int, float] = {depth: 1 / self.seconds(depth, context)}
        terms[other] = terms.get(other, 0.0) - 1 / self.seconds(other, context)
        terms[SLOPE] = context * (terms[depth] + terms[other])
        variance = sum(
            a * b * self.covariance[i][j] for i, a in terms.items() for j, b in terms.items()
        )
        return math.sqrt(max(0.0, variance))

    def add(self, depth: int, context: int, seconds: float) -> None:
        """A representative round of that depth took so many seconds."""
        self.drift(PACE_DRIFT, OWN_DRIFT)
        if depth not in self.mean:
            # Noise is on the slow side: of the first two rounds the quicker one is believed.
            if depth not in self._first:
                self._first[depth] = seconds
                return
            seconds = min(seconds, self._first.pop(depth))
            self._begin(depth, context, seconds)
        difference = seconds - self.seconds(depth, context)
        limit = SURPRISE * math.sqrt(self._variance(depth, context))
        side = 0 if abs(difference) <= limit else 1 if difference > 0 else -1
        self._surprises = self._surprises + side if self._surprises * side > 0 else side
        last, run = self._run
        self._run = (depth, run + 1 if depth == last else 1)
        if abs(self._surprises) == 2 and self._run[1] <= 3:
            # This depth is not as it was, or the machine is not: other depths will show.
            self.drift(0.5, 0.0)
            self.covariance[depth][depth] += (0.5 * self.mean[depth]) ** 2
            self._surprises = 0
        elif abs(self._surprises) == 3:  # all of a sudden: the machine's pace has changed
            self.drift(0.5, 0.0)
            self._surprises = 0
        self._update(depth, context, difference)

    def drift(self, pace: float, own: float) -> None:
        """Relative standard deviations by which all costs, and each alone, may have changed."""
        for i, a in self.mean.items():
            row, shared = self.covariance[i], pace**2 * a
            for j, b in self.mean.items():
                row[j] += shared * b
            row[i] += (own * a) ** 2

    def _begin(self, depth: int, context: int, seconds: float) -> None:
        if SLOPE not in self.mean:
            # As good as unknown: costs may double within 20,000 tokens, or stay as they are.
            self._insert(SLOPE, 0.0, seconds / 20_000)
        self._insert(depth, seconds - self.mean[SLOPE] * context, seconds)

    def _insert(self, key: int, mean: float, deviation: float) -> None:
        for row in self.covariance.values():
            row[key] = 0.0
        self.covariance[key] = {**dict.fromkeys(self.mean, 0.0), key: deviation**2}
        self.mean[key] = mean

    def _variance(self, depth: int, context: int) -> float:
        """Of a round's seconds around what is expected."""
        of_depth, of_slope = self.covariance[depth], self.covariance[SLOPE]
        known = of_depth[depth] + 2 * context * of_depth[SLOPE] + context**2 * of_slope[SLOPE]
        return known + (NOISE * self.seconds(depth, context)) ** 2

    def _update(self, depth: int, context: int, difference: float) -> None:
        variance = max(self._variance(depth, context), (difference / SURPRISE) ** 2)
        against = {
            key: row[depth] + context * row[SLOPE] for key, row in self.covariance.items()
        }  # covariance with the expected seconds of this round
        for i, a in against.items():
            row, gain = self.covariance[i], a / variance
            self.mean[i] += gain * difference
            for j, b in against.items():
                row[j] -= gain * b
        self._bound_slope(context)

    def _bound_slope(self, context: int) -> None:
        """Costs neither fall with the context, nor vanish without one. What is expected at this
        context stays the same."""
        slope = self.mean[SLOPE]
        least = min(self.seconds(depth, context) for depth in self.depths)
        bounded = max(0.0, min(slope, 0.8 * least / max(1, context)))
        if bounded != slope:
            for depth in self.depths:
                self.mean[depth] += (slope - bounded) * context
            self.mean[SLOPE] = bounded


SPAN = 500  # tokens, any of which may together lose 3 % of their time: 15.5 plain steps
ALLOWED = 10.0  # plain steps of that, as the round that exceeds it may be a dear one
CAP, REGAIN = 8.0, 0.01  # plain steps, and plain steps a token: within SPAN not much more


@dataclass
class Account:
    """What drafting may still lose against plain decoding, in plain steps.

    Either of two rules lets it go on: the loss since the best moment of the last SPAN tokens is
    less than ALLOWED; or an account of CAP, which each token refills by REGAIN, is not empty. The
    first forgives bad luck, the second does not wait until SPAN tokens have passed. A depth is
    chosen only if the balance can pay for three rounds in which nothing is accepted, so no SPAN
    tokens lose more than about CAP + SPAN * REGAIN, as far as the costs are known.

    Attributes:
        tokens, gained: so far; plain steps.
        refilled: the second account.
        peaks: moments of the last SPAN tokens after which the gain was never so high again.
    """

    tokens: int = 0
    gained: float = 0.0
    refilled: float = CAP
    peaks: deque[tuple[int, float]] = field(default_factory=lambda: deque([(0, 0.0)]))

    @property
    def lost(self) -> float:
        return self.peaks[0][1] - self.gained

    @property
    def balance(self) -> float:
        return max(self.refilled, ALLOWED - self.lost)

    def add(self, tokens: int, steps: float) -> None:
        """A round gave so many tokens and cost as much as so many plain steps."""
        self.tokens += tokens
        self.gained += tokens - steps
        self.refilled = min(CAP, self.refilled + tokens * (1 + REGAIN) - steps)
        while self.peaks and self.peaks[-1][1] <= self.gained:
            self.peaks.pop()
        self.peaks.append((self.tokens, self.gained))
        while self.peaks[0][0] < self.tokens - SPAN:
            self.peaks.popleft()


@dataclass
class Knowledge:
    """What requests to one loaded model pass on to each other."""

    costs: Costs = field(default_factory=Costs)
    rates: Rates = field(default_factory=lambda: Rates(LONG_WINDOW, [2.4], [4.0]))
    account: Account = field(default_factory=Account)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": VERSION,
            "seconds": {str(depth): self.costs.mean[depth] for depth in self.costs.depths},
            "seconds_per_context_token": self.costs.mean.get(SLOPE, 0.0),
            "right": self.rates.right,
            "offered": self.rates.offered,
        }

    @classmethod
    def from_dict(cls, saved: Any) -> "Knowledge":
        """What `as_dict` gave, as a prior of limited weight; a fresh start if it is none of it."""
        try:
            if saved["version"] != VERSION:
                return cls()
            seconds = {int(depth): float(value) for depth, value in saved["seconds"].items()}
            slope = float(saved["seconds_per_context_token"])
            right = [float(value) for value in saved["right"]]
            offered = [float(value) for value in saved["offered"]]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            return cls()
        if not (
            len(right) == len(offered)
            and all(0 <= a <= b < math.inf for a, b in zip(right, offered, strict=True))
            and all(n >= 0 and 0 < value < math.inf for n, value in seconds.items())
            and 0 <= slope < math.inf
        ):
            return cls()
        return cls(Costs.remembered(seconds, slope), Rates(LONG_WINDOW, right, offered))
