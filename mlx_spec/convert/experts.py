"""Which source tensors make which parameter of a NextN head, whose names are known by now.

What is left are experts, of which three layouts are in use (vLLM's qwen3_5_mtp.py reads the first
two):

    mlp.experts.{e}.{gate,up,down}_proj.weight   per expert: Qwen3-Next, Qwen3.5, DeepSeek, fp8
    mlp.experts.{gate_up,down}_proj              fused, gate rows first: Qwen3.6
    mlp.switch_mlp.{gate,up,down}_proj.weight    stacked: what MLX computes with
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.match import Recipe, copy
from mlx_spec.errors import CheckpointError

EXPERT = re.compile(r"^(?P<mlp>.*\.mlp)\.experts\.(?P<e>\d+)\.(?P<rest>(gate|up|down)_proj\.\w+)$")
FUSED = re.compile(r"^(?P<mlp>.*\.mlp)\.experts\.(?P<proj>gate_up|down)_proj(\.weight)?$")
STACKED = re.compile(r"^(?P<mlp>.*\.mlp)\.switch_mlp\.")


def expert_number(name: str) -> int | None:
    match = EXPERT.match(name)
    return int(match["e"]) if match else None


def by_parameter(
    checkpoint: Checkpoint, names: Iterable[str], parameter: Callable[[str], str]
) -> dict[str, str]:
    """Tensors by what `parameter` calls them.

    Raises:
        CheckpointError: it calls two of them the same.
    """
    found: dict[str, str] = {}
    for name in names:
        key = parameter(name)
        if key in found:
            raise _twice(checkpoint, key, found[key], name)
        found[key] = name
    return found


def plan(checkpoint: Checkpoint, named: dict[str, str]) -> dict[str, Recipe]:
    """The parameters that tensors make, whether or not the module has them.

    Args:
        named: tensors by parameter, but for experts.

    Raises:
        CheckpointError: a parameter is there twice, in two layouts.
    """
    recipes: dict[str, Recipe] = {}
    layouts: dict[str, set[str]] = defaultdict(set)
    experts: dict[str, dict[int, str]] = defaultdict(dict)

    def add(key: str, recipe: Recipe) -> None:
        if key in recipes:
            raise _twice(checkpoint, key, recipes[key].sources[0], recipe.sources[0])
        recipes[key] = recipe

    for inner, name in named.items():
        if match := EXPERT.match(inner):
            layouts[match["mlp"]].add("one tensor per expert")
            experts[f"{match['mlp']}.switch_mlp.{match['rest']}"][int(match["e"])] = name
        elif match := FUSED.match(inner):
            layouts[match["mlp"]].add("fused experts")
            for key, recipe in _split(checkpoint, match["mlp"], match["proj"], name).items():
                add(key, recipe)
        else:
            if match := STACKED.match(inner):
                layouts[match["mlp"]].add("stacked experts")
            add(inner, copy(checkpoint, name))
    for mlp, found in layouts.items():
        if len(found) > 1:
            raise CheckpointError(
                f"{checkpoint.path} holds the experts of {mlp} more than once, as "
                f"{' and as '.join(sorted(found))}: convert from the original repository"
            )
    for key, by_number in experts.items():
        add(key, _stack(checkpoint, [by_number[e] for e in sorted(by_number)]))
    return recipes


def _stack(checkpoint: Checkpoint, names: list[str]) -> Recipe:
    tensors = [checkpoint.tensor(name) for name in names]
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for name, tensor in zip(names, tensors, strict=True):
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise CheckpointError(
                f"the experts of {checkpoint.path} differ: {names[0]} is {shape} of {dtype}, "
                f"{name} is {tensor.shape} of {tensor.dtype}"
            )
    return Recipe(tuple(names), (len(names), *shape), dtype, stack=True)


def _split(checkpoint: Checkpoint, mlp: str, projection: str, name: str) -> dict[str, Recipe]:
    tensor = checkpoint.tensor(name)
    if projection == "down":
        return {f"{mlp}.switch_mlp.down_proj.weight": copy(checkpoint, name)}
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        raise CheckpointError(
            f"{name} in {checkpoint.path} is {tensor.shape} and should be (experts, 2 x rows, "
            "columns)"
        )
    experts, rows, columns = tensor.shape
    return {
        f"{mlp}.switch_mlp.{part}_proj.weight": Recipe(
            (name,), (experts, rows // 2, columns), tensor.dtype, half=half
        )
        for half, part in enumerate(("gate", "up"))
    }


def _twice(checkpoint: Checkpoint, key: str, first: str, second: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path} holds {key} twice, as {first} and as {second}: "
        "convert from the original repository"
    )
