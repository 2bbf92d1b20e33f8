"""NextN heads in GGUF files, as llama.cpp's converter writes them, seen as safetensors.

In a GGUF file the head is the layer after the model's own, with a few tensors under `nextn.`.
Norms have the one folded in, experts are stacked, and no rows are permuted (llama.cpp,
conversion/qwen.py). What llama.cpp does not need is not in the file, so the configuration comes
from the model that the head is for.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.convert.checkpoint import CONFIG, Checkpoint
from mlx_spec.convert.header import render_header
from mlx_spec.convert.qwen_nextn import TARGET_TYPES
from mlx_spec.convert.ranges import Range
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter, SpecError

TENSORS = "tensors.safetensors"
TYPES = ("F32", "F16", "BF16", "Q8_0")
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
BLOCK = re.compile(r"^blk\.(?P<layer>\d+)\.(?P<rest>.+)$")

NEXTN = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
} | {
    f"ffn_{part}{suffix}": f"mlp.{module}{part}_proj"
    for part in ("gate", "up", "down")
    for suffix, module in (("", ""), ("_shexp", "shared_expert."), ("_exps", "switch_mlp."))
}
GATE = "mlp.shared_expert_gate.weight"  # llama.cpp drops its first axis, of size 1


def open_gguf(path: Path, config: dict[str, Any], dtype: mx.Dtype | None = None) -> Checkpoint:
    """A checkpoint of the head in a GGUF file, and of the model's norms.

    Args:
        path: the file.
        config: config.json of the model that the head is for.
        dtype: of the tensors. Default: that of the head's largest matrix, bfloat16 for Q8_0;
            GGUF has single vectors in float32, whatever they were.

    Raises:
        NoDrafter: the file holds no head.
        Incompatible: the model is not one of Qwen's.
        CheckpointError: it is damaged, or packed in a way that is not supported.
        SpecError: the gguf package is not installed.
    """
    if (model_type := config.get("model_type")) not in TARGET_TYPES:
        raise Incompatible(
            f"{path} cannot be read for a {model_type} model, as of GGUF files only Qwen's heads "
            "are known: convert from the original repository"
        )
    record = {"norm_convention": "folded", "norm_evidence": "GGUF has the one folded in"}
    return GgufCheckpoint(path, GgufFiles(path, config | {"mlx_spec": record}, dtype))


class GgufCheckpoint(Checkpoint):
    files: "GgufFiles"

    def read_stored(self, name: str) -> mx.array:
        """Counts what is read from the file, not what is made of it."""
        value = super().read_stored(name)
        self.bytes_read += int(self.files.tensors[name].n_bytes) - self.tensor(name).nbytes
        return value

    @property
    def source_bytes(self) -> int:
        """Size of the file itself."""
        return self.path.stat().st_size


class GgufFiles:
    """See `mlx_spec.convert.checkpoint.Files`: a config.json, and one file of safetensors whose
    bytes are made when they are asked for."""

    fetched_bytes = None

    def __init__(self, path: Path, config: dict[str, Any], dtype: mx.Dtype | None):
        self.path = path
        self.config = json.dumps(config).encode()
        self.tensors = _named(path, _open(path))
        _check_types(path, self.tensors)
        self.dtype = dtype or _own_dtype(self.tensors)
        size = self.dtype.size
        short = {mlx: name for name, mlx in DTYPES.items()}[self.dtype]
        self.header = render_header(
            {
                name: (short, _shape(name, tensor), int(tensor.n_elements) * size)
                for name, tensor in self.tensors.items()
            },
            {"format": "mlx"},
        )

    def names(self) -> list[str]:
        return [CONFIG, TENSORS]

    def prepare(self, wanted: Mapping[str, list[Range]]) -> None:
        pass

    def fetch_all(self) -> None:
        pass

    def release(self) -> None:
        pass

    def size_bytes(self, name: str) -> int:
        if name == CONFIG:
            return len(self.config)
        elements = sum(int(tensor.n_elements) for tensor in self.tensors.values())
        return len(self.header) + elements * self.dtype.size

    def read(self, name: str, begin: int, end: int) -> bytes:
        if name == CONFIG:
            return self.config[begin:end]
        parts = [self.header[begin:end]]
        start, size = len(self.header), self.dtype.size
        for tensor in self.tensors.values():
            stop = start + int(tensor.n_elements) * size
            if begin < stop and start < end:
                first, last = max(begin - start, 0), min(end, stop) - start
                values = _values(tensor, first // size, -(-last // size))
                data = np.array(mx.array(values).astype(self.dtype).view(mx.uint8)).tobytes()
                parts.append(data[first % size : first % size + last - first])
            start = stop
        return b"".join(parts)


def _open(path: Path) -> Any:
    """A `gguf.GGUFReader`."""
    try:
        import gguf
    except ImportError as error:
        raise SpecError(
            f"reading {path} needs the gguf package: pip install 'mlx-spec[gguf]'"
        ) from error
    try:
        return gguf.GGUFReader(path)
    except (ValueError, LookupError, TypeError, OSError, OverflowError) as error:
        message = f"{path} is no GGUF file or damaged ({error}); download it again"
        raise CheckpointError(message) from error


def _named(path: Path, reader: Any) -> dict[str, Any]:
    """The head's tensors and the model's norms, by the names that Hugging Face gives them."""
    tensors = {}
    first = _first_layer(path, reader)
    for tensor in reader.tensors:
        match = BLOCK.match(tensor.name)
        if tensor.name == "output_norm.weight":
            tensors["model.norm.weight"] = tensor
        elif match and (layer := int(match["layer"])) >= first:
            tensors[_head_name(layer - first, match["rest"])] = tensor
        elif match and match["rest"] == "attn_norm.weight":
            tensors[f"model.layers.{layer}.input_layernorm.weight"] = tensor
    return tensors


def _first_layer(path: Path, reader: Any) -> int:
    """The number of the head's first layer."""
    blocks = [match for t in reader.tensors if (match := BLOCK.match(t.name))]
    if not any(match["rest"].startswith("nextn.") for match in blocks):
        raise NoDrafter(
            f"{path} has no NextN head, as it holds no nextn tensors: use a GGUF file that was "
            "converted with them, of several parts the last one"
        )
    architecture = _field(reader, "general.architecture")
    layers = _field(reader, f"{architecture}.nextn_predict_layers")
    count = _field(reader, f"{architecture}.block_count")
    if not isinstance(layers, int) or not isinstance(count, int):
        return min(int(m["layer"]) for m in blocks if m["rest"].startswith("nextn."))
    return count - layers


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return field.contents() if field is not None else None


def _head_name(layer: int, name: str) -> str:
    """Names that are not known stay as they are, so that errors can tell of them."""
    stem, _, parameter = name.rpartition(".")
    if stem in NEXTN:
        return f"mtp.{NEXTN[stem]}.{parameter}"
    return f"mtp.layers.{layer}.{LAYER.get(stem, stem)}.{parameter}"


def _check_types(path: Path, tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        if tensor.tensor_type.name not in TYPES:
            raise CheckpointError(
                f"{tensor.name} in {path} is packed as {tensor.tensor_type.name}, which is not "
                f"supported: use a GGUF file of type {', '.join(TYPES)}"
            )


def _own_dtype(tensors: dict[str, Any]) -> mx.Dtype:
    head = [tensor for name, tensor in tensors.items() if name.startswith("mtp.")]
    largest = max(head, key=lambda tensor: int(tensor.n_elements))
    return DTYPES.get(largest.tensor_type.name, mx.bfloat16)


def _shape(name: str, tensor: Any) -> tuple[int, ...]:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return (1, *shape) if name.endswith(GATE) and len(shape) == 1 else shape


def _values(tensor: Any, first: int, last: int) -> np.ndarray:
    """Values first to last of the flattened tensor, in float32."""
    import gguf

    values, size_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = tensor.data.reshape(-1).view(np.uint8).reshape(-1, size_bytes)
    blocks = np.ascontiguousarray(blocks[first // values : -(-last // values)])
    decoded = gguf.quants.dequantize(blocks, tensor.tensor_type).reshape(-1)
    start = first - first // values * values
    return decoded[start : start + last - first]
