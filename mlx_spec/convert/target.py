"""Writing the model itself, from the files that its drafter is read from, by mlx_lm.convert."""

import os
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path

from mlx_lm.convert import convert

from mlx_spec.errors import SpecError, reported_as


def check_target_out(out: Path, drafter: Path, source: Path) -> None:
    """Raises SpecError if `out` is there, or lies in the drafter or the source, or around them."""
    if out.exists():
        raise SpecError(f"{out} exists: choose another place for the model")
    for other in (drafter, source):
        inside, around = out.resolve(), other.resolve()
        if inside.is_relative_to(around) or around.is_relative_to(inside):
            raise SpecError(f"{out} and {other} lie one in the other: choose another place")


def write_target(source: Path, out: Path, q_bits: int | None, dtype: str | None) -> None:
    """Writes the model in `source` for MLX.

    Args:
        source: a directory in the layout of Hugging Face.
        out: directory to write, which is not there yet.
        q_bits: bits per weight. Default: not quantised.
        dtype: of weights that are not quantised. Default: as config.json says.

    Raises: SpecError for whatever mlx_lm cannot do.
    """
    new = out.parent / f".{out.name}.{os.getpid()}.new"
    try:
        with reported_as(SpecError), redirect_stdout(sys.stderr):
            convert(str(source), str(new), quantize=q_bits is not None, q_bits=q_bits, dtype=dtype)
            new.rename(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
