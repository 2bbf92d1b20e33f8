"""How many tokens to draft in the next round.

Adaptive depth maximises expected tokens per measured second over the depths 0 to `max`. Depth 0
is plain decoding: drafting is "parked" where it does not pay, and tried again now and then.
"""

from collections import deque
from typing import Literal, Protocol

from mlx_spec.costs import Account, Knowledge
from mlx_spec.rates import TextRates

State = Literal["fixed", "active", "probing", "parked"]

WINDOW = 32  # offers of a position that count ...
CARRIED = 1.0  # ... and how many of the requests before: what a text begins with is another thing
RISK = 1 / 3  # of the account, in one round
GAIN = 1.03  # for less than that the depth is not changed
BURST = 3  # rounds in which a depth's cost is measured; the first is not timed
PLAIN_BURST = 5  # the same for depth 0, which all others are compared with
PROBE = 4  # rounds in which a parked drafter is tried
FIRST_WAIT = 12  # tokens before a parked drafter is tried again, doubling ...
PROBE_SHARE = 0.015  # ... until probes in which nothing is accepted take such a share of the time
RESERVE = 7.0  # plain steps that a measurement leaves in the account
WARM_UP = 2.0  # plain steps that the first round at a depth may cost more than the next ones
LASTING = 64  # tokens after which a return from being parked has been worth it
FIRST_CHECK, LAST_CHECK = 128, 1024  # tokens before depth 0 is measured again, doubling
GUESS = 0.5  # plain steps of a draft whose cost was not measured, cautiously
SURE = 1.4  # times depth 0; from there on its cost is measured again much later
RETRY = 128  # tokens before a depth is measured again, doubling
SECOND_LOOK = 48  # tokens before a cost that is well known, but looks too high, is measured again
STALE = 0.08  # relative doubt from which a cost is measured again, if that can matter
UNSURE = 0.12  # relative doubt from which the costs of deeper rounds say more


class Depth(Protocol):
    """Attributes:
    max: the most that `choose` will ever say.
    state: what is going on.
    why: why nothing is drafted, if so.
    """

    max: int
    state: State
    why: str | None

    @property
    def asleep(self) -> bool:
        """Whether `choose` would say 0 and try nothing, so that there is no use in waiting."""

    def choose(self, context: int) -> int:
        """Drafts for the next round; `context` tokens are in the target's cache."""

    def observe(
        self,
        drafted: int,
        accepted: int,
        context: int,
        seconds: float | None,
        waited: bool = False,
    ) -> None:
        """The next of the chosen rounds was read, `seconds` after the one before it (None: not
        known). It may have drafted less than was chosen. `waited`: it has no drafts, and the
        device had nothing to do before it, as drafts were hoped for."""


class Fixed:
    """Always the same depth."""

    def __init__(self, n: int) -> None:
        self.max = n
        self.state: State = "fixed"
        self.why: str | None = None

    @property
    def asleep(self) -> bool:
        return self.max == 0

    def choose(self, context: int) -> int:
        return self.max

    def observe(
        self,
        drafted: int,
        accepted: int,
        context: int,
        seconds: float | None,
        waited: bool = False,
    ) -> None:
        pass


class Adaptive:
    """The depth with the best ratio of expected tokens to measured cost, for one request.

    - What is expected of a round depends on whether drafts were wrong just before (rates.py).
    - A depth is measured in a short burst before it is used, and again when its cost has become
      doubtful or looks too high beside a deeper one's, where the outcome could change the choice. A
      burst must be affordable.
    - The depth is changed for a gain of 3 % or more, and to 0 as soon as drafting does not pay.
    - Parked, the drafter is tried in short probes, at first after 12 tokens, then less often.
    - Whatever the estimates say: once the account of losses is empty, drafting is parked.

    While depth 0 is chosen, `choose` may run some rounds ahead of `observe`.
    """

    def __init__(
        self, knowledge: Knowledge, max_draft_tokens: int = 8, account: Account | None = None
    ) -> None:
        """`account`: that of another depth in the same request, which enters plain rounds in it.
        Raises ValueError if `max_draft_tokens` is negative."""
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens is {max_draft_tokens}; it must be 0 or more.")
        self.max = max_draft_tokens
        self.state: State = "probing"
        self.why: str | None = None
        self.knowledge = knowledge
        self._account = account or knowledge.account
        self._enters_plain = account is None
        self._costs = knowledge.costs
        self._costs.drift(0.2, 0.0)  # since the last request
        self._rates = TextRates(WINDOW, knowledge.rates)
        self._rates.cut(CARRIED)
        self._expected = self._rates.tokens(self.max)
        self._depth: int | None = None  # the last one chosen as the best
        self._burst = (0, 0)  # depth, rounds left
        self._tokens = 0  # observed
        self._last_drafted: int | None = None
        self._retry: dict[int, tuple[int, int]] = {}  # not before so many tokens, and the next wait
        self._second_look = SECOND_LOOK  # not before so many tokens
        self._wait = FIRST_WAIT
        self._wake = 0  # parked until so many tokens
        self._came_back = 0  # at so many tokens
        self._unpaid: deque[tuple[int, int, int, float | None]] = deque(maxlen=64)  # yet
        self._check_after(FIRST_CHECK)

    @property
    def asleep(self) -> bool:
        """Whether `choose` would say 0 and try nothing, so that there is no use in waiting."""
        if self._account.balance <= 0:
            return True
        depth, left = self._burst
        if left > 0:
            return depth == 0
        return self.state == "parked" and self._tokens < self._wake

    def choose(self, context: int) -> int:
        """Drafts for the next round, 0 to `max`; `context` tokens are in the target's cache."""
        depth, left = self._burst
        if left > 0 and self._affordable(depth, 1, context):
            self._burst = (depth, left - 1)
            return depth
        self._burst = (0, 0)
        if self.max == 0:
            self.state, self.why = "parked", "no drafts are allowed"
            return 0
        if 0 not in self._costs:
            # Drafts come first, and again if no time could be taken: a short text has some, too.
            return self._measure(0, PLAIN_BURST) if depth == 1 else self._measure(1, BURST)
        if self.state == "parked":
            return self._probe(context) if self._tokens >= self._wake else 0
        return self._best(context)

    def observe(
        self,
        drafted: int,
        accepted: int,
        context: int,
        seconds: float | None,
        waited: bool = False,
    ) -> None:
        """See `Depth`."""
        representative = drafted == self._last_drafted and not waited
        self._last_drafted = drafted
        self._tokens += accepted + 1
        self._rates.add(drafted, accepted)
        self._expected = self._rates.tokens(self.max)
        self.knowledge.rates.add(drafted, accepted)
        if seconds is not None and seconds > 0 and representative:
            self._costs.add(drafted, context, seconds)
        self._unpaid.append((drafted, accepted, context, None if representative else seconds))
        if 0 in self._costs:
            for round in self._unpaid:
                self._pay(*round)
            self._unpaid.clear()

    def _pay(self, drafted: int, accepted: int, context: int, seconds: float | None) -> None:
        """Enter a round into the account; `seconds` if it was not a representative one."""
        if drafted == 0 and not self._enters_plain:
            return
        steps = self._steps(drafted, context)
        if seconds is not None:
            measured = min(seconds / self._costs.seconds(0, context), steps + 3)
            steps = measured if drafted == 0 else max(steps, measured)
        elif drafted in self._costs:
            steps *= 1 + self._costs.doubt(drafted, 0, context)
        self._account.add(accepted + 1, steps)

    def _best(self, context: int) -> int:
        """The best depth of those measured, or one that may be better and is to be measured."""
        ratios = {n: self._costs.ratio(n, context) for n in self._costs.depths if n <= self.max}
        affordable = 1 + RISK * max(0.0, self._account.balance)  # if nothing is accepted
        values = {n: self._expected[n] / ratios[n] for n in ratios if ratios[n] <= affordable}
        best = max(values, key=lambda n: values[n])
        current = self._depth if self._depth in values else best
        assert current is not None
        check = self._check + (LAST_CHECK if values[current] >= SURE else 0)
        if current > 0 and self._tokens >= check:
            self._check_after(min(2 * self._check_wait, LAST_CHECK))
            return self._measure(0, BURST)
        hopeful = self._hopeful(current, values[best], RESERVE, context)
        if hopeful is not None:
            return self._measure(hopeful, BURST if hopeful > 0 else PLAIN_BURST)
        if best > 0 and (current > 0 or values[best] >= GAIN):
            if current == 0 or values[best] > GAIN * values[current]:
                current = best
        elif self._usually_pays({n: ratios[n] for n in values}):  # if not in this very round
            current = max((n for n in values if n > 0), key=lambda n: values[n])
        else:
            return self._park(context)
        if self._depth in (None, 0):
            self._came_back = self._tokens
            self._check_after(FIRST_CHECK)
        self._depth = current
        self.state, self.why = "active", None
        return current

    def _usually_pays(self, ratios: dict[int, float]) -> bool:
        usual = self._rates.usual_tokens(self.max)
        return any(n > 0 and usual[n] >= GAIN * ratio for n, ratio in ratios.items())

    def _check_after(self, wait: int) -> None:
        self._check_wait, self._check = wait, self._tokens + wait

    def _hopeful(self, current: int, value: float, reserve: float, context: int) -> int | None:
        """A depth that may be better than `value`, and whose measurement can be paid for."""
        for n in range(self.max + 1):
            until, wait = self._retry.get(n, (0, RETRY))
            more = reserve if n in self._costs else reserve + WARM_UP
            if (
                n != current
                and self._tokens >= until
                and self._hope(n, current, context) > GAIN * value
                and self._affordable(n, BURST, context, more)
            ):
                self._retry[n] = (self._tokens + wait, 2 * wait)
                self._second_look = self._tokens + SECOND_LOOK
                return n
        return None

    def _hope(self, n: int, current: int, context: int) -> float:
        """The value of depth n if its cost is at the lower end of what is possible; 0 where it
        is known well enough. A machine that was busy for a moment leaves a cost that is too high,
        and nothing corrects it where the depth is not used: a deeper round can show that."""
        if n not in self._costs:
            return self._expected[n] / self._least(n, context)
        doubt = self._costs.doubt(n, current, context)
        if doubt <= STALE and (current == 0 or self._tokens < self._second_look):
            return 0.0
        ratios = {m: self._costs.ratio(m, context) for m in self._costs.depths if m > n > 0}
        least = [1 + (ratio - 1) * n / m for m, ratio in ratios.items()]
        if doubt > STALE:
            least.append(self._costs.ratio(n, context) / (1 + 2 * doubt))
        return self._expected[n] / min(least) if least else 0.0

    def _least(self, n: int, context: int) -> float:
        """What a depth that was not measured costs at least. Costs of kernels jump, down too:
        not below the cheapest depth, nor far below the next lower one."""
        below = [self._costs.ratio(m, context) for m in self._costs.depths if 0 < m < n]
        return max(min(below), 0.85 * below[-1]) if below else 1.0

    def _steps(self, n: int, context: int) -> float:
        """Cost of a round in plain steps; a cautious guess where it was not measured. Where it is
        unsure, it is hardly more than that of a deeper one."""
        if n in self._costs:
            deeper = [cost for _, cost in self._deeper(n, context)]
            return min([self._costs.ratio(n, context), *deeper])
        below = [m for m in self._costs.depths if m < n]
        return self._costs.ratio(below[-1], context) + GUESS * (n - below[-1])

    def _deeper(self, n: int, context: int) -> list[tuple[int, float]]:
        """Depths beyond n with their costs in plain steps, if that of n is unsure."""
        if n == 0 or self._costs.doubt(n, 0, context) <= UNSURE:
            return []
        return [(m, self._costs.ratio(m, context)) for m in self._costs.depths if m > n]

    def _affordable(self, n: int, rounds: int, context: int, more: float = 0.0) -> bool:
        """Can the account pay for so many rounds if half of what is expected is accepted, and
        for so many plain steps `more`?"""
        if n == 0 or 0 not in self._costs:
            return True
        loss = self._steps(n, context) - 1 - (self._expected[n] - 1) / 2
        return self._account.balance >= rounds * loss + more

    def _measure(self, n: int, rounds: int) -> int:
        self.state, self.why = "probing", None
        self._burst = (n, rounds - 1)
        return n

    def _probe(self, context: int) -> int:
        """Try the drafter at a depth that may pay and was not measured, or else at the cheapest
        one, where what was known of acceptance counts little."""
        hopeful = self._hopeful(0, 1.0, 0.0, context)
        if hopeful is not None:
            return self._measure(hopeful, BURST)
        n = self._cheapest(context)
        if not self._affordable(n, PROBE, context):
            return 0
        self._rates.cut(1)
        self._expected = self._rates.tokens(self.max)
        return self._measure(n, PROBE)

    def _last_wait(self, context: int) -> int:
        loss = PROBE * (self._steps(self._cheapest(context), context) - 1)
        return max(FIRST_WAIT, round(loss / PROBE_SHARE))

    def _cheapest(self, context: int) -> int:
        tried = [n for n in self._costs.depths if 0 < n <= self.max]
        return min(tried, key=lambda n: self._steps(n, context), default=1)

    def _park(self, context: int) -> int:
        if self._depth and self._tokens - self._came_back >= LASTING:
            self._wait = FIRST_WAIT
        elif self.state == "probing" and self._depth == 0:
            self._wait = min(2 * self._wait, self._last_wait(context))
        self._depth = 0
        self._wake = self._tokens + self._wait
        self.state, self.why = "parked", self._reason(context)
        return 0

    def _reason(self, context: int) -> str:
        tried = [n for n in self._costs.depths if 0 < n <= self.max]
        best = max(tried, key=lambda n: self._expected[n] / self._steps(n, context), default=1)
        acceptance = (self._expected[best] - 1) / best
        break_even = (self._steps(best, context) - 1) / best
        if tried and round(acceptance, 2) < round(break_even, 2):
            return f"acceptance {acceptance:.2f} < break-even {break_even:.2f}"
        if self._account.balance < RESERVE:
            return f"drafting has lost {self._account.lost:.0f} steps lately"
        if not tried:
            return "what drafts cost here could not be measured yet"
        return f"acceptance {acceptance:.2f}, break-even {break_even:.2f}: too little to gain"
