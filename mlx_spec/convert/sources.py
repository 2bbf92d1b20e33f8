"""Opening what a drafter can be read from: a directory, a repository, or one file."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.convert.checkpoint import CONFIG, SUFFIX, Checkpoint, Folder
from mlx_spec.convert.gguf import open_gguf
from mlx_spec.convert.hub import open_model
from mlx_spec.errors import SpecError


class OneFile(Folder):
    """A file of safetensors, with the config.json beside it, or a given one if there is none."""

    def __init__(self, path: Path, config: dict[str, Any] | None):
        super().__init__(path.parent)
        self.file = path.name
        self.config = None if config is None else json.dumps(config).encode()
        if (path.parent / CONFIG).is_file():
            self.config = None

    def names(self) -> list[str]:
        beside = [CONFIG] if self.config is not None or (self.path / CONFIG).is_file() else []
        return [*beside, self.file]

    def size_bytes(self, name: str) -> int:
        given = name == CONFIG and self.config is not None
        return len(self.config or b"") if given else super().size_bytes(name)

    def read(self, name: str, begin: int, end: int) -> bytes:
        if name == CONFIG and self.config is not None:
            return self.config[begin:end]
        return super().read(name, begin, end)


def open_source(
    source: str | Path, config: dict[str, Any] | None, dtype: mx.Dtype | None
) -> Checkpoint:
    """A checkpoint to read a drafter from.

    Args:
        source: a directory, ORG/REPO[@REVISION] of the hub, a .safetensors file that holds the
            head, or a .gguf file.
        config: config.json of the model that the drafter is for, if it is known. A file alone
            needs it.
        dtype: of the weights that will be asked for, if any.

    Raises: SpecError, as `convert.hub.open_model` and `open_gguf`.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == SUFFIX:
        if config is None and not (path.parent / CONFIG).is_file():
            raise SpecError(f"there is no {CONFIG} beside {path}: give the model with --target")
        return Checkpoint(path.parent, OneFile(path, config), directory=path)
    if path.is_file() and path.suffix == ".gguf":
        if config is None:
            raise SpecError(
                f"{path} does not say all that a drafter needs: give the model with --target"
            )
        return open_gguf(path, config, dtype)
    return open_model(source)
