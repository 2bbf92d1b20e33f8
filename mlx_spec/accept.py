"""Acceptance laws: how target rows become tokens, and how drafts are picked to agree with them.

What is emitted is always the target's own draw. A law is called in this order in a round:
`begin`, `pick` for each draft, `draw` for the target's rows, `committed` after the host read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from mlx_spec.candidates import Candidates
from mlx_spec.randomness import generator_state, integers, set_generator_state


@dataclass(frozen=True)
class Draws:
    """The target's draws of one round, lazy.

    tokens: (n+1,) uint32. logprobs: n+1 arrays (V,). keys: the state of mlx's global random
    generator after each draw, each (2,) uint32; empty where the law draws nothing at random.
    """

    tokens: mx.array
    logprobs: list[mx.array]
    keys: list[mx.array]


class Acceptance(Protocol):
    def begin(self) -> None: ...

    def pick(self, logits: mx.array | Candidates, drafts: list[mx.array]) -> mx.array:
        """A draft from the drafter's logits, (1, V) or of candidates, after `drafts`.
        Returns (1,)."""

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        """Tokens from the target's logits (1, n+1, V); row k follows the first k drafts."""

    def committed(self, tokens: list[int], key: list[int] | None) -> None:
        """These tokens were accepted; `key` is the generator's state after the last of them."""

    def leave(self, key: list[int] | None) -> None:
        """Generation ends here: leave the generator in state `key` (None: as it is)."""


class Greedy:
    """argmax, without processors: all rows at once."""

    def begin(self) -> None:
        pass

    def pick(self, logits: mx.array | Candidates, drafts: list[mx.array]) -> mx.array:
        return logits.best() if isinstance(logits, Candidates) else mx.argmax(logits, axis=-1)

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        rows = logits[0]  # (n+1, V)
        logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        return Draws(greedy_sampler(logprobs), list(logprobs), [])

    def committed(self, tokens: list[int], key: list[int] | None) -> None:
        pass

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
    """

    under_way: ClassVar["WeakSet[Stock]"] = WeakSet()

    def __init__(self, sampler: Sampler, processors: Sequence[LogitsProcessor], history: mx.array):
        self.sampler = sampler
        self.processors = processors
        self.history = history  # all tokens that the target has seen, with the pending one
        self.key: list[int] | None = None
        if sampler is not greedy_sampler:
            state = generator_state()
            self.key = integers(mx.random.split(state)[1] if Stock.under_way else state)

    def begin(self) -> None:
        if self.key is not None:
            Stock.under_way.add(self)
        self._restore(self.key)

    def pick(self, logits: mx.array | Candidates, drafts: list[mx.array]) -> mx.array:
        if isinstance(logits, Candidates):
            logits = logits.over_vocabulary()
        return self._draw_one(logits, drafts)[0]

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        self._restore(self.key)
        tokens, logprobs, keys = [], [], []
        for row in range(logits.shape[1]):
            token, row_logprobs = self._draw_one(logits[:, row], drafts[:row])
            tokens.append(token)
            logprobs.append(row_logprobs[0])
            keys.append(generator_state())
        return Draws(mx.concatenate(tokens), logprobs, [] if self.key is None else keys)

    def committed(self, tokens: list[int], key: list[int] | None) -> None:
        self.key = key
        self._restore(key)
        if self.processors:
            self.history = mx.concatenate([self.history, mx.array(tokens, mx.uint32)])

    def leave(self, key: list[int] | None) -> None:
        self._restore(key)
        Stock.under_way.discard(self)

    def _restore(self, key: list[int] | None) -> None:
        if key is not None:
            set_generator_state(key)

    def _draw_one(self, logits: mx.array, drafts: list[mx.array]) -> tuple[mx.array, mx.array]:
        if self.processors:
            tokens = mx.concatenate([self.history, *drafts])
            for processor in self.processors:
                logits = processor(tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.sampler(logprobs), logprobs


def make_law(
    sampler: Sampler | None, processors: Sequence[LogitsProcessor] | None, prompt: mx.array
) -> Acceptance:
    """The law for a sampler and processors as mlx_lm.generate_step takes them."""
    sampler = sampler or greedy_sampler
    if sampler is greedy_sampler and not processors:
        return Greedy()
    return Stock(sampler, processors or [], prompt)
