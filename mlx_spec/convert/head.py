"""What a layout file returns: a drafter's configuration, its weights, and their origin."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.convert.norms import NormConvention

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Provenance:
    """Where a head came from.

    Attributes:
        source: the directory.
        files: the files that hold the head.
        norm_convention: how the source stores its norms.
        norm_evidence: what decided that.
        used, unused: names of the source's tensors.
    """

    source: str
    files: tuple[str, ...]
    norm_convention: NormConvention
    norm_evidence: str
    used: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True)
class Head:
    """A drafter that was read and checked.

    Attributes:
        config: the drafter's config.json, without the `mlx_spec` block.
        weights: exactly the parameters of its module, norms folded.
        provenance: where they came from.
    """

    config: dict[str, Any]
    weights: dict[str, mx.array]
    provenance: Provenance
