"""Targets: how an mlx-lm model gives hidden states and records what a roll-back needs."""

import mlx.nn as nn

from mlx_spec.errors import Incompatible
from mlx_spec.targets import gemma4, qwen
from mlx_spec.targets.target import Target

MODEL_TYPES = (*qwen.MODEL_TYPES, *gemma4.MODEL_TYPES)


def target_for(model: nn.Module) -> Target:
    """The Target of a loaded mlx-lm model. Raises Incompatible for other families."""
    if isinstance(model, qwen.MODELS):
        return qwen.QwenTarget(model)
    if isinstance(model, gemma4.MODELS):
        return gemma4.Gemma4Target(model)
    raise unsupported(type(model).__module__.rpartition(".")[2])


def unsupported(family: str) -> Incompatible:
    return Incompatible(
        f"mlx-spec has no fast path for {family} models; "
        f"it decodes {', '.join(MODEL_TYPES)} speculatively."
    )
