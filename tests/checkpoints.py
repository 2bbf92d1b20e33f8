"""Checkpoints for tests: read without `mlx_spec`, changed, and written in other layouts."""

import json
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from reference_files import checkpoints

NAMES = (
    "qwen3-5",
    "qwen3-5-tied",
    "qwen3-5-trained",
    "qwen3-5-moe",
    "qwen3-6-moe",
    "qwen3-6-moe-trained",
    "qwen3-next",
)
ASSISTANTS = tuple(
    f"gemma4-{name}-assistant" for name in ("dense", "dense-trained", "e2b", "e2b-trained", "moe")
)
INDEX = "model.safetensors.index.json"

# The norms of a head with one layer, which Hugging Face stores minus one.
NORMS = {
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Source:
    """A checkpoint in memory, free to be changed."""

    config: dict[str, Any]
    tensors: dict[str, Stored]
    metadata: dict[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    path: Path | None = None

    def map(self, wanted: Callable[[str], bool], change: Callable[[np.ndarray], np.ndarray]):
        """Changes values, keeping each type."""
        for name, stored in self.tensors.items():
            if wanted(name):
                self.tensors[name] = encode(change(decode(stored)), stored.dtype)

    def rename(self, change: Callable[[str], str]):
        self.tensors = {change(name): stored for name, stored in self.tensors.items()}

    def head(self) -> dict[str, Stored]:
        return {n: s for n, s in self.tensors.items() if n.startswith("mtp.")}


def fp8_table() -> np.ndarray:
    """Values of the 256 codes of E4M3 (OCP FP8 specification, no infinities)."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


def decode(stored: Stored) -> np.ndarray:
    """Values in float32, or as they are for integers."""
    if stored.dtype == "BF16":
        bits = np.frombuffer(stored.data, np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32)
    elif stored.dtype == "F8_E4M3":
        values = fp8_table()[np.frombuffer(stored.data, np.uint8)]
    else:
        dtype = {
            "F16": np.float16,
            "F32": np.float32,
            "U32": np.uint32,
            "U8": np.uint8,
            "I32": np.int32,
            "I64": np.int64,
        }
        values = np.frombuffer(stored.data, dtype[stored.dtype])
        if stored.dtype == "F16":
            values = values.astype(np.float32)
    return values.reshape(stored.shape)


def encode(values: np.ndarray, dtype: str) -> Stored:
    """To the nearest value of the type, ties to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    else:
        numpy_type = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "I64": np.int64}
        data = values.astype(numpy_type[dtype]).tobytes()
    return Stored(dtype, values.shape, data)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return decode(encode(values, dtype))


def reference(name: str) -> Path:
    return checkpoints() / name


def weights_of(path: Path) -> dict[str, Stored]:
    """Stored tensors of a drafter directory, read by the safetensors library."""
    return read_file(path / "model.safetensors")


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def read_file(path: Path) -> dict[str, Stored]:
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }


def write_file(path: Path, tensors: dict[str, Stored], metadata: dict[str, str] | None) -> None:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, stored in tensors.items():
        end = offset + len(stored.data)
        header[name] = {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    data = b"".join(stored.data for stored in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load(name: str) -> Source:
    """A reference checkpoint."""
    path = checkpoints() / name
    config = json.loads((path / "config.json").read_text())
    return Source(config, read_file(path / "model.safetensors"), path=path)


def save(source: Source, out: Path) -> Path:
    """As one file."""
    _start(source, out)
    write_file(out / "model.safetensors", source.tensors, source.metadata)
    return out


def save_sharded(source: Source, out: Path, shards: int = 3, *, index: bool = True) -> Path:
    """As several files, the trunk before the head."""
    names = sorted(source.tensors, key=lambda name: ("mtp." in name, name))
    size = -(-len(names) // shards)
    return save_grouped(
        source, out, [names[i : i + size] for i in range(0, len(names), size)], index=index
    )


def save_grouped(
    source: Source, out: Path, groups: Iterable[Iterable[str]], *, index: bool = True
) -> Path:
    """As one file per group of names."""
    _start(source, out)
    groups = [list(group) for group in groups]
    places = {}
    for i, group in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        write_file(out / file, {name: source.tensors[name] for name in group}, source.metadata)
        places |= dict.fromkeys(group, file)
    if index:
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return out


def _start(source: Source, out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(source.config))
    if source.path:
        for file in source.path.glob("*token*"):
            shutil.copyfile(file, out / file.name)


def split_trunk_and_head(source: Source) -> list[list[str]]:
    head = list(source.head())
    return [[name for name in source.tensors if name not in head], head]


def expected(source: Source) -> dict[str, np.ndarray]:
    """What a drafter of a Hugging Face checkpoint must hold, in float32, by its own reading."""
    head = {name.removeprefix("mtp."): decode(s) for name, s in source.head().items()}
    result = {n: v + np.float32(1) if n in NORMS else v for n, v in head.items()}
    mlp = "layers.0.mlp."
    for name in ("gate", "up", "down"):
        parts = [result.pop(f"{mlp}experts.{e}.{name}_proj.weight", None) for e in range(8)]
        if parts[0] is not None:
            result[f"{mlp}switch_mlp.{name}_proj.weight"] = np.stack(parts)
    fused = result.pop(f"{mlp}experts.gate_up_proj", None)
    if fused is not None:
        rows = fused.shape[1] // 2
        result[f"{mlp}switch_mlp.gate_proj.weight"] = fused[:, :rows]
        result[f"{mlp}switch_mlp.up_proj.weight"] = fused[:, rows:]
        result[f"{mlp}switch_mlp.down_proj.weight"] = result.pop(f"{mlp}experts.down_proj")
    return result


def fuse_experts(source: Source) -> None:
    mlp = "mtp.layers.0.mlp.experts."
    taken = {
        name: np.stack(
            [decode(source.tensors.pop(f"{mlp}{e}.{name}_proj.weight")) for e in range(8)]
        )
        for name in ("gate", "up", "down")
    }
    fused = np.concatenate([taken["gate"], taken["up"]], axis=1)
    source.tensors[f"{mlp}gate_up_proj"] = encode(fused, "BF16")
    source.tensors[f"{mlp}down_proj"] = encode(taken["down"], "BF16")


def to_mlx_layout(source: Source) -> None:
    """As an MLX converter leaves it: norms folded, convolutions transposed."""
    names = {f"mtp.{name}" for name in NORMS}
    source.map(lambda name: name in names, lambda w: w + 1)
    source.map(lambda name: name.endswith("conv1d.weight"), lambda w: np.moveaxis(w, 2, 1))
    source.metadata = {"format": "mlx"}


def to_fp8(
    source: Source, wanted: Callable[[str], bool], block: int = 128
) -> dict[str, np.ndarray]:
    """Packs matrices block by block, the last blocks cut off.

    Returns: their values after packing, in float32.
    """
    table = fp8_table()
    source.config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
    }
    packed = {}
    for name in [name for name in source.tensors if wanted(name)]:
        values = decode(source.tensors[name])
        *batch, rows, columns = values.shape
        scale = np.zeros((*batch, -(-rows // block), -(-columns // block)), np.float32)
        codes = np.zeros(values.shape, np.uint8)
        result = np.zeros(values.shape, np.float32)
        for i in range(scale.shape[-2]):
            for j in range(scale.shape[-1]):
                part = (..., slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
                largest = np.abs(values[part]).max(axis=(-2, -1), keepdims=True)
                scale[..., i, j] = (largest / 448).squeeze((-2, -1))
                ratio = (values[part] / (largest / 448)).astype(np.float32)
                codes[part] = _nearest_code(ratio, table)
                result[part] = table[codes[part]] * scale[..., i : i + 1, j : j + 1]
        source.tensors[name] = Stored("F8_E4M3", values.shape, codes.tobytes())
        source.tensors[f"{name}_scale_inv"] = encode(scale, "F32")
        packed[name] = result
    return packed


def _nearest_code(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")[:254]
    ordered = table[order]
    right = np.clip(np.searchsorted(ordered, values), 1, 253)
    nearer_left = values - ordered[right - 1] <= ordered[right] - values
    return order[np.where(nearer_left, right - 1, right)].astype(np.uint8)


# Assistants of other models than their own


def cut(source: Source, wanted: str, *shape: int) -> None:
    """Keeps the first rows and columns of all tensors whose names end in `wanted`."""
    corner = tuple(slice(size) for size in shape)
    source.map(lambda name: name.endswith(wanted), lambda values: values[corner])


def of_another_width(source: Source) -> None:
    source.config["backbone_hidden_size"] = 64
    cut(source, "pre_projection.weight", 64, 128)
    cut(source, "post_projection.weight", 64, 64)


def of_another_vocabulary(source: Source) -> None:
    source.config["text_config"]["vocab_size"] = 256
    cut(source, "embed_tokens.weight", 256, 64)


def with_another_kind_of_layer(source: Source) -> None:
    text = source.config["text_config"]
    text["layer_types"][0] = "chunked_attention"
    text["rope_parameters"]["chunked_attention"] = {"rope_theta": 1e4, "rope_type": "default"}


def with_smaller_heads(source: Source) -> None:
    """Those of sliding attention, 16 numbers in place of 32."""
    source.config["text_config"]["head_dim"] = 16
    for layer in range(3):
        cut(source, f"layers.{layer}.self_attn.q_proj.weight", 64, 64)
        cut(source, f"layers.{layer}.self_attn.q_norm.weight", 16)
        cut(source, f"layers.{layer}.self_attn.o_proj.weight", 64, 64)


def with_smaller_global_heads(source: Source) -> None:
    source.config["text_config"]["global_head_dim"] = 32
    cut(source, "layers.3.self_attn.q_proj.weight", 128, 64)
    cut(source, "layers.3.self_attn.q_norm.weight", 32)
    cut(source, "layers.3.self_attn.o_proj.weight", 64, 128)


def with_three_heads(source: Source) -> None:
    source.config["text_config"]["num_attention_heads"] = 3
    for layer in range(4):
        size = 64 if layer == 3 else 32
        cut(source, f"layers.{layer}.self_attn.q_proj.weight", 3 * size, 64)
        cut(source, f"layers.{layer}.self_attn.o_proj.weight", 64, 3 * size)


# Changes to gemma4-dense-assistant, and what each is refused for beside gemma4-dense.
MISFITS = {
    "hidden size": (
        of_another_width,
        "its backbone_hidden_size is 64 and the model's hidden size is 128",
    ),
    "vocabulary": (
        of_another_vocabulary,
        "its vocab_size is 256 and the model's vocabulary is 512",
    ),
    "layer kinds": (
        with_another_kind_of_layer,
        "it has chunked_attention layers and the model has no keys and values of that kind",
    ),
    "head size": (
        with_smaller_heads,
        "its head_dim is 16 and the model's head size in sliding_attention is 32",
    ),
    "global head size": (
        with_smaller_global_heads,
        "its global_head_dim is 32 and the model's head size in full_attention is 64",
    ),
    "number of heads": (
        with_three_heads,
        "its 3 heads cannot share the model's 2 heads of keys and values in sliding_attention",
    ),
}


def save_misfit(fault: str, out: Path) -> Path:
    """A sound assistant that does not fit gemma4-dense."""
    source = load("gemma4-dense-assistant")
    change, _ = MISFITS[fault]
    change(source)
    return save(source, out)


def rename_token(path: Path, old: str, new: str) -> None:
    """In the tokenizer of a directory; its id stays."""
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[new] = vocabulary.pop(old)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
