"""What the loop, the roll-back and the drafters know of a target."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

# keep -> the recurrent state after the first `keep` rows of a recorded forward
Replay = Callable[[int], mx.array]


class Target(Protocol):
    """An mlx-lm model, seen by the loop."""

    model: nn.Module
    window: int | None  # of sliding attention, in tokens
    recurrent: bool  # whether `recording` records what each ArraysCache of the model holds

    @property
    def vocab_size(self) -> int:
        """Of the logits."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array | None, mx.array]:
        """One forward: tokens (1, T) -> hidden states (1, T, H), None from a target that gives
        none, and logits (1, T, V), all lazy."""

    def recording(self) -> AbstractContextManager[list[Replay]]:
        """Within it, forwards append one Replay per recurrent layer, in order of layers."""


class HiddenTarget(Target, Protocol):
    """A target that gives what a drafter made for it computes with: the hidden states are those
    after the final norm."""

    hidden_size: int
    embed: Callable[[mx.array], mx.array]  # what the first layer gets: (1, T) -> (1, T, H)
    lm_head: Callable[[mx.array], mx.array]  # from hidden to logits: (1, T, H) -> (1, T, V)
    output_matrix: nn.Module  # of lm_head, a row for each token; the embedding if they are tied

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]: ...
