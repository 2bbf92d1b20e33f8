"""Block-wise fp8 as in DeepSeek's and Qwen's packs: W = codes * scale of the block.

Formula: `weight_dequant` in the inference code of DeepSeek-V3. The last blocks of a matrix
may be cut off.
"""

from collections.abc import Collection

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


def read(checkpoint: Checkpoint, weight: str, scale: str) -> mx.array:
    """The weight in float32."""
    return dequantise(checkpoint.read(weight), checkpoint.read(scale), _block(checkpoint))


def dequantise(codes: mx.array, scale: mx.array, block: tuple[int, int]) -> mx.array:
    """Args: codes (..., R, C), decoded; scale (..., R / block, C / block), rounded up.

    Returns: (..., R, C) in float32.
    """
    rows, columns = codes.shape[-2:]
    grid = mx.repeat(scale.astype(mx.float32), block[0], axis=-2)
    grid = mx.repeat(grid, block[1], axis=-1)
    return codes.astype(mx.float32) * grid[..., :rows, :columns]


def _block(checkpoint: Checkpoint) -> tuple[int, int]:
    block = checkpoint.section("quantization_config").get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise CheckpointError(
            f"{checkpoint.path} has fp8 weights, but its config.json has no "
            "quantization_config.weight_block_size: convert from the original repository"
        )
    return block[0], block[1]


def _check_shapes(checkpoint: Checkpoint, weight: str, scale: str) -> None:
    rows_per_block, columns_per_block = _block(checkpoint)
    *batch, rows, columns = checkpoint.tensor(weight).shape
    expected = (*batch, -(-rows // rows_per_block), -(-columns // columns_per_block))
    if (shape := checkpoint.tensor(scale).shape) != expected:
        raise CheckpointError(
            f"{scale} in {checkpoint.path} has shape {shape}, and blocks of "
            f"{rows_per_block}x{columns_per_block} need {expected}"
        )
