"""Mistakes that a drafter may come with, and how each of them is undone in a loaded one.

A conversion, or whoever wrote the checkpoint, may have taken norms, the order of inputs or the
hidden states for something else than they are. The weights then load, and drafts are wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Undo = Callable[[Any, Any], AbstractContextManager[None]]
Change = Callable[[mx.array, Any], mx.array]


@dataclass(frozen=True)
class Mistake:
    """One way in which a drafter may be wrong.

    Attributes:
        kind: of the mistake, in a word or two.
        fault: a clause that says what is wrong with the drafter.
        undone: takes a drafter and its target; within the context that it returns, the drafter
            drafts as if it had been made without the mistake.
    """

    kind: str
    fault: str
    undone: Undo


@contextmanager
def shifted_norms(by: float, drafter: Any, target: Any) -> Iterator[None]:
    """All norms of the head, each weight more by one number."""
    norms = [module for module in drafter.head.modules() if isinstance(module, nn.RMSNorm)]
    weights = [norm.weight for norm in norms]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight = (weight.astype(mx.float32) + by).astype(weight.dtype)
    try:
        yield
    finally:
        for norm, weight in zip(norms, weights, strict=True):
            norm.weight = weight


class _Changed(nn.Module):
    """A matrix that is given its input changed; it may be quantised."""

    def __init__(self, matrix: nn.Module, change: Callable[[mx.array], mx.array]):
        super().__init__()
        self.matrix = matrix
        self.change = change

    def __call__(self, x: mx.array) -> mx.array:
        return self.matrix(self.change(x))


@contextmanager
def changed_input(matrix: str, change: Change, drafter: Any, target: Any) -> Iterator[None]:
    """What comes into one matrix of the head, or of each of its layers (`layers.matrix`), is
    changed: [embedding ; hidden state]."""
    name = matrix.removeprefix("layers.")
    owners = drafter.head.layers if name != matrix else [drafter.head]
    inner = [getattr(owner, name) for owner in owners]
    for owner, own in zip(owners, inner, strict=True):
        setattr(owner, name, _Changed(own, lambda x: change(x, target)))
    try:
        yield
    finally:
        for owner, own in zip(owners, inner, strict=True):
            setattr(owner, name, own)


def swapped(x: mx.array, target: Any) -> mx.array:
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate([second, first], axis=-1)


def unscaled(x: mx.array, target: Any) -> mx.array:
    embedding, hidden = mx.split(x, 2, axis=-1)
    return mx.concatenate([embedding / target.text.model.embed_scale, hidden], axis=-1)


def scaled_twice(x: mx.array, target: Any) -> mx.array:
    embedding, hidden = mx.split(x, 2, axis=-1)
    return mx.concatenate([embedding * target.text.model.embed_scale, hidden], axis=-1)


@contextmanager
def before_final_norm(drafter: Any, target: Any) -> Iterator[None]:
    """The model's hidden states come before its final norm, but for a factor, which the head's
    own norm of them takes out."""
    weight = target.text.model.norm.weight
    extend, draft = drafter.extend, drafter.draft

    def before(hidden: mx.array) -> mx.array:
        return mx.where(weight == 0, 0, hidden / weight).astype(hidden.dtype)

    drafter.extend = lambda tokens, hidden, caches: extend(tokens, before(hidden), caches)
    drafter.draft = lambda tokens, hidden, *others: draft(tokens, before(hidden), *others)
    try:
        yield
    finally:
        del drafter.extend, drafter.draft


@contextmanager
def other_position(drafter: Any, target: Any) -> Iterator[None]:
    shift = drafter.shift
    drafter.shift = -1 - shift
    try:
        yield
    finally:
        drafter.shift = shift


@contextmanager
def shifted_layers(by: int, drafter: Any, target: Any) -> Iterator[None]:
    """Features of EAGLE-3 come from so many layers later, of those that there are."""
    layers, count = drafter.layers, len(target.model.layers)
    drafter.layers = tuple(min(max(i + by, 0), count) for i in layers)
    try:
        yield
    finally:
        drafter.layers = layers


@contextmanager
def other_residual(drafter: Any, target: Any) -> Iterator[None]:
    layer = drafter.head.layers[0]
    layer.norm_before_residual = not layer.norm_before_residual
    try:
        yield
    finally:
        layer.norm_before_residual = not layer.norm_before_residual


NORMS = (
    Mistake("norms", "its norms lack the one that is to be added", partial(shifted_norms, 1.0)),
    Mistake("norms", "its norms have one too much", partial(shifted_norms, -1.0)),
)
BEFORE_FINAL_NORM = Mistake(
    "hidden variant",
    "it takes the model's hidden states before the final norm",
    before_final_norm,
)
QWEN_NEXTN = (
    *NORMS,
    Mistake(
        "concat order",
        "its fc takes the hidden state first and the embedding second",
        partial(changed_input, "fc", swapped),
    ),
    BEFORE_FINAL_NORM,
)
DEEPSEEK_NEXTN = (
    *NORMS,
    Mistake(
        "concat order",
        "its eh_proj takes the embedding and the hidden state in the other order",
        partial(changed_input, "layers.eh_proj", swapped),
    ),
    BEFORE_FINAL_NORM,
)
GEMMA4_ASSISTANT = (
    *NORMS,
    Mistake(
        "concat order",
        "its pre_projection takes the hidden state first and the embedding second",
        partial(changed_input, "pre_projection", swapped),
    ),
    Mistake(
        "query position",
        "its queries stand at the other one of the positions P and P-1 (query_position)",
        other_position,
    ),
    Mistake(
        "embedding scale",
        "its pre_projection takes embeddings that are not scaled",
        partial(changed_input, "pre_projection", unscaled),
    ),
    Mistake(
        "embedding scale",
        "its pre_projection takes embeddings that are scaled twice",
        partial(changed_input, "pre_projection", scaled_twice),
    ),
)
EAGLE3 = (
    Mistake(
        "layer ids",
        'its features are outputs of the listed layers ("layer_ids": "output")',
        partial(shifted_layers, 1),
    ),
    Mistake(
        "layer ids",
        'its features are inputs of the listed layers ("layer_ids": "input")',
        partial(shifted_layers, -1),
    ),
    Mistake(
        "residual",
        "its residual starts at the other side of its first norm (norm_before_residual)",
        other_residual,
    ),
)
