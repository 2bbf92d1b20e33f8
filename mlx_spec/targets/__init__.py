"""Targets: how an mlx-lm model gives hidden states and records what a roll-back needs."""

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

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """One forward: tokens (1, T) -> hidden states after the final norm (1, T, H) and
        logits (1, T, V), both lazy."""

    def embed(self, tokens: mx.array) -> mx.array:
        """(1, T) -> (1, T, H): the input embeddings."""

    def lm_head(self, hidden: mx.array) -> mx.array:
        """(1, T, H) -> (1, T, V): the output matrix alone."""

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
