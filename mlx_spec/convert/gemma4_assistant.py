"""Reads the assistants of Gemma-4: repositories of their own, beside that of the model.

Names of tensors are those of `Gemma4Assistant`, and norms are stored as they are used, so that
only the configuration needs work.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gemma4, gemma4_text

from mlx_spec.convert import draft_vocab, match
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import Head, Provenance, check_format_version, origin
from mlx_spec.convert.weights import Parameter, Weights, cast
from mlx_spec.drafters import gemma4_assistant as drafter
from mlx_spec.drafters.gemma4_assistant import Gemma4Assistant, ModelArgs
from mlx_spec.errors import CheckpointError, NoDrafter
from mlx_spec.targets.gemma4 import Gemma4Target

DRAFTER_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
ORDERING = "masked_embedding.token_ordering"
INTEGERS = {ORDERING: ("I64", "I32"), **dict.fromkeys(draft_vocab.NAMES, draft_vocab.INTEGERS)}

# Without these the classes of mlx-lm would fall back on a default, that is, invent them.
REQUIRED = ("backbone_hidden_size", "text_config")
REQUIRED_ORDERED = ("num_centroids", "centroid_intermediate_top_k")
REQUIRED_TEXT = (
    "hidden_size",
    "hidden_size_per_layer_input",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "layer_types",
    "rope_parameters",
)

# What is missing if tensors are, and what to do.
INCOMPLETE = ("assistant", "download it again from the original repository")


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether it is an assistant."""
    return checkpoint.config.get("model_type") in DRAFTER_TYPES


def read_head(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> Head:
    """Reads an assistant as it was released, as MLX packed it, or as we wrote it; a tensor when
    its parameter is asked for.

    Args:
        checkpoint: what to read from.
        dtype: of the weights but integers. Default: the source's own.

    Raises:
        NoDrafter: the checkpoint is a model, not an assistant.
        Incompatible: it is of a later format version.
        CheckpointError: tensors are missing, doubled, misshapen or unreadable, or config.json
            does not describe an assistant.
    """
    if not has_head(checkpoint):
        raise NoDrafter(
            f"{checkpoint.path} (model type {checkpoint.config.get('model_type')!r}) is a Gemma-4 "
            "model without a drafter: its assistant is a repository of its own, whose name ends "
            "in -assistant; download that"
        )
    check_format_version(checkpoint)
    config, recipes = _match(checkpoint)
    checkpoint.prepare(recipes)
    provenance = Provenance(
        *origin(checkpoint),
        directory=checkpoint.directory,
        files=tuple(sorted({checkpoint.tensor(key).file for key in recipes})),
        used=tuple(sorted(recipes)),
        unused=tuple(sorted(set(checkpoint.names) - recipes.keys())),
    )
    weights = _weights(checkpoint, recipes, dtype)
    vocab_size = config["text_config"]["vocab_size"]
    return Head(config, draft_vocab.checked(weights, checkpoint, vocab_size), provenance)


def _weights(checkpoint: Checkpoint, recipes: match.Recipes, dtype: mx.Dtype | None) -> Weights:
    def make(name: str, to: mx.Dtype) -> mx.array:
        value = cast(checkpoint.read(name), to, f"{name} in {checkpoint.path}")
        if name == ORDERING:
            _check_ordering(checkpoint, value)
        return value

    parameters = {}
    for name, recipe in recipes.items():
        to = match.INTEGERS.get(recipe.dtype) or dtype or match.FLOATS[recipe.dtype]
        parameters[name] = Parameter(recipe.shape, to, partial(make, name, to))
    return Weights(parameters)


def build(config: dict[str, Any], weights: Iterable[str]) -> Gemma4Assistant:
    """The module of an assistant; its configuration says all about it."""
    return Gemma4Assistant(ModelArgs.from_config(config))


def misfits(assistant: Checkpoint, model: Checkpoint) -> list[str]:
    """What keeps an assistant from working with a model, judged by their configurations."""
    _, module = match.skeleton(assistant, "an assistant", lambda: _configured(assistant))
    model_class = gemma4_text if model.config["model_type"] == "gemma4_text" else gemma4
    config = copy.deepcopy(model.config)  # mlx-lm writes into it
    target = match.skeleton(
        model,
        "a Gemma-4 model",
        lambda: Gemma4Target(model_class.Model(model_class.ModelArgs.from_dict(config))),
    )
    return drafter.misfits(module.args, target)


def _match(checkpoint: Checkpoint) -> tuple[dict[str, Any], match.Recipes]:
    """Compares the tensors with what the module needs.

    Returns: the drafter's config, and the recipe of each parameter in order of name.
    """
    config, module = match.skeleton(checkpoint, "an assistant", lambda: _configured(checkpoint))
    modules = dict(module.named_modules())
    made = {
        name: match.copy(checkpoint, name)
        for name in checkpoint.names
        if name.rpartition(".")[0] in modules
    }
    recorded = checkpoint.section("quantization")
    if quantization := match.pack(checkpoint, module, made, recorded):
        config |= dict.fromkeys(match.QUANTIZATION, quantization)
    needed = match.shapes(module)
    missing, unused = sorted(needed.keys() - made), sorted(set(checkpoint.names) - needed.keys())
    match.check_missing(checkpoint, missing, unused, *INCOMPLETE)
    match.check_shapes(checkpoint, made, needed)
    for key in INTEGERS.keys() & needed:
        match.check_dtypes(checkpoint, made, {key: needed[key]}, INTEGERS[key])
    floats = {key: needed[key] for key in needed if key not in INTEGERS}
    match.check_dtypes(checkpoint, made, floats, match.FLOATS)
    return config, {key: made[key] for key in sorted(needed)}


def _configured(checkpoint: Checkpoint) -> tuple[dict[str, Any], Gemma4Assistant]:
    """The drafter's config, and the module that it describes."""
    config = _drafter_config(checkpoint)
    _check_config(checkpoint, config, config["text_config"])
    return config, build(config, ())


def _drafter_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The source's config.json, checked, with the released names of its fields."""
    dropped = (*match.QUANTIZATION, "mlx_spec")
    config = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    config.setdefault("use_ordered_embeddings", False)
    text = _released_fields(checkpoint, checkpoint.section("text_config"))
    required = REQUIRED + (REQUIRED_ORDERED if config["use_ordered_embeddings"] else ())
    missing = [field for field in required if not config.get(field)]
    if text:
        missing += [f"text_config.{field}" for field in REQUIRED_TEXT if text.get(field) is None]
        missing += _missing_by_kind(text)
    if missing:
        raise CheckpointError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}: "
            "download it from the original repository"
        )
    _check_types(checkpoint, text)
    config["text_config"] = {key: text[key] for key in text if key not in dropped}
    config["mlx_spec"] = {
        "norm_convention": "plain",
        "query_position": checkpoint.section("mlx_spec").get("query_position", "P"),
        **draft_vocab.recorded(checkpoint),
    }
    return config


def _check_types(checkpoint: Checkpoint, text: dict[str, Any]) -> None:
    """Raises CheckpointError for a field of the text configuration that is no number."""
    others = ("layer_types", "rope_parameters", "rms_norm_eps")
    for field in REQUIRED_TEXT:
        if field not in others and not isinstance(text[field], int):
            raise CheckpointError(
                f"text_config.{field} in config.json of {checkpoint.path} is {text[field]!r} and "
                "not a number: download it from the original repository"
            )


def _missing_by_kind(text: dict[str, Any]) -> list[str]:
    """What is missing for the kinds of layers that there are."""
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list):
        return ["a list in text_config.layer_types"]
    kinds = sorted(set(kinds))
    rope = text.get("rope_parameters") or {}
    missing = [
        f"text_config.rope_parameters.{kind}.rope_theta"
        for kind in kinds
        if "rope_theta" not in (rope.get(kind) or {})
    ]
    if "full_attention" in kinds and "global_head_dim" not in text:
        missing.append("text_config.global_head_dim")
    return missing


def _released_fields(checkpoint: Checkpoint, text: dict[str, Any]) -> dict[str, Any]:
    """A text configuration with the fields of the released files.

    transformers 5.24 writes what differs by layer as `per_layer_config`, and lets
    `num_kv_shared_layers` default to all layers.
    """
    text = dict(text)
    layers = text.pop("per_layer_config", None)
    if text and not text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = text.get("num_hidden_layers")
    if not layers:
        return text
    kinds = text.get("layer_types") or []
    try:
        full = [layers[str(i)] for i, kind in enumerate(kinds) if kind == "full_attention"]
        differing = len(layers) > len(full) or any(layer != full[0] for layer in full)
        text["global_head_dim"] = full[0].get("head_dim", text.get("head_dim"))
        text["num_global_key_value_heads"] = full[0].get("num_key_value_heads")
    except (AttributeError, IndexError, KeyError, TypeError):
        differing = True
    if differing:
        raise CheckpointError(
            f"text_config.per_layer_config in {checkpoint.path / 'config.json'} is not the same "
            "for all layers of full attention, and for these alone: such assistants are unknown"
        )
    return text


def _check_config(checkpoint: Checkpoint, config: dict[str, Any], text: dict[str, Any]) -> None:
    """Raises CheckpointError for what `Gemma4Assistant` would compute wrongly, or not at all."""
    faults = []
    layers, kinds = text["num_hidden_layers"], text["layer_types"]
    if len(kinds) != layers:
        faults.append(f"it has {layers} layers, but layer_types has {len(kinds)}")
    if text["num_kv_shared_layers"] != layers:
        faults.append(
            f"{text['num_kv_shared_layers']} of its {layers} layers use the model's keys and "
            "values, and all should"
        )
    if config.get("tie_word_embeddings") is False:
        faults.append("its output matrix is not its embedding (tie_word_embeddings is false)")
    if config["use_ordered_embeddings"]:
        vocabulary, clusters = text["vocab_size"], config["num_centroids"]
        if vocabulary % clusters:
            faults.append(f"its {vocabulary} tokens do not divide into {clusters} clusters")
        if config["centroid_intermediate_top_k"] > clusters:
            faults.append(
                f"it chooses {config['centroid_intermediate_top_k']} of {clusters} clusters"
            )
    if faults:
        raise CheckpointError(
            f"config.json of {checkpoint.path} describes an assistant that is not supported: "
            f"{'; '.join(faults)}"
        )


def _check_ordering(checkpoint: Checkpoint, ordering: mx.array) -> None:
    """Raises CheckpointError unless every token is in one cluster."""
    if not np.array_equal(np.sort(np.array(ordering)), np.arange(ordering.size)):
        raise CheckpointError(
            f"{ORDERING} in {checkpoint.path / checkpoint.tensor(ORDERING).file} is not a "
            "permutation of the vocabulary: download it again from the original repository"
        )
