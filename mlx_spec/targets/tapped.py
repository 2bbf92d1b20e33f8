"""A target that gives, in place of its hidden states, what some of its layers are given: the
features of EAGLE-3. It may be of any family; mlx-lm's own classes do the maths."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.errors import Incompatible
from mlx_spec.targets.target import Replay, Target

_recording = threading.RLock()


class TappedTarget:
    """See `mlx_spec.targets.Target`. Its hidden states are (1, T, K * H), the residual stream
    before each of K layers; layer N, after the last one, stands for what the last one returns."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        """Raises: Incompatible for layers that the model does not have."""
        self.inner = target
        self.model = target.model
        self.window = target.window
        self.recurrent = target.recurrent
        self.layers = layers
        count = len(self.model.layers)
        if outside := [i for i in layers if not 0 <= i <= count]:
            raise Incompatible(
                f"The drafter looks at layer {outside[0]} of the model, which has {count}; "
                "give the drafter of this model."
            )

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @cached_property
    def feature_size(self) -> int:
        """Of the hidden states that it gives. A graph is asked, and not run.

        Raises: Incompatible where the layers are called in another way than mlx-lm's are."""
        tokens, caches = mx.array([[0]]), make_prompt_cache(self.model)
        with record_inputs(self.model.layers, self.layers) as inputs:
            self.inner(tokens, caches)
        if inputs.keys() != set(self.layers):
            family = type(self.model).__module__.rpartition(".")[2]
            raise Incompatible(
                f"What the layers of {family} models are given cannot be seen from outside, so "
                "this drafter cannot be used; give --draft-model none or another one."
            )
        return sum(inputs[i].shape[-1] for i in self.layers)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        with record_inputs(self.model.layers, self.layers) as inputs:
            _, logits = self.inner(tokens, cache)
        return mx.concatenate([inputs[i] for i in self.layers], axis=-1), logits

    def recording(self) -> AbstractContextManager[list[Replay]]:
        return self.inner.recording()


@contextmanager
def record_inputs(
    layers: Sequence[nn.Module], wanted: Collection[int]
) -> Iterator[dict[int, mx.array]]:
    """Keep what the wanted layers are given in this thread, by their index; see `TappedTarget`.

    A call is looked up in the class, so that it is the classes' own which are wrapped, and put
    back at the end.
    """
    owner = threading.get_ident()
    index = {id(layer): i for i, layer in enumerate(layers)}
    last = len(layers) - 1
    inputs: dict[int, mx.array] = {}

    def recorded(call: Callable) -> Callable:
        @wraps(call)
        def record(layer, x, *args, **kwargs):
            output = call(layer, x, *args, **kwargs)
            if threading.get_ident() == owner:
                i = index.get(id(layer), -1)
                if i in wanted:
                    inputs[i] = x
                if i == last and last + 1 in wanted:
                    inputs[last + 1] = output[0] if isinstance(output, tuple) else output
            return output

        return record

    kinds: set[Any] = {type(layers[min(i, last)]) for i in wanted}
    with _recording:
        before = {kind: vars(kind).get("__call__") for kind in kinds}
        try:
            for kind in kinds:
                kind.__call__ = recorded(kind.__call__)
            yield inputs
        finally:
            for kind, call in before.items():
                if call is not None:
                    kind.__call__ = call
                elif "__call__" in vars(kind):  # it has inherited its own
                    del kind.__call__
