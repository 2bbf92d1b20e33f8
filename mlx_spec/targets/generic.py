"""Any other model of mlx-lm: logits only, as its own `__call__` gives them.

Enough for drafters that look at tokens: prompt lookup and a small model. Which caches can be
rolled back is for rollback.py to say; the state of a recurrence is not recorded here, so that a
model with one is refused.
"""

from contextlib import nullcontext
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_spec.errors import Incompatible

SHARDED = (AllToShardedLinear, QuantizedAllToShardedLinear)


class GenericTarget:
    """See `mlx_spec.targets.target.Target`."""

    recurrent = False

    def __init__(self, model: nn.Module):
        """Raises: Incompatible for a model that is spread over several machines."""
        refuse_spread(model)
        self.model = model
        rings = {c.max_size for c in make_prompt_cache(model) if type(c) is RotatingKVCache}
        self.window: int | None = rings.pop() if len(rings) == 1 else None

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[None, mx.array]:
        return None, self.model(tokens, cache=cache)

    def recording(self):
        return nullcontext([])

    @cached_property
    def vocab_size(self) -> int:
        """Of the logits. Families name it differently, so that a graph is asked, and not run."""
        logits = self.model(mx.array([[0]]), cache=make_prompt_cache(self.model))
        return logits.shape[-1]


def refuse_spread(model: nn.Module) -> None:
    """Raises Incompatible for a model that is on several machines."""
    first, last = model.layers[0], model.layers[-1]
    if first is None or any(isinstance(module, SHARDED) for module in last.modules()):
        raise Incompatible("A model spread over several machines is decoded without drafts.")
