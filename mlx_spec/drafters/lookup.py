"""Prompt lookup: what followed the last time that the text went so (Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding), with the longest match instead of n-grams.

No weights and no forward: a proposal costs a few steps on the host. The text is what the request
has given and generated. With the length of the match grows how much of its continuation is
proposed; without a match nothing is.
"""

from typing import Any

import mlx.core as mx

from mlx_spec.candidates import Certain
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.text import Text

SHORTEST = 3  # tokens that must have occurred before
LONG = 8  # the same where a head would draft otherwise
MOST = 16


class Lookup(Drafter):
    """See `mlx_spec.drafters.Drafter`. Its one cache is the text.

    Args:
        shortest: the match in tokens from which on something is proposed.
    """

    kind = "lookup"
    head = None
    learns = False
    needs_hidden = False
    most = MOST

    def __init__(self, shortest: int = SHORTEST):
        self.shortest = shortest

    def make_cache(self) -> list[Any]:
        return [Text()]

    def text(self, caches: list[Any]) -> Text:
        return caches[0]

    def limit(self, caches: list[Any]) -> int:
        match = caches[0].match
        return min(match, MOST) if match >= self.shortest else 0

    def expects(self, caches: list[Any]) -> bool:
        return caches[0].match >= self.shortest - 1

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        pass

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        drafts: list[mx.array] = []
        for token in caches[0].continuation(n):
            drafts.append(pick(Certain(mx.array([token], mx.uint32)), drafts))
        return drafts

    def position(self, caches: list[Any]) -> None:
        return None  # the text holds nothing that may be undone

    def rewind(self, caches: list[Any], position: None) -> None:
        pass
