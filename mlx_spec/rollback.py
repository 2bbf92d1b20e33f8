"""Roll-back: a transaction over a whole list of mlx-lm caches, one rule per cache class.

    transaction = Transaction(target, caches)
    hidden, logits = transaction.verify(tokens)      # T rows
    transaction.commit(keep)                         # the first `keep` rows stay

- `KVCache`, `QuantizedKVCache`: rows are appended; a shorter offset drops them. So it is with
  `SlidingWindow`, in which a `RotatingKVCache` is decoded.
- `ArraysCache` of a gated-delta layer: the forward runs on a stand-in, and the cache itself
  changes with the commit. The conv window after each row comes from the forward; the recurrent
  state is replayed from the recorded inputs of the recurrence. No second pass of the model.

`commit` may be repeated with another number of rows, and `abort` undoes it, as long as what came
later is undone first: both put every cache into a state that depends on the number alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_spec.errors import Incompatible
from mlx_spec.sliding_window import SlidingWindow, check_ring
from mlx_spec.targets.target import Replay, Target

Appended: TypeAlias = KVCache | QuantizedKVCache | SlidingWindow


class AppendedRows:
    """`KVCache`, `QuantizedKVCache` and `SlidingWindow`."""

    def __init__(self, cache: Appended):
        self.cache = cache
        self.begin = cache.offset
        self.before: dict[str, Any] | None = dict(vars(cache))  # while a forward is being built

    def stand_in(self, lengths: mx.array) -> Appended:
        """The cache to run a forward on; `lengths` is [1, ..., number of rows]."""
        return self.cache

    def built(self) -> None:
        """The update is complete, so the offset says it all. The arrays of before must not
        outlive it: where a cache grows, they are another copy of it."""
        self.before = None

    def commit(self, keep: int) -> None:
        self.cache.offset = self.begin + keep

    def abort(self) -> None:
        if self.before is not None:
            self.cache.__dict__.update(self.before)
        elif self.begin == 0:
            self.cache.keys = self.cache.values = None
        self.cache.offset = self.begin


class RecurrentState:
    """`ArraysCache` of a gated-delta layer: [conv window, recurrent state]."""

    def __init__(self, cache: ArraysCache):
        if cache.lengths is not None or cache.left_padding is not None:
            raise Incompatible("A batched ArraysCache cannot be decoded speculatively.")
        self.cache = cache
        self.before = list(cache.cache)
        self.replay: Replay | None = None

    def stand_in(self, lengths: mx.array) -> ArraysCache:
        """A single row needs the last window only, which is cheaper for mlx-lm to cut out."""
        self.rows = lengths.size
        self.after = ArraysCache(2) if self.rows == 1 else EveryWindow(lengths)
        self.after.cache = list(self.before)
        return self.after

    def built(self) -> None:
        pass

    def commit(self, keep: int) -> None:
        windows, state = self.after.cache  # (rows, K-1, C), (1, Hv, Dv, Dk)
        assert windows is not None
        if keep < self.rows:
            assert self.replay is not None
            state = self.replay(keep)
        self.cache.cache = [windows[keep - 1 : keep], state]

    def abort(self) -> None:
        self.cache.cache = list(self.before)


class EveryWindow(ArraysCache):
    """What a verify forward works on in place of an `ArraysCache`.

    mlx-lm stores the conv window that ends at `lengths`, one for each length. All lengths from 1
    on give the window after every row. No row is padding, so there is no mask.
    """

    def __init__(self, lengths: mx.array):
        super().__init__(2)
        self.lengths = lengths

    def make_mask(self, N: int) -> None:
        return None

    def advance(self, N: int) -> None:
        pass


RULES: dict[type, type[AppendedRows] | type[RecurrentState]] = {
    KVCache: AppendedRows,
    QuantizedKVCache: AppendedRows,
    SlidingWindow: AppendedRows,
    ArraysCache: RecurrentState,
}


def check_caches(target: Target, caches: list[Any]) -> None:
    """Raises Incompatible that names the first cache that cannot be rolled back."""
    for cache in caches:
        check_class(cache)
        if type(cache) is RotatingKVCache:
            check_ring(cache, target.window)
        elif type(cache) is ArraysCache and not target.recurrent:
            raise Incompatible(
                f"The recurrent state in an {type(cache).__name__} of this family of models cannot "
                "be rolled back, so this model is decoded without drafts."
            )


def check_class(cache: Any) -> None:
    """Raises Incompatible that names the class of a cache for which there is no rule."""
    if type(cache) is not RotatingKVCache and type(cache) not in RULES:
        raise Incompatible(
            f"A cache of class {type(cache).__name__} cannot be rolled back, "
            "so this model is decoded without drafts."
        )


def tokens_in(caches: list[Any]) -> int:
    """How many tokens the target's caches hold."""
    return max((cache.offset for cache in caches if hasattr(cache, "offset")), default=0)


class Transaction:
    def __init__(self, target: Target, caches: list[Any]):
        self.target = target
        self.caches = caches
        self.entries = list(caches)
        self.rules = [RULES[type(cache)](cache) for cache in caches]

    def prefill(self, tokens: mx.array) -> mx.array | None:
        """tokens (T,) -> hidden (1, T, H), if the target gives any. All rows stay, unless the
        transaction is aborted before `keep_all`."""
        hidden, _ = self.target(tokens[None], self.caches)
        self._built()
        return hidden

    def keep_all(self) -> None:
        """What was prefilled stays: this transaction can no longer be aborted."""
        for cache in self.caches:
            if isinstance(cache, SlidingWindow):
                cache.keep_update()

    def verify(self, tokens: mx.array) -> tuple[mx.array | None, mx.array]:
        """tokens (T,) -> hidden (1, T, H), if any, and logits (1, T, V). `commit` says how many
        rows stay."""
        lengths = mx.arange(1, tokens.size + 1)
        stand_ins = [rule.stand_in(lengths) for rule in self.rules]
        replayed = [r for r in self.rules if isinstance(r, RecurrentState) and r.rows > 1]
        with self.target.recording() if replayed else nullcontext([]) as replays:
            hidden, logits = self.target(tokens[None], stand_ins)
        for rule, replay in zip(replayed, replays, strict=True):
            rule.replay = replay
        self._built()
        return hidden, logits

    def commit(self, keep: int) -> None:
        """Keep the first `keep` (at least 1) rows of the verify."""
        self._finish(lambda rule: rule.commit(keep))

    def abort(self) -> None:
        """Put every cache back to where it was when the transaction began."""
        self._finish(lambda rule: rule.abort())

    def _built(self) -> None:
        for rule in self.rules:
            rule.built()

    def _finish(self, action: Callable[[AppendedRows | RecurrentState], None]) -> None:
        self.caches[:] = self.entries
        try:
            for rule in self.rules:
                action(rule)
        except BaseException:  # interrupted between two caches: they must end up alike
            for rule in self.rules:
                action(rule)
            raise
