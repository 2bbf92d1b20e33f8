"""Quantising a drafter, matrix by matrix as they are written."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import quantize_model

from mlx_spec.convert.head import Head
from mlx_spec.convert.weights import Parameter, Shared, Weights
from mlx_spec.errors import SpecError
from mlx_spec.randomness import untouched_generator

DEFAULT_BITS = 8
DEFAULT_GROUP_SIZE = 64
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
STEP = 2**16  # numbers that are quantised at once
MODES = ("affine", "mxfp4", "nvfp4", "mxfp8")


def quantize_head(
    head: Head,
    module: Any,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
) -> Head:
    """The same drafter with packed matrices, but for what keeps eight bits.

    Args:
        head: not quantised.
        module: of its family, for its shapes.
        bits: per weight. Default: 8, since heads of 4 bits have been reported to lose most of
            their acceptance.
        group_size: weights that share one scale. Default: 64.
        mode: one of mlx's; those but affine have one number of bits and one size of groups.

    Raises:
        SpecError: the head cannot be quantised that way.
    """
    source = head.provenance.directory
    if "quantization" in head.config:
        raise SpecError(f"{source} is quantised already: convert from the original repository")
    with untouched_generator():  # initial values are not computed, but draw their keys
        bits, group_size = _checked(bits, group_size, mode)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            _, config = quantize_model(
                module,
                head.config,
                group_size,
                bits,
                mode=mode,
                quant_predicate=_predicate(module, bits, group_size, mode),
            )
    packed = {path: layer for path, layer in module.named_modules() if "scales" in layer}
    if not packed:
        raise SpecError(
            f"no matrix of {source} divides into groups of {group_size}: "
            "choose a smaller group size"
        )
    parameters = dict(head.weights.parameters)
    for path, layer in packed.items():
        parameters |= _pack(path, layer, parameters[f"{path}.weight"])
    return replace(head, config=config, weights=Weights(parameters))


def describe(quantization: dict[str, Any]) -> str:
    """A `quantization` block in a word or two."""
    mode = quantization.get("mode", "affine")
    return f"{quantization['bits']} bits" if mode == "affine" else mode


def _checked(bits: int | None, group_size: int | None, mode: str) -> tuple[int, int]:
    """Bits and group size, mlx's own for modes but affine. Raises SpecError."""
    if mode not in MODES:
        raise SpecError(f"quantisation mode {mode!r} is not one of {', '.join(MODES)}")
    if mode == "affine":
        bits = DEFAULT_BITS if bits is None else bits
        group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        if bits not in BITS or group_size not in GROUP_SIZES:
            raise SpecError(
                f"{bits} bits in groups of {group_size} are not supported: bits are one of "
                f"{BITS}, groups one of {GROUP_SIZES}"
            )
        return bits, group_size
    own = nn.QuantizedLinear(128, 1, bias=False, mode=mode)
    if bits not in (None, own.bits) or group_size not in (None, own.group_size):
        raise SpecError(
            f"{mode} always has {own.bits} bits in groups of {own.group_size}: "
            "leave out the bits and the group size"
        )
    return own.bits, own.group_size


def _pack(path: str, layer: nn.Module, matrix: Parameter) -> dict[str, Parameter]:
    """What takes the place of a matrix: it is made once, for two or three parameters.

    Args: layer: packed, for the shapes; its values are those of an initial matrix.
    """
    names = [name for name in ("weight", "scales", "biases") if name in layer]

    def quantize(_: str) -> list[mx.array]:
        return _quantize(matrix.value(), layer.group_size, layer.bits, layer.mode)

    values = Shared(quantize, [path] * len(names))

    def make(i: int) -> mx.array:
        return values(path)[i]

    def dtype(name: str) -> mx.Dtype:
        as_matrix = layer.mode == "affine" and name != "weight"
        return matrix.dtype if as_matrix else layer[name].dtype

    return {
        f"{path}.{name}": Parameter(layer[name].shape, dtype(name), partial(make, i))
        for i, name in enumerate(names)
    }


def _quantize(matrix: mx.array, group_size: int, bits: int, mode: str) -> list[mx.array]:
    """mx.quantize, some rows at a time: without a kernel it needs 40 times their memory."""
    *shape, columns = matrix.shape
    rows = matrix.reshape(-1, columns)
    step = max(1, STEP // columns)
    parts = []
    for first in range(0, len(rows), step):
        part = mx.quantize(rows[first : first + step], group_size, bits, mode=mode)
        mx.eval(part)
        parts.append(part)
    kinds = zip(*parts, strict=True)
    values = [mx.concatenate(list(of_kind)).reshape(*shape, -1) for of_kind in kinds]
    mx.eval(values)
    return values


def _predicate(
    module: Any, bits: int, group_size: int, mode: str
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """What the module wants in eight bits is in eight affine bits, whatever the others have."""
    from_module = module.quant_predicate
    sizes = (group_size,) if mode == "affine" else (64, 32)

    def predicate(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if (mode, bits) == ("affine", 8) or not isinstance(from_module(path, layer), dict):
            return True
        for size in sizes:
            if layer.weight.shape[-1] % size == 0:
                return {"group_size": size, "bits": 8, "mode": "affine"}
        return False

    return predicate
