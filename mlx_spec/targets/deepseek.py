"""DeepSeek-V3, GLM-4.5 to 4.7 and MiMo: models of mlx-lm whose heads follow DeepSeek's layout.

Added to mlx-lm's own classes: hidden states beside the logits. All their caches are KVCache; those
of latent attention (MLA) hold the latent rows and the rotated keys, of different widths.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, mimo

from mlx_spec.targets.generic import refuse_spread

MODELS = (deepseek_v3.Model, glm4_moe.Model, glm4_moe_lite.Model, mimo.Model)


class DeepSeekTarget:
    """See `mlx_spec.targets.target.HiddenTarget`."""

    def __init__(self, model: nn.Module):
        refuse_spread(model)
        self.model = model
        self.text = model
        self.hidden_size = model.args.hidden_size
        self.vocab_size = model.args.vocab_size
        self.window: int | None = None
        self.recurrent = False
        # Of the model's parts, not of the model: a drafter that is kept with its model holds these.
        embedding = model.model.embed_tokens
        tied = "lm_head" not in model
        self.embed = embedding
        self.lm_head: Callable[[mx.array], mx.array] = (
            embedding.as_linear if tied else model.lm_head
        )
        self.output_matrix: nn.Module = embedding if tied else model.lm_head

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        hidden = self.model.model(tokens, cache)
        return hidden, self.lm_head(hidden)

    def recording(self):
        return nullcontext([])  # nothing is recurrent
