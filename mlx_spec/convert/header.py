"""The safetensors header: eight bytes of length, then JSON, then the tensors' bytes.

Knows nothing of where the bytes come from. Format and limits:
https://huggingface.co/docs/safetensors
"""

import json
import math
import reprlib
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlx_spec.errors import CheckpointError

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_TENSORS = 500_000
MAX_NAME = 1000
MAX_RANK = 8
MAX_DIMENSION = 2**31 - 1  # mlx counts in 32 bits
MAX_BYTES = 2**63 - 1

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
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
    """The tensors of a file, which together fill it, each byte once.

    Args:
        file: the `file` of each tensor.
        where: the file's full name, for messages.
        text: the JSON, as many bytes as `header_bytes` said.
        size_bytes: length of the whole file.

    Raises:
        CheckpointError: a corrupt header, or a file cut short.
    """
    try:
        entries = _entries(text)
        metadata = _metadata(entries.pop("__metadata__", None))
        start = PREFIX_BYTES + len(text)
        tensors = {name: _tensor(file, start, name, entry) for name, entry in entries.items()}
        for name, tensor in tensors.items():
            if tensor.end > size_bytes:
                raise CheckpointError(
                    f"{where} is truncated: {name} ends at byte {tensor.end} and the file has "
                    f"{size_bytes}; download it again"
                )
        _check_layout(start, tensors, size_bytes)
    except RecursionError as error:
        raise _corrupt(where, "it is nested too deeply") from error
    except ValueError as error:
        raise _corrupt(where, str(error)) from error
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


def _corrupt(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} has a corrupt header ({why}); download it again")


# The functions below raise ValueError for what cannot be.


def _entries(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise ValueError("it is not a JSON object")
    entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
    if len(entries) > MAX_TENSORS + 1:
        raise ValueError(f"it lists {len(entries)} tensors, and the limit is {MAX_TENSORS}")
    for name in entries:
        # isprintable: no line ends, and no halves of surrogate pairs, which cannot be encoded
        if len(name) > MAX_NAME or not name.isprintable():
            raise ValueError(f"{_short(name)} is no name")
    return entries


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{_short(name)} is listed twice")
    return result


def _metadata(entry: Any) -> dict[str, str]:
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise ValueError(f"__metadata__ is not an object of strings but {_short(entry)}")
    return entry


def _tensor(file: str, start: int, name: str, entry: Any) -> Tensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"impossible entry of {name}: {_short(entry)}")
    if not all(_is_count(number) for number in (begin, end, *shape)) or begin > end:
        raise ValueError(f"impossible entry of {name}: {_short(entry)}")
    if dtype not in BITS:
        raise ValueError(f"{name} is of the unknown type {_short(dtype)}")
    if len(shape) > MAX_RANK or any(size > MAX_DIMENSION for size in shape):
        raise ValueError(f"{name} has the impossible shape {_short(shape)}")
    if math.prod(shape) * BITS[dtype] != (end - begin) * 8:
        raise ValueError(
            f"{name} with shape {tuple(shape)} of {dtype} cannot be {end - begin} bytes long"
        )
    return Tensor(file, dtype, tuple(shape), start + begin, start + end)


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= MAX_BYTES  # and True is an int


def _check_layout(start: int, tensors: dict[str, Tensor], size_bytes: int) -> None:
    """Do the tensors lie one after the other, up to the file's end?"""
    ordered = sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end))
    for former, name in pairwise(ordered):
        if tensors[name].begin < tensors[former].end:
            raise ValueError(f"{name} overlaps {former}")
    filled = start
    for name in ordered:
        if tensors[name].begin > filled:
            raise ValueError(
                f"no tensor has the {tensors[name].begin - filled} bytes before {name}"
            )
        filled = tensors[name].end
    if filled < size_bytes:
        raise ValueError(f"no tensor has the last {size_bytes - filled} bytes")


def _short(value: Any) -> str:
    """What was found, in one line however large it is."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxstring = _SHORT.maxother = 60
