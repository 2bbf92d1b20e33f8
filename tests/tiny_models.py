"""Tiny models of families for which mlx-spec has no file: mlx-lm's own classes, random weights."""

from functools import cache
from importlib import import_module

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from models import checkpoint_path

VOCAB = 64
LLAMA = "llama-target-trained"  # a checkpoint, vocabulary 512
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
}
CONFIGS = {
    # no make_cache of its own
    "qwen3": {"max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 1e4},
    # two layers of three have a window of 8 tokens
    "gemma3_text": {
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    },
    # a mixture of experts, attention sinks, a window in every other layer
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": True,
    },
}
DECODED = [LLAMA, "qwen3", "gemma3_text", "gpt_oss"]
WINDOWED = ["gemma3_text", "gpt_oss"]


@cache
def tiny(name: str) -> nn.Module:
    """In float32."""
    if name == LLAMA:
        model, _ = load_model(checkpoint_path(LLAMA))
        model.set_dtype(mx.float32)
        return model
    module = import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name} | COMMON | CONFIGS[name]
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    # larger weights than at initialisation, so that the text does not repeat one token
    model.update(tree_map(lambda w: w + 0.3 * mx.random.normal(w.shape), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def prompt_of(name: str, length: int = 20) -> list[int]:
    mx.random.seed(5)
    return mx.random.randint(3, VOCAB, (length,)).tolist()
