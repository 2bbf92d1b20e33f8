"""The families of drafters, one row each: what the converter, the loader and `inspect` need.

A new family is one file in targets/, one in drafters/, one in convert/, and a row here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec import mistakes
from mlx_spec.convert import deepseek_nextn, eagle3, gemma4_assistant, qwen_nextn
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import Head
from mlx_spec.drafters.deepseek_nextn import DeepSeekNextNDrafter
from mlx_spec.drafters.eagle3 import Eagle3Drafter
from mlx_spec.drafters.gemma4_assistant import AssistantDrafter
from mlx_spec.drafters.nextn import NextNDrafter
from mlx_spec.errors import Incompatible
from mlx_spec.mistakes import Mistake
from mlx_spec.targets import gemma4
from mlx_spec.targets.deepseek import DeepSeekTarget
from mlx_spec.targets.qwen import QwenTarget
from mlx_spec.targets.target import Target


@dataclass(frozen=True)
class Family:
    """A kind of drafter.

    Attributes:
        drafter: the class of a drafter, which is made of its module and its target.
        is_drafter: whether a config.json is that of a drafter directory.
        source_types: of all checkpoints that a drafter may be in.
        target, target_types: the class of its targets, and their model types; None: of any.
        norms_minus_one: whether Hugging Face stores the norms of its models minus one.
        siblings: a pattern of names of drafter directories beside a model.
        none_found: where a drafter was looked for in vain.
        has_head: whether `read_head` has something to read in a checkpoint.
        read_head: reads a drafter in a given dtype, or in its own.
        build: the module of a drafter with this config and these weights, not quantised.
        layers: of that module.
        misfits: what keeps the first checkpoint's drafter from working with the second one, a
            model of `target_types`; one clause for each fault.
        mistakes: that a drafter may come with, in the order in which they are likely.
        own_rope: whether its rotary embeddings have nothing to do with the model's.
    """

    drafter: Any
    is_drafter: Callable[[dict[str, Any]], bool]
    source_types: tuple[str, ...]
    target: type
    target_types: tuple[str, ...] | None
    norms_minus_one: bool
    siblings: str
    none_found: str
    has_head: Callable[[Checkpoint], bool]
    read_head: Callable[[Checkpoint, mx.Dtype | None], Head]
    build: Callable[[dict[str, Any], Iterable[str]], Any]
    layers: Callable[[Any], list[nn.Module]]
    misfits: Callable[[Checkpoint, Checkpoint], list[str]]
    mistakes: tuple[Mistake, ...]
    own_rope: bool = False


def of_type(*model_types: str) -> Callable[[dict[str, Any]], bool]:
    return lambda config: config.get("model_type") in model_types


QWEN_NEXTN = Family(
    drafter=NextNDrafter,
    is_drafter=of_type(qwen_nextn.DRAFTER_TYPE),
    source_types=qwen_nextn.MODEL_TYPES,
    target=QwenTarget,
    target_types=qwen_nextn.TARGET_TYPES,
    norms_minus_one=True,
    siblings="*-[Mm][Tt][Pp]*",
    none_found="no mtp.* weights among the model's own and no *-MTP* drafter beside it",
    has_head=qwen_nextn.has_head,
    read_head=qwen_nextn.read_head,
    build=qwen_nextn.build,
    layers=lambda module: module.layers,
    misfits=qwen_nextn.misfits,
    mistakes=mistakes.QWEN_NEXTN,
)
GEMMA4_ASSISTANT = Family(
    drafter=AssistantDrafter,
    is_drafter=of_type(*gemma4_assistant.DRAFTER_TYPES),
    source_types=gemma4_assistant.DRAFTER_TYPES,
    target=gemma4.Gemma4Target,
    target_types=gemma4.MODEL_TYPES,
    norms_minus_one=False,
    siblings="*-[Aa]ssistant*",
    none_found="no *-assistant* drafter beside it (--draft-model names one elsewhere)",
    has_head=gemma4_assistant.has_head,
    read_head=gemma4_assistant.read_head,
    build=gemma4_assistant.build,
    layers=lambda module: module.model.layers,
    misfits=gemma4_assistant.misfits,
    mistakes=mistakes.GEMMA4_ASSISTANT,
)
DEEPSEEK_NEXTN = Family(
    drafter=DeepSeekNextNDrafter,
    is_drafter=of_type(*deepseek_nextn.DRAFTER_TYPES),
    source_types=deepseek_nextn.MODEL_TYPES,
    target=DeepSeekTarget,
    target_types=deepseek_nextn.TARGET_TYPES,
    norms_minus_one=False,
    siblings="*-[Mm][Tt][Pp]*",
    none_found="no layer for drafts after the model's own and no *-MTP* drafter beside it",
    has_head=deepseek_nextn.has_head,
    read_head=deepseek_nextn.read_head,
    build=deepseek_nextn.build,
    layers=lambda module: module.layers,
    misfits=deepseek_nextn.misfits,
    mistakes=mistakes.DEEPSEEK_NEXTN,
)
EAGLE3 = Family(
    drafter=Eagle3Drafter,
    is_drafter=eagle3.is_drafter,
    source_types=("EAGLE-3 heads",),
    target=object,
    target_types=None,
    norms_minus_one=False,
    siblings="*[Ee][Aa][Gg][Ll][Ee]3*",
    none_found="no *EAGLE3* drafter beside it (--draft-model names one elsewhere)",
    has_head=eagle3.has_head,
    read_head=eagle3.read_head,
    build=eagle3.build,
    layers=lambda module: module.layers,
    misfits=eagle3.misfits,
    mistakes=mistakes.EAGLE3,
    own_rope=True,
)
FAMILIES = (QWEN_NEXTN, GEMMA4_ASSISTANT, DEEPSEEK_NEXTN, EAGLE3)


def family_of_drafter(config: dict[str, Any]) -> Family | None:
    """The family of a drafter directory; None if its config.json is that of something else."""
    return next((family for family in FAMILIES if family.is_drafter(config)), None)


def family_of_head(head: Head) -> Family:
    """The family of a drafter that was read."""
    family = family_of_drafter(head.config)
    assert family is not None
    return family


def mistakes_of(drafter: Any) -> tuple[Mistake, ...]:
    """Those of a loaded drafter's family; none for another kind of drafter."""
    found = (family.mistakes for family in FAMILIES if type(drafter) is family.drafter)
    return next(found, ())


def family_of_target(config: dict[str, Any]) -> Family | None:
    """The family of the drafters that are made for such models; None if there is none."""
    model_type = config.get("model_type")
    made_for = (family for family in FAMILIES if model_type in (family.target_types or ()))
    return next(made_for, None)


def families_for(config: dict[str, Any]) -> list[Family]:
    """The families whose drafters may fit a model: its own, then those for all models."""
    own = family_of_target(config)
    others = [family for family in FAMILIES if family.target_types is None]
    return others if own is None else [own, *others]


def family_of(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint that a drafter is to be read from.

    Raises:
        Incompatible: it is of none.
    """
    config = checkpoint.config
    family = family_of_drafter(config) or family_of_target(config)
    if family is None:
        supported = [name for family in FAMILIES for name in family.source_types]
        raise Incompatible(
            f"{checkpoint.path} holds no drafter that can be read, as its model type "
            f"{config.get('model_type')!r} is not supported: supported are {', '.join(supported)}"
        )
    return family


def misfits(family: Family, drafter: Checkpoint, model: Checkpoint) -> list[str]:
    """What keeps a checkpoint's drafter from working with a model, judged by their
    configurations; one clause for each fault."""
    model_type = model.config.get("model_type")
    if family.target_types is not None and model_type not in family.target_types:
        models = ", ".join(family.target_types)
        return [f"it is for models of type {models}, and the model is a {model_type}"]
    return family.misfits(drafter, model)


def check_target(family: Family, target: Target) -> None:
    """Raises Incompatible for a target of another family."""
    if not isinstance(target, family.target):
        raise Incompatible(
            f"The drafter does not fit the model: it is for models of type "
            f"{', '.join(family.target_types or ())}; give the drafter of this model."
        )
