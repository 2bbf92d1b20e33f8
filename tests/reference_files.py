"""The reference checkpoints, unpacked: in the repository the larger weights lie compressed."""

import hashlib
import lzma
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

REFERENCE = Path(__file__).parent / "reference"
PACKED = REFERENCE / "ckpts"


@cache
def checkpoints() -> Path:
    """The directory of all of them, beside each other; made once, kept beside `reference`."""
    files = sorted(path for path in PACKED.rglob("*") if path.is_file())
    listed = [f"{path.relative_to(PACKED)} {path.stat().st_size}" for path in files]
    key = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:12]
    unpacked = REFERENCE.parent / ".reference" / key
    if not unpacked.exists():
        new = unpacked.with_name(f"{key}.{os.getpid()}.new")
        for path in files:
            to = new / path.relative_to(PACKED)
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".xz":
                to.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
            else:
                shutil.copyfile(path, to)
        with suppress(OSError):  # another process was quicker
            new.rename(unpacked)
        shutil.rmtree(new, ignore_errors=True)
    return unpacked
