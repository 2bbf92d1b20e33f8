"""A `RotatingKVCache` that can be rolled back: the same rows in time order.

mlx-lm's ring overwrites the oldest row with each token, so a rejected one cannot be taken back
past the window; and where it takes several tokens at once, it copies the whole window. Here
rows are appended with some room to spare, and a shorter offset drops the newest again.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mlx_spec.errors import Incompatible

ROOM = 32  # rows to spare, so that the window is copied once in as many


class SlidingWindow(RotatingKVCache):
    """Takes the place of `ring` while a generation is under way.

    `keys` and `values` (1, heads, rows, D) hold the rows from position `first` on. What the last
    two updates appended can be dropped, and `max_size` rows are still left.
    """

    def __init__(self, ring: RotatingKVCache):
        super().__init__(ring.max_size)
        self.ring = ring
        self.offset = ring.offset
        if not ring.empty():
            self.keys = ring._temporal_order(ring.keys)
            self.values = ring._temporal_order(ring.values)
        self.first = self.offset - (0 if self.empty() else self.keys.shape[2])
        self.last_update = 0  # rows

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (1, heads, T, D); returns what these rows may attend to, at most
        max_size - 1 + T rows, as mlx-lm does for several tokens."""
        new = keys.shape[2]
        rows = self.offset - self.first
        if self.empty() or rows + new > self.keys.shape[2]:
            kept = min(rows, self.max_size + self.last_update)
            room = new + (ROOM if new <= ROOM else 0)  # none after a chunk of the prompt
            self.keys = _with_room(self.keys, rows - kept, rows, keys, room)
            self.values = _with_room(self.values, rows - kept, rows, values, room)
            self.first, rows = self.offset - kept, kept
        self.keys[..., rows : rows + new, :] = keys
        self.values[..., rows : rows + new, :] = values
        self.offset += new
        self.last_update = new
        return self._newest(self.max_size - 1 + new)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows in the window, at most max_size."""
        return self._newest(self.max_size)

    def _newest(self, count: int) -> tuple[mx.array, mx.array]:
        rows = self.offset - self.first
        newest = slice(max(0, rows - count), rows)
        return self.keys[..., newest, :], self.values[..., newest, :]

    def keep_update(self) -> None:
        """The last update will not be dropped, so no row beyond the window is needed for it."""
        self.last_update = 0

    def settle(self) -> None:
        """Give the ring what is now in the window, and no view of a longer buffer."""
        keys = values = None
        if self.offset > 0:
            keys, values = map(mx.contiguous, self.keys_and_values())
            mx.async_eval(keys, values)
        rows = 0 if keys is None else keys.shape[2]
        self.ring.state = (keys, values, self.offset, 0, self.max_size, rows)


def check_ring(ring: RotatingKVCache, window: int | None) -> None:
    """Raises Incompatible for a ring that shows several tokens other rows than it shows each of
    them alone: one whose size is not the model's window, or that keeps its first rows."""
    if ring.max_size != window or ring.keep:
        raise Incompatible(
            f"A RotatingKVCache of {ring.max_size} rows that keeps the first {ring.keep} does not "
            f"belong to this model, whose window is {window}, so this prompt cache is decoded "
            "without drafts."
        )


def _with_room(old: mx.array | None, begin: int, end: int, like: mx.array, room: int) -> mx.array:
    """A copy of the rows from `begin` to `end`, with `room` rows after them."""
    space = mx.zeros((*like.shape[:2], room, like.shape[3]), like.dtype)
    return space if old is None else mx.concatenate([old[..., begin:end, :], space], axis=2)


def in_time_order(caches: list[Any]) -> list[Any]:
    """Put a SlidingWindow in the place of each ring in the list, and return the list. The rings
    are empty until `settled`: no row is held twice."""
    for i, cache in enumerate(caches):
        if type(cache) is RotatingKVCache:
            caches[i] = SlidingWindow(cache)
            cache.keys = cache.values = None
    return caches


def settled(caches: list[Any]) -> list[Any]:
    """Put the rings back, with what is now in their windows, and return the list."""
    for i, cache in enumerate(caches):
        if isinstance(cache, SlidingWindow):
            cache.settle()
            caches[i] = cache.ring
    return caches
