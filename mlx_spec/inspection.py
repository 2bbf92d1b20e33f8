"""`mlx-spec inspect`: would a model be decoded speculatively, and if not, why?

It loads the model as `mlx_spec.load` does, without reading the weights of the target.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

from huggingface_hub.errors import LocalEntryNotFoundError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_model

from mlx_spec.convert.check import check_hashes
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.fingerprint import Relation, recorded
from mlx_spec.convert.head import Head
from mlx_spec.convert.quantize import describe
from mlx_spec.convert.tokenizer import Tokenizers, compare_tokenizers, load_tokenizer
from mlx_spec.drafters.draft_model import DraftModel
from mlx_spec.drafters.draft_vocab import size_of
from mlx_spec.errors import BadArguments, CheckpointError, Incompatible, NoDrafter
from mlx_spec.families import families_for, family_of, family_of_drafter, family_of_head
from mlx_spec.fit import rope_doubts
from mlx_spec.load import (
    Found,
    build_head,
    check_model,
    check_relation,
    drafter_path,
    find_drafter,
    is_draft_model,
    local_path,
    read_drafter,
    relation_to,
)
from mlx_spec.options import DraftTokens, SpecOptions
from mlx_spec.probe import Probe, parse_bits, precisions
from mlx_spec.probe import probe as probe_drafter
from mlx_spec.rollback import check_caches
from mlx_spec.targets import target_for
from mlx_spec.targets.target import Target

Verdict = Literal["usable", "no-drafter", "unverified", "incompatible"]
EXIT_CODES: dict[Verdict, int] = {"usable": 0, "no-drafter": 2, "unverified": 3, "incompatible": 4}


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter is.

    Attributes:
        path: where it is.
        kind: as statistics call it.
        layers: how many.
        parameters: how many, as mlx-lm counts them.
        quantization: its own `quantization` block, if any.
        source, revision: what it was converted from.
        fingerprint: the beginning of that of the model that it belongs to, where it is recorded.
        checked: how many tensors were compared with their recorded hashes; None if not asked for.
        ordered_embedding: whether it looks at likely clusters of tokens only, instead of all of
            the vocabulary; None for a family that never does.
        query_position: the position that its queries have; None for a family without a choice.
        layer_ids: what the model's layers are listed by; None where it has no such list.
        draft_vocab: how many tokens it may propose; None for all of them.
    """

    path: str
    kind: str
    layers: int
    parameters: int
    quantization: dict[str, Any] | None
    source: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    checked: int | None = None
    ordered_embedding: bool | None = None
    query_position: str | None = None
    layer_ids: str | None = None
    draft_vocab: int | None = None

    def as_lines(self) -> list[str]:
        details = [
            f"{self.kind}, {self.layers} layer(s), {self.parameters / 1e6:.2f} M parameters",
            _bits(self.quantization),
        ]
        if self.ordered_embedding is not None:
            details.append("ordered embedding" if self.ordered_embedding else "full embedding")
        if self.query_position is not None:
            details.append(f"query position {self.query_position}")
        if self.layer_ids is not None:
            details.append(f"layers listed by their {self.layer_ids}")
        if self.draft_vocab is not None:
            details.append(f"draft vocabulary {self.draft_vocab}")
        lines = [
            f"  drafter       {', '.join(details)}",
            f"                in {self.path}",
        ]
        if self.source is not None:
            revision = f", revision {self.revision}" if self.revision else ""
            lines.append(f"                converted from {self.source}{revision}")
        if self.fingerprint is not None:
            lines.append(f"                for the model with fingerprint {self.fingerprint}")
        if self.checked is not None:
            lines.append(f"                {self.checked} tensors are as they were written")
        return lines


@dataclass(frozen=True)
class Way:
    """One way to draft for a model: its `--draft-kind` or the kind of a drafter, whether it works,
    and a clause that says why, or what is needed."""

    kind: str
    works: bool
    why: str


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        path: the model, or a drafter alone.
        family: its model type.
        quantization: its `quantization` block, if any.
        drafter: the drafter that `generate` would use.
        tokenizer: whether the drafter's tokenizer is that of the model; None without a pair.
        fingerprint: whether the model is the one that the drafter belongs to; None if the drafter
            does not say.
        probe: what drafting with the model showed; None if that was not asked for.
        num_draft_tokens: that `generate` would use.
        verdict, why: the conclusion.
        ways: all that drafts, or does not, in the order in which one is chosen.
    """

    path: str
    family: str
    quantization: dict[str, Any] | None
    drafter: DrafterFacts | None
    tokenizer: Tokenizers | None
    fingerprint: Relation | None
    probe: Probe | None
    num_draft_tokens: DraftTokens | None
    verdict: Verdict
    why: str
    ways: list[Way]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.verdict if self.tokenizer else None
        fingerprint = self.fingerprint.verdict if self.fingerprint else None
        probe = self.probe.as_dict() if self.probe else None
        facts = {"tokenizer": tokenizer, "fingerprint": fingerprint, "probe": probe}
        return asdict(self) | facts | {"engages": self.verdict == "usable"}

    def as_text(self) -> str:
        lines = [
            f"{self.path}",
            f"  family        {self.family}",
            f"  quantisation  {_bits(self.quantization)}",
        ]
        if self.drafter is not None:
            lines += self.drafter.as_lines()
        if self.tokenizer is not None:
            lines.append(f"  tokenizer     {self.tokenizer.verdict}: {self.tokenizer.detail}")
        if self.fingerprint is not None:
            lines.append(f"  fingerprint   {self.fingerprint.verdict}: {self.fingerprint.detail}")
        if self.probe is not None:
            lines.append(indent(self.probe.as_text(), "  "))
        if self.num_draft_tokens is not None:
            lines.append(f"  depth         {self.num_draft_tokens}")
        for at, way in enumerate(self.ways):
            label = "ways" if at == 0 else ""
            works = "works" if way.works else "does not work"
            lines.append(f"  {label:13} {way.kind} {works}: {way.why}")
        return "\n".join([*lines, f"  verdict       {self.verdict}: {self.why}"])


def inspect_path(
    path_or_hf_repo: str,
    draft_model: str = "auto",
    check: bool = False,
    probe: bool = False,
    probe_bits: str | None = None,
) -> Inspection:
    """What `mlx_spec.load` would make of a model.

    Args:
        path_or_hf_repo: of the model, or of a drafter to be described.
        draft_model: a drafter directory or repository; "auto" looks for one.
        check: compare each of the drafter's tensors with the hash that is recorded of it.
        probe: draft with the model, whose weights are read for that.
        probe_bits: probe these numbers of bits, too, for example "4,8".

    Raises: SpecError where the files are damaged.
    """
    bits = parse_bits(probe_bits)
    try:
        path = local_path(path_or_hf_repo)
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{path_or_hf_repo} has not been downloaded; do so with hf download {path_or_hf_repo}."
        ) from error
    checkpoint = Checkpoint.open(path)
    family = str(checkpoint.config.get("model_type"))
    quantization = checkpoint.config.get("quantization")
    facts: DrafterFacts | None = None
    tokenizer: Tokenizers | None = None
    fingerprint: Relation | None = None
    probed: Probe | None = None
    rolls_back = False
    kind = families_for(checkpoint.config)[0].drafter.kind  # or that of what is found

    def conclude(verdict: Verdict, why: str) -> Inspection:
        depth = SpecOptions().num_draft_tokens if verdict == "usable" else None
        return Inspection(
            str(path),
            family,
            quantization,
            facts,
            tokenizer,
            fingerprint,
            probed,
            depth,
            verdict,
            why,
            [] if own_family else _ways(kind, verdict, why, rolls_back),
        )

    own_family = family_of_drafter(checkpoint.config)
    if own_family is not None:
        if probe or bits:
            raise BadArguments(
                f"{path} is a drafter alone; probe it with its model: mlx-spec inspect MODEL "
                f"--draft-model {path} --probe"
            )
        head = own_family.read_head(checkpoint, None)
        facts = _facts(path, checkpoint, head, build_head(head), check)
        return conclude("unverified", "a drafter alone; inspect the model it is for")
    check_model(str(path))
    try:
        found = find_drafter(path) if draft_model == "auto" else Found(drafter_path(draft_model))
        model, _ = load_model(path, lazy=True)
        target = target_for(model)
        check_caches(target, make_prompt_cache(model))
        rolls_back = True
        if found.path is None:
            raise NoDrafter(found.why_not)
        if is_draft_model(found.path, path):
            kind = DraftModel.kind
            if probe or bits:
                raise BadArguments(
                    f"{found.path} is a model, not a head or an assistant, which is what --probe "
                    "tries; measure it with mlx-spec bench."
                )
            tokenizer = compare_tokenizers(found.path, path)
            if tokenizer.verdict == "differs":
                raise Incompatible(f"The tokenizers differ: {tokenizer.detail}.")
            facts = _facts_of_model(found.path, target)
            return conclude("usable", "a model that can draft for this one")
        kind = family_of(Checkpoint.open(found.path)).drafter.kind
        head = read_drafter(found.path, target)
        module = build_head(head)
        facts = _facts(found.path, Checkpoint.open(found.path), head, module, check)
        drafter = family_of_head(head).drafter(module, target)
        fingerprint = relation_to(found.path, target)
        check_relation(fingerprint)
        tokenizer = compare_tokenizers(found.path, path)
        if tokenizer.verdict == "differs":
            raise Incompatible(f"The tokenizers differ: {tokenizer.detail}.")
        if probe or bits:
            forms = precisions(head, bits, None, target)
            probed = probe_drafter(model, load_tokenizer(path), drafter, forms)
            if probed.verdict == "does not work":
                raise Incompatible(
                    f"The drafter does not work with this model; likely cause: {probed.cause}."
                )
    except NoDrafter as error:
        return conclude("no-drafter", str(error))
    except Incompatible as error:
        return conclude("incompatible", str(error))
    doubts = rope_doubts(family_of_head(head), Checkpoint.open(found.path), checkpoint)
    but = f", but {'; '.join(doubts)}" if doubts else ""
    return conclude("usable", f"the drafter fits this model{but}")


def _ways(kind: str, verdict: Verdict, why: str, rolls_back: bool) -> list[Way]:
    """All ways to draft for a model; `kind` and `why` are those of the verdict on its drafter."""
    works = verdict == "usable"
    ways = [Way(kind, works, why)]
    if not rolls_back:
        return [*ways, *(Way(other, False, why) for other in ("lookup", "draft-model"))]
    ways.append(Way("lookup", True, "it drafts what followed earlier in the text"))
    if works:
        ways.append(Way("combined", True, f"lookup where its match is long, {kind} otherwise"))
    if kind != "draft-model":
        named = "with a smaller model of the same tokenizer as --draft-model"
        ways.append(Way("draft-model", True, named))
    return ways


def _facts_of_model(path: Path, target: Target) -> DrafterFacts:
    """Of an ordinary model that is to draft. Raises: Incompatible where it cannot."""
    check_model(str(path))
    model, config = load_model(path, lazy=True)
    return DrafterFacts(
        str(path),
        DraftModel(model, target).kind,
        len(model.layers),
        get_total_parameters(model),
        config.get("quantization"),
    )


def _facts(
    path: Path, checkpoint: Checkpoint, head: Head, module: Any, check: bool
) -> DrafterFacts:
    alone = family_of_drafter(checkpoint.config) is not None  # else it is inside a model
    record = checkpoint.section("mlx_spec") if alone else {}
    fingerprint = recorded(checkpoint) if alone else None
    family = family_of_head(head)
    return DrafterFacts(
        str(path),
        family.drafter.kind,
        len(family.layers(module)),
        get_total_parameters(module),
        head.config.get("quantization"),
        record.get("source"),
        record.get("revision"),
        fingerprint.sha256[:16] if fingerprint else None,
        check_hashes(checkpoint) if check else None,
        head.config.get("use_ordered_embeddings"),
        head.config["mlx_spec"].get("query_position"),
        head.config["mlx_spec"].get("layer_ids"),
        head.config.get("draft_vocab_size") or size_of(head.config),
    )


def _bits(quantization: dict[str, Any] | None) -> str:
    return describe(quantization) if quantization else "none"
