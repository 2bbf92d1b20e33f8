"""Quantising a drafter."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from mlx_spec.convert.head import Head
from mlx_spec.errors import SpecError

DEFAULT_BITS = 8
DEFAULT_GROUP_SIZE = 64
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


def quantize_head(head: Head, module: Any, bits: int, group_size: int) -> Head:
    """The same drafter with packed matrices, but for what keeps eight bits.

    Args:
        head: not quantised.
        module: of its family, for its shapes.
        bits: per weight.
        group_size: weights that share one scale.

    Raises:
        SpecError: the head cannot be quantised that way.
    """
    source = head.provenance.source
    if "quantization" in head.config:
        raise SpecError(f"{source} is quantised already: convert from the original repository")
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise SpecError(
            f"{bits} bits in groups of {group_size} are not supported: bits are one of {BITS}, "
            f"groups one of {GROUP_SIZES}"
        )
    module.load_weights(list(head.weights.items()), strict=True)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
        _, config = quantize_model(
            module,
            head.config,
            group_size,
            bits,
            quant_predicate=_predicate(module, bits, group_size),
        )
    weights = dict(tree_flatten(module.parameters()))
    if not any(name.endswith(".scales") for name in weights):
        raise SpecError(
            f"no matrix of {source} divides into groups of {group_size}: "
            "choose a smaller group size"
        )
    return replace(head, config=config, weights=weights)


def _predicate(
    module: Any, bits: int, group_size: int
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """What the module wants in eight bits is in eight bits, whatever the others have."""
    from_module = module.quant_predicate
    eight = {"group_size": group_size, "bits": 8, "mode": "affine"}

    def predicate(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        return dict(eight) if bits < 8 and isinstance(from_module(path, layer), dict) else True

    return predicate
