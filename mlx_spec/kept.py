"""What a drafter knows of a prompt cache, kept with it for the next turn.

It hangs on the first of the target's caches: the list itself stays what mlx-lm expects, and a
copy of the list copies it. Files of prompt caches do not hold it.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.drafters import Drafter
from mlx_spec.rollback import tokens_in
from mlx_spec.round import Pairs


@dataclass(frozen=True)
class Kept:
    """Attributes:
    drafters: the parts of the one that the caches are of; another one cannot use them.
    caches: of the drafter.
    hidden: (1, 1, H), the target's hidden state of the newest token in its caches, if known.
    tokens: how many the target's caches held.
    """

    drafters: tuple[weakref.ref, ...]
    caches: list[Any]
    hidden: mx.array | None
    tokens: int


def keep(own: list[Any], drafter: Drafter, caches: list[Any], hidden: mx.array | None) -> None:
    """Hang what the drafter knows on the target's caches `own`."""
    if hidden is not None:
        hidden = mx.contiguous(hidden)
    drafters = tuple(map(weakref.ref, drafter.parts))
    own[0].mlx_spec = Kept(drafters, caches, hidden, tokens_in(own))


def take_kept(own: list[Any], drafter: Drafter) -> Kept | None:
    """Take it off again; None where nothing was kept that is of use."""
    kept = vars(own[0]).pop("mlx_spec", None)
    if kept is None or kept.tokens != tokens_in(own):
        return None
    return kept if [known() for known in kept.drafters] == list(drafter.parts) else None


def first_pair(drafter: Drafter, kept: Kept | None, prompt: mx.array) -> Pairs | None:
    """The first token of a further prompt (T,), with the hidden state that was kept. A drafter that
    needs none can learn the first of all tokens, too."""
    first = prompt[:1].astype(mx.uint32)
    if not drafter.needs_hidden:
        return Pairs(first, None) if drafter.learns else None
    if kept is None or kept.hidden is None:
        return None
    return Pairs(first, kept.hidden)
