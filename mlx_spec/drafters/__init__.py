"""Drafters: what proposes the next tokens."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.candidates import Proposal
from mlx_spec.drafters.text import Text
from mlx_spec.targets.target import Target

# (what is proposed, the drafts before it, each (1,)) -> the drafted token (1,)
Pick = Callable[[Proposal, list[mx.array]], mx.array]
NO_LIMIT = sys.maxsize


class Drafter(Protocol):
    """Learns committed tokens and proposes what follows them, without a host read.

    `tokens` (m,) are committed tokens and `hidden` (1, m, H) the target's hidden states that
    predicted each of them, None for a drafter that needs none. `caches` is a list that `make_cache`
    made; `target_caches` are the target's, which hold the committed tokens but the newest.
    """

    kind: str
    head: nn.Module | None  # what it computes with, beside the target
    learns: bool  # whether `extend` does anything, so that it has to see the prompt
    needs_hidden: bool = True
    most: int = 8  # drafts in a round at automatic depth, unless the caller says otherwise

    def view(self, target: Target) -> Target:
        """The target as the loop is to run it: one that gives the hidden states it needs."""
        return target

    def make_cache(self) -> list[Any]:
        """Empty caches for one request, of mlx-lm's own classes; none for a drafter that only
        reads the target's."""

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        """Learn the pairs; draft nothing."""

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
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

    # What follows has a meaning for drafters that look at the text itself.

    @property
    def parts(self) -> tuple["Drafter", ...]:
        """The drafters that take turns, in the order in which they are asked."""
        return (self,)

    def caches_of_parts(self, caches: list[Any]) -> list[list[Any]]:
        return [caches]

    def text(self, caches: list[Any]) -> Text | None:
        """Where the loop writes down the committed tokens, if that is of use."""
        return None

    def limit(self, caches: list[Any]) -> int:
        """How many drafts there is a reason for; the text is known up to the newest token."""
        return NO_LIMIT

    def expects(self, caches: list[Any]) -> bool:
        """Whether there may be a reason for drafts as soon as the newest token is known."""
        return False
