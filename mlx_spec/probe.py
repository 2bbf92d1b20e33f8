"""`--probe`: does a drafter work with its model? And if not, what is the likely cause?

It drafts over a few texts that come along, greedily and at a fixed depth. If few first drafts are
right, usual mistakes are undone, one at a time, and the drafts counted again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.bench.prompts import encode, read_class
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import Head
from mlx_spec.convert.hub import explained
from mlx_spec.convert.quantize import quantize_head
from mlx_spec.drafters import Drafter
from mlx_spec.errors import BadArguments, Incompatible, NotEngaged
from mlx_spec.families import family_of_head, mistakes_of
from mlx_spec.generate import speculative_generate_step
from mlx_spec.load import build_head, load, load_drafter
from mlx_spec.mistakes import Mistake
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from mlx_spec.targets.target import Target

CLASSES = ("code", "prose", "json")
DEPTH = 3  # drafts a round
MAX_TOKENS = 64  # of each text
MAX_PROMPT_TOKENS = 512
FLOOR = 0.3  # of the first drafts are right, or it does not work
GOOD = 0.5  # below, a cause is looked for
FEWEST = 10  # first drafts that were right, to judge second ones by
GAIN = 0.1  # of the first drafts, by which undoing a mistake must help
HOLDS = 0.98  # of the tokens a round without quantisation
WHOLE = "not quantised"

Verdict = Literal["works", "weak", "does not work"]


@dataclass(frozen=True)
class Trial:
    """What a form of the drafter did over all texts."""

    form: str
    stats: SpecStats

    @property
    def by_position(self) -> list[float]:
        """Of the drafts offered at each position, the share that was accepted."""
        counts = zip(self.stats.accepted_by_position, self.stats.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in counts]

    @property
    def first(self) -> float:
        """The share of first drafts that were accepted."""
        return self.by_position[0]

    @property
    def second(self) -> float | None:
        """The share of second drafts that were accepted, of those whose first one was; None where
        these are too few."""
        right, *others = self.stats.accepted_by_position
        return others[0] / right if others and right >= FEWEST else None

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.stats.accepted / self.stats.rounds

    def as_dict(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "acceptance": self.stats.acceptance,
            "acceptance_by_position": self.by_position,
            "tokens_per_round": self.tokens_per_round,
            "rounds": self.stats.rounds,
        }

    def as_text(self, width: int = 0) -> str:
        positions = " ".join(f"{share:.2f}" for share in self.by_position)
        return (
            f"{self.form:<{width}}  {self.stats.acceptance:.2f} of the drafts accepted, by "
            f"position {positions}; {self.tokens_per_round:.2f} tokens a round"
        )


@dataclass(frozen=True)
class Cause:
    """A mistake that was undone, and whether that helped."""

    mistake: Mistake
    trial: Trial
    helps: bool

    def as_dict(self) -> dict[str, Any]:
        return {"cause": self.mistake.kind, "helps": self.helps, **self.trial.as_dict()}


@dataclass(frozen=True)
class Probe:
    """What was found.

    Attributes:
        trial: of the drafter as it is.
        precisions: of the same drafter without quantisation, if it is quantised, then with numbers
            of bits that were asked for.
        causes: what was tried to explain a low acceptance, those that help first, the best of
            them at the very beginning; empty if it is not low.
    """

    trial: Trial
    precisions: tuple[Trial, ...] = ()
    causes: tuple[Cause, ...] = ()

    @property
    def verdict(self) -> Verdict:
        if self.trial.first < FLOOR:
            return "does not work"
        return "weak" if self.trial.first < GOOD or self._only_first else "works"

    @property
    def _only_first(self) -> bool:
        first, second = self.trial.first, self.trial.second
        return first >= FLOOR and second is not None and second < FLOOR

    @property
    def cause(self) -> str | None:
        """The likeliest one; None where none is needed."""
        if not self.causes:
            return None
        if self.causes[0].helps:
            return self.causes[0].mistake.kind
        return "wrong target" if self.verdict == "does not work" else None

    @property
    def explanation(self) -> str:
        """A clause."""
        tried = ", ".join(dict.fromkeys(cause.mistake.kind for cause in self.causes))
        helping = [
            f"{cause.mistake.fault} ({cause.mistake.kind}; with that undone "
            f"{cause.trial.first:.2f} are right)"
            for cause in self.causes
            if cause.helps
        ]
        if helping:
            return f"likely {', or '.join(helping)}"
        if self.verdict == "weak":
            return f"none of the usual causes explains it (tried: {tried})"
        return (
            "likely a wrong target, that is, a drafter of another generation or fine-tune of the "
            f"model, as none of the usual mistakes explains it (tried: {tried})"
        )

    @property
    def summary(self) -> str:
        """A clause."""
        offered = self.trial.stats.drafted_by_position[0]
        right = self.trial.stats.accepted_by_position[0]
        text = f"{right} of {offered} first drafts were right ({self.trial.first:.2f}"
        if self.verdict == "does not work":
            text += f", and the floor is {FLOOR:.2f}"
        text += ")"
        if self._only_first:
            text += (
                f", but only {self.trial.second:.2f} of the second ones after them: it drafts one "
                "token well, so that more than one a round are hardly worth it"
            )
        return text + (f"; {self.explanation}" if self.causes else "")

    def check(self) -> None:
        """Raises Incompatible where the drafter does not work."""
        if self.verdict == "does not work":
            raise Incompatible(f"The drafter does not work with this model: {self.summary}.")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "floor": FLOOR,
            "cause": self.cause,
            **self.trial.as_dict(),
            "causes": [cause.as_dict() for cause in self.causes],
            "precisions": [trial.as_dict() for trial in self.precisions],
        }

    def as_text(self) -> str:
        trials = [self.trial, *self.precisions]
        width = max(len(trial.form) for trial in trials)
        lines = [f"Probe: {self.verdict}; {self.summary}"]
        lines += [f"  {trial.as_text(width)}" for trial in trials]
        return "\n".join(lines + self.advice())

    def advice(self) -> list[str]:
        """A line on each quantised form."""
        whole = next((trial for trial in self.precisions if trial.form == WHOLE), None)
        packed = [trial for trial in self.precisions if trial is not whole]
        best = (whole or self.trial).tokens_per_round
        return [
            f"{trial.form}: holds, {trial.tokens_per_round:.2f} of {best:.2f} tokens a round"
            if trial.tokens_per_round >= HOLDS * best
            else f"{trial.form}: loses, {trial.tokens_per_round:.2f} of {best:.2f} tokens a round; "
            "take more bits"
            for trial in ([self.trial] if whole else []) + packed
        ]


def probe(
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter,
    precisions: Iterable[tuple[str, Drafter]] = (),
    prompts: Sequence[list[int]] | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Probe:
    """Try a drafter with its loaded model.

    Args:
        precisions: other forms of it with their names, as `precisions` makes them.
        prompts: token ids. Default: of texts that come along.
        max_tokens: of each text.

    Raises: NotEngaged if all texts ended before a draft could be made.
    """
    if prompts is None:
        prompts = [encode(read_class(name), tokenizer, MAX_PROMPT_TOKENS) for name in CLASSES]
    ends = set(tokenizer.eos_token_ids)

    def trial(form: str, drafter: Drafter) -> Trial:
        stats = SpecStats()
        for prompt in prompts:
            steps = speculative_generate_step(
                mx.array(prompt),
                model,
                drafter,
                num_draft_tokens=DEPTH,
                max_tokens=max_tokens,
                stats=stats,
            )
            with closing(steps):
                for token, _, _ in steps:
                    if token in ends:
                        break
        if not stats.engaged:
            raise NotEngaged(
                "The model ended all texts of the probe before a draft could be made, so that "
                "nothing is known of the drafter; leave --probe out."
            )
        return Trial(form, stats)

    as_it_is = trial("as it is", drafter)
    causes = []
    if as_it_is.first < GOOD:
        target = target_for(model)
        for mistake in mistakes_of(drafter):
            with mistake.undone(drafter, target):
                undone = trial(mistake.fault, drafter)
            helps = undone.first >= max(FLOOR, as_it_is.first + GAIN)
            causes.append(Cause(mistake, undone, helps))
    causes.sort(key=lambda cause: (-cause.trial.first, -cause.trial.tokens_per_round))
    return Probe(as_it_is, tuple(trial(*form) for form in precisions), tuple(causes))


def probe_directory(
    path: Path, model: Checkpoint, head: Head, bits: Sequence[int], group_size: int | None
) -> Probe:
    """Load a model and try the drafter in a directory with it.

    Args:
        model: a directory, or on the hub, from where it is downloaded.
        head: what the drafter was made from, which is tried, too, if it was quantised, and with
            each of `bits`.

    Raises: CheckpointError where the model cannot be had; else as `load` and `probe`.
    """
    with explained(str(model.path)):
        loaded, tokenizer = load(str(model.path), revision=model.revision, draft_model=None)
    target = target_for(loaded)
    drafter = load_drafter(path, target)
    quantised = bool(Checkpoint.open(path).section("quantization"))
    made_smaller = quantised and "quantization" not in head.config
    forms = precisions(head, bits, group_size, target, whole=made_smaller)
    return probe(loaded, tokenizer, drafter, forms)


def precisions(
    head: Head, bits: Sequence[int], group_size: int | None, target: Target, whole: bool = False
) -> Iterator[tuple[str, Drafter]]:
    """A drafter with so many bits, each with its name, made when it is asked for; with `whole`
    first without quantisation.

    Raises: SpecError for a head that is quantised already, or bits that do not exist.
    """
    family = family_of_head(head)
    if whole:
        yield WHOLE, family.drafter(build_head(head), target)
    for count in sorted(set(bits), reverse=True):
        module = family.build(head.config, head.weights)
        packed = quantize_head(head, module, count, group_size)
        yield f"{count} bits", family.drafter(build_head(packed), target)


def parse_bits(text: str | None) -> tuple[int, ...]:
    """Numbers of bits, as in "4,8". Raises: BadArguments."""
    try:
        return tuple(int(number) for number in text.split(",")) if text else ()
    except ValueError:
        raise BadArguments(
            f"--probe-bits {text} is no list of numbers; give for example 4,8."
        ) from None
