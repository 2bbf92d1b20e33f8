"""Do a drafter and a model belong together? Judged by their files, before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.fingerprint import (
    Fingerprint,
    Relation,
    compare,
    fingerprint_of,
    recorded,
)
from mlx_spec.convert.head import Head
from mlx_spec.convert.tokenizer import Tokenizers, compare_tokenizers
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.families import Family, family_of, family_of_target, misfits

ROPE = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        model: its directory, or ORG/REPO.
        faults: what keeps them from working together; one clause each.
        doubts: what would work, but with drafts that are seldom right.
        tokenizers: the comparison of these.
        relation: of the model that the drafter was trained with to this one; None if unknown.
    """

    model: Path
    faults: tuple[str, ...]
    doubts: tuple[str, ...]
    tokenizers: Tokenizers
    relation: Relation | None

    @property
    def sentence(self) -> str:
        """For a pair without faults."""
        if self.doubts:
            return f"Does not quite fit {self.model}: {'; '.join(self.doubts)}"
        unknown = "no fingerprint tells whether the drafter belongs to this very model"
        relation = self.relation.detail if self.relation else unknown
        return f"Fits {self.model}; {self.tokenizers.detail}; {relation}"


def checked_fit(drafter: Checkpoint, model: Checkpoint, allow_mismatch: bool) -> Fit:
    """Raises Incompatible if they do not fit, or there are doubts and they were not allowed."""
    fit = check_fit(drafter, model)
    if fit.faults:
        clauses = "; ".join(fit.faults + fit.doubts)
        raise Incompatible(f"{drafter.path} does not fit {model.path}: {clauses}")
    if fit.doubts and not allow_mismatch:
        raise Incompatible(
            f"{drafter.path} does not fit {model.path}: {'; '.join(fit.doubts)}; use the head of "
            "the model itself, or go on with --allow-mismatch"
        )
    return fit


def check_fit(drafter: Checkpoint, model: Checkpoint) -> Fit:
    """Compares architecture, sizes, vocabulary, rope, tokenizer and fingerprint."""
    family = family_of(drafter)
    tokenizers = compare_tokenizers(drafter.tokenizer_folder, model.directory)
    doubts = [tokenizers.detail] if tokenizers.verdict == "differs" else []
    if faults := misfits(family, drafter, model):
        return Fit(model.path, tuple(faults), tuple(doubts), tokenizers, None)
    doubts += rope_doubts(family, drafter, model)
    relation = None
    own, theirs = fingerprint_in(drafter, family), model_fingerprint(model)()
    if own is not None and theirs is not None:
        relation = compare(own, theirs)
        if relation.verdict != "same":
            doubts.append(relation.detail)
    return Fit(model.path, (), tuple(doubts), tokenizers, relation)


def fingerprint_in(checkpoint: Checkpoint, family: Family) -> Fingerprint | None:
    """Of the model that a checkpoint's drafter belongs to: as it is recorded there, or that of
    the model in the same files; None if neither is there."""
    if family.is_drafter(checkpoint.config):  # its norms are its own
        return recorded(checkpoint)
    return fingerprint_of(checkpoint, family.norms_minus_one)


def with_fingerprint(head: Head, source: Checkpoint, model: Checkpoint | None) -> Head:
    """The same head with a record of the model that it belongs to, which is the target if the
    source does not tell; of a target that is another one, which was allowed; and of the target's
    repository, if it is on the hub."""
    own = fingerprint_in(source, family_of(source))
    theirs = model_fingerprint(model)() if model else None
    allowed = source.section("mlx_spec").get("allowed_target")
    if own is not None and theirs is not None:
        allowed = theirs.sha256 if theirs.sha256 != own.sha256 else None
    record = dict(head.config["mlx_spec"])
    if (fingerprint := own or theirs) is not None:
        record["fingerprint"] = fingerprint.as_record()
    if allowed is not None:
        record["allowed_target"] = allowed
    target = source.section("mlx_spec").get("target")
    if model is not None:
        target = str(model.path) if model.revision else None
    if target is not None:
        record["target"] = target
    return replace(head, config=head.config | {"mlx_spec": record})


def model_fingerprint(model: Checkpoint) -> Callable[[], Fingerprint | None]:
    """The fingerprint of a model, read when it is first asked for; None if its files do not say
    enough."""

    @cache
    def read() -> Fingerprint | None:
        family = family_of_target(model.config)
        try:
            return fingerprint_of(model, family is not None and family.norms_minus_one)
        except CheckpointError:  # those who need its weights will say what is wrong with them
            return None

    return read


def rope_doubts(family: Family, drafter: Checkpoint, model: Checkpoint) -> list[str]:
    """Clauses about rotary embeddings, where the drafter's should be the model's."""
    return [] if family.own_rope else rope_differences(drafter.config, model.config)


def rope_differences(own: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Clauses about rotary embeddings that differ between two configurations."""
    ropes, others = _ropes(own), _ropes(theirs)
    return [
        f"its {key}{f' in {kind}' if kind else ''} is {ropes[kind][key]} "
        f"and the model's {others[kind][key]}"
        for kind in sorted(ropes.keys() & others.keys())
        for key in ROPE
        if key in ropes[kind] and key in others[kind] and ropes[kind][key] != others[kind][key]
    ]


def _ropes(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters by kind of layer; the kind is empty where all layers have the same."""
    text = config.get("text_config") or config
    parameters = text.get("rope_parameters")
    if not isinstance(parameters, dict):  # Qwen3-Next has them flat
        flat = {key: text[key] for key in ROPE if key in text}
        parameters = flat | (text.get("rope_scaling") or {})
    nested = {kind: dict(value) for kind, value in parameters.items() if isinstance(value, dict)}
    return {
        kind: {"rope_type": value.get("type", "default"), "factor": 1.0} | value
        for kind, value in (nested or {"": parameters}).items()
    }
