"""What a drafter may propose beside logits of the whole vocabulary."""

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx


@dataclass(frozen=True)
class Candidates:
    """logits (1, C) of the tokens ids (C,); no other token is proposed.

    A drafter with an ordered embedding gives these.
    """

    logits: mx.array
    ids: mx.array
    vocab_size: int

    def best(self) -> mx.array:
        """The most likely token, (1,)."""
        return self.ids[mx.argmax(self.logits, axis=-1)]

    def over_vocabulary(self) -> mx.array:
        """(1, V), minus infinity where a token is no candidate: for samplers and processors,
        which look tokens up by their ids."""
        nothing = mx.full((1, self.vocab_size), -mx.inf, self.logits.dtype)
        return mx.put_along_axis(nothing, self.ids[None], self.logits, axis=-1)


@dataclass(frozen=True)
class Certain:
    """One token (1,), proposed whatever the sampler: its probability is 1."""

    token: mx.array


Proposal: TypeAlias = mx.array | Candidates | Certain  # logits are (1, V)
