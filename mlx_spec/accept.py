"""Acceptance laws: how target rows become tokens, and how drafts are picked to agree with them.

What is emitted is always the target's own draw; the laws differ in how draws and drafts share
their randomness. A law is called in this order in a round: `begin`, `pick` for each draft, `draw`
for the target's rows, `committed` when it is known which tokens stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import ReferenceType, WeakSet, ref

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from mlx_spec.candidates import Candidates, Certain, Proposal
from mlx_spec.errors import BadArguments
from mlx_spec.randomness import generator_state, integers, key_of_one_draw, set_generator_state
from mlx_spec.sampling import Law, Parameters, Sampling, read_sampler

Key = list[int] | mx.array  # a state of the generator; an array (2,) where it was not read yet


@dataclass(frozen=True)
class Draws:
    """The target's draws of one round, lazy.

    tokens: (n+1,) uint32. logprobs: n+1 arrays (V,). keys: the state of mlx's global random
    generator after each draw, each (2,) uint32; empty where the law leaves that generator alone.
    """

    tokens: mx.array
    logprobs: list[mx.array]
    keys: list[mx.array]


class Acceptance(Protocol):
    @property
    def name(self) -> Law: ...

    def begin(self, n: int) -> None:
        """A round of n drafts."""

    def pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        """A draft from what the drafter proposes after `drafts`. Returns (1,)."""

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        """Tokens from the target's logits (1, n+1, V); row k follows the first k drafts.
        A draft is accepted if it equals the token of its row and all before it did."""

    def committed(self, tokens: mx.array, key: Key | None) -> None:
        """These tokens (m,) stay; `key` is the generator's state after the last of them, None if
        the law leaves it alone."""

    def leave(self, key: list[int] | None) -> None:
        """Generation ends here: leave the generator in state `key` (None: as it is)."""


class History:
    """What logits processors are given: all tokens that the target has seen, with the pending
    one, and the drafts."""

    def __init__(self, processors: Sequence[LogitsProcessor] | None, tokens: mx.array):
        self.processors = processors or []
        self.tokens = tokens

    def processed(self, logits: mx.array, drafts: list[mx.array]) -> mx.array:
        """logits (1, V), after `drafts`."""
        if self.processors:
            tokens = mx.concatenate([self.tokens, *drafts])
            for processor in self.processors:
                logits = processor(tokens, logits)
        return logits

    def log_probabilities(self, logits: mx.array, drafts: list[mx.array]) -> mx.array:
        """Of the target's logits (1, n+1, V), row k after the first k drafts; (n+1, V)."""
        rows = logits[0]
        if self.processors:
            rows = mx.concatenate(
                [self.processed(logits[:, k], drafts[:k]) for k in range(logits.shape[1])]
            )
        return rows - mx.logsumexp(rows, axis=-1, keepdims=True)

    def draft_log_probabilities(
        self, logits: mx.array | Candidates, drafts: list[mx.array]
    ) -> mx.array:
        """Of the drafter's logits; (1, V)."""
        if isinstance(logits, Candidates):
            logits = logits.over_vocabulary()
        logits = self.processed(logits, drafts)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def add(self, tokens: mx.array) -> None:
        if self.processors:
            self.tokens = mx.concatenate([self.tokens, tokens.astype(mx.uint32)])


class Greedy:
    """argmax, of all rows at once."""

    name: Law = "greedy"

    def __init__(self, history: History | None = None):
        self.history = history or History(None, mx.array([], mx.uint32))

    def begin(self, n: int) -> None:
        pass

    def pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        if isinstance(proposal, Certain):
            return proposal.token
        if self.history.processors:
            return greedy_sampler(self.history.draft_log_probabilities(proposal, drafts))
        if isinstance(proposal, Candidates):
            return proposal.best()
        return mx.argmax(proposal, axis=-1)

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        logprobs = self.history.log_probabilities(logits, drafts)
        return Draws(greedy_sampler(logprobs), list(logprobs), [])

    def committed(self, tokens: mx.array, key: Key | None) -> None:
        self.history.add(tokens)

    def leave(self, key: list[int] | None) -> None:
        pass


class Stock:
    """The very tokens of mlx-lm at the same seed, for any sampler and any processors.

    mlx's generator state is a function of the seed and of the number of draws. Drafts are picked
    by the user's sampler under the state that their position will have, then the state is put
    back and the target's rows draw in turn, as mlx_lm.generate_step does it for one row.

    The sampler's randomness must be that generator's, and it must keep no state of its own.
    Until the generation ends, the generator follows it alone; so one that begins while another
    is under way starts from a state split off, or both would draw the same numbers.

    Attributes:
        key: the generator's state before the next draw.
        last: whose rounds the generator has followed since it was last set.
    """

    name: Law = "stock"
    under_way: ClassVar["WeakSet[Stock]"] = WeakSet()
    last: ClassVar["ReferenceType[Stock] | None"] = None

    def __init__(self, sampler: Sampler, history: History):
        self.sampler = sampler
        self.history = history
        state = generator_state()
        self.key: Key = integers(mx.random.split(state)[1] if Stock.under_way else state)

    def begin(self, n: int) -> None:
        Stock.under_way.add(self)
        if isinstance(self.key, mx.array):  # the generator is there, if nobody else has set it
            if n == 0 and Stock.last is not None and Stock.last() is self:
                return
            self.key = integers(self.key)
        Stock.last = ref(self)
        set_generator_state(self.key)

    def pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        if isinstance(proposal, Certain):
            return proposal.token
        if isinstance(proposal, Candidates):
            proposal = proposal.over_vocabulary()
        return self._draw_one(proposal, drafts)[0]

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        if isinstance(self.key, list):
            set_generator_state(self.key)
        tokens, logprobs, keys = [], [], []
        for row in range(logits.shape[1]):
            token, row_logprobs = self._draw_one(logits[:, row], drafts[:row])
            tokens.append(token)
            logprobs.append(row_logprobs[0])
            keys.append(generator_state())
        return Draws(mx.concatenate(tokens), logprobs, keys)

    def committed(self, tokens: mx.array, key: Key | None) -> None:
        assert key is not None
        self.key = key
        if isinstance(key, list):
            set_generator_state(key)
        self.history.add(tokens)

    def leave(self, key: list[int] | None) -> None:
        if key is not None:
            set_generator_state(key)
        Stock.under_way.discard(self)

    def _draw_one(self, logits: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
        logits = self.history.processed(logits, drafts)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.sampler(logprobs), logprobs


class Keyed:
    """Randomness that is a function of a request's key and of a token's position in its text.

    The key is one draw of mlx's global generator, so `mx.random.seed` governs it.

    Attributes:
        position: how many tokens the request has drawn.
    """

    def __init__(self, parameters: Parameters, history: History):
        self.parameters = parameters
        self.history = history
        self.key = key_of_one_draw()
        Stock.last = None  # one that is under way has to set the generator again
        self.position = 0

    def keys(self, purpose: int, first: int, count: int) -> mx.array:
        """A key for each of `count` positions from `first` on: (count, 2)."""
        positions = [[purpose, first + k] for k in range(count)]
        return self.key + mx.array(positions, mx.uint32)

    def coins(self, first: int, count: int) -> mx.array | None:
        """(count, 1), for XTC."""
        if not self.parameters.tosses_coins:
            return None
        keys = self.keys(1, first, count)

        def toss(key: mx.array) -> mx.array:
            return mx.random.uniform(shape=(1,), key=key)

        return mx.vmap(toss)(keys)

    def log_weights(self, logprobs: mx.array, offset: int = 0) -> mx.array:
        """Of log-probabilities (m, V) at `offset` after the position and on; (m, V)."""
        coins = self.coins(self.position + offset, logprobs.shape[0])
        return self.parameters.log_weights(logprobs, coins)

    def committed(self, tokens: mx.array, key: Key | None) -> None:
        self.position += tokens.size
        self.history.add(tokens)

    def leave(self, key: list[int] | None) -> None:
        pass


class Seed(Keyed):
    """Gumbel noise that drafter and target share, keyed by position.

    A token is the argmax of log-weights plus standard Gumbel noise, which draws from their softmax;
    as both use the same noise, they agree with probability (1-TV)/(1+TV) at least (Daliri et al.
    2024, arXiv 2408.07978). The text depends on the request's key alone: not on the drafter, nor on
    the depth, nor on whether anything is drafted. As a sampler in mlx-lm's own loops, it draws the
    same tokens there.
    """

    name: Law = "seed"

    def begin(self, n: int) -> None:
        self.rows = n + 1
        self.noise: mx.array | None = None

    def pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        if isinstance(proposal, Certain):
            return proposal.token
        k = len(drafts)
        logprobs = self.history.draft_log_probabilities(proposal, drafts)
        noise = self._noise_of_round(logprobs.shape[-1])[k : k + 1]
        return mx.argmax(self.log_weights(logprobs, k) + noise, axis=-1)

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        logprobs = self.history.log_probabilities(logits, drafts)
        noise = self._noise_of_round(logprobs.shape[-1])
        tokens = mx.argmax(self.log_weights(logprobs) + noise, axis=-1)
        return Draws(tokens, list(logprobs), [])

    def __call__(self, logprobs: mx.array) -> mx.array:
        """As an mlx-lm sampler, once for each position: (1, V) -> (1,)."""
        noise = self.gumbel(self.position, 1, logprobs.shape[-1])
        token = mx.argmax(self.log_weights(logprobs) + noise, axis=-1)
        self.position += 1
        return token

    def gumbel(self, first: int, count: int, vocab_size: int) -> mx.array:
        """The noise of `count` positions from `first` on: (count, V)."""

        def draw(key: mx.array) -> mx.array:
            return mx.random.gumbel((vocab_size,), key=key)

        return mx.vmap(draw)(self.keys(0, first, count))

    def _noise_of_round(self, vocab_size: int) -> mx.array:
        if self.noise is None:
            self.noise = self.gumbel(self.position, self.rows, vocab_size)
        return self.noise


class Ratio(Keyed):
    """Rejection sampling: a draft d is accepted with probability min(1, p(d)/q(d)), otherwise a
    token is drawn from the residual max(0, p - q) (Leviathan et al. 2022, arXiv 2211.17192,
    algorithm 1; Chen et al. 2023, arXiv 2302.01318). Acceptance 1 - TV; the same distribution as
    plain sampling, not the same text.
    """

    name: Law = "ratio"

    def __init__(self, parameters: Parameters, history: History):
        super().__init__(parameters, history)
        self.rounds = 0

    def begin(self, n: int) -> None:
        self.round_keys = mx.random.split(self.keys(2, self.rounds, 1)[0], n + 3)
        self.rounds += 1
        self.q: list[mx.array | Certain] = []  # normalised log-probabilities (1, V) of each draft

    def pick(self, proposal: Proposal, drafts: list[mx.array]) -> mx.array:
        if isinstance(proposal, Certain):
            self.q.append(proposal)
            return proposal.token
        logprobs = self.history.draft_log_probabilities(proposal, drafts)
        q = _normalised(self.log_weights(logprobs, len(drafts)))
        self.q.append(q)
        return mx.random.categorical(q, key=self.round_keys[len(drafts)])

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        logprobs = self.history.log_probabilities(logits, drafts)
        p = _normalised(self.log_weights(logprobs))  # (n+1, V)
        last, *others = self.round_keys[-3:]
        n = sum(draft.size for draft in drafts)
        tokens = mx.random.categorical(p[n:], key=last)
        if drafts:
            tokens = mx.concatenate([self._checked(p[:n], drafts, *others), tokens])
        return Draws(tokens.astype(mx.uint32), list(logprobs), [])

    def _checked(
        self, p: mx.array, drafts: list[mx.array], uniform_key: mx.array, residual_key: mx.array
    ) -> mx.array:
        """The drafts that are accepted, a draw from the residual for the others: (n,)."""
        vocab_size = p.shape[-1]
        q = mx.concatenate(
            [_point(q.token, vocab_size) if isinstance(q, Certain) else q for q in self.q]
        )  # (n, V)
        d = mx.concatenate(drafts)  # (n,)
        p_d, q_d = (mx.take_along_axis(x, d[:, None], axis=-1)[:, 0] for x in (p, q))
        accepted = mx.random.uniform(shape=d.shape, key=uniform_key) < mx.exp(p_d - q_d)
        residual = mx.maximum(mx.exp(p) - mx.exp(q), 0)
        nothing_left = residual.sum(axis=-1, keepdims=True) == 0  # p and q equal up to rounding
        log_residual = mx.where(nothing_left, p, mx.log(residual))
        return mx.where(accepted, d, mx.random.categorical(log_residual, key=residual_key))


def _normalised(log_weights: mx.array) -> mx.array:
    return log_weights - mx.logsumexp(log_weights, axis=-1, keepdims=True)


def _point(token: mx.array, vocab_size: int) -> mx.array:
    """Log-probabilities (1, V) of what is certain to be that token (1,)."""
    return mx.where(mx.arange(vocab_size) == token, 0.0, -mx.inf)[None]


def make_law(
    sampler: Sampler | None,
    processors: Sequence[LogitsProcessor] | None,
    prompt: mx.array,
    sampling: Sampling = "auto",
) -> Acceptance:
    """The law for a sampler and processors as mlx_lm.generate_step takes them.

    Args:
        prompt: (T,), all tokens that the target has seen, with the pending one.
        sampling: "stock": mlx-lm's tokens at the same seed; "seed" or "ratio": for a sampler of
            mlx-lm; "auto": "seed", or "stock" for another sampler.

    Raises: BadArguments where the law cannot follow the sampler.
    """
    history = History(processors, prompt)
    if isinstance(sampler, Seed):
        sampler.history = history
        return sampler
    sampler = sampler or greedy_sampler
    parameters = read_sampler(sampler)
    if sampler is greedy_sampler:
        return Greedy(history)
    if sampling == "stock" or (sampling == "auto" and parameters is None):
        return Stock(sampler, history)
    if parameters is None:
        raise BadArguments(
            f"Sampling {sampling!r} needs a sampler of mlx_lm.sample_utils.make_sampler, and this "
            "one is not; leave sampling out, or make it 'stock'."
        )
    if parameters.is_greedy:
        return Greedy(history)
    return Ratio(parameters, history) if sampling == "ratio" else Seed(parameters, history)


def plain_sampler(sampler: Sampler | None, sampling: Sampling) -> tuple[Sampler | None, Law]:
    """The sampler for mlx-lm's own loop, where nothing drafts, and the law that it follows."""
    law = make_law(sampler, None, mx.array([], mx.uint32), sampling)
    if isinstance(law, Seed):
        return law, "seed"
    return sampler, "greedy" if isinstance(law, Greedy) else "stock"
