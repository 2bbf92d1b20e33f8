"""Reads EAGLE-3 heads, as they were first released (`midlayer.*`) or as speculators writes them
(`layers.0.*`, with a nested configuration). Written is one flat configuration, with the names of
tensors that speculators and vLLM use, and offsets in `d2t`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert import match
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import Head, Provenance, check_format_version, origin
from mlx_spec.convert.weights import Parameter, Weights, cast
from mlx_spec.drafters.eagle3 import Eagle3, ModelArgs, layer_ids, meaning_of_layer_ids
from mlx_spec.errors import CheckpointError, NoDrafter

ARCHITECTURE = "LlamaForCausalLMEagle3"
MAPPING, MASK = "d2t", "t2d"
INTEGERS = ("I64", "I32")
# Tensors that a head may bring and does not need: a mask, frequencies that can be computed, and
# copies of the model's.
UNUSED = re.compile(rf"{MASK}$|verifier_|.*\.inv_freq$")

# Without these the classes of mlx-lm would fall back on a default, that is, invent them.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
NUMBERS = (*REQUIRED, "head_dim", "draft_vocab_size", "target_hidden_size", "sliding_window")
LAYOUT = ("transformer_layer_config", "speculators_config", "auto_map")

INCOMPLETE = ("EAGLE-3 head", "download it again from the original repository")


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, as released or as written here."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return (
        any("eagle3" in str(name).lower() for name in names)
        or config.get("speculators_model_type") == "eagle3"
        or (config.get("model_type") == "llama" and "draft_vocab_size" in config)
    )


def has_head(checkpoint: Checkpoint) -> bool:
    return is_drafter(checkpoint.config)


def read_head(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> Head:
    """Reads a head in one of its layouts, as MLX packed it, or as we wrote it; a tensor when its
    parameter is asked for.

    Args:
        checkpoint: what to read from.
        dtype: of the weights but integers. Default: the source's own.

    Raises:
        NoDrafter: the checkpoint is not a head.
        Incompatible: it is of a later format version.
        CheckpointError: tensors are missing, doubled, misshapen, unreadable or unknown, config.json
            does not describe a head that is supported, or `d2t` is no map of tokens.
    """
    if not has_head(checkpoint):
        raise NoDrafter(
            f"{checkpoint.path} (model type {checkpoint.config.get('model_type')!r}) is not an "
            "EAGLE-3 head; give the repository of the head"
        )
    check_format_version(checkpoint)
    config, recipes = _match(checkpoint)
    used = [name for recipe in recipes.values() for name in recipe.sources]
    used += [MASK] if MAPPING in recipes and _has_mask(checkpoint) else []
    checkpoint.prepare(used)
    provenance = Provenance(
        *origin(checkpoint),
        directory=checkpoint.directory,
        files=tuple(sorted({checkpoint.tensor(name).file for name in used})),
        used=tuple(sorted(used)),
        unused=tuple(sorted(set(checkpoint.names) - set(used))),
    )
    return Head(config, _weights(checkpoint, recipes, config["vocab_size"], dtype), provenance)


def build(config: dict[str, Any], weights: Iterable[str]) -> Eagle3:
    """The module of a head with these parameters."""
    return Eagle3(ModelArgs.from_config(config, weights))


def misfits(head: Checkpoint, model: Checkpoint) -> list[str]:
    """What keeps a head from working with a model, judged by their configurations."""
    config, module = match.skeleton(head, "an EAGLE-3 head", lambda: _configured(head))
    theirs = model.section("text_config") or model.config
    pairs = [
        ("vocab_size", config["vocab_size"], "vocab_size"),
        (
            "target_hidden_size",
            config.get("target_hidden_size", config["hidden_size"]),
            "hidden_size",
        ),
    ]
    if not module.args.dedicated_embedding:
        pairs.append(("hidden_size", config["hidden_size"], "hidden_size"))
    faults = [
        f"its {name} is {own} and the model's {theirs[field]}"
        for name, own, field in pairs
        if field in theirs and theirs[field] != own
    ]
    count = theirs.get("num_hidden_layers")
    if isinstance(count, int) and (layers := module.args.layers_of(count)):
        outside = [i for i in layers if not 0 <= i <= count]
        faults += [f"it looks at layer {i} of the model, which has {count}" for i in outside[:1]]
    return faults


# ---- the configuration ---------------------------------------------------------------------------


def _drafter_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """One flat configuration, checked."""
    nested = checkpoint.section("transformer_layer_config")
    dropped = (*match.QUANTIZATION, *LAYOUT, "mlx_spec")
    merged = nested | {key: value for key, value in checkpoint.config.items()}
    config = {
        key: value
        for key, value in merged.items()
        if key not in dropped and not key.startswith("speculators_") and value is not None
    }
    if nested:
        config["model_type"] = nested.get("model_type", "llama")
        config.setdefault("norm_before_residual", True)
    _check_config(checkpoint, config)
    config |= {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.get("draft_vocab_size", config["vocab_size"]),
        "mlx_spec": {"norm_convention": "plain"},
    }
    if layer_ids(config):
        config["mlx_spec"]["layer_ids"] = meaning_of_layer_ids(checkpoint.config)
    return config


def _check_config(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raises CheckpointError for what `Eagle3` would compute wrongly, or not at all."""
    if missing := [field for field in REQUIRED if field not in config]:
        raise CheckpointError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}: "
            "download it from the original repository"
        )
    for field in NUMBERS:
        value = config.get(field, 1)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(
                f"{field} in config.json of {checkpoint.path} is {value!r} and not a number: "
                "download it from the original repository"
            )
    faults = []
    if (kind := config.get("model_type", "llama")) != "llama":
        faults.append(f"its layer is a {kind} layer, and not a llama layer")
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        faults.append(f"it has {layers} layers, and not one")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        faults.append(f"its activation is {activation!r}, and not 'silu'")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        faults.append("it does not look at layers of the model (use_aux_hidden_state is false)")
    ids = layer_ids(config) or ()
    if not all(isinstance(i, int) for i in ids):
        faults.append(f"its list of layers is {list(ids)!r}")
    if faults:
        raise CheckpointError(
            f"config.json of {checkpoint.path} describes an EAGLE-3 head that is not supported: "
            f"{'; '.join(faults)}"
        )


# ---- the tensors ---------------------------------------------------------------------------------


def _key_of(name: str) -> str:
    """The parameter's name in `Eagle3`."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _configured(checkpoint: Checkpoint) -> tuple[dict[str, Any], Eagle3]:
    """The drafter's config, and the module that it describes."""
    config = _drafter_config(checkpoint)
    names = {_key_of(name) for name in checkpoint.names}
    if config["draft_vocab_size"] != config["vocab_size"]:
        names |= {MAPPING, "lm_head.weight"}  # which must be there
    return config, build(config, names)


def _match(checkpoint: Checkpoint) -> tuple[dict[str, Any], match.Recipes]:
    """Compares the tensors with what the module needs.

    Returns: the drafter's config, and the recipe of each parameter in order of name.
    """
    config, module = match.skeleton(checkpoint, "an EAGLE-3 head", lambda: _configured(checkpoint))
    made: match.Recipes = {}
    for name in checkpoint.names:
        if UNUSED.match(name):
            continue
        recipe = match.copy(checkpoint, name)
        if (other := made.get(_key_of(name))) is not None:
            raise CheckpointError(
                f"{checkpoint.path} holds both {other.sources[0]} and {name}, which are the same "
                "parameter: remove the one that does not belong there"
            )
        made[_key_of(name)] = recipe
    if quantization := match.pack(checkpoint, module, made, checkpoint.section("quantization")):
        config |= dict.fromkeys(match.QUANTIZATION, quantization)
    needed = match.shapes(module)
    unknown = sorted(name for key in made.keys() - needed for name in made[key].sources)
    match.check_missing(checkpoint, sorted(needed.keys() - made), unknown, *INCOMPLETE)
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} holds {', '.join(unknown[:5])}, which no EAGLE-3 head that is "
            "supported has: such heads are unknown"
        )
    match.check_shapes(checkpoint, made, needed)
    mapping = {key: needed[key] for key in needed if key == MAPPING}
    match.check_dtypes(checkpoint, made, mapping, INTEGERS)
    floats = {key: needed[key] for key in needed if key != MAPPING}
    match.check_dtypes(checkpoint, made, floats, match.FLOATS)
    return config, {key: made[key] for key in sorted(needed)}


def _weights(
    checkpoint: Checkpoint, recipes: match.Recipes, vocab_size: int, dtype: mx.Dtype | None
) -> Weights:
    def make(name: str, to: mx.Dtype) -> mx.array:
        return cast(checkpoint.read(name), to, f"{name} in {checkpoint.path}")

    parameters = {}
    for key, recipe in recipes.items():
        name = recipe.sources[0]
        to = match.INTEGERS.get(recipe.dtype) or dtype or match.FLOATS[recipe.dtype]
        parameters[key] = Parameter(recipe.shape, to, partial(make, name, to))
    if MAPPING in parameters:
        offsets = partial(_offsets, checkpoint, vocab_size)
        parameters[MAPPING] = replace(parameters[MAPPING], dtype=mx.int64, make=offsets)
    return Weights(parameters)


# ---- the reduced vocabulary ----------------------------------------------------------------------


def _has_mask(checkpoint: Checkpoint) -> bool:
    return MASK in checkpoint.names and checkpoint.tensor(MASK).dtype in ("BOOL", "U8")


def _offsets(checkpoint: Checkpoint, vocab_size: int) -> mx.array:
    """`d2t` as offsets: token i of the reduced vocabulary is token i + d2t[i] of the model's."""
    stored = np.array(checkpoint.read(MAPPING)).astype(np.int64)
    mask = np.array(checkpoint.read(MASK)).astype(bool) if _has_mask(checkpoint) else None
    offsets = as_offsets(stored, mask, vocab_size)
    if offsets is None:
        raise CheckpointError(
            f"{MAPPING} in {checkpoint.path / checkpoint.tensor(MAPPING).file} is no map to "
            f"distinct tokens of {vocab_size}{'' if mask is None else f' that {MASK} marks'}, "
            "neither as ids nor as offsets: download it again from the original repository"
        )
    return mx.array(offsets)


def as_offsets(stored: np.ndarray, mask: np.ndarray | None, vocab_size: int) -> np.ndarray | None:
    """What is to be added to the ids of a reduced vocabulary; None for something else.

    Heads store this or, some of them, the model's ids themselves. `mask` (V,) marks the tokens of
    the reduced vocabulary, which decides. Without it, the ids have to ascend: a list that does so
    strictly is one of ids, as there are always neighbours among the tokens, which have the same
    offset.

    Args: stored: (N,) int64.
    """
    places = np.arange(stored.size)

    def valid(ids: np.ndarray) -> bool:
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            return False
        if mask is None:
            return bool((np.diff(ids) > 0).all())
        return mask.size == vocab_size and np.array_equal(np.sort(ids), np.flatnonzero(mask))

    as_ids, from_offsets = valid(stored), valid(stored + places)
    if as_ids and (stored.size > 1 or not from_offsets):
        return stored - places
    return stored if from_offsets else None
