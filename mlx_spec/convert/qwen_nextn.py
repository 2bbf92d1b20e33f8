"""Reads Qwen's NextN ("MTP") heads: finds them, compares them with `QwenNextN`, folds the norms."""

import re
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from mlx_spec.convert import draft_vocab, fp8, match, nextn
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.experts import by_parameter, plan
from mlx_spec.convert.head import Head, check_format_version
from mlx_spec.convert.match import Recipes
from mlx_spec.convert.norms import norm_convention
from mlx_spec.drafters.qwen_nextn import ModelArgs, QwenNextN
from mlx_spec.errors import NoDrafter

DRAFTER_TYPE = "qwen3_5_mtp"
TARGET_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = (*TARGET_TYPES, DRAFTER_TYPE)

PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?mtp\.")
RENAMED = {"shared_head.head.weight": "lm_head.weight"}

# Hugging Face stores these minus one: x / rms(x) * (1 + w).
NORMS = {
    "pre_fc_norm_embedding",
    "pre_fc_norm_hidden",
    "norm",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
}

# Without these the classes of mlx-lm would fall back on a default, that is, invent them.
REQUIRED = [
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
]
REQUIRED_DENSE = ["intermediate_size"]
REQUIRED_MOE = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
]
# Beyond these, building the module to see its shapes would take all time and memory.
MAXIMA = {"mtp_num_hidden_layers": 64, "num_experts": 10_000}

# What the configuration of a head has in common with that of its model.
SHAPE = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether `read_head` has something to read. Opens no shard that an index lists."""
    known = checkpoint.config.get("model_type") in MODEL_TYPES
    return known and bool(_head_names(checkpoint))


def read_head(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> Head:
    """Reads the NextN head of a model's checkpoint, or of a drafter directory.

    Only the bytes of the head's tensors are read, each when its parameter is asked for, and only
    after all their headers were found good.

    Args:
        checkpoint: what to read from.
        dtype: of the weights. Default: the source's own, and bfloat16 for fp8.

    Raises:
        NoDrafter: the checkpoint has no head.
        Incompatible: it is of a later format version.
        CheckpointError: tensors are missing, doubled, misshapen or unreadable, or nothing
            tells whether the norms are stored minus one.
    """
    names = _find(checkpoint)
    scales = fp8.pair_scales(checkpoint, names)
    unscaled = [name for name in names if name not in scales.values()]
    made = plan(checkpoint, by_parameter(checkpoint, unscaled, _parameter))
    config, recipes = _match(checkpoint, made)
    origin = nextn.provenance(checkpoint, names, recipes, scales)
    convention, evidence = norm_convention(checkpoint, origin.files)
    checkpoint.prepare(origin.used)
    folded = {key for key in recipes if _is_norm(key) and convention == "minus_one"}
    weights = nextn.weights_of(checkpoint, recipes, scales, dtype, folded=folded)
    config["mlx_spec"] |= {"norm_convention": "folded", "norm_evidence": evidence}
    vocab_size = config["text_config"]["vocab_size"]
    return Head(config, draft_vocab.checked(weights, checkpoint, vocab_size), origin)


def build(config: dict[str, Any], weights: Iterable[str]) -> QwenNextN:
    """The module of a head with these parameters."""
    return QwenNextN(ModelArgs.from_config(config, dict.fromkeys(weights)))


def misfits(drafter: Checkpoint, model: Checkpoint) -> list[str]:
    """What keeps a head from working with a model, judged by their configurations."""
    own, theirs = (c.section("text_config") or c.config for c in (drafter, model))
    return [
        f"its {key} is {own[key]} and the model's {theirs[key]}"
        for key in SHAPE
        if key in own and key in theirs and own[key] != theirs[key]
    ]


def _is_norm(key: str) -> bool:
    *_, module, parameter = key.split(".")
    return module in NORMS and parameter == "weight"


def _parameter(name: str) -> str:
    inner = PREFIX.sub("", name)
    return RENAMED.get(inner, inner)


def _prefix(checkpoint: Checkpoint) -> str:
    """What stands before the head's own names; nothing in a drafter directory."""
    return next((found[0] for name in checkpoint.names if (found := PREFIX.match(name))), "")


def _head_names(checkpoint: Checkpoint) -> list[str]:
    """Full names of the head's tensors: under `mtp.`, or all of a drafter directory."""
    names = [name for name in checkpoint.names if PREFIX.match(name)]
    if not names and checkpoint.config.get("model_type") == DRAFTER_TYPE:
        return checkpoint.names
    return names


def _find(checkpoint: Checkpoint) -> list[str]:
    """As `_head_names`, or an error that says why there is no head to read."""
    path, model_type = checkpoint.path, checkpoint.config.get("model_type")
    names = _head_names(checkpoint)
    if not names and (layers := _announced_layers(checkpoint)):
        raise NoDrafter(
            f"config.json of {path} announces a NextN head (mtp_num_hidden_layers {layers}), but "
            "the weights hold no mtp tensors: the head was stripped from this repository; "
            "convert from the original repository"
        )
    if not names:
        raise NoDrafter(
            f"{path} (model type {model_type!r}) has no NextN head, as it holds no mtp tensors: "
            "convert from the original repository of a Qwen3-Next, Qwen3.5 or Qwen3.6 model"
        )
    check_format_version(checkpoint)
    return names


def _match(checkpoint: Checkpoint, made: Recipes) -> tuple[dict[str, Any], Recipes]:
    """Compares what can be made with what the module needs.

    Returns: the drafter's config, and the recipe of each parameter in order of name.
    """
    config = _drafter_config(checkpoint, made)
    module = _skeleton(checkpoint, config, made)
    drafter = checkpoint.config.get("model_type") == DRAFTER_TYPE
    recorded = checkpoint.section("quantization") if drafter else {}  # else it is the target's
    if quantization := match.pack(checkpoint, module, made, recorded):
        config |= dict.fromkeys(match.QUANTIZATION, quantization)
    needed = match.shapes(module)
    if config["text_config"].get("mtp_use_dedicated_embeddings"):
        needed.setdefault("embed_tokens.weight", (module.args.vocab_size, module.args.hidden_size))
    prefix = _prefix(checkpoint)
    nextn.check(checkpoint, made, needed, lambda key: prefix + key)
    return config, {key: made[key] for key in sorted(needed)}


def _drafter_config(checkpoint: Checkpoint, made: Iterable[str]) -> dict[str, Any]:
    text = _text_config(checkpoint)
    required = REQUIRED + (REQUIRED_MOE if _is_moe(made) else REQUIRED_DENSE)
    nextn.check_config(checkpoint, text, required, MAXIMA)
    drafter = checkpoint.config.get("model_type") == DRAFTER_TYPE
    tied = checkpoint.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {
        "model_type": DRAFTER_TYPE,
        "text_config": text,
        "tie_word_embeddings": tied,
        "block_size": _layers(checkpoint, made) + 2,
        "mlx_spec": draft_vocab.recorded(checkpoint) if drafter else {},
    }


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's text configuration. Its quantization is no business of the drafter."""
    text = checkpoint.section("text_config") or checkpoint.config  # Qwen3-Next has one level
    dropped = (*match.QUANTIZATION, "mlx_spec")
    return {key: value for key, value in text.items() if key not in dropped}


def _announced_layers(checkpoint: Checkpoint) -> int:
    count = _text_config(checkpoint).get("mtp_num_hidden_layers")
    return count if isinstance(count, int) else 0


def _layers(checkpoint: Checkpoint, made: Iterable[str]) -> int:
    """Number of layers: those that are there, but no fewer than announced."""
    found = {key.split(".")[1] for key in made if key.startswith("layers.")}
    return max(len(found), _announced_layers(checkpoint), 1)


def _is_moe(made: Iterable[str]) -> bool:
    return any(".mlp.switch_mlp." in key or ".mlp.shared_expert" in key for key in made)


def _skeleton(checkpoint: Checkpoint, config: dict[str, Any], made: Iterable[str]) -> QwenNextN:
    """The module with initial values that are never computed."""
    keys = dict.fromkeys(made)
    for i in range(_layers(checkpoint, made)):
        keys[f"layers.{i}.input_layernorm.weight"] = None
    if _is_moe(made):
        keys["layers.0.mlp.gate.weight"] = None
    return match.skeleton(checkpoint, "a NextN head", lambda: build(config, keys))
