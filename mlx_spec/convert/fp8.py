"""Block-wise fp8 as in DeepSeek's and Qwen's packs: W = codes * scale of the block.

Formula: `weight_dequant` in the inference code of DeepSeek-V3. The last blocks of a matrix
may be cut off.
"""

from collections.abc import Callable, Collection
from itertools import product

import mlx.core as mx

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.errors import CheckpointError

SCALE = "_scale_inv"


def pair_scales(checkpoint: Checkpoint, names: Collection[str]) -> dict[str, str]:
    """Of the given tensors, each fp8 weight and its scale.

    Raises:
        CheckpointError: a scale or an fp8 weight is alone, or their shapes do not fit.
    """
    scales = {name.removesuffix(SCALE): name for name in names if name.endswith(SCALE)}
    weights = {name for name in names if checkpoint.tensor(name).dtype == "F8_E4M3"}
    if alone := sorted(scales.keys() - weights):
        raise CheckpointError(
            f"{checkpoint.path} holds {scales[alone[0]]} without the fp8 weight that it scales: "
            "convert from the original repository"
        )
    if alone := sorted(weights - scales.keys()):
        raise CheckpointError(
            f"{checkpoint.path} holds the fp8 weight {alone[0]} without its scale "
            f"{alone[0]}{SCALE}: convert from the original repository"
        )
    for weight, scale in scales.items():
        _check_shapes(checkpoint, weight, scale)
    return scales


def dequantise(
    codes: mx.array,
    scale: mx.array,
    block: tuple[int, int],
    rows: slice,
    dtype: mx.Dtype,
    cast: Callable[[mx.array], mx.array],
) -> mx.array:
    """The given rows of a weight, one row of blocks at a time, as float32 is four times as large.

    Args:
        codes: (..., R, C), not decoded.
        scale: (..., R / block, C / block), rounded up.
        cast: makes `dtype` of float32.

    Returns: (..., rows, C) in `dtype`.
    """
    *batch, _, columns = codes.shape
    codes, scale = codes.reshape(-1, *codes.shape[-2:]), scale.reshape(-1, *scale.shape[-2:])
    values = mx.zeros((len(codes), rows.stop - rows.start, columns), dtype)
    blocks = range(rows.start // block[0], -(-rows.stop // block[0]))
    for matrix, i in product(range(len(codes)), blocks):
        first, last = max(rows.start, i * block[0]), min(rows.stop, (i + 1) * block[0])
        factors = mx.repeat(scale[matrix, i].astype(mx.float32), block[1])[:columns]
        part = mx.from_fp8(codes[matrix, first:last], mx.float32) * factors
        values[matrix, first - rows.start : last - rows.start] = cast(part)
        mx.eval(values)  # in place
    return values.reshape(*batch, -1, columns)


def block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        CheckpointError: config.json does not say.
    """
    block = checkpoint.section("quantization_config").get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(
            f"{checkpoint.path} has fp8 weights, but its config.json has no "
            "quantization_config.weight_block_size: convert from the original repository"
        )
    return block[0], block[1]


def _check_shapes(checkpoint: Checkpoint, weight: str, scale: str) -> None:
    rows_per_block, columns_per_block = block_size(checkpoint)
    *batch, rows, columns = checkpoint.tensor(weight).shape
    expected = (*batch, -(-rows // rows_per_block), -(-columns // columns_per_block))
    if (shape := checkpoint.tensor(scale).shape) != expected:
        raise CheckpointError(
            f"{scale} in {checkpoint.path} has shape {shape}, and blocks of "
            f"{rows_per_block}x{columns_per_block} need {expected}"
        )
