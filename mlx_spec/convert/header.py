"""The safetensors header: eight bytes of length, then JSON, then the tensors' bytes.

Knows nothing of where the bytes come from. Format and limits:
https://huggingface.co/docs/safetensors
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import CheckpointError

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: bytes `begin` to `end` of `file`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def header_bytes(where: str, prefix: bytes, size_bytes: int) -> int:
    """Length of the JSON that follows the first eight bytes of a file.

    Raises:
        CheckpointError: the file is no safetensors file, or is cut short.
    """
    if prefix.startswith(b"version "):
        raise CheckpointError(f"{where} is a Git LFS pointer, not the weights: run `git lfs pull`")
    if len(prefix) < PREFIX_BYTES:
        raise CheckpointError(
            f"{where} is truncated: {size_bytes} bytes cannot hold a header; download it again"
        )
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where} has a corrupt header ({length} bytes long): "
            "it is not a safetensors file, or must be downloaded again"
        )
    if PREFIX_BYTES + length > size_bytes:
        raise CheckpointError(
            f"{where} is truncated: its header needs {length} bytes and the file has "
            f"{size_bytes}; download it again"
        )
    return length


def parse_header(file: str, where: str, text: bytes, size_bytes: int) -> Header:
    """The tensors of a file, each checked to lie within it.

    Args:
        file: the `file` of each tensor.
        where: the file's full name, for messages.
        text: the JSON, as many bytes as `header_bytes` said.
        size_bytes: length of the whole file.

    Raises:
        CheckpointError: a corrupt header, or a file cut short.
    """
    try:
        entries = json.loads(text, object_pairs_hook=_unique)
        metadata = dict(entries.pop("__metadata__", None) or {})
        start = PREFIX_BYTES + len(text)
        tensors = {name: _tensor(file, start, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{where} has a corrupt header ({error}); download it again"
        ) from error
    for name, tensor in tensors.items():
        _check_extent(where, name, tensor, size_bytes)
    _check_overlap(where, tensors)
    return Header(tensors, metadata)


def render_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]
) -> bytes:
    """Length and JSON for tensors written one after the other in the given order.

    Args:
        tensors: name to (dtype, shape, bytes).
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight
    return struct.pack("<Q", len(text)) + text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is listed twice")
    return result


def _tensor(file: str, start: int, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    numbers = (begin, end, *shape)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or begin > end:
        raise ValueError(f"impossible entry {entry}")
    return Tensor(file, str(entry["dtype"]), shape, start + begin, start + end)


def _check_extent(where: str, name: str, tensor: Tensor, size_bytes: int) -> None:
    if tensor.end > size_bytes:
        raise CheckpointError(
            f"{where} is truncated: {name} ends at byte {tensor.end} and the file has "
            f"{size_bytes}; download it again"
        )
    bits = BITS.get(tensor.dtype)
    if bits is not None and math.prod(tensor.shape) * bits != tensor.nbytes * 8:
        raise CheckpointError(
            f"{where} has a corrupt header ({name} with shape {tensor.shape} of "
            f"{tensor.dtype} cannot be {tensor.nbytes} bytes long); download it again"
        )


def _check_overlap(where: str, tensors: dict[str, Tensor]) -> None:
    filled = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.nbytes and tensor.begin < filled:
            raise CheckpointError(
                f"{where} has a corrupt header ({name} overlaps another tensor); download it again"
            )
        filled = max(filled, tensor.end)
