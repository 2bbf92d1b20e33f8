"""A checkpoint seen from outside: which tensors there are, and the bytes of one at a time.

A shard that the index lists is opened when one of its tensors is asked for, so shards that
hold nothing wanted need not even be there.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_spec.convert.header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Header,
    Tensor,
    header_bytes,
    parse_header,
)
from mlx_spec.convert.ranges import Range
from mlx_spec.errors import CheckpointError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"

PICKLE = (
    "{path} holds its weights as {file}, a pickle, which may run any code when it is read and is "
    "not read here: write safetensors beside it with Python, torch and safetensors, "
    "`save_file(torch.load('{file}', map_location='cpu', weights_only=True), "
    "'model.safetensors')`, and give that directory"
)

MAX_JSON_BYTES = MAX_HEADER_BYTES
MAX_TENSOR_BYTES = 2**36

# BF16 comes as its bits, F8_E4M3 as its codes.
NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
}


class Files(Protocol):
    """Where a checkpoint's files are: a folder, or a repository elsewhere."""

    def names(self) -> list[str]: ...

    def size_bytes(self, name: str) -> int: ...

    def read(self, name: str, begin: int, end: int) -> bytes: ...

    def prepare(self, wanted: Mapping[str, list[Range]]) -> None:
        """Announces what will be read, so that it can be fetched together."""

    def fetch_all(self) -> None:
        """Announces that the whole model will be read."""

    def release(self) -> None:
        """Says that nothing more will be read."""

    @property
    def fetched_bytes(self) -> int | None:
        """How much has travelled; None where nothing has to."""


class Folder:
    """The files of a local directory."""

    fetched_bytes = None

    def __init__(self, path: Path):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist: give the directory of a checkpoint")
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory: give the directory that holds it")
        self.path = path

    def names(self) -> list[str]:
        # macOS leaves `._name` companions on foreign disks
        try:
            files = [file.name for file in self.path.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        return sorted(name for name in files if not name.startswith("."))

    def size_bytes(self, name: str) -> int:
        try:
            return (self.path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def read(self, name: str, begin: int, end: int) -> bytes:
        try:
            with open(self.path / name, "rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error.strerror}") from error

    def prepare(self, wanted: Mapping[str, list[Range]]) -> None:
        pass

    def fetch_all(self) -> None:
        pass

    def release(self) -> None:
        pass


class Checkpoint:
    """The configuration and the tensors of a directory of safetensors.

    Attributes:
        path: the directory, or ORG/REPO of the hub.
        directory: where the configuration and the tokenizer are; or a single file.
        revision: the commit of the hub, if it is one.
        config: its config.json.
        names: every tensor's name.
        bytes_read: bytes of tensors read so far (headers not counted).
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        directory: Path | None = None,
        revision: str | None = None,
    ):
        self.path = path
        self.directory = path if directory is None else directory
        self.revision = revision
        self.files = files
        self.bytes_read = 0
        self._headers: dict[str, Header] = {}
        self._present = files.names()
        self._indexed = self._read_index()
        self._shards: dict[str, list[str]] = {
            name: [shard] for name, shard in self._indexed.items()
        }
        self._add_stray_files()
        self.config = self._read_json(CONFIG)

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Opens a local directory.

        Raises:
            CheckpointError: no such directory, no safetensors or no config.json in it, or one
                of them is damaged.
        """
        path = Path(path).expanduser()
        return cls(path, Folder(path))

    @property
    def names(self) -> list[str]:
        return sorted(self._shards)

    @property
    def tokenizer_folder(self) -> Path:
        """Where a tokenizer would be: of a single file, beside it."""
        return self.directory.parent if self.directory.is_file() else self.directory

    def section(self, name: str) -> dict[str, Any]:
        """An object inside config.json, empty if it is not there."""
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{name} in {self.path / CONFIG} is not an object; download it again"
            )
        return value

    @property
    def source_bytes(self) -> int:
        """Size of all the safetensors files together."""
        return sum(self.files.size_bytes(name) for name in self._present if name.endswith(SUFFIX))

    def tensor(self, name: str) -> Tensor:
        """Where a tensor lies. Opens the header of its shard.

        Raises:
            CheckpointError: the tensor is in two files, or its shard is missing or damaged.
        """
        shards = self._shards[name]
        if len(shards) > 1:
            raise CheckpointError(
                f"{self.path} holds {name} twice, in {' and in '.join(shards)}: "
                "remove the file that does not belong there"
            )
        return self.header(shards[0]).tensors[name]

    def header(self, file: str) -> Header:
        """The header of a file, read once."""
        if file not in self._headers:
            self._headers[file] = self._open(file)
        return self._headers[file]

    def prepare(self, names: Iterable[str]) -> None:
        """Announces the tensors that will be read, so that their bytes are fetched together.

        Raises:
            CheckpointError: as `tensor`, or they cannot be fetched.
        """
        ranges: dict[str, list[Range]] = defaultdict(list)
        for name in names:
            tensor = self.tensor(name)
            self._check_size(name, tensor)
            ranges[tensor.file].append((tensor.begin, tensor.end))
        self.files.prepare(ranges)

    def read(self, name: str) -> mx.array:
        """A tensor's values; fp8 codes come decoded, in bfloat16, which holds them exactly.

        Raises:
            CheckpointError: as `tensor`, or a type of number that is not supported.
        """
        values = self.read_stored(name)
        if self.tensor(name).dtype == "F8_E4M3":
            return mx.from_fp8(values, mx.bfloat16)
        return values

    def read_stored(self, name: str) -> mx.array:
        """As `read`, but fp8 as its codes, in uint8."""
        tensor = self.tensor(name)
        if tensor.dtype not in NUMPY:
            raise CheckpointError(
                f"{name} in {self.path / tensor.file} is stored as {tensor.dtype}, "
                "which is not supported: convert from the original repository"
            )
        self._check_size(name, tensor)
        data = self.files.read(tensor.file, tensor.begin, tensor.end)
        if len(data) != tensor.nbytes:
            raise CheckpointError(
                f"{self.path / tensor.file} is truncated: {name} could not be read; "
                "download it again"
            )
        self.bytes_read += len(data)
        values = mx.array(np.frombuffer(data, NUMPY[tensor.dtype]).reshape(tensor.shape))
        if tensor.dtype == "BF16":
            return values.view(mx.bfloat16)
        return values

    def _check_size(self, name: str, tensor: Tensor) -> None:
        if tensor.nbytes > MAX_TENSOR_BYTES:
            raise CheckpointError(
                f"{name} in {self.path / tensor.file} has {tensor.nbytes} bytes, and the limit is "
                f"{MAX_TENSOR_BYTES}: such drafters are unknown"
            )

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self._present:
            raise CheckpointError(
                f"{self.path} has no {name}: download it from the repository of the weights"
            )
        if (size := self.files.size_bytes(name)) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self.path / name} has {size} bytes, and the limit is {MAX_JSON_BYTES}; "
                "download it again"
            )
        data = self.files.read(name, 0, size)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path / name} is not JSON ({error}); download it again"
            ) from error
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.path / name} is not a JSON object but a {type(value).__name__}; "
                "download it again"
            )
        return value

    def _read_index(self) -> dict[str, str]:
        """Which shard holds which tensor; empty without an index."""
        if INDEX not in self._present:
            return {}
        shards = self._read_json(INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(shard, str) and Path(shard).name == shard for shard in shards.values()
        ):
            raise CheckpointError(
                f"{self.path / INDEX} has no weight_map of names to files; download it again"
            )
        return shards

    def _add_stray_files(self) -> None:
        """Files that no index lists: all of them without one, and extra ones beside it."""
        listed = set(self._indexed.values())
        stray = [name for name in self._present if name.endswith(SUFFIX) and name not in listed]
        for file in stray:
            for name in self.header(file).tensors:
                self._shards.setdefault(name, []).append(file)
        if not listed and not stray:
            pickles = [name for name in self._present if name.endswith((".bin", ".pt", ".pth"))]
            gguf = [name for name in self._present if name.endswith(".gguf")]
            if pickles and not gguf:
                raise CheckpointError(PICKLE.format(path=self.path, file=pickles[0]))
            found, instead = "", "give a directory in the layout of Hugging Face"
            if gguf:
                found, instead = f" (but {gguf[0]})", "give that file itself, downloaded"
            raise CheckpointError(f"{self.path} holds no safetensors{found}: {instead}")

    def _open(self, file: str) -> Header:
        if file not in self._present:
            raise CheckpointError(f"{self.path} has no {file}, which {INDEX} lists: download it")
        size, where = self.files.size_bytes(file), str(self.path / file)
        prefix = self.files.read(file, 0, PREFIX_BYTES)
        length = header_bytes(where, prefix, size)
        text = self.files.read(file, PREFIX_BYTES, PREFIX_BYTES + length)
        header = parse_header(file, where, text, size)
        self._check_against_index(file, header)
        return header

    def _check_against_index(self, file: str, header: Header) -> None:
        promised = {name for name, shard in self._indexed.items() if shard == file}
        if not promised:
            return
        if lost := sorted(promised - header.tensors.keys()):
            raise CheckpointError(
                f"{self.path / file} does not hold {lost[0]}, which {INDEX} places there; "
                "they are of different downloads: download both again"
            )
        if extra := sorted(header.tensors.keys() - promised):
            raise CheckpointError(
                f"{self.path / file} holds {extra[0]}, which {INDEX} does not place there; "
                "they are of different downloads: download both again"
            )
