"""Compares the tensors of a checkpoint with the parameters that a drafter's module needs.

Nothing is read before it was found that every parameter is there once, in the right shape and in
a type that can be read, so no parameter keeps its initial value.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.errors import CheckpointError
from mlx_spec.randomness import untouched_generator

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
INTEGERS = {"U32": mx.uint32, "U8": mx.uint8, "I64": mx.int64, "I32": mx.int32}
PACKED = ("U32", "U8")
QUANTIZATION = ("quantization", "quantization_config")  # MLX writes both

Shapes = dict[str, tuple[int, ...]]
T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """How one parameter is made.

    Attributes:
        sources: full names of the tensors.
        shape: of what `make` will give.
        dtype: of the sources, as safetensors spells it.
        stack: put the sources along a new first axis.
        half: of a fused `gate_up_proj`, 0 for the gate's rows and 1 for the others.
        change: what is done with the one source in the end.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    stack: bool = False
    half: int | None = None
    change: Callable[[mx.array], mx.array] | None = None

    def make(self, read: Callable[[str, int | None], mx.array]) -> mx.array:
        """Args: read: gives the values of a source, or of one half of its rows."""
        if self.stack:
            return mx.stack([read(name, None) for name in self.sources])  # (E, out, in)
        value = read(self.sources[0], self.half)  # (E, 2M, H) -> (E, M, H) for a half
        return value if self.change is None else self.change(value)


Recipes = dict[str, Recipe]


def copy(checkpoint: Checkpoint, name: str) -> Recipe:
    """The tensor as it is."""
    tensor = checkpoint.tensor(name)
    return Recipe((name,), tensor.shape, tensor.dtype)


def rows_of(shape: tuple[int, ...], half: int | None) -> slice:
    """Of a matrix, or of all matrices that are stacked: all its rows, or one half of them."""
    rows = shape[-2] if len(shape) > 1 else 0
    return slice(0, rows) if half is None else slice(half * rows // 2, (half + 1) * rows // 2)


def skeleton(checkpoint: Checkpoint, what: str, build: Callable[[], T]) -> T:
    """What `build` makes of the configuration: a module with initial values that are never
    computed.

    Raises:
        CheckpointError: config.json does not describe `what`.
    """
    try:
        with untouched_generator():
            return build()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"config.json of {checkpoint.path} does not describe {what} ({e}): "
            "download it from the original repository"
        ) from e


def pack(
    checkpoint: Checkpoint, module: nn.Module, made: Recipes, recorded: dict[str, Any]
) -> dict[str, Any]:
    """Gives the module packed parameters where the source has them, as MLX files may.

    Args:
        recorded: the `quantization` block about these tensors, empty if there is none.

    Returns: the drafter's `quantization` block, empty if nothing is packed. What is not recorded
    is read off the shapes.
    """
    packed = [key.removesuffix(".scales") for key in made if key.endswith(".scales")]
    if not packed:
        return {}
    modules: dict[str, Any] = dict(module.named_modules())
    stand_ins = {
        key: mx.zeros(recipe.shape, mx.uint8 if recipe.dtype == "U8" else mx.float32)
        for key, recipe in made.items()
    }
    try:
        found = {
            path: recorded.get(path) or infer_quant_config(path, modules[path], stand_ins)
            for path in packed
        }
        nn.quantize(module, class_predicate=lambda path, _: found.get(path, False))
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{checkpoint.path} holds packed weights that do not fit the head ({error}): "
            "convert from the original repository"
        ) from error
    return recorded or found[packed[0]] | found


def shapes(module: nn.Module) -> Shapes:
    """Of all its parameters."""
    return {key: value.shape for key, value in dict(tree_flatten(module.parameters())).items()}


def check_missing(
    checkpoint: Checkpoint, missing: list[str], unused: list[str], what: str, hint: str
) -> None:
    """Raises CheckpointError if tensors of `what` are missing. It names them and those that
    nothing uses, as these may be the same under another name, and says what to do."""
    if not missing:
        return
    shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    others = f" (and has no use for {', '.join(unused[:5])})" if unused else ""
    raise CheckpointError(
        f"{checkpoint.path} lacks {len(missing)} tensors of its {what}: {shown}{others}; {hint}"
    )


def check_shapes(checkpoint: Checkpoint, made: Recipes, needed: Shapes) -> None:
    """Raises CheckpointError for parameters that would be made in another shape."""
    wrong = [
        f"{made[key].sources[0]} gives {key} the shape {made[key].shape} and not {shape}"
        for key, shape in sorted(needed.items())
        if made[key].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"tensors of {checkpoint.path} do not fit its config.json: {'; '.join(wrong)}"
        )


def check_dtypes(
    checkpoint: Checkpoint, made: Recipes, needed: Shapes, allowed: Collection[str]
) -> None:
    """Raises CheckpointError for tensors that are neither packed nor of an allowed type."""
    for key in needed:
        packed = f"{key.rpartition('.')[0]}.scales" in needed and made[key].dtype in PACKED
        if made[key].dtype not in allowed and not packed:
            raise CheckpointError(
                f"{made[key].sources[0]} in {checkpoint.path} is stored as {made[key].dtype}, "
                "which is not supported: convert from the original repository"
            )
