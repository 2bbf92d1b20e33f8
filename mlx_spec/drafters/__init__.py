"""Drafters: what proposes the next tokens."""

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.candidates import Candidates

# (logits (1, V) or Candidates, the drafts before it, each (1,)) -> the drafted token (1,)
Pick = Callable[[mx.array | Candidates, list[mx.array]], mx.array]


class Drafter(Protocol):
    """Learns committed tokens and proposes what follows them, without a host read.

    `tokens` (m,) are committed tokens and `hidden` (1, m, H) the target's hidden states that
    predicted each of them. `caches` is a list that `make_cache` made; `target_caches` are the
    target's, which hold the committed tokens but the newest.
    """

    kind: str
    head: nn.Module | None  # what it computes with, beside the target
    learns: bool  # whether `extend` does anything, so that it has to see the prompt

    def make_cache(self) -> list[Any]:
        """Empty caches for one request, of mlx-lm's own classes; none for a drafter that only
        reads the target's."""

    def extend(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> None:
        """Learn the pairs; draft nothing."""

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        """Learn the pairs and propose n >= 1 tokens, each (1,), in n forwards.
        Afterwards the caches hold what was learnt and nothing of the proposals."""

    def rewind(self, caches: list[Any], position: Any) -> None:
        """Forget what was learnt since `position`, a value of `position(caches)`."""

    def position(self, caches: list[Any]) -> Any: ...
