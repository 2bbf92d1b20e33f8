"""Which model does a head belong to? Its norms tell, as quantisation leaves them alone.

A fingerprint is made of the final norm and the norms before the first, the middle and the last
layer, as mlx-lm holds them (Qwen's with the one folded in), rounded to bfloat16: so files of
Hugging Face, of MLX in any type and quantisation, and GGUF give the same.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.norms import norm_convention
from mlx_spec.errors import CheckpointError, NoParts

NORM = re.compile(
    r"^((model|language_model)\.)+"
    r"(?P<norm>layers\.(?P<layer>\d+)\.input_layernorm|norm)\.weight$"
)
VALUES = 32  # kept of each norm, to say how far another one is from it
# Mean relative difference of values that were rounded twice: some are off by a step of bfloat16.
ROUNDING = 0.001
# Of the spread of values within a norm: two models that have nothing in common differ by more
# than the spread itself, as values of different channels do.
UNRELATED = 0.5

Verdict = Literal["same", "fine-tune", "another"]


@dataclass(frozen=True)
class Fingerprint:
    """Attributes:
    sha256: of all values of the norms.
    norms: some of their values, by the norm's name inside the model.
    """

    sha256: str
    norms: dict[str, tuple[float, ...]]

    def as_record(self) -> dict[str, Any]:
        """For config.json."""
        return {
            "sha256": self.sha256,
            "norms": {name: list(values) for name, values in self.norms.items()},
        }


@dataclass(frozen=True)
class Relation:
    """Of the model that a head was trained with to another one.

    Attributes:
        verdict: "same"; "fine-tune" of it, or another release; or "another" model.
        difference: of the norms' values, on average and relative to them.
        allowed: whether the user allowed this very mismatch when converting.
    """

    verdict: Verdict
    difference: float
    allowed: bool = False

    @property
    def detail(self) -> str:
        """A clause that says it."""
        if self.verdict == "same":
            return "the head belongs to this model"
        kind = {
            "fine-tune": "a fine-tune or another release of this model",
            "another": "another model",
        }[self.verdict]
        allowed = ", which was allowed" if self.allowed else ""
        return (
            f"the head belongs to {kind}: norms differ by {self.difference:.1%} on average{allowed}"
        )

    @property
    def refused(self) -> bool:
        """Whether to go on is pointless: hardly a draft would be right."""
        return self.verdict == "another" and not self.allowed


def fingerprint_of(checkpoint: Checkpoint, minus_one: bool) -> Fingerprint | None:
    """The fingerprint of the model in a checkpoint; None if its norms are not there or would have
    to be fetched with all of their files, or nothing tells how they are stored.

    Args:
        minus_one: whether files of the family may store norms minus one.

    Raises:
        CheckpointError: a file is damaged.
    """
    try:
        chosen = norms_of(checkpoint)
        checkpoint.prepare(chosen.values())
    except NoParts:
        return None
    if not chosen:
        return None
    folded = not minus_one
    if minus_one:
        files = sorted({checkpoint.tensor(name).file for name in chosen.values()})
        try:
            folded = norm_convention(checkpoint, files)[0] == "folded"
        except CheckpointError:
            return None

    def read(name: str) -> mx.array:
        value = checkpoint.read(name).astype(mx.float32)
        return value if folded else value + 1.0

    return _make(chosen, read)


def norms_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors that `fingerprint_of` reads, by the norm's name; empty if they are not all there."""
    text = checkpoint.section("text_config") or checkpoint.config
    chosen = _choose(checkpoint.names, text.get("num_hidden_layers"))
    try:
        for name in chosen.values():
            checkpoint.tensor(name)
    except CheckpointError:
        if checkpoint.files.fetched_bytes is not None:  # the files are there, the hub is not
            raise
        return {}
    return chosen


def fingerprint_of_model(model: nn.Module) -> Fingerprint | None:
    """The fingerprint of a model that mlx-lm has loaded, lazily or not."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return _make(_choose(parameters), lambda name: parameters[name])


def recorded(checkpoint: Checkpoint) -> Fingerprint | None:
    """The fingerprint in the config.json of a drafter.

    Raises:
        CheckpointError: it is not one.
    """
    record = checkpoint.section("mlx_spec").get("fingerprint")
    if record is None:
        return None
    try:
        norms = {str(name): tuple(map(float, v)) for name, v in record["norms"].items()}
        return Fingerprint(str(record["sha256"]), norms)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the fingerprint in config.json of {checkpoint.path} cannot be read ({error!r}); "
            "convert the drafter again"
        ) from error


def relation(drafter: Checkpoint, model: Callable[[], Fingerprint | None]) -> Relation | None:
    """Of the model that a drafter directory belongs to and the one that it is to be used with;
    None if it does not say what it belongs to. `model` is called only if it does."""
    own = recorded(drafter)
    if own is None or (theirs := model()) is None:
        return None
    found = compare(own, theirs)
    allowed = drafter.section("mlx_spec").get("allowed_target") == theirs.sha256
    return replace(found, allowed=allowed and found.verdict != "same")


def compare(own: Fingerprint, theirs: Fingerprint) -> Relation:
    """How near two models are."""
    if own.sha256 == theirs.sha256:
        return Relation("same", 0.0)
    pairs = [
        (np.array(own.norms[name]), np.array(theirs.norms[name]))
        for name in own.norms.keys() & theirs.norms.keys()
        if len(own.norms[name]) == len(theirs.norms[name])
    ]
    if len(pairs) < max(len(own.norms), len(theirs.norms)):
        return Relation("another", 1.0)
    distance = sum(np.abs(a - b).mean() for a, b in pairs)
    difference = float(distance / sum(np.abs(a).mean() for a, _ in pairs))
    if difference <= ROUNDING:
        return Relation("same", difference)
    spread = sum(np.abs(a - a.mean()).mean() for a, _ in pairs)
    return Relation("fine-tune" if distance <= UNRELATED * spread else "another", difference)


def _choose(names: Iterable[str], number: Any = None) -> dict[str, str]:
    """The norms of a fingerprint, each with its full name. Layers from `number` on are a head's, as
    far as it is known."""
    found = {
        match["norm"]: name
        for name in names
        if (match := NORM.match(name))
        and not (isinstance(number, int) and int(match["layer"] or 0) >= max(number, 1))
    }
    layers = sum(norm.startswith("layers.") for norm in found)
    wanted = [f"layers.{i}.input_layernorm" for i in sorted({0, layers // 2, layers - 1})]
    if not layers or any(norm not in found for norm in [*wanted, "norm"]):
        return {}
    return {norm: found[norm] for norm in [*wanted, "norm"]}


def _make(chosen: dict[str, str], read: Callable[[str], mx.array]) -> Fingerprint | None:
    if not chosen:
        return None
    digest = hashlib.sha256()
    norms = {}
    for norm, name in chosen.items():
        value = read(name).astype(mx.bfloat16)
        digest.update(f"{norm} {value.size}\n".encode())
        digest.update(np.array(value.view(mx.uint16)).tobytes())
        where = np.linspace(0, value.size - 1, min(VALUES, value.size)).astype(int)
        norms[norm] = tuple(np.array(value.astype(mx.float32))[where].tolist())
    return Fingerprint(digest.hexdigest(), norms)
