"""Reads Qwen's NextN ("MTP") heads: finds them, compares them with `QwenNextN`, folds the norms."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.convert import fp8
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import FORMAT_VERSION, Head, Provenance
from mlx_spec.convert.norms import norm_convention
from mlx_spec.convert.qwen_names import PREFIX, Recipe, expert_number, plan, prefix_of
from mlx_spec.drafters.qwen_nextn import ModelArgs, QwenNextN
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter
from mlx_spec.randomness import untouched_generator

DRAFTER_TYPE = "qwen3_5_mtp"
TARGET_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
MODEL_TYPES = (*TARGET_TYPES, DRAFTER_TYPE)

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
FLOATS = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F8_E4M3": mx.bfloat16,  # once it is decoded
}

Recipes = dict[str, Recipe]
Shapes = dict[str, tuple[int, ...]]


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether `read_head` has something to read. Opens no shard that an index lists."""
    known = checkpoint.config.get("model_type") in MODEL_TYPES
    return known and bool(_head_names(checkpoint))


def read_head(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> Head:
    """Reads the NextN head of a model's checkpoint, or of a drafter directory.

    Only the bytes of the head's tensors are read, and only after all their headers were found
    good.

    Args:
        checkpoint: what to read from.
        dtype: of the weights. Default: the source's own, and bfloat16 for fp8.

    Raises:
        NoDrafter: the checkpoint has no head.
        Incompatible: it is of an unsupported family or format version.
        CheckpointError: tensors are missing, doubled, misshapen or unreadable, or nothing
            tells whether the norms are stored minus one.
    """
    names = _find(checkpoint)
    scales = fp8.pair_scales(checkpoint, names)
    made = plan(checkpoint, [name for name in names if name not in scales.values()])
    config, recipes = _match(checkpoint, made)
    used = {name for recipe in recipes.values() for name in recipe.sources}
    used |= {scales[name] for name in used if name in scales}
    files = sorted({checkpoint.tensor(name).file for name in used})
    convention, evidence = norm_convention(checkpoint, files)

    @cache
    def read(name: str) -> mx.array:
        if name in scales:
            return fp8.read(checkpoint, name, scales[name])
        return checkpoint.read(name)

    weights = {}
    for key, recipe in recipes.items():
        value = recipe.make([read(name) for name in recipe.sources])
        if _is_norm(key) and convention == "minus_one":
            value = value.astype(mx.float32) + 1.0
        if mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(dtype or FLOATS[recipe.dtype])
        weights[key] = value
    origin = Provenance(
        source=str(checkpoint.path),
        files=tuple(files),
        norm_convention=convention,
        norm_evidence=evidence,
        used=tuple(sorted(used)),
        unused=tuple(sorted(set(names) - used)),
    )
    return Head(config, weights, origin)


def _is_norm(key: str) -> bool:
    *_, module, parameter = key.split(".")
    return module in NORMS and parameter == "weight"


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
    if names and model_type not in MODEL_TYPES:
        raise Incompatible(
            f"{path} has mtp tensors, but its model type {model_type!r} is not supported: "
            f"supported are {', '.join(TARGET_TYPES)}"
        )
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
    version = checkpoint.section("mlx_spec").get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise Incompatible(
            f"{path} has format version {version}, and this mlx-spec reads {FORMAT_VERSION}: "
            "update mlx-spec or convert again"
        )
    return names


def _match(checkpoint: Checkpoint, made: Recipes) -> tuple[dict[str, Any], Recipes]:
    """Compares what can be made with what the module needs.

    Returns: the drafter's config, and the recipe of each parameter in order of name.
    """
    config = _drafter_config(checkpoint, made)
    module = _skeleton(checkpoint, config, made)
    if quantization := _quantize(checkpoint, module, made):
        config |= {"quantization": quantization, "quantization_config": quantization}
    needed = {key: value.shape for key, value in dict(tree_flatten(module.parameters())).items()}
    if config["text_config"].get("mtp_use_dedicated_embeddings"):
        needed.setdefault("embed_tokens.weight", (module.args.vocab_size, module.args.hidden_size))
    _check_missing(checkpoint, made, needed)
    _check_shapes(checkpoint, made, needed)
    _check_dtypes(checkpoint, made, needed)
    return config, {key: made[key] for key in sorted(needed)}


def _drafter_config(checkpoint: Checkpoint, made: Iterable[str]) -> dict[str, Any]:
    text = _text_config(checkpoint)
    required = REQUIRED + (REQUIRED_MOE if _is_moe(made) else REQUIRED_DENSE)
    missing = [field for field in required if text.get(field) is None]
    if (text.get("rope_parameters") or text).get("rope_theta") is None:
        missing.append("rope_theta")
    if missing:
        raise CheckpointError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}: "
            "download it from the original repository"
        )
    tied = checkpoint.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {
        "model_type": DRAFTER_TYPE,
        "text_config": text,
        "tie_word_embeddings": tied,
        "block_size": _layers(checkpoint, made) + 2,
    }


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's text configuration. Its quantization is no business of the drafter."""
    text = checkpoint.section("text_config") or checkpoint.config  # Qwen3-Next has one level
    dropped = ("quantization", "quantization_config", "mlx_spec")
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
    try:
        with untouched_generator():
            return QwenNextN(ModelArgs.from_config(config, keys))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"config.json of {checkpoint.path} does not describe a NextN head ({error}): "
            "download it from the original repository"
        ) from error


def _quantize(checkpoint: Checkpoint, module: QwenNextN, made: Recipes) -> dict[str, Any]:
    """Gives the module packed parameters where the source has them, as MLX files may.

    Returns: the drafter's `quantization` block, empty if nothing is packed. A drafter directory
    records it; elsewhere the block is about the target, so the head's is read off its shapes.
    """
    packed = [key.removesuffix(".scales") for key in made if key.endswith(".scales")]
    if not packed:
        return {}
    drafter = checkpoint.config.get("model_type") == DRAFTER_TYPE
    recorded = checkpoint.section("quantization") if drafter else {}
    modules: dict[str, Any] = dict(module.named_modules())
    stand_ins = {
        key: mx.zeros(recipe.shape, mx.uint8 if recipe.dtype == "U8" else mx.float32)
        for key, recipe in made.items()
    }
    try:
        found = {
            path: recorded.get(path) or infer_quant_config(path, modules[path], stand_ins)
            for path in packed
        }
        nn.quantize(module, class_predicate=lambda path, _: found.get(path, False))
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{checkpoint.path} holds packed weights that do not fit the head ({error}): "
            "convert from the original repository"
        ) from error
    return recorded or found[packed[0]] | found


def _check_missing(checkpoint: Checkpoint, made: Recipes, needed: Shapes) -> None:
    prefix = prefix_of(checkpoint.names)
    missing = [prefix + key for key in sorted(needed.keys() - made)]
    for key in sorted(needed.keys() & made):
        if made[key].stack:
            layer, projection = key.split(".switch_mlp.")
            there = {expert_number(name) for name in made[key].sources}
            missing += [
                f"{prefix}{layer}.experts.{e}.{projection}"
                for e in range(needed[key][0])
                if e not in there
            ]
    if not missing:
        return
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    left_over = sorted(name for key in made.keys() - needed for name in made[key].sources)
    hint = f" (and has no use for {', '.join(left_over[:5])})" if left_over else ""
    raise CheckpointError(
        f"{checkpoint.path} lacks {len(missing)} tensors of its NextN head: {shown}{hint}; the "
        "head was stripped from this repository or packed; convert from the original repository"
    )


def _check_shapes(checkpoint: Checkpoint, made: Recipes, needed: Shapes) -> None:
    wrong = [
        f"{made[key].sources[0]} gives {key} the shape {made[key].shape} and not {shape}"
        for key, shape in sorted(needed.items())
        if made[key].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"tensors of {checkpoint.path} do not fit its config.json: {'; '.join(wrong)}"
        )


def _check_dtypes(checkpoint: Checkpoint, made: Recipes, needed: Shapes) -> None:
    for key in needed:
        packed = f"{key.rpartition('.')[0]}.scales" in needed
        if made[key].dtype not in FLOATS and not (packed and made[key].dtype in ("U32", "U8")):
            raise CheckpointError(
                f"{made[key].sources[0]} in {checkpoint.path} is stored as {made[key].dtype}, "
                "which is not supported: convert from the original repository"
            )
