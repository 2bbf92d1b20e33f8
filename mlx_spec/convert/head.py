"""What a layout file returns: a drafter's configuration, its weights, and their origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.weights import Weights
from mlx_spec.errors import Incompatible

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Provenance:
    """Where a head came from.

    Attributes:
        source: the directory, or ORG/REPO of the hub.
        revision: the commit of the hub, if it is one.
        directory: where its tokenizer is.
        files: the files that hold the head.
        used, unused: names of the source's tensors.
    """

    source: str
    revision: str | None
    directory: Path
    files: tuple[str, ...]
    used: tuple[str, ...]
    unused: tuple[str, ...]


def origin(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The `source` and the `revision` of what is read there: of a drafter that was converted from
    the hub, those that it records."""
    record = checkpoint.section("mlx_spec")
    match record.get("source"), record.get("revision"):
        case str(source), str(revision):
            return source, revision
    return str(checkpoint.path), checkpoint.revision


@dataclass(frozen=True)
class Head:
    """A drafter that was read and checked.

    Attributes:
        config: the drafter's config.json. Its `mlx_spec` block holds what the family has to say:
            how norms are stored in `weights`, and what its module wants to know.
        weights: exactly the parameters of its module, made when they are asked for.
        provenance: where they came from.
    """

    config: dict[str, Any]
    weights: Weights
    provenance: Provenance


def check_format_version(checkpoint: Checkpoint) -> None:
    """Raises Incompatible for a drafter directory of a later mlx-spec."""
    version = checkpoint.section("mlx_spec").get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise Incompatible(
            f"{checkpoint.path} has format version {version}, and this mlx-spec reads "
            f"{FORMAT_VERSION}: update mlx-spec or convert again"
        )
