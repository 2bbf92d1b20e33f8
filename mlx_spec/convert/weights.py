"""The parameters of a drafter: their shapes and types are known, their values are made on demand.

So a checkpoint is converted parameter by parameter: read, changed, written, dropped. At its peak
that needs memory for about two of the largest tensors: the bytes that were read and the array,
or single experts and their stack.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx
import numpy as np

from mlx_spec.errors import CheckpointError

FLOAT16_ENDS = 65520.0  # from here on float16 rounds to infinity

T = TypeVar("T")


@dataclass(frozen=True)
class Parameter:
    """A parameter that has not been made.

    Attributes:
        shape, dtype: of what `make` will give.
        make: reads what it needs; `value` computes it.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    make: Callable[[], mx.array]

    @classmethod
    def of(cls, value: mx.array) -> "Parameter":
        """One that is in memory already."""
        return cls(value.shape, value.dtype, lambda: value)

    def value(self) -> mx.array:
        value = self.make()
        mx.eval(value)
        assert (value.shape, value.dtype) == (self.shape, self.dtype), (value.shape, value.dtype)
        return value

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size


class Weights(Mapping[str, mx.array]):
    """Names to values. Each look-up makes the value anew and keeps nothing.

    Attributes:
        parameters: the same without the values.
    """

    def __init__(self, parameters: Mapping[str, Parameter]):
        self.parameters = dict(parameters)

    def __getitem__(self, name: str) -> mx.array:
        return self.parameters[name].value()

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class Shared(Generic[T]):
    """What is read for several parameters is read once, and kept until the last one has it.

    Args:
        read: gives the value of a name.
        uses: each name as often as it will be asked for. Later it is read again.
    """

    def __init__(self, read: Callable[[str], T], uses: Iterable[str]):
        self._read = read
        self._left = Counter(uses)
        self._kept: dict[str, T] = {}

    def __call__(self, name: str) -> T:
        value = self._kept.pop(name) if name in self._kept else self._read(name)
        self._left[name] -= 1
        if self._left[name] > 0:
            self._kept[name] = value
        return value


def cast(value: mx.array, dtype: mx.Dtype, where: str) -> mx.array:
    """Floats in another type.

    Args:
        where: what the value is called in messages.

    Raises:
        CheckpointError: float16 cannot hold one of the numbers.
    """
    if value.dtype == dtype:
        return value
    if dtype == mx.float16 and value.size:
        extremes = mx.stack([mx.max(value), mx.min(value)]).astype(mx.float32)
        for extreme in np.array(extremes):
            if not abs(extreme) < FLOAT16_ENDS:
                raise CheckpointError(
                    f"{where} holds {extreme:g}, and float16 ends at 65504: use another dtype"
                )
    return value.astype(dtype)
