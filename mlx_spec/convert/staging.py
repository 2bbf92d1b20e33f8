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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mlx_spec.errors import SpecError

READ_BYTES = 1 << 20
LOCK = ".lock"


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
    """A directory of pieces, which several users may fill at once.

    Raises:
        SpecError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._pieces: dict[str, dict[Piece, Path]] = {}
        with self._writing():
            self._lock = self._shared_lock()

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
        beside = folder / f".{piece.begin}-{piece.end}.{os.getpid()}-{id(self)}.new"
        digest = hashlib.sha256()
        with self._writing():
            folder.mkdir(exist_ok=True)
            beside.touch()
        try:
            with open(beside, "wb") as file:
                for part in data:
                    digest.update(part)
                    with self._writing():
                        file.write(part)
                with self._writing():
                    file.flush()
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        path = folder / f"{piece.begin}-{piece.end}.{digest.hexdigest()}"
        os.replace(beside, path)
        self._pieces.setdefault(piece.file, {})[piece] = path

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Bytes of a file, which may lie in several pieces; fewer if not all of them are here."""
        parts = []
        for path, offset, nbytes in self._places(file, begin, end):
            with open(path, "rb") as stored:
                stored.seek(offset)
                parts.append(stored.read(nbytes))
        return b"".join(parts)

    def covers(self, file: str, begin: int, end: int) -> bool:
        """Are these bytes of a file here?"""
        return sum(nbytes for _, _, nbytes in self._places(file, begin, end)) == end - begin

    def _places(self, file: str, begin: int, end: int) -> Iterator[tuple[Path, int, int]]:
        """Where the bytes from `begin` on lie, up to the first that is not here: (path of a piece,
        offset in it, how many). Pieces may overlap."""
        for piece, path in sorted(self._pieces.get(file, {}).items()):
            if piece.begin <= begin < min(piece.end, end):
                nbytes = min(piece.end, end) - begin
                yield path, begin - piece.begin, nbytes
                begin += nbytes

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
        """Removes all pieces, unless others use them."""
        with suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _shared_lock(self) -> TextIO:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / LOCK, "a")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):  # another user has just removed it
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path / LOCK)):
                    return file
            file.close()


def sha256_of(paths: Iterable[Path], head: bytes = b"") -> str:
    """Of `head` and these files one after the other, in hex."""
    digest = hashlib.sha256(head)
    for path in paths:
        with open(path, "rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
    return digest.hexdigest()
