"""Where pieces of a download wait until all of them are there, so that a run that was interrupted
can go on.

A piece is written beside its place and renamed. Its name holds its sha256, which is checked when
a later run finds it.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_spec.errors import SpecError

READ_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Piece:
    """Bytes `begin` to `end` of a file.

    Attributes:
        file: a name that also says which content the file has.
    """

    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Staging:
    """A directory of pieces.

    Raises:
        SpecError: another process uses it, or it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._pieces: dict[str, dict[Piece, Path]] = {}
        with self._writing():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SpecError(
                f"another process is fetching the same repository into {path}: wait for it"
            ) from error

    def find(self, piece: Piece) -> bool:
        """Is a sound copy of it here? One that is not is removed."""
        for path in (self.path / piece.file).glob(f"{piece.begin}-{piece.end}.*"):
            if path.stat().st_size == piece.nbytes and f".{sha256_of([path])}" == path.suffix:
                self._pieces.setdefault(piece.file, {})[piece] = path
                return True
            path.unlink()
        return False

    def put(self, piece: Piece, data: Iterable[bytes]) -> None:
        """Raises SpecError if it cannot be written."""
        folder = self.path / piece.file
        beside = folder / f".{piece.begin}-{piece.end}.new"
        digest = hashlib.sha256()
        with self._writing():
            folder.mkdir(exist_ok=True)
            beside.touch()
        with open(beside, "wb") as file:
            for part in data:
                digest.update(part)
                with self._writing():
                    file.write(part)
            with self._writing():
                file.flush()
        path = folder / f"{piece.begin}-{piece.end}.{digest.hexdigest()}"
        os.replace(beside, path)
        self._pieces.setdefault(piece.file, {})[piece] = path

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Bytes of a file, which may lie in several pieces; fewer if not all of them are here."""
        parts = []
        for piece, path in sorted(self._pieces.get(file, {}).items()):
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first < last:
                with open(path, "rb") as stored:
                    stored.seek(first - piece.begin)
                    parts.append(stored.read(last - first))
        return b"".join(parts)

    def sha256(self, file: str, head: bytes, size_bytes: int) -> str | None:
        """Of a file that begins with `head`, in hex; None unless all the rest is here."""
        filled = len(head)
        paths = []
        for piece, path in sorted(self._pieces[file].items()):
            if piece.begin != filled:
                return None
            filled = piece.end
            paths.append(path)
        return sha256_of(paths, head) if filled == size_bytes else None

    def drop(self, file: str) -> None:
        """Forgets a file whose pieces are not sound."""
        shutil.rmtree(self.path / file)
        del self._pieces[file]

    def check_space(self, needed_bytes: int) -> None:
        """Raises SpecError if the disk cannot hold so much more."""
        free = shutil.disk_usage(self.path).free
        if free < needed_bytes:
            raise SpecError(
                f"{self.path} cannot hold {needed_bytes / 1e9:.2f} GB, as {free / 1e9:.2f} GB are "
                "free: make room, or set XDG_CACHE_HOME to another disk"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpecError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """What was fetched stays for another run."""
        self._lock.close()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sha256_of(paths: Iterable[Path], head: bytes = b"") -> str:
    """Of `head` and these files one after the other, in hex."""
    digest = hashlib.sha256(head)
    for path in paths:
        with open(path, "rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
    return digest.hexdigest()
