"""Are a file's RMSNorm weights stored minus one (Hugging Face), or with the one folded in (MLX)?

Values cannot tell: trained norms lie anywhere. So the file's origin decides, once for all of
its tensors.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.header import Header
from mlx_spec.errors import CheckpointError

RECORD_IT = (
    'add "mlx_spec": {"norm_convention": "minus_one"} to config.json for weights '
    'from Hugging Face, "folded" for weights from MLX'
)

NormConvention = Literal["minus_one", "folded"]


def norm_convention(checkpoint: Checkpoint, files: Iterable[str]) -> tuple[NormConvention, str]:
    """The convention of the given files, and what decided it.

    In order: what config.json records; the layout of the trunk's convolutions in the same file,
    which mlx-lm changes together with the norms (its own test, `sanitize` in
    mlx_lm/models/qwen3_5.py); the `format` that the writer put into the file; the convolutions
    in another file.

    Raises:
        CheckpointError: nothing tells, or the files differ.
    """
    record = checkpoint.section("mlx_spec")
    match record.get("norm_convention"):
        case "folded" | "minus_one" as recorded:
            return recorded, record.get("norm_evidence", "recorded in config.json")
        case None:
            return _from_files(checkpoint, files)
        case other:
            raise CheckpointError(
                f"config.json of {checkpoint.path} records the norm convention {other!r}: "
                'it must be "folded" or "minus_one"'
            )


def _from_files(checkpoint: Checkpoint, files: Iterable[str]) -> tuple[NormConvention, str]:
    verdicts = [
        verdict for file in files if (verdict := _from_header(file, checkpoint.header(file)))
    ]
    trunk = _from_trunk(checkpoint)
    if not verdicts and trunk is not None:
        return trunk
    if not verdicts:
        raise CheckpointError(
            f"the files of {checkpoint.path} do not say whether their norms are stored minus "
            f"one: {RECORD_IT}"
        )
    if trunk is not None and trunk[0] == "minus_one" and verdicts[0][0] == "folded":
        verdicts.append(trunk)  # MLX wrote the head, but a trunk that it has not converted
    if len({convention for convention, _ in verdicts}) > 1:
        reasons = "; ".join(f"{evidence}: {convention}" for convention, evidence in verdicts)
        raise CheckpointError(
            f"the files of {checkpoint.path} differ in how they store norms ({reasons}): "
            f"convert from the original repository, or {RECORD_IT}"
        )
    return verdicts[0]


def _from_trunk(checkpoint: Checkpoint) -> tuple[NormConvention, str] | None:
    """By the convolutions of any shard, as far as the shards are here."""
    for name in checkpoint.names:
        if name.endswith("conv1d.weight"):
            with suppress(CheckpointError):
                file = checkpoint.tensor(name).file
                return _from_header(file, checkpoint.header(file))
    return None


def _from_header(file: str, header: Header) -> tuple[NormConvention, str] | None:
    convolutions = [
        tensor.shape
        for name, tensor in header.tensors.items()
        if name.endswith("conv1d.weight") and len(tensor.shape) == 3
    ]
    if convolutions:  # torch: (channels, 1, kernel); MLX: (channels, kernel, 1)
        raw = any(shape[-1] != 1 for shape in convolutions)
        return ("minus_one" if raw else "folded"), f"layout of conv1d in {file}"
    match header.metadata.get("format"):
        case "pt":
            return "minus_one", f"format pt of {file}"
        case "mlx":
            return "folded", f"format mlx of {file}"
    return None
