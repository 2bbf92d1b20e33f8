"""Targets: how an mlx-lm model gives hidden states and records what a roll-back needs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import Incompatible
from mlx_spec.rollback import Replay
from mlx_spec.targets import qwen


class Target(Protocol):
    """An mlx-lm model, seen by the loop and by the drafters."""

    model: nn.Module
    hidden_size: int
    vocab_size: int
    embed: Callable[[mx.array], mx.array]  # input embeddings: (1, T) -> (1, T, H)
    lm_head: Callable[[mx.array], mx.array]  # the output matrix alone: (1, T, H) -> (1, T, V)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """One forward: tokens (1, T) -> hidden states after the final norm (1, T, H) and
        logits (1, T, V), both lazy."""

    def recording(self) -> AbstractContextManager[list[Replay]]:
        """Within it, forwards append one Replay per recurrent layer, in order of layers."""


def target_for(model: nn.Module) -> Target:
    """The Target of a loaded mlx-lm model. Raises Incompatible for other families."""
    if isinstance(model, qwen.MODELS):
        return qwen.QwenTarget(model)
    raise unsupported(type(model).__module__.rpartition(".")[2])


def unsupported(family: str) -> Incompatible:
    return Incompatible(
        f"mlx-spec has no fast path for {family} models; "
        f"it decodes {', '.join(qwen.FAMILIES)} speculatively."
    )
