"""What the layouts of NextN heads have in common: their checks, and how their weights are made."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_spec.convert import draft_vocab, fp8, match
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.experts import expert_number
from mlx_spec.convert.head import Provenance, origin
from mlx_spec.convert.match import Recipe, Recipes, Shapes
from mlx_spec.convert.weights import Parameter, Shared, Weights, cast
from mlx_spec.errors import CheckpointError

FLOATS = match.FLOATS | {"F8_E4M3": mx.bfloat16}  # once it is decoded

# What is missing if tensors are, and why they may be.
STRIPPED = (
    "NextN head",
    "the head was stripped from this repository or packed; convert from the original repository",
)


def check_config(
    checkpoint: Checkpoint, text: dict[str, Any], required: Iterable[str], maxima: dict[str, int]
) -> None:
    """Raises CheckpointError for fields that the configuration lacks, or that are too large."""
    missing = [field for field in required if text.get(field) is None]
    if (text.get("rope_parameters") or text).get("rope_theta") is None:
        missing.append("rope_theta")
    if missing:
        raise CheckpointError(
            f"config.json of {checkpoint.path} lacks {', '.join(missing)}: "
            "download it from the original repository"
        )
    for field, maximum in maxima.items():
        if isinstance(value := text.get(field), int) and value > maximum:
            raise CheckpointError(
                f"config.json of {checkpoint.path} has {field} {value}, and the limit is "
                f"{maximum}: download it from the original repository"
            )


def check(
    checkpoint: Checkpoint, made: Recipes, needed: Shapes, name: Callable[[str], str]
) -> None:
    """Raises CheckpointError unless all that the module needs can be made, in its shape and of
    types that can be read. `name` is what the checkpoint calls a parameter."""
    unused = sorted(source for key in made.keys() - needed for source in made[key].sources)
    match.check_missing(checkpoint, _missing(made, needed, name), unused, *STRIPPED)
    match.check_shapes(checkpoint, made, needed)
    integers = {key: needed[key] for key in needed if key in draft_vocab.NAMES}
    match.check_dtypes(checkpoint, made, integers, draft_vocab.INTEGERS)
    floats = {key: needed[key] for key in needed if key not in integers}
    match.check_dtypes(checkpoint, made, floats, FLOATS)


def _missing(made: Recipes, needed: Shapes, name: Callable[[str], str]) -> list[str]:
    """Names of the tensors that would make what cannot be made, single experts included."""
    missing = list(dict.fromkeys(name(key) for key in sorted(needed.keys() - made)))
    for key in sorted(needed.keys() & made):
        if made[key].stack:
            layer, projection = key.split(".switch_mlp.")
            there = {expert_number(source) for source in made[key].sources}
            missing += [
                name(f"{layer}.experts.{e}.{projection}")
                for e in range(needed[key][0])
                if e not in there
            ]
    return missing


def provenance(
    checkpoint: Checkpoint, names: Collection[str], recipes: Recipes, scales: dict[str, str]
) -> Provenance:
    """Of a head with these parameters. `names` are all its tensors, `scales` those of fp8 ones."""
    used = {name for recipe in recipes.values() for name in recipe.sources}
    used |= {scales[name] for name in used if name in scales}
    return Provenance(
        *origin(checkpoint),
        directory=checkpoint.directory,
        files=tuple(sorted({checkpoint.tensor(name).file for name in used})),
        used=tuple(sorted(used)),
        unused=tuple(sorted(set(names) - used)),
    )


def weights_of(
    checkpoint: Checkpoint,
    recipes: Recipes,
    scales: dict[str, str],
    dtype: mx.Dtype | None,
    *,
    folded: Collection[str] = (),
    exact: Collection[str] = (),
) -> Weights:
    """Parameters that are read when they are asked for.

    Args:
        scales: of fp8 tensors.
        dtype: of the parameters. Default: the source's own, and bfloat16 for fp8.
        folded: parameters that one is to be added to.
        exact: parameters that keep their own type.
    """
    sources = [name for recipe in recipes.values() for name in recipe.sources]
    stored = Shared(
        checkpoint.read_stored, sources + [scales[name] for name in sources if name in scales]
    )

    def make(key: str, recipe: Recipe, to: mx.Dtype) -> mx.array:
        def finish(name: str, value: mx.array) -> mx.array:
            if key in folded:
                value = value.astype(mx.float32) + 1.0
            return cast(value, to, f"{name} in {checkpoint.path}")

        def read(name: str, half: int | None) -> mx.array:
            value = stored(name)
            rows = match.rows_of(value.shape, half)
            if name in scales:
                block, scale = fp8.block_size(checkpoint), stored(scales[name])
                return fp8.dequantise(value, scale, block, rows, to, partial(finish, name))
            return finish(name, value if half is None else value[..., rows, :])

        return recipe.make(read)

    parameters = {}
    for key, recipe in recipes.items():
        wanted = None if key in exact else dtype
        to = match.INTEGERS.get(recipe.dtype) or wanted or FLOATS[recipe.dtype]
        parameters[key] = Parameter(recipe.shape, to, partial(make, key, recipe, to))
    return Weights(parameters)
