"""Parts of a model that drafters for any family use, found by the names that mlx-lm gives them."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import Incompatible


def embedding_of(model: nn.Module) -> nn.Module:
    """The model's embedding of tokens: what it gives is not scaled yet, where a model does that.

    Raises: Incompatible if there is not one.
    """
    found = _named(model, "embed_tokens")
    if len(found) != 1:
        family = type(model).__module__.rpartition(".")[2]
        raise Incompatible(
            f"The drafter has no embedding of its own, and that of {family} models is not where "
            "mlx-spec looks for it; give a drafter that brings one."
        )
    return found[0]


def output_of(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """The product with the model's output matrix: (..., H) -> (..., V)."""
    found = _named(model, "lm_head")
    return found[0] if len(found) == 1 else embedding_of(model).as_linear  # they are tied


def _named(model: nn.Module, name: str) -> list[nn.Module]:
    return [m for path, m in model.named_modules() if path.rpartition(".")[2] == name]
