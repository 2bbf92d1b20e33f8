"""What was measured of each loaded model, from request to request and from start to start."""

import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import mlx.nn as nn

from mlx_spec import depth_cache
from mlx_spec.costs import Knowledge
from mlx_spec.depth import Adaptive, Depth, Fixed
from mlx_spec.drafters import Drafter
from mlx_spec.options import SpecOptions

WRITE_S = 30.0  # at least, between two writes to the cache
SURE = 4  # rounds as which a deliberate measurement counts


@dataclass
class Known:
    fingerprint: str
    knowledge: Knowledge
    written: float | None = None  # time.monotonic()


_known: WeakKeyDictionary[Drafter, Known] = WeakKeyDictionary()


def depths_for(options: SpecOptions, model: nn.Module, drafter: Drafter) -> list[Depth]:
    """The depths of one request, by the parts of its drafter. What these may lose, they may lose
    together."""
    if options.num_draft_tokens == "auto":
        *others, last = drafter.parts
        known = knowledge_of(model, last)
        most = options.max_draft_tokens
        return [
            *(Adaptive(knowledge_of(model, p), most or p.most, known.account) for p in others),
            Adaptive(known, most or last.most),
        ]
    return [Fixed(options.num_draft_tokens) for _ in drafter.parts]


def knowledge_of(model: nn.Module, drafter: Drafter) -> Knowledge:
    """It lives as long as the drafter; at first it is what an earlier start has left."""
    known = _known.get(drafter)
    if known is None:
        fingerprint = depth_cache.fingerprint(model, drafter.head)
        known = _known[drafter] = Known(fingerprint, depth_cache.read(fingerprint))
    return known.knowledge


def learn_costs(
    model: nn.Module, drafter: Drafter, context: int, seconds: dict[int, float]
) -> None:
    """Take over measured seconds of a round by depth, in a context of so many tokens, and leave
    them to the next start."""
    knowledge = knowledge_of(model, drafter)
    for depth, duration in seconds.items():
        for _ in range(SURE):
            knowledge.costs.add(depth, context, duration)
    depth_cache.write(_known[drafter].fingerprint, knowledge)


def remember(drafter: Drafter) -> None:
    """A request has ended: leave what is known to the next start."""
    now = time.monotonic()
    for part in drafter.parts:
        known = _known.get(part)
        if known is not None and (known.written is None or now - known.written > WRITE_S):
            depth_cache.write(known.fingerprint, known.knowledge)
            known.written = now
