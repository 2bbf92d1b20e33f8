"""Writing a drafter directory: all of it, or nothing."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from mlx_spec.convert.card import CARD, make_card, read_front_matter
from mlx_spec.convert.head import FORMAT_VERSION, Head
from mlx_spec.convert.header import render_header
from mlx_spec.convert.weights import Weights
from mlx_spec.errors import SpecError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint32: "U32",
    mx.uint8: "U8",
}


def check_out(out: Path, source: Path) -> None:
    """Is `out` a place where a drafter directory may be written?

    Raises:
        SpecError: it would touch the source, or replace something else than a drafter.
    """
    inside, around = out.resolve(), source.resolve()
    if inside.is_relative_to(around) or around.is_relative_to(inside):
        raise SpecError(f"{out} and the source {source} lie one in the other: choose another place")
    if not out.exists() or (out.is_dir() and not _files(out)):
        return
    if not _is_drafter(out):
        raise SpecError(
            f"{out} exists and is not a drafter directory of mlx-spec: choose another place"
        )
    if others := sorted(_files(out) - {CONFIG, WEIGHTS, CARD, *TOKENIZER}):
        raise SpecError(
            f"{out} is a drafter directory that also holds {others[0]}, which would be lost: "
            "move that away or choose another place"
        )


def _files(path: Path) -> set[str]:
    """Names of a directory's files, without those that a file manager leaves there."""
    return {path.name for path in path.iterdir() if not path.name.startswith(".")}


def write_drafter(
    head: Head,
    out: Path,
    tokenizer: Path | None = None,
    check: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Writes the drafter directory `out` of a head; the same head gives the same bytes.

    `out` is replaced if it is a drafter directory.

    Args:
        tokenizer: directory that tokenizer files are copied from. Default: the head's own.
        check: is given the complete directory before it gets its name. Where it raises an error,
            nothing is written.

    Returns: config.json as written.

    Raises:
        SpecError: `out` cannot be written.
    """
    source = head.provenance.directory
    check_out(out, source)
    config = dict(head.config)
    try:
        with _new_directory(out) as directory:
            hashes = _write_weights(directory / WEIGHTS, head.weights)
            config["mlx_spec"] = head.config["mlx_spec"] | {
                "format_version": FORMAT_VERSION,
                "source": head.provenance.source,
                "revision": head.provenance.revision,
                "sha256": hashes,
            }
            text = json.dumps(config, indent=4, sort_keys=True, ensure_ascii=False)
            card = make_card(config, read_front_matter(source))
            (directory / CARD).write_text(card, encoding="utf-8")
            tokenizer = tokenizer or source
            for name in TOKENIZER:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, directory / name)
            # Last, since nothing loads a directory without it, should we be killed before.
            (directory / CONFIG).write_text(text + "\n", encoding="utf-8")
            if check is not None:
                check(directory)
    except OSError as error:
        raise SpecError(f"{out} cannot be written: {error.strerror or error}") from error
    return config


def _is_drafter(path: Path) -> bool:
    """Whether we wrote it."""
    try:
        config = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError):
        return False
    # A downloaded assistant has the same model type, and may have a `mlx_spec` block by hand.
    record = config.get("mlx_spec") if isinstance(config, dict) else None
    return isinstance(record, dict) and "format_version" in record


@contextlib.contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory next to `out`, which takes its place when the block ends without error."""
    target = out.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f".{target.name}.{os.getpid()}.new"
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    new.mkdir()
    try:
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_weights(path: Path, weights: Weights) -> dict[str, str]:
    """Writes one tensor after the other; none stays in memory.

    `mx.save_safetensors` needs all of them, and writes in the order of a hash table.

    Returns: sha256 of each tensor's bytes.
    """
    parameters = dict(sorted(weights.parameters.items()))
    layout = {name: (DTYPES[p.dtype], p.shape, p.nbytes) for name, p in parameters.items()}
    hashes = {}
    with open(path, "wb") as file:
        file.write(render_header(layout, {"format": "mlx"}))
        for name in parameters:
            hashes[name] = _write_tensor(file, weights[name])
            mx.clear_cache()  # on a GPU, freed buffers wait there for others of their size
    return hashes


def _write_tensor(file: BinaryIO, value: mx.array) -> str:
    """Returns: sha256 of its bytes."""
    data = np.asarray(value.reshape(-1).view(mx.uint8)).data  # not a copy
    file.write(data)
    return hashlib.sha256(data).hexdigest()
