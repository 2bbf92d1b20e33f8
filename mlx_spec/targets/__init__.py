"""Targets: how an mlx-lm model is run, gives hidden states, and records what a roll-back needs."""

import mlx.nn as nn

from mlx_spec.targets import deepseek, gemma4, qwen
from mlx_spec.targets.generic import GenericTarget
from mlx_spec.targets.target import Target


def target_for(model: nn.Module) -> Target:
    """The Target of a loaded mlx-lm model. Raises Incompatible for one that is spread over several
    machines."""
    if isinstance(model, qwen.MODELS):
        return qwen.QwenTarget(model)
    if isinstance(model, gemma4.MODELS):
        return gemma4.Gemma4Target(model)
    if isinstance(model, deepseek.MODELS):
        return deepseek.DeepSeekTarget(model)
    return GenericTarget(model)
