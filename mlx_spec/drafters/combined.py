"""Lookup where its match is long, and another drafter otherwise."""

from typing import Any

import mlx.core as mx

from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.drafters.text import Text
from mlx_spec.targets.target import Target


class Combined(Drafter):
    """See `mlx_spec.drafters.Drafter`. The loop asks the parts in turn; the first cache is that of
    the lookup."""

    def __init__(self, lookup: Lookup, drafter: Drafter):
        self.lookup = lookup
        self.drafter = drafter
        self.kind = f"{lookup.kind}+{drafter.kind}"
        self.head = drafter.head
        self.learns = drafter.learns
        self.needs_hidden = drafter.needs_hidden

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.lookup, self.drafter)

    def caches_of_parts(self, caches: list[Any]) -> list[list[Any]]:
        return [caches[:1], caches[1:]]

    def view(self, target: Target) -> Target:
        return self.drafter.view(target)

    def make_cache(self) -> list[Any]:
        return self.lookup.make_cache() + self.drafter.make_cache()

    def text(self, caches: list[Any]) -> Text:
        return self.lookup.text(caches[:1])

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        self.drafter.extend(tokens, hidden, caches[1:])

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        """Without the lookup, which the loop asks first."""
        return self.drafter.draft(tokens, hidden, n, pick, caches[1:], target_caches)

    def position(self, caches: list[Any]) -> Any:
        return self.drafter.position(caches[1:])

    def rewind(self, caches: list[Any], position: Any) -> None:
        self.drafter.rewind(caches[1:], position)
