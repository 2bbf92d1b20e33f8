"""The state of mlx's global random generator: two 32-bit words, a function of the seed and of the
number of draws since."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx


def generator_state() -> mx.array:
    """(2,) uint32, lazy."""
    return cast(list[mx.array], mx.random.state)[0]


def set_generator_state(words: list[int]) -> None:
    """A seed is the state that it leads to, so this restores one exactly."""
    high, low = words
    if not sys.is_finalizing():  # at Python's end mlx's generator is gone before ours are closed
        mx.random.seed(high << 32 | low)


def key_of_one_draw() -> mx.array:
    """A key as mlx's functions take it, (2,) uint32: that of one draw, which is made."""
    state = generator_state()
    mx.random.uniform()  # leaves the generator in the first half of the split
    key = mx.random.split(state)[1]
    mx.eval(key)
    return key


def integers(array: mx.array) -> list[int]:
    """A one-dimensional array, read by the host."""
    return cast(list[int], array.tolist())


@contextmanager
def untouched_generator() -> Iterator[None]:
    """Draws within it do not count: making a module draws its initial weights."""
    words = integers(generator_state())
    try:
        yield
    finally:
        set_generator_state(words)
