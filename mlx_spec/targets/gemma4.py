"""Gemma-4 (E2B, E4B, 12B unified, 26B-A4B, 31B): models with sliding and full attention.

mlx-lm's own classes do the maths. Added here: hidden states beside the logits, and the keys and
values that the assistant drafter attends to.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.models.cache import QuantizedKVCache

MODEL_TYPES = ("gemma4", "gemma4_text", "gemma4_unified")
MODELS = (gemma4.Model, gemma4_text.Model)  # gemma4_unified is read as gemma4


@dataclass(frozen=True)
class SharedKV:
    """Keys and values of the `length` committed tokens, each (1, kv heads, T, D), by kind of
    layer; T is `length` for full attention, and at most the window for sliding attention."""

    length: int
    rows: dict[str, tuple[mx.array, mx.array]]


class Gemma4Target:
    """See `mlx_spec.targets.target.HiddenTarget`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.text = model.language_model if isinstance(model, gemma4.Model) else model
        args = self.text.args
        self.hidden_size = args.hidden_size
        self.vocab_size = args.vocab_size
        self.window = args.sliding_window
        self.recurrent = False
        # Functions of the model's parts, not of the model: a drafter that is kept with its
        # model holds these.
        embedding, scale = self.text.model.embed_tokens, self.text.model.embed_scale
        self.embed: Callable[[mx.array], mx.array] = lambda tokens: embedding(tokens) * scale
        tied = args.tie_word_embeddings
        matrix = embedding.as_linear if tied else self.text.lm_head
        self.output_matrix: nn.Module = embedding if tied else self.text.lm_head
        softcap = self.text.final_logit_softcapping
        self.lm_head: Callable[[mx.array], mx.array] = matrix
        if softcap is not None:
            self.lm_head = lambda hidden: gemma4_text.logit_softcap(softcap, matrix(hidden))
        # The last layer of each kind that has keys and values of its own.
        owners = self.text.layers[: args.num_hidden_layers - args.num_kv_shared_layers]
        self.kv_owners = {layer.layer_type: i for i, layer in enumerate(owners)}
        self.kv_shapes = {
            kind: (owners[i].self_attn.n_kv_heads, owners[i].self_attn.head_dim)
            for kind, i in self.kv_owners.items()
        }
        self.shared_kv = partial(shared_kv, self.kv_owners)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        hidden = self.text.model(tokens, cache=cache)
        return hidden, self.lm_head(hidden)

    def recording(self):
        return nullcontext([])  # nothing is recurrent


def shared_kv(owners: dict[str, int], caches: list[Any]) -> SharedKV:
    """Views of the target's own caches. A quantised cache is unpacked for it, all of its rows
    in each round."""
    rows = {kind: _rows(caches[i]) for kind, i in owners.items()}
    return SharedKV(caches[0].offset, rows)


def _rows(cache: Any) -> tuple[mx.array, mx.array]:
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        unpack = partial(mx.dequantize, group_size=cache.group_size, bits=cache.bits)
        return unpack(*keys), unpack(*values)
    return keys, values
