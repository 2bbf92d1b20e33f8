"""Make a small model cost like a large one without changing what it computes."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, qwen3_5

MLPS = (qwen3_5.MLP, gemma4_text.MLP)
EXTRA_ROW_SCALE = 0.02


def widen_mlps(layers: list[nn.Module], width: int) -> int:
    """Widen each dense MLP of `layers` to `width` hidden units, in place.

    down(act(gate x) * up x) stays the same function: the new rows of gate and up are small random
    numbers and the new columns of down are zero. The new units cost what any unit costs.

    Returns the number of added parameters.
    Raises: ValueError where an MLP is a mixture of experts, quantised, or wider already.
    """
    added = 0
    for layer in layers:
        before = parameter_count(layer.mlp)
        widen(layer.mlp, width)
        added += parameter_count(layer.mlp) - before
    return added


def widen(mlp: nn.Module, width: int) -> None:
    if not isinstance(mlp, MLPS) or not isinstance(mlp.gate_proj, nn.Linear):
        raise ValueError("Only dense MLPs that are not quantised can be widened.")
    rows, columns = mlp.gate_proj.weight.shape  # (width, hidden size)
    if width < rows:
        raise ValueError(f"The MLPs are {rows} wide already; {width} would be narrower.")
    dtype, extra = mlp.gate_proj.weight.dtype, width - rows
    for number, projection in enumerate((mlp.gate_proj, mlp.up_proj)):
        noise = mx.random.normal((extra, columns), dtype, key=mx.random.key(number))
        projection.weight = mx.concatenate([projection.weight, EXTRA_ROW_SCALE * noise])
    zeros = mx.zeros((columns, extra), dtype)
    mlp.down_proj.weight = mx.concatenate([mlp.down_proj.weight, zeros], axis=1)
    mx.eval(mlp.parameters())


def parameter_count(module: nn.Module) -> int:
    return sum(weight.size for _, weight in tree_flatten(module.parameters()))
