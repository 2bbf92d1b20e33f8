"""Qwen3-Next, Qwen3.5 and Qwen3.6 (dense and MoE): hybrid models of mlx-lm.

mlx-lm's own classes do the maths. Added here: hidden states beside the logits, and a record of
what each gated-delta layer fed to its recurrence, so that a shorter run can be replayed.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_next

from mlx_spec.errors import Incompatible
from mlx_spec.targets.target import Replay

MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MODELS = (qwen3_5.Model, qwen3_next.Model)  # qwen3_5_moe.Model is a qwen3_5.Model

_recording = threading.Lock()


class QwenTarget:
    """See `mlx_spec.targets.target.HiddenTarget`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.text = model.language_model if isinstance(model, qwen3_5.Model) else model
        if self.text.model.pipeline_size > 1 or _sharded(model):
            raise Incompatible("A model spread over several machines is decoded without drafts.")
        self.hidden_size = self.text.args.hidden_size
        self.vocab_size = self.text.args.vocab_size
        self.window: int | None = None
        self.recurrent = True
        # Of the model's parts, not of the model: a drafter that is kept with its model holds these.
        embedding = self.text.model.embed_tokens
        tied = self.text.args.tie_word_embeddings
        self.embed = embedding
        self.lm_head = embedding.as_linear if tied else self.text.lm_head
        self.output_matrix: nn.Module = embedding if tied else self.text.lm_head
        self._module = sys.modules[type(self.text).__module__]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        hidden = self.text.model(tokens, cache)
        return hidden, self.lm_head(hidden)

    def recording(self):
        return record_recurrence(self._module)


def _sharded(model: nn.Module) -> bool:
    return isinstance(model, qwen3_5.Model) and any(
        layer.is_linear and layer.linear_attn.sharding_group is not None for layer in model.layers
    )


@contextmanager
def record_recurrence(module: Any) -> Iterator[list[Replay]]:
    """Keep the inputs of each `gated_delta_update` that `module` calls in this thread.

    The inputs belong to n+1 rows; a Replay of `keep` rows runs the recurrence again over the
    first `keep` of them, from the state before. It is mlx-lm's own function in both runs.
    """
    owner = threading.get_ident()
    replays: list[Replay] = []

    def record(q, k, v, a, b, A_log, dt_bias, state=None, mask=None, **options):
        if threading.get_ident() == owner:

            def replay(keep: int) -> mx.array:
                rows = [x[:, :keep] for x in (q, k, v, a, b)]
                return update(*rows, A_log, dt_bias, state, None, **options)[1]

            replays.append(replay)
        return update(q, k, v, a, b, A_log, dt_bias, state, mask, **options)

    with _recording:
        update = module.gated_delta_update
        module.gated_delta_update = record
        try:
            yield replays
        finally:
            module.gated_delta_update = update
