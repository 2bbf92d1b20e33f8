"""Reads the NextN ("MTP") heads of DeepSeek-V3, of GLM-4.5 to 4.7, and of MiMo.

They are layers after the model's last one, `model.layers.{N}.*` (GLM has the same names), or
`model.mtp_layers.{k}.*` (MiMo). Norms are stored as they are used. A layer may hold copies of the
model's embedding and output matrix; these are left out where they are the same.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_spec.convert import draft_vocab, fp8, match, nextn
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.experts import by_parameter, plan
from mlx_spec.convert.head import Head, check_format_version
from mlx_spec.convert.match import Recipes
from mlx_spec.drafters.deepseek_nextn import KINDS, DeepSeekNextN, ModelArgs
from mlx_spec.errors import CheckpointError, NoDrafter

TARGET_TYPES = tuple(KINDS)
DRAFTER_TYPES = tuple(f"{kind}_mtp" for kind in KINDS)
MODEL_TYPES = (*TARGET_TYPES, *DRAFTER_TYPES)

LAYER = re.compile(r"^model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)$")
MIMO_LAYER = re.compile(r"^model\.mtp_layers\.(?P<layer>\d+)\.(?P<rest>.+)$")
RENAMED = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
MIMO_RENAMED = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
}
# What the model has for the copies in the layers, by parameter; the embedding if they are tied.
SHARED = {
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
SAMPLES = 4  # rows that are compared

# Without these the classes of mlx-lm would fall back on a default, that is, invent them.
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)
REQUIRED_MOE = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)
REQUIRED_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# Beyond these, building the module to see its shapes would take all time and memory.
MAXIMA = {"num_nextn_predict_layers": 64, "n_routed_experts": 10_000}

# What the configuration of a head has in common with that of its model.
SHAPE = ("model_type", *REQUIRED[:1], *REQUIRED[2:6])


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether `read_head` has something to read. Opens no shard that an index lists."""
    return checkpoint.config.get("model_type") in MODEL_TYPES and bool(_head_names(checkpoint))


def read_head(checkpoint: Checkpoint, dtype: mx.Dtype | None = None) -> Head:
    """Reads the NextN head of a model's checkpoint, or of a drafter directory.

    Of tensors, only the bytes of the head's are read, each when its parameter is asked for, and
    only after all their headers were found good; and a few rows, to know copies as such.

    Args:
        checkpoint: what to read from.
        dtype: of the weights, but for the bias of routers. Default: the source's own, and
            bfloat16 for fp8.

    Raises:
        NoDrafter: the checkpoint has no head.
        Incompatible: it is of a later format version.
        CheckpointError: tensors are missing, doubled, misshapen or unreadable.
    """
    names = _find(checkpoint)
    scales = fp8.pair_scales(checkpoint, names)
    unscaled = [name for name in names if name not in scales.values()]
    if not _is_drafter(checkpoint):
        unscaled = _without_copies(checkpoint, unscaled)
    made = plan(checkpoint, by_parameter(checkpoint, unscaled, partial(_parameter, checkpoint)))
    config, recipes = _match(checkpoint, made)
    origin = nextn.provenance(checkpoint, names, recipes, scales)
    checkpoint.prepare(origin.used)
    exact = [key for key in recipes if key.endswith("e_score_correction_bias")]
    weights = nextn.weights_of(checkpoint, recipes, scales, dtype, exact=exact)
    vocab_size = config["text_config"]["vocab_size"]
    return Head(config, draft_vocab.checked(weights, checkpoint, vocab_size), origin)


def build(config: dict[str, Any], weights: Iterable[str]) -> DeepSeekNextN:
    """The module of a head with these parameters."""
    return DeepSeekNextN(ModelArgs.from_config(config, weights))


def misfits(drafter: Checkpoint, model: Checkpoint) -> list[str]:
    """What keeps a head from working with a model, judged by their configurations."""
    own, theirs = drafter.section("text_config") or drafter.config, model.config
    return [
        f"its {key} is {own[key]} and the model's {theirs[key]}"
        for key in SHAPE
        if key in own and key in theirs and own[key] != theirs[key]
    ]


# ---- names ---------------------------------------------------------------------------------------


def _is_drafter(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") in DRAFTER_TYPES


def _place(checkpoint: Checkpoint, name: str) -> tuple[int, str] | None:
    """The layer of the head that a model's tensor is in, and its name there; None for others."""
    if found := MIMO_LAYER.match(name):
        return int(found["layer"]), found["rest"]
    first = checkpoint.config.get("num_hidden_layers")
    found = LAYER.match(name)
    if found and isinstance(first, int) and (layer := int(found["layer"]) - first) >= 0:
        return layer, found["rest"]
    return None


def _head_names(checkpoint: Checkpoint) -> list[str]:
    """Full names of the head's tensors: of some layers, or all of a drafter directory."""
    if _is_drafter(checkpoint):
        return checkpoint.names
    return [name for name in checkpoint.names if _place(checkpoint, name) is not None]


def _parameter(checkpoint: Checkpoint, name: str) -> str:
    """What the module calls a tensor. In a drafter directory names are the module's own."""
    if _is_drafter(checkpoint):
        return name
    place = _place(checkpoint, name)
    assert place is not None
    layer, rest = place
    stem, _, suffix = rest.rpartition(".")
    renamed = (MIMO_RENAMED if MIMO_LAYER.match(name) else RENAMED).get(stem)
    if renamed is None:
        return f"layers.{layer}.mtp_block.{rest}"
    key = f"{renamed}.{suffix}"
    return key if key in SHARED else f"layers.{layer}.{key}"


def _name(checkpoint: Checkpoint, key: str) -> str:
    """What the checkpoint calls a parameter that it should have."""
    if _is_drafter(checkpoint) or not key.startswith("layers."):
        return key
    _, layer, rest = key.split(".", 2)
    stem, _, suffix = rest.rpartition(".")
    mimo = checkpoint.config["model_type"] == "mimo"
    theirs = {own: name for name, own in (MIMO_RENAMED if mimo else RENAMED).items()}
    rest = f"{theirs[stem]}.{suffix}" if stem in theirs else rest.removeprefix("mtp_block.")
    rest = re.sub(r"\.(embed_q|unembed_out)\.", ".kv_b_proj.", rest)
    if mimo:
        return f"model.mtp_layers.{layer}.{rest}"
    return f"model.layers.{checkpoint.config['num_hidden_layers'] + int(layer)}.{rest}"


def _find(checkpoint: Checkpoint) -> list[str]:
    """As `_head_names`, or an error that says why there is no head to read."""
    names, text = _head_names(checkpoint), _text_config(checkpoint)
    if not names:
        layers = text.get("num_nextn_predict_layers") or 0
        raise NoDrafter(
            f"{checkpoint.path} (model type {text.get('model_type')!r}) has no NextN head: its "
            f"config.json announces {layers} such layers, and its weights hold none, as most "
            "conversions leave them out; convert from the original repository"
        )
    check_format_version(checkpoint)
    return names


# ---- copies of the model's embedding and output matrix -------------------------------------------


def _without_copies(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """The names without copies of the model's matrices, and without all but the first layer's of
    matrices that are the head's own.

    Raises:
        CheckpointError: layers have different matrices of their own.
    """
    kept = []
    own: dict[str, str] = {}
    for name in sorted(names, key=lambda name: _place(checkpoint, name) or (0, "")):
        key = _parameter(checkpoint, name)
        if key not in SHARED:
            kept.append(name)
        elif not _is_copy(checkpoint, name, key):
            if key not in own:
                own[key] = name
                kept.append(name)
            elif not _same(checkpoint, name, own[key]):
                raise CheckpointError(
                    f"{name} and {own[key]} in {checkpoint.path} differ: heads whose layers have "
                    "different embeddings or output matrices are unknown"
                )
    return kept


def _is_copy(checkpoint: Checkpoint, name: str, key: str) -> bool:
    there = [shared for shared in SHARED[key] if shared in checkpoint.names]
    return bool(there) and _same(checkpoint, name, there[0])


def _same(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether two matrices are the same in a few rows; False where the shard of the other one is
    not here."""
    tensor = checkpoint.tensor(name)
    try:
        shared = checkpoint.tensor(other)
    except CheckpointError:
        if checkpoint.files.fetched_bytes is not None:  # it is there, the hub is not
            raise
        return False
    if (tensor.shape, tensor.dtype) != (shared.shape, shared.dtype) or len(tensor.shape) != 2:
        return False
    rows, row_bytes = tensor.shape[0], tensor.nbytes // tensor.shape[0]
    samples = sorted({rows * (2 * i + 1) // (2 * SAMPLES) for i in range(SAMPLES)})
    ranges: dict[str, list[tuple[int, int]]] = {}
    for where in (tensor, shared):
        ranges.setdefault(where.file, []).extend(
            (where.begin + row * row_bytes, where.begin + (row + 1) * row_bytes) for row in samples
        )
    checkpoint.files.prepare(ranges)
    read = checkpoint.files.read
    return all(
        read(tensor.file, tensor.begin + at, tensor.begin + at + row_bytes)
        == read(shared.file, shared.begin + at, shared.begin + at + row_bytes)
        for at in (row * row_bytes for row in samples)
    )


# ---- comparison with the module ------------------------------------------------------------------


def _match(checkpoint: Checkpoint, made: Recipes) -> tuple[dict[str, Any], Recipes]:
    """Compares what can be made with what the module needs.

    Returns: the drafter's config, and the recipe of each parameter in order of name.
    """
    config = _drafter_config(checkpoint, made)
    keys = [*made, *(f"layers.{i}.norm.weight" for i in range(_layers(checkpoint, made)))]
    module = match.skeleton(checkpoint, "a NextN head", lambda: build(config, keys))
    recorded = checkpoint.section("quantization") if _is_drafter(checkpoint) else {}
    made = _absorbed(checkpoint, made, module.args.block)
    if quantization := match.pack(checkpoint, module, made, recorded):
        config |= dict.fromkeys(match.QUANTIZATION, quantization)
    needed = match.shapes(module)
    nextn.check(checkpoint, made, needed, partial(_name, checkpoint))
    return config, {key: made[key] for key in sorted(needed)}


def _drafter_config(checkpoint: Checkpoint, made: Iterable[str]) -> dict[str, Any]:
    text, made = _text_config(checkpoint), list(made)
    kind = text.get("model_type")
    if kind not in KINDS:
        raise CheckpointError(
            f"text_config.model_type in config.json of {checkpoint.path} is {kind!r} and not one "
            f"of {', '.join(KINDS)}: convert the drafter again"
        )
    moe = any(".mlp.gate." in key or ".mlp.switch_mlp." in key for key in made)
    required = [
        *REQUIRED,
        *(REQUIRED_MOE if moe else ()),
        *(REQUIRED_LATENT if KINDS[kind].latent else ()),
    ]
    nextn.check_config(checkpoint, text, required, MAXIMA)
    drafter = _is_drafter(checkpoint)
    return {
        "model_type": f"{kind}_mtp",
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "block_size": _layers(checkpoint, made) + 2,
        "mlx_spec": {"norm_convention": "plain"}
        | (draft_vocab.recorded(checkpoint) if drafter else {}),
    }


def _text_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The target's configuration. Its quantization is no business of the drafter."""
    text = checkpoint.section("text_config") or checkpoint.config
    dropped = (*match.QUANTIZATION, "mlx_spec")
    return {key: value for key, value in text.items() if key not in dropped}


def _layers(checkpoint: Checkpoint, made: Iterable[str]) -> int:
    """Number of layers: those that are there, but no fewer than announced."""
    last = max((int(key.split(".")[1]) for key in made if key.startswith("layers.")), default=0)
    announced = _text_config(checkpoint).get("num_nextn_predict_layers")
    return max(last + 1, announced if isinstance(announced, int) else 0)


def _absorbed(checkpoint: Checkpoint, made: Recipes, args: Any) -> Recipes:
    """With what mlx-lm makes of latent attention's `kv_b_proj` (heads * (nope + v), rank) where
    it loads a model: one part belongs to queries, the other to the output.

    Raises:
        CheckpointError: its shape is not that.
    """
    absorbed = dict(made)
    for key in made:
        if not key.endswith(".kv_b_proj.weight"):
            continue
        source = absorbed.pop(key)
        heads, nope, v = args.num_attention_heads, args.qk_nope_head_dim, args.v_head_dim
        expected = (heads * (nope + v), args.kv_lora_rank)
        if source.shape != expected:
            raise CheckpointError(
                f"{source.sources[0]} in {checkpoint.path} is {source.shape}, and by config.json "
                f"it should be {expected}: download both again"
            )
        stem = key.removesuffix("kv_b_proj.weight")
        for name, shape, change in (
            ("embed_q", (heads, args.kv_lora_rank, nope), partial(_of_queries, heads, nope)),
            ("unembed_out", (heads, v, args.kv_lora_rank), partial(_of_output, heads, nope)),
        ):
            absorbed[f"{stem}{name}.weight"] = replace(source, shape=shape, change=change)
    return absorbed


def _of_queries(heads: int, nope: int, kv_b: mx.array) -> mx.array:
    by_head = kv_b.reshape(heads, -1, kv_b.shape[-1])  # (heads, nope + v, rank)
    return mx.contiguous(by_head[:, :nope].swapaxes(-1, -2))


def _of_output(heads: int, nope: int, kv_b: mx.array) -> mx.array:
    return mx.contiguous(kv_b.reshape(heads, -1, kv_b.shape[-1])[:, nope:])
