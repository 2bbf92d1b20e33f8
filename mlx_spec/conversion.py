"""`mlx-spec convert`: from a checkpoint to a drafter directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.convert import draft_vocab as vocabulary
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.hub import is_repository_name, open_model
from mlx_spec.convert.quantize import describe, quantize_head
from mlx_spec.convert.sources import open_source
from mlx_spec.convert.target import check_target_out, write_target
from mlx_spec.convert.tokenizer import FILE as TOKENIZER
from mlx_spec.convert.write import check_out, write_drafter
from mlx_spec.errors import BadArguments, Incompatible
from mlx_spec.families import family_of, family_of_drafter
from mlx_spec.fit import checked_fit, with_fingerprint
from mlx_spec.probe import Probe, parse_bits, probe_directory
from mlx_spec.upload import upload as upload_drafter

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
        fetched_bytes: bytes of them that have travelled; None for a directory.
        norm_evidence: what decided whether the source's norms are stored minus one; None where
            they never are.
        unused: tensors of the head that nothing uses.
        quantization: the `quantization` block of config.json, if any.
        fingerprint: whether that of its model is recorded.
        pairing: what was found of the drafter and the target that was given; None without one.
        target: the model that was written, too; None if it was not.
        draft_vocab: what a reduced draft vocabulary saves and costs; None without one.
        probe: what probing the drafter showed; None if that was not asked for.
    """

    out: Path
    tensors: int
    parameters: int
    bytes_read: int
    source_bytes: int
    fetched_bytes: int | None
    norm_evidence: str | None
    unused: tuple[str, ...]
    quantization: dict[str, Any] | None
    fingerprint: bool
    pairing: str | None
    target: Path | None
    draft_vocab: vocabulary.Savings | None = None
    probe: Probe | None = None

    def as_text(self) -> str:
        """Lines for people."""
        packed = f", {describe(self.quantization)}" if self.quantization else ""
        norms = f"; norms by {self.norm_evidence}" if self.norm_evidence else ""
        lines = [
            f"Wrote {self.out}: {self.tensors} tensors, {self.parameters / 1e6:.2f} M parameters"
            f"{packed}"
        ]
        if self.target:
            lines.append(f"Wrote {self.target}: the model, by mlx_lm")
        lines.append(f"Read {_part(self.bytes_read, self.source_bytes)}{norms}")
        if self.pairing:
            lines.append(self.pairing)
        if not self.fingerprint:
            lines.append(
                "No fingerprint of its model is recorded"
                + (", as its norms could not be read" if self.pairing else "; --target gives one")
            )
        if self.unused:
            lines.append(f"Not used: {', '.join(self.unused)}")
        if self.draft_vocab is not None:
            lines.append(self.draft_vocab.as_text())
        if self.probe is not None:
            lines.append(self.probe.as_text())
        elif self.quantization and self.quantization["bits"] < 8:
            lines.append(
                "With fewer than 8 bits a drafter may be right less often: check it with --probe"
            )
        if self.fetched_bytes is not None:
            lines.append(f"Fetched {_part(self.fetched_bytes, self.source_bytes)}")
        return "\n".join(lines)


def convert(
    source: str | Path,
    out: str | Path,
    target: str | Path | None = None,
    *,
    allow_mismatch: bool = False,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str | None = None,
    dtype: str | None = None,
    with_target: str | Path | None = None,
    target_q_bits: int | None = None,
    draft_vocab: int | None = None,
    calibrate: str | None = None,
    probe: bool = False,
    probe_bits: str | None = None,
    upload: str | None = None,
) -> Report:
    """Writes the drafter directory of the drafter in `source`.

    Args:
        source: a model with a NextN head, a Gemma-4 assistant, an EAGLE-3 head, or a drafter,
            as a directory or ORG/REPO[@REVISION] of the Hugging Face hub, of which only the drafter
            is fetched; or a .safetensors or .gguf file that holds a NextN head.
        out: directory to write; an existing one is replaced if it is a drafter directory.
        target: directory or repository of the model that the drafter is for, to check that it
            fits. A file alone needs it, for its configuration.
        allow_mismatch: go on where the target has another tokenizer or other rotary embeddings,
            or is a fine-tune of the model that the head was trained with, or another one.
        quantize: pack the matrices.
        q_bits, q_group_size, q_mode: as `quantize_head`. Default: 8 bits, affine.
        dtype: "float16", "bfloat16" or "float32". Default: as in the source, fp8 as bfloat16.
        with_target: directory to write for the model in `source`, as mlx_lm.convert does. It is
            what the drafter is probed with, unless `target` is given.
        target_q_bits: bits per weight of that model. Default: not quantised.
        draft_vocab: let the drafter propose so many tokens only, the likeliest ones. Default: all.
        calibrate: the text that says which these are, a file. Default: "builtin", texts that come
            along.
        probe: draft with the model before the directory gets its name, and write nothing where
            that does not work.
        probe_bits: probe these numbers of bits, too, for example "4,8".
        upload: repository on the Hugging Face hub to put the drafter into.

    Raises:
        NoDrafter: there is no head in `source`.
        Incompatible: its family is not supported, or it does not fit `target`.
        CheckpointError: `source` is damaged or incomplete, or the hub does not give it; the message
            says what and where.
        SpecError: `out` cannot be written, or an option does not fit.
    """
    out = Path(out).expanduser()
    if dtype is not None and dtype not in DTYPES:
        raise BadArguments(f"There is no dtype {dtype!r}; choose from {', '.join(DTYPES)}.")
    if not quantize and (q_bits, q_group_size, q_mode) != (None, None, None):
        raise BadArguments("How to quantise was given without asking for it; give -q, too.")
    if target_q_bits is not None and with_target is None:
        raise BadArguments(
            "--target-q-bits is for the model itself; say with --with-target where to write it."
        )
    if upload is not None and not is_repository_name(upload):
        raise BadArguments(f"{upload!r} cannot be a repository; give ORG/REPO to upload to.")
    bits = parse_bits(probe_bits)
    probe = probe or bool(bits)
    if probe and target is None and with_target is None:
        raise BadArguments("A probe needs the model that the drafter is for; give --target, too.")
    if calibrate is not None and draft_vocab is None:
        raise BadArguments("--calibrate chooses a draft vocabulary; give --draft-vocab, too.")
    model = None if target is None else open_model(target)
    mlx_dtype = DTYPES[dtype] if dtype else None
    checkpoint = open_source(source, model.config if model else None, mlx_dtype)
    check_out(out, checkpoint.directory)
    family = family_of(checkpoint)
    if with_target is not None:
        with_target = Path(with_target).expanduser()
        check_target_out(with_target, out, checkpoint.directory)
        _check_holds_target(checkpoint)
    fit = None
    if family.has_head(checkpoint):  # else `read_head` says what is missing
        if model is not None:
            fit = checked_fit(checkpoint, model, allow_mismatch)
        if with_target is not None:
            checkpoint.files.fetch_all()
    head = with_fingerprint(family.read_head(checkpoint, mlx_dtype), checkpoint, model)
    parameters = sum(parameter.size for parameter in head.weights.parameters.values())
    if draft_vocab is not None:
        vocabulary.check_all_tokens(head)
        text = vocabulary.read_text(
            (model or checkpoint).tokenizer_folder,
            vocabulary.vocab_size_of(head),
            calibrate,
        )
        head = vocabulary.restrict(head, draft_vocab, text)
    whole = head
    if quantize:
        module = family.build(head.config, head.weights)
        head = quantize_head(head, module, q_bits, q_group_size, q_mode or "affine")
    if with_target is not None:
        write_target(checkpoint.directory, with_target, target_q_bits, dtype)
        model = model or open_model(with_target)  # to probe the drafter with
    probed: Probe | None = None
    bytes_read = None

    def check(directory: Path) -> None:
        nonlocal probed, bytes_read
        assert model is not None
        bytes_read = checkpoint.bytes_read  # once, and again for other forms
        probed = probe_directory(directory, model, whole, bits, q_group_size)
        probed.check()

    config = write_drafter(
        head, out, _tokenizer_folder(checkpoint, model), check if probe else None
    )
    savings = None
    if "draft_vocab" in config["mlx_spec"]:
        savings = vocabulary.savings(head, model or checkpoint)
    for used in (checkpoint, model):
        if used is not None:
            used.files.release()
    if upload is not None:
        upload_drafter(out, upload)
    return Report(
        out=out,
        tensors=len(config["mlx_spec"]["sha256"]),
        parameters=parameters,
        bytes_read=checkpoint.bytes_read if bytes_read is None else bytes_read,
        source_bytes=checkpoint.source_bytes,
        fetched_bytes=checkpoint.files.fetched_bytes,
        norm_evidence=config["mlx_spec"].get("norm_evidence"),
        unused=head.provenance.unused,
        quantization=config.get("quantization"),
        fingerprint="fingerprint" in config["mlx_spec"],
        pairing=fit.sentence if fit else None,
        target=with_target,
        draft_vocab=savings,
        probe=probed,
    )


def _check_holds_target(checkpoint: Checkpoint) -> None:
    """Raises Incompatible if a drafter is alone in its checkpoint."""
    alone = checkpoint.directory.is_file()
    if alone or family_of_drafter(checkpoint.config) is not None:
        raise Incompatible(
            f"{checkpoint.directory if alone else checkpoint.path} is a drafter and holds no model "
            "that could be written: convert the model's own repository with mlx_lm.convert"
        )


def _tokenizer_folder(source: Checkpoint, model: Checkpoint | None) -> Path | None:
    """Where tokenizer files are: beside the head, else with the target."""
    folders = [used.tokenizer_folder for used in (source, model) if used is not None]
    return next((folder for folder in folders if (folder / TOKENIZER).is_file()), None)


def _part(part_bytes: int, all_bytes: int) -> str:
    """For example "0.85 of 55.6 GB"."""
    if all_bytes < 1e9:
        return f"{part_bytes / 1e6:.2f} of {all_bytes / 1e6:.2f} MB"
    return f"{part_bytes / 1e9:.2f} of {all_bytes / 1e9:.1f} GB"
