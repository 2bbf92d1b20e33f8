"""How often drafts are right, by their position in a round and by what the text did just before."""

import math
from dataclasses import dataclass, field

FIRST_ESTIMATE = 0.6  # of a first draft, which counts as one offer
POOLED = 4.0  # offers that the estimate of the position before counts as
LONG_WINDOW = 256  # offers of a position that count for the next request
RECENT = 6  # offers; the window of the last few
SURPRISE = 3.0  # standard deviations of it, from which most of what is known is forgotten
STREAK = 4  # tokens of a text without a wrong draft after which acceptance is another
USUAL = 16.0  # offers that the estimate over all rounds counts as, before and after that


def expected_tokens(estimates: list[float]) -> list[float]:
    """Of a round with 0, 1, ... drafts: 1 + the sum over k of the product of the first k."""
    tokens, chance = [1.0], 1.0
    for estimate in estimates:
        chance *= estimate
        tokens.append(tokens[-1] + chance)
    return tokens


@dataclass
class Rates:
    """Acceptance by position: how often draft i is right if all before it are.

    Of each position the last `window` offers count. What was not offered lately fades likewise,
    and a position of which little is known takes after the one before it. If the last few first
    drafts contradict what is known, most of it is forgotten.
    """

    window: float
    right: list[float] = field(default_factory=list)
    offered: list[float] = field(default_factory=list)
    _recent: float = FIRST_ESTIMATE

    def __post_init__(self) -> None:
        if self.offered:
            self._recent = (self.right[0] + FIRST_ESTIMATE) / (self.offered[0] + 1)

    def add(self, drafted: int, accepted: int) -> None:
        """A round: draft `accepted` + 1 was the first wrong one, if there were so many."""
        if drafted == 0:
            return
        reached = min(drafted, accepted + 1)
        missing = reached - len(self.offered)
        self.right.extend([0.0] * missing)
        self.offered.extend([0.0] * missing)
        for position in range(len(self.offered)):
            self.right[position] *= 1 - 1 / self.window
            self.offered[position] *= 1 - 1 / self.window
            self.right[position] += position < accepted
            self.offered[position] += position < reached
        self._recent += ((accepted > 0) - self._recent) / RECENT
        rate = (self.right[0] + FIRST_ESTIMATE) / (self.offered[0] + 1)
        deviation = math.sqrt(rate * (1 - rate) / (2 * RECENT))
        if abs(self._recent - rate) > SURPRISE * deviation:
            self.cut(RECENT / 2)

    def estimates(self, depth: int) -> list[float]:
        """Of positions 1 to `depth`."""
        estimates = []
        estimate, weight = FIRST_ESTIMATE, 1.0
        for position in range(depth):
            if position < len(self.offered):
                right, offered = self.right[position], self.offered[position]
                estimate = (right + weight * estimate) / (offered + weight)
            estimates.append(estimate)
            weight = POOLED
        return estimates

    def tokens(self, depth: int) -> list[float]:
        """Expected of a round with 0, 1, ... `depth` drafts."""
        return expected_tokens(self.estimates(depth))

    def cut(self, offers: float) -> None:
        """Believe what is known no more than so many offers of each position."""
        for position, offered in enumerate(self.offered):
            if offered > offers:
                self.right[position] *= offers / offered
                self.offered[position] = offers


class TextRates:
    """Acceptance in one text. Wrong drafts come in clusters: what is expected of a round depends on
    how many tokens there were since the last wrong one."""

    def __init__(self, window: float, known: Rates) -> None:
        """`known`: of the texts before."""
        self._all = Rates(window, list(known.right), list(known.offered))
        self._after_wrong, self._in_streak = Rates(window), Rates(window)
        self._since_wrong = 0  # tokens

    @property
    def _now(self) -> Rates:
        return self._in_streak if self._since_wrong >= STREAK else self._after_wrong

    def add(self, drafted: int, accepted: int) -> None:
        """See `Rates`."""
        if drafted == 0:
            return
        self._all.add(drafted, accepted)
        self._now.add(drafted, accepted)
        self._since_wrong = self._since_wrong + accepted + 1 if accepted == drafted else 0

    def cut(self, offers: float) -> None:
        """See `Rates`."""
        for rates in (self._all, self._after_wrong, self._in_streak):
            rates.cut(offers)

    def usual_tokens(self, depth: int) -> list[float]:
        """Expected of a round anywhere in the text, with 0, 1, ... `depth` drafts."""
        return self._all.tokens(depth)

    def tokens(self, depth: int) -> list[float]:
        """Expected of the next round, with 0, 1, ... `depth` drafts."""
        rates, estimates, wrong = self._now, [], 1.0
        for position, usual in enumerate(self._all.estimates(depth)):
            # A position of which nothing is known is wrong as much more often as the one before.
            estimate = 1 - min(1.0, wrong * (1 - usual))
            if position < len(rates.offered):
                right, offered = rates.right[position], rates.offered[position]
                estimate = (right + USUAL * estimate) / (offered + USUAL)
            wrong = (1 - estimate) / (1 - usual) if usual < 1 else 1.0
            estimates.append(estimate)
        return expected_tokens(estimates)
