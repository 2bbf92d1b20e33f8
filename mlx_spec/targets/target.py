"""What the loop, the roll-back and the drafters know of a target."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

# keep -> the recurrent state after the first `keep` rows of a recorded forward
Replay = Callable[[int], mx.array]


class Target(Protocol):
    """An mlx-lm model, seen by the loop and by the drafters."""

    model: nn.Module
    hidden_size: int
    vocab_size: int
    window: int | None  # of sliding attention, in tokens
    embed: Callable[[mx.array], mx.array]  # what the first layer gets: (1, T) -> (1, T, H)
    lm_head: Callable[[mx.array], mx.array]  # from hidden to logits: (1, T, H) -> (1, T, V)
    output_matrix: nn.Module  # of lm_head, a row for each token; the embedding if they are tied

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """One forward: tokens (1, T) -> hidden states after the final norm (1, T, H) and
        logits (1, T, V), both lazy."""

    def recording(self) -> AbstractContextManager[list[Replay]]:
        """Within it, forwards append one Replay per recurrent layer, in order of layers."""
