"""Loading a model together with its drafter.

A drafter is looked for in the model's own directory (an `mtp.*` head among its weights), then
beside it (a directory named `*-MTP*`, or `*-assistant*` for Gemma-4, or `*EAGLE3*` for any model).
Where there is none, lookup drafts, which needs no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, infer_quant_config

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.fingerprint import Fingerprint, Relation, fingerprint_of_model, relation
from mlx_spec.convert.head import Head
from mlx_spec.convert.hub import is_repository_name
from mlx_spec.convert.tokenizer import compare_tokenizers, compare_vocabularies
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.draft_model import DraftModel
from mlx_spec.drafters.lookup import SHORTEST, Lookup
from mlx_spec.errors import CheckpointError, Incompatible, SpecError
from mlx_spec.families import (
    check_target,
    families_for,
    family_of,
    family_of_drafter,
    family_of_head,
    family_of_target,
    misfits,
)
from mlx_spec.fit import model_fingerprint
from mlx_spec.randomness import untouched_generator
from mlx_spec.stats import Reason
from mlx_spec.targets import target_for
from mlx_spec.targets.parts import embedding_of
from mlx_spec.targets.target import Target


@dataclass(frozen=True)
class Pairing:
    """What `load` found for a model: a drafter, or the reason why there is none.

    `path`: of its weights, None for lookup. `detail`: with a drafter, why it may seldom be right;
    with lookup, why there is no other one.
    """

    drafter: Drafter | None
    path: Path | None = None
    reason: Reason | None = None
    detail: str | None = None


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    draft_model: str | None = "auto",
) -> tuple[Any, ...]:
    """mlx_lm.load, then the drafter.

    Args: those of mlx_lm.load, and
        draft_model: "auto" looks for one, and takes lookup if there is none; a directory or a
            repository of the hub must hold a drafter that fits, or a model with the same
            tokenizer; None or "none" looks for none.

    Returns: model and tokenizer (and the config with return_config), as mlx_lm.load.
    Raises: SpecError in one sentence for what is wrong with the files.
    """
    check_model(path_or_hf_repo)
    model, tokenizer, config = mlx_lm.load(
        path_or_hf_repo,
        tokenizer_config,
        model_config,
        adapter_path,
        lazy,
        return_config=True,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    where = partial(local_path, path_or_hf_repo, revision)
    model.mlx_spec = pair(model, tokenizer, where, draft_model)
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def pairing_of(model: nn.Module) -> Pairing:
    """What `load` attached to the model."""
    if "mlx_spec" in vars(model):
        return vars(model)["mlx_spec"]
    return Pairing(None, reason="no-drafter", detail="the model was not loaded by mlx_spec.load")


def pair(
    model: nn.Module, tokenizer: Any, where: Callable[[], Path], draft_model: str | None
) -> Pairing:
    """The drafter of a loaded model, whose files are `where` if they are asked for."""
    if draft_model in (None, "none"):
        return Pairing(None, reason="no-drafter", detail="none was asked for")
    try:
        target = target_for(model)
    except Incompatible as error:
        if draft_model == "auto":
            return Pairing(None, reason="unsupported-model", detail=str(error))
        raise
    if draft_model != "auto":
        path = drafter_path(draft_model)
        if is_draft_model(path, where()):
            return Pairing(load_draft_model(path, target, tokenizer, where()), path)
        return _paired(path, target)
    found = find_drafter(where())
    if found.path is None:
        return Pairing(lookup_of(model), detail=found.why_not)
    try:
        return _paired(found.path, target)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (or go on without drafts: --draft-model none)") from error


def _paired(path: Path, target: Target) -> Pairing:
    drafter = load_drafter(path, target)
    found = relation_to(path, target)
    doubtful = found is not None and found.verdict != "same"
    return Pairing(drafter, path, detail=found.detail if found and doubtful else None)


def pair_loaded(model: nn.Module) -> None:
    """Look for the drafter of a model that mlx_lm itself has loaded, unless that was done.
    A damaged one is a reason to go on without drafts, as mlx_lm would have."""
    if "mlx_spec" in vars(model) or "mlx_spec_source" not in vars(model):
        return
    source = vars(model)["mlx_spec_source"]
    try:
        model.mlx_spec = pair(model, None, lambda: source, "auto")
    except SpecError as error:
        model.mlx_spec = Pairing(None, reason="no-drafter", detail=str(error))


def lookup_of(model: nn.Module, shortest: int = SHORTEST) -> Lookup:
    """The model's own one: what is learnt of depths is kept with it."""
    name = f"mlx_spec_lookup_{shortest}"
    return vars(model).get(name) or vars(model).setdefault(name, Lookup(shortest))


def is_draft_model(path: Path, model_path: Path) -> bool:
    """Whether a directory holds a model that is to draft itself: not a drafter, nor a model of the
    same size as the one in the other directory, whose head is wanted then."""
    drafter, model = Checkpoint.open(path), Checkpoint.open(model_path)
    if family_of_drafter(drafter.config) is not None:
        return False
    return family_of_target(drafter.config) is None or _size(drafter) != _size(model)


def _size(model: Checkpoint) -> list[Any]:
    text = model.section("text_config") or model.config
    return [model.config.get("model_type"), text.get("hidden_size"), text.get("num_hidden_layers")]


def load_draft_model(path: Path, target: Target, tokenizer: Any, model_path: Path) -> DraftModel:
    """A model of mlx-lm that drafts for the target.

    Raises: Incompatible where its tokenizer is another one, or a cache of it cannot be put back.
    """
    check_model(str(path))
    model, own = mlx_lm.load(str(path))
    found = compare_tokenizers(path, model_path)
    if found.verdict == "unknown":
        found = compare_vocabularies(own.get_vocab(), tokenizer.get_vocab())
    if found.verdict == "differs":
        raise Incompatible(
            f"{path} has another tokenizer than the model ({found.detail}); "
            "choose a draft model of the same family."
        )
    return draft_model_of(model, target)


def draft_model_of(model: nn.Module, target: Target) -> DraftModel:
    """A loaded model as the drafter for a target; the same one each time."""
    drafter = vars(model).get("mlx_spec_drafter")
    if drafter is None or drafter.vocab_size != target.vocab_size:
        drafter = model.mlx_spec_drafter = DraftModel(model, target)
    return drafter


def local_path(
    path_or_hf_repo: str, revision: str | None = None, local_files_only: bool = True
) -> Path:
    """A directory, or where mlx-lm has put a repository of the Hugging Face hub."""
    path = Path(path_or_hf_repo)
    if path_or_hf_repo and path.exists():
        return path
    check_repository_name(path_or_hf_repo)
    return Path(
        snapshot_download(
            path_or_hf_repo,
            revision=revision,
            allow_patterns=DEFAULT_ALLOW_PATTERNS,
            local_files_only=local_files_only,
        )
    )


def drafter_path(draft_model: str) -> Path:
    """A directory, or a repository of the Hugging Face hub, downloaded if it is not here.

    Raises: CheckpointError where it is neither.
    """
    if not draft_model:
        raise CheckpointError("The name of the drafter is empty; give a directory or ORG/REPO.")
    try:
        path = local_path(draft_model, local_files_only=False)
    except GatedRepoError as error:
        raise CheckpointError(
            f"The Hugging Face hub does not let you download the drafter {draft_model}; accept its "
            "licence there and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"The drafter {draft_model} does not exist, neither here nor on the Hugging Face hub; "
            "check its name."
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"The drafter {draft_model} does not exist here, and the Hugging Face hub could not be "
            "reached for it; give a directory, or try again with a network."
        ) from error
    if not Path(draft_model).exists() and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"The drafter {draft_model} has no safetensors; what it has instead, and what to do, "
            f"is what `mlx-spec convert --from {draft_model} --to DIR` says."
        )
    return path


def check_repository_name(name: str) -> None:
    """Raises CheckpointError for a path that does not exist and cannot be a repository."""
    if not is_repository_name(name):
        raise CheckpointError(f"{name!r} does not exist; give a directory or ORG/REPO.")


@dataclass(frozen=True)
class Found:
    """A drafter's directory, or why there is none."""

    path: Path | None
    why_not: str = ""


def find_drafter(model_path: Path) -> Found:
    """The model's own directory if it holds a head, else the sibling that fits and whose name
    shares the longest beginning with the model's: a drafter made for its family before others."""
    model = Checkpoint.open(model_path)
    families = families_for(model.config)
    if families[0].has_head(model):
        return Found(model_path)
    # A link's neighbours count as well as those of what it leads to.
    places = [model_path.absolute(), model_path.resolve()]
    names = {place.name for place in places}
    fingerprint = model_fingerprint(model)
    passed_over = []
    for family in families:
        fitting = []
        for path in sorted({p for own in places for p in own.parent.glob(family.siblings)}):
            if path in places or path.name.startswith("."):  # the latter by a killed `convert`
                continue
            if fault := _why_unfit(path, model, fingerprint):
                passed_over.append(f"{path.name} beside it does not fit: {fault}")
            else:
                fitting.append(path)
        if fitting:
            return Found(max(fitting, key=lambda path: _preference(path, names)))
    return Found(None, "; ".join([families[0].none_found, *passed_over]))


def _preference(path: Path, names: set[str]) -> tuple[int, int]:
    """The most alike name first, then the smaller drafter: whoever made it wants it used."""
    alike = max(len(commonprefix([path.name, name])) for name in names)  # noqa: RUF071
    return alike, -Checkpoint.open(path).source_bytes


def _why_unfit(path: Path, model: Checkpoint, fingerprint: Callable[[], Fingerprint | None]) -> str:
    """Why a directory beside a model is not its drafter; empty if it may be."""
    try:
        drafter = Checkpoint.open(path)
        family = family_of_drafter(drafter.config)
        if family is None:
            return "it is not a drafter"
        if faults := misfits(family, drafter, model):
            return "; ".join(faults)
        found = relation(drafter, fingerprint)
        return found.detail if found is not None and found.refused else ""
    except SpecError as error:
        return str(error)


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """A drafter directory, or the head inside a model's directory, in the target's dtype.

    Raises: NoDrafter, Incompatible or CheckpointError.
    """
    head = read_drafter(path, target)
    drafter = family_of_head(head).drafter(build_head(head), target)
    check_relation(relation_to(Path(path), target))
    return drafter


def read_drafter(path: str | Path, target: Target) -> Head:
    """As `load_drafter`, but only its configuration and its weights."""
    checkpoint = Checkpoint.open(path)
    family = family_of(checkpoint)
    check_target(family, target)
    dtype = embedding_of(target.model)(mx.array([[0]])).dtype
    return family.read_head(checkpoint, dtype)


def relation_to(path: Path, target: Target) -> Relation | None:
    """Of the model that a drafter directory belongs to, to the one that is loaded; None if it does
    not say. Of the model's weights only a few norms are read."""
    return relation(Checkpoint.open(path), lambda: fingerprint_of_model(target.model))


def check_relation(found: Relation | None) -> None:
    """Raises Incompatible for a drafter that belongs to another model."""
    if found is not None and found.refused:
        raise Incompatible(
            f"The drafter does not fit the model: {found.detail}; convert the head of this model, "
            "or convert this one again with --target and --allow-mismatch."
        )


def build_head(source: Head) -> Any:
    """The module of a drafter that was read, quantised as its weights are."""
    weights = dict(source.weights)
    with untouched_generator():
        head = family_of_head(source).build(source.config, weights)

    def quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, module, weights)

    nn.quantize(head, class_predicate=quantised)
    head.load_weights(list(weights.items()))
    head.eval()
    return head


def check_model(path_or_hf_repo: str) -> None:
    """Raises SpecError where a local path does not hold a model that mlx-lm could load."""
    path = Path(path_or_hf_repo)
    if not path_or_hf_repo or not path.exists():
        return check_repository_name(path_or_hf_repo)
    checkpoint = Checkpoint.open(path)
    if family_of_drafter(checkpoint.config) is not None:
        raise Incompatible(
            f"{path} is a drafter, not a model; give it as --draft-model beside its model."
        )
    if not checkpoint.names:
        raise CheckpointError(f"{path} has no *.safetensors files; download the model again.")
