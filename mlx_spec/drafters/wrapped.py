"""A drafter in place of another one, for what measures or replaces its drafts."""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters import Drafter
from mlx_spec.targets.target import Target


class Wrapped(Drafter):
    """Leaves to `inner` what it learns; `draft` is for a subclass to say."""

    def __init__(self, inner: Drafter):
        self.inner = inner
        self.kind = inner.kind
        self.head = inner.head
        self.learns = inner.learns
        self.needs_hidden = inner.needs_hidden
        self.most = inner.most

    def view(self, target: Target) -> Target:
        return self.inner.view(target)

    def make_cache(self) -> list[Any]:
        return self.inner.make_cache()

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        self.inner.extend(tokens, hidden, caches)

    def position(self, caches: list[Any]) -> Any:
        return self.inner.position(caches)

    def rewind(self, caches: list[Any], position: Any) -> None:
        self.inner.rewind(caches, position)
