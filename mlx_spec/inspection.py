"""`mlx-spec inspect`: would a model be decoded speculatively, and if not, why?

It loads the model as `mlx_spec.load` does, without reading the weights of the target.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, load_model

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.qwen_nextn import read_head
from mlx_spec.drafters.qwen_nextn import QwenNextN
from mlx_spec.errors import Incompatible, NoDrafter
from mlx_spec.generate import DEFAULT_NUM_DRAFT_TOKENS
from mlx_spec.load import (
    build_head,
    check_model,
    find_drafter,
    is_drafter,
    load_drafter,
    local_path,
)
from mlx_spec.rollback import check_caches
from mlx_spec.targets import target_for, unsupported
from mlx_spec.targets.qwen import FAMILIES

Verdict = Literal["usable", "no-drafter", "unverified", "incompatible"]
EXIT_CODES: dict[Verdict, int] = {"usable": 0, "no-drafter": 2, "unverified": 3, "incompatible": 4}


@dataclass(frozen=True)
class DrafterFacts:
    path: str
    kind: str
    layers: int
    parameters: int
    quantization: dict[str, Any] | None
    source: str | None  # where it was converted from


@dataclass(frozen=True)
class Inspection:
    path: str
    family: str
    quantization: dict[str, Any] | None
    drafter: DrafterFacts | None
    num_draft_tokens: int | None  # that `generate` would use
    verdict: Verdict
    why: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"engages": self.verdict == "usable"}

    def as_text(self) -> str:
        lines = [
            f"{self.path}",
            f"  family        {self.family}",
            f"  quantisation  {_bits(self.quantization)}",
        ]
        if self.drafter is not None:
            lines += [
                f"  drafter       {self.drafter.kind}, {self.drafter.layers} layer(s), "
                f"{self.drafter.parameters / 1e6:.2f} M parameters, "
                f"{_bits(self.drafter.quantization)}",
                f"                in {self.drafter.path}",
            ]
        if self.num_draft_tokens is not None:
            lines.append(f"  depth         {self.num_draft_tokens} drafts in a round")
        return "\n".join([*lines, f"  verdict       {self.verdict}: {self.why}"])


def inspect_path(path_or_hf_repo: str) -> Inspection:
    """Raises SpecError where the files are damaged."""
    path = local_path(path_or_hf_repo)
    checkpoint = Checkpoint.open(path)
    family = str(checkpoint.config.get("model_type"))
    quantization = checkpoint.config.get("quantization")

    def conclude(verdict: Verdict, why: str, drafter: DrafterFacts | None = None) -> Inspection:
        depth = DEFAULT_NUM_DRAFT_TOKENS if verdict == "usable" else None
        return Inspection(str(path), family, quantization, drafter, depth, verdict, why)

    if is_drafter(checkpoint):
        facts = _facts(path, checkpoint, build_head(read_head(checkpoint)))
        return conclude("unverified", "a drafter alone; inspect the model it is for", facts)
    check_model(str(path))
    try:
        if family not in FAMILIES:
            raise unsupported(family)
        found = find_drafter(path)
        model, _ = load_model(path, lazy=True)
        target = target_for(model)
        check_caches(make_prompt_cache(model))
        if found.path is None:
            raise NoDrafter(found.why_not)
        drafter = load_drafter(found.path, target)
    except NoDrafter as error:
        return conclude("no-drafter", str(error))
    except Incompatible as error:
        return conclude("incompatible", str(error))
    facts = _facts(found.path, Checkpoint.open(found.path), drafter.head)
    return conclude("usable", "the drafter fits this model", facts)


def _facts(path: Path, checkpoint: Checkpoint, head: QwenNextN) -> DrafterFacts:
    own = is_drafter(checkpoint)
    return DrafterFacts(
        str(path),
        "nextn",
        len(head.layers),
        get_total_parameters(head),
        checkpoint.config.get("quantization") if own else None,
        checkpoint.config.get("mlx_spec", {}).get("source") if own else None,
    )


def _bits(quantization: dict[str, Any] | None) -> str:
    return f"{quantization['bits']} bits" if quantization else "none"
