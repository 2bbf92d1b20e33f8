"""`mlx-spec convert`: from a checkpoint to a drafter directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.quantize import quantize_head
from mlx_spec.convert.tokenizer import compare_tokenizers
from mlx_spec.convert.write import check_out, write_drafter
from mlx_spec.errors import Incompatible, SpecError
from mlx_spec.families import family_of, misfits

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        out: the drafter directory.
        tensors: how many were written.
        parameters: how many numbers the source's tensors have.
        bytes_read: bytes of tensors read from the source.
        source_bytes: size of all its safetensors.
        norm_evidence: what decided whether the source's norms are stored minus one; None where
            they never are.
        unused: tensors of the head that nothing uses.
        quantization: the `quantization` block of config.json, if any.
        pairing: what was found of the drafter and the model that was given; None without one.
    """

    out: Path
    tensors: int
    parameters: int
    bytes_read: int
    source_bytes: int
    norm_evidence: str | None
    unused: tuple[str, ...]
    quantization: dict[str, Any] | None
    pairing: str | None

    def as_text(self) -> str:
        """Lines for people."""
        packed = f", {_kind(self.quantization)}" if self.quantization else ""
        norms = f"; norms by {self.norm_evidence}" if self.norm_evidence else ""
        lines = [
            f"Wrote {self.out}: {self.tensors} tensors, {self.parameters / 1e6:.2f} M parameters"
            f"{packed}",
            f"Read {self.bytes_read / 1e6:.2f} of {self.source_bytes / 1e6:.2f} MB{norms}",
        ]
        if self.pairing:
            lines.append(self.pairing)
        if self.unused:
            lines.append(f"Not used: {', '.join(self.unused)}")
        if self.quantization and self.quantization["bits"] < 8:
            lines.append(
                "With fewer than 8 bits a drafter may be right less often: check it with --probe"
            )
        return "\n".join(lines)


def convert(
    source: str | Path,
    out: str | Path,
    model: str | Path | None = None,
    *,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str | None = None,
    dtype: str | None = None,
) -> Report:
    """Writes the drafter directory of the drafter in `source`.

    Args:
        source: directory of a Qwen model with a NextN head, of a Gemma-4 assistant, or a drafter
            directory.
        out: directory to write; an existing one is replaced if it is a drafter directory.
        model: directory of the model that the drafter is for, to check that it fits.
        quantize: pack the matrices.
        q_bits, q_group_size, q_mode: as `quantize_head`. Default: 8 bits, affine.
        dtype: "float16", "bfloat16" or "float32". Default: as in the source, fp8 as bfloat16.

    Raises:
        NoDrafter: there is no head in `source`.
        Incompatible: its family is not supported, or it does not fit `model`.
        CheckpointError: `source` is damaged or incomplete; the message says what and where.
        SpecError: `out` cannot be written, or an option does not fit.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    if dtype is not None and dtype not in DTYPES:
        raise SpecError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not quantize and (q_bits, q_group_size, q_mode) != (None, None, None):
        raise SpecError("how to quantise was given without asking to quantise: do both or neither")
    checkpoint = Checkpoint.open(source)
    check_out(out, source)
    family = family_of(checkpoint)
    pairing = None
    if model is not None and family.has_head(checkpoint):
        pairing = _check_pairing(checkpoint, Path(model).expanduser())
    head = family.read_head(checkpoint, DTYPES[dtype] if dtype else None)
    parameters = sum(parameter.size for parameter in head.weights.parameters.values())
    if quantize:
        module = family.build(head.config, head.weights)
        head = quantize_head(head, module, q_bits, q_group_size, q_mode or "affine")
    config = write_drafter(head, out)
    return Report(
        out=out,
        tensors=len(config["mlx_spec"]["sha256"]),
        parameters=parameters,
        bytes_read=checkpoint.bytes_read,
        source_bytes=checkpoint.source_bytes,
        norm_evidence=config["mlx_spec"].get("norm_evidence"),
        unused=head.provenance.unused,
        quantization=config.get("quantization"),
        pairing=pairing,
    )


def _kind(quantization: dict[str, Any]) -> str:
    mode = quantization.get("mode", "affine")
    return f"{quantization['bits']} bits" if mode == "affine" else mode


def _check_pairing(drafter: Checkpoint, model: Path) -> str:
    """A line that says that the drafter fits. Raises Incompatible if it does not."""
    faults = misfits(family_of(drafter), drafter, Checkpoint.open(model))
    tokenizers = compare_tokenizers(drafter.path, model)
    if tokenizers.verdict == "differs":
        faults.append(tokenizers.detail)
    if faults:
        raise Incompatible(f"{drafter.path} does not fit {model}: {'; '.join(faults)}")
    return f"Fits {model}; {tokenizers.detail}"
