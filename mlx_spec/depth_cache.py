"""What was measured of a model, kept from one process to the next.

One small JSON file for each model with its head, machine and software, under
`$XDG_CACHE_HOME/mlx-spec/depth` (default: `~/.cache/mlx-spec/depth`). It may be deleted at any
time. Where it cannot be read or written, measuring starts afresh.
"""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_spec.cache_directory import cache_directory
from mlx_spec.costs import Knowledge


def fingerprint(model: nn.Module, head: nn.Module | None) -> str:
    """SHA-256, in hex, of all that costs depend on: names, shapes and types of the parameters of
    a model and its drafter's, the device, and the versions of mlx and mlx-lm."""
    digest = hashlib.sha256()
    for module in (model, head):
        parameters: dict[str, Any] = {}
        if module is not None:
            tree_flatten(module.parameters(), destination=parameters)
        digest.update(f"{len(parameters)}\n".encode())
        for name, array in sorted(parameters.items()):
            digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
    device = mx.device_info()["device_name"]
    digest.update(f"{device} {version('mlx')} {version('mlx-lm')}".encode())
    return digest.hexdigest()


def read(fingerprint: str) -> Knowledge:
    """What was written; fresh knowledge where there is none, or none that can be used."""
    try:
        saved = json.loads(_path(fingerprint).read_text())
    except (OSError, RuntimeError, ValueError, RecursionError):
        saved = None
    return Knowledge.from_dict(saved)


def write(fingerprint: str, knowledge: Knowledge) -> None:
    """Replaces what was there. A cache that cannot be written is left as it is."""
    with suppress(OSError, RuntimeError):
        path = _path(fingerprint)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".json")
        try:
            with open(handle, "w") as file:
                json.dump(knowledge.as_dict(), file)
            os.replace(beside, path)
        except BaseException:
            os.unlink(beside)
            raise


def _path(fingerprint: str) -> Path:
    """Raises RuntimeError where the home directory is not known."""
    return cache_directory() / "depth" / f"{fingerprint}.json"
