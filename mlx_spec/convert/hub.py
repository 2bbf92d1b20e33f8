"""A checkpoint in a repository of the Hugging Face hub, of which only what is needed is fetched.

Configuration and tokenizer go into the cache of huggingface_hub, where other programs find them,
and shards that are there already are read from there. Of other shards the announced tensors are
fetched, in pieces that are kept until the conversion is done.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm, validate_repo_id

from mlx_spec.cache_directory import cache_directory
from mlx_spec.convert.card import CARD
from mlx_spec.convert.checkpoint import CONFIG, INDEX, MAX_JSON_BYTES, SUFFIX, Checkpoint, Folder
from mlx_spec.convert.download import Downloads, RemoteFile
from mlx_spec.convert.ranges import Range, coalesce, split, total_bytes
from mlx_spec.convert.staging import Piece, Staging, sha256_of
from mlx_spec.convert.write import TOKENIZER
from mlx_spec.errors import CheckpointError, NoParts, one_line

SMALL = [CONFIG, INDEX, CARD, *TOKENIZER]
MODEL = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]  # no code
FOLDERS = ["*/*"]  # mlx-lm reads nothing in them; weights may lie there once more
MAX_EXCESS = 1.05  # what may travel for what is wanted
PIECE_BYTES = 16 << 20
WORKERS = 4


def open_model(source: str | Path) -> Checkpoint:
    """Opens a directory, or ORG/REPO[@REVISION] of the hub.

    Raises:
        CheckpointError: as `Checkpoint.open`, or the hub does not have it, or does not give it.
    """
    path = Path(source).expanduser()
    name, _, revision = str(source).partition("@")
    if path.exists() or not is_repository_name(name):
        return Checkpoint.open(path)
    with explained(str(source)):
        return _open_repository(name, revision or "main")


def is_repository_name(name: str) -> bool:
    """Whether it may be ORG/REPO."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


@contextmanager
def explained(name: str) -> Iterator[None]:
    """What the hub says about a repository becomes a CheckpointError in one sentence."""
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"The Hugging Face hub does not let you read {name}: accept its licence there and log "
            "in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} does not exist, neither here nor on the Hugging Face hub, or is private: "
            "check its name, or log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"The repository of {name} has no such revision: give a branch, a tag or a commit"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"The Hugging Face hub did not give {name} ({one_line(error)}): try again later; what "
            "was fetched is kept"
        ) from error
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        why = f" ({one_line(cause)})" if cause else ""
        raise CheckpointError(
            f"{name} is not here, and the Hugging Face hub could not be reached for it{why}: try "
            "again with a network; what was fetched is kept"
        ) from error


class NoBar(tqdm):
    """For files that are not worth the several bars that huggingface_hub leaves on the screen."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **(options | {"disable": True}))


class Repository:
    """The files of a repository at one commit, without those in its folders.

    Attributes:
        name: ORG/REPO.
        folder: what the cache of huggingface_hub has of it.
    """

    def __init__(self, name: str, downloads: Downloads, files: dict[str, RemoteFile], folder: Path):
        self.name = name
        self.folder = folder
        self._downloads = downloads
        self._files = files
        self._heads: dict[str, bytes] = {}
        self._whole_bytes = 0
        self._staging: Staging | None = None

    @property
    def fetched_bytes(self) -> int:
        """Of tensors and headers."""
        return self._downloads.received_bytes + self._whole_bytes

    def names(self) -> list[str]:
        return sorted(self._files)

    def size_bytes(self, name: str) -> int:
        return self._files[name].size_bytes

    def read(self, name: str, begin: int, end: int) -> bytes:
        file = self._files[name]
        if self._is_here(file):
            return Folder(self.folder).read(name, begin, end)
        if self._staging and self._is_staged(file, begin, end):
            return self._staging.read(_key(file), begin, end)
        with explained(f"{self.name}/{name}"):
            data = b"".join(self._downloads.stream(file, begin, end))
        if begin == len(self._heads.get(name, b"")):
            self._heads[name] = self._heads.get(name, b"") + data
        return data

    def prepare(self, wanted: Mapping[str, list[Range]]) -> None:
        """Fetches these bytes of the files, as far as they are not here.

        Raises:
            CheckpointError: the hub does not give them, or gives others.
            SpecError: there is no room for them.
        """
        pieces = []
        for name, ranges in wanted.items():
            file = self._files[name]
            if self._is_here(file):
                continue
            if name in self._downloads.ranges_ignored:
                self._fetch_whole(file, total_bytes(ranges))
                continue
            ranges = [part for part in ranges if not self._is_staged(file, *part)]
            pieces += [(file, *part) for part in split(coalesce(ranges), PIECE_BYTES)]
        try:
            if pieces:
                self._fetch(pieces)
        except BaseException:
            self._close()
            raise

    def fetch_all(self) -> None:
        """The whole model, into the cache of huggingface_hub."""
        missing = [f for f in self._files.values() if not self._is_here(f)]
        with explained(self.name):
            _snapshot(self._downloads, self.name, self._downloads.commit, MODEL)
        self._whole_bytes += sum(f.size_bytes for f in missing if f.name.endswith(SUFFIX))

    def release(self) -> None:
        """The fetched pieces are no longer needed."""
        if self._staging:
            self._staging.remove()
            self._staging = None

    def _close(self) -> None:
        """What was fetched stays for another run."""
        if self._staging:
            self._staging.close()
            self._staging = None

    def _is_here(self, file: RemoteFile) -> bool:
        path = self.folder / file.name
        return path.is_file() and path.stat().st_size == file.size_bytes

    def _is_staged(self, file: RemoteFile, begin: int, end: int) -> bool:
        return self._staging is not None and self._staging.covers(_key(file), begin, end)

    def _fetch(self, parts: list[tuple[RemoteFile, int, int]]) -> None:
        if self._staging is None:
            place = f"{self.name.replace('/', '--')}--{self._downloads.commit}"
            self._staging = Staging(cache_directory() / "hub" / place)
        staging = self._staging
        pieces = {Piece(_key(file), begin, end): file for file, begin, end in parts}
        missing = [piece for piece in pieces if not staging.find(piece)]
        all_bytes = sum(piece.nbytes for piece in pieces)
        missing_bytes = sum(piece.nbytes for piece in missing)
        staging.check_space(missing_bytes)
        self._downloads.stop.clear()
        bar = tqdm(
            desc=f"Fetching from {self.name}",
            total=all_bytes,
            initial=all_bytes - missing_bytes,
            unit="B",
            unit_scale=True,
            disable=None,  # unless stderr is a terminal
        )
        with explained(self.name), bar, ThreadPoolExecutor(WORKERS) as pool:
            waiting = [pool.submit(self._fetch_piece, p, pieces[p], bar) for p in missing]
            try:
                for done in as_completed(waiting):
                    done.result()
            except BaseException:
                self._downloads.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        for file in dict.fromkeys(pieces.values()):
            self._check_whole(file)

    def _fetch_piece(self, piece: Piece, file: RemoteFile, bar: Any) -> None:
        def counted() -> Iterator[bytes]:
            for data in self._downloads.stream(file, piece.begin, piece.end):
                bar.update(len(data))
                yield data

        assert self._staging
        self._staging.put(piece, counted())

    def _check_whole(self, file: RemoteFile) -> None:
        """Compares the sha256 of a file of which all was fetched."""
        assert self._staging
        found = self._staging.sha256(_key(file), self._heads.get(file.name, b""), file.size_bytes)
        if found and file.sha256 and found != file.sha256:
            self._staging.drop(_key(file))
            raise _damaged(self.name, file)

    def _fetch_whole(self, file: RemoteFile, wanted_bytes: int) -> None:
        """A file of a server that knows no ranges."""
        if file.size_bytes > MAX_EXCESS * wanted_bytes:
            raise NoParts(
                f"The server gives no parts of files, and only {_amount(wanted_bytes)} of the "
                f"{_amount(file.size_bytes)} of {self.name}/{file.name} are needed: use another "
                "mirror, or download the repository and give its directory"
            )
        with explained(f"{self.name}/{file.name}"):
            path = Path(
                self._downloads.retried(
                    lambda: hf_hub_download(self.name, file.name, revision=self._downloads.commit)
                )
            )
        self._whole_bytes += file.size_bytes
        if file.sha256 and sha256_of([path]) != file.sha256:
            path.resolve().unlink()
            raise _damaged(self.name, file)


def _open_repository(name: str, revision: str) -> Checkpoint:
    downloads = Downloads("")
    api = HfApi()
    try:
        info = downloads.retried(
            lambda: api.model_info(name, revision=revision, files_metadata=True), attempts=3
        )
    except HfHubHTTPError:
        raise
    except (HTTPError, OfflineModeIsEnabled):
        return _open_cached(name, revision)
    if not info.sha or not re.fullmatch("[0-9a-f]{40}", info.sha):
        raise CheckpointError(f"The hub does not say which commit of {name} it has")
    downloads.commit = info.sha
    files = {}
    for found in info.siblings or []:
        if "/" not in found.rfilename and not found.rfilename.startswith("."):
            files[found.rfilename] = _remote_file(name, info.sha, found)
    for small in files.keys() & {*SMALL}:
        if files[small].size_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{name}/{small} is {_amount(files[small].size_bytes)} large, which it cannot be"
            )
    # By the revision's name, so that it is found offline, too.
    folder = _snapshot(downloads, name, revision, SMALL, NoBar)
    if folder.name != info.sha:
        raise CheckpointError(f"{name} has changed while it was read: try again")
    return Checkpoint(Path(name), Repository(name, downloads, files, folder), folder, info.sha)


def _open_cached(name: str, revision: str) -> Checkpoint:
    """What the cache of huggingface_hub has of a repository."""
    folder = Path(
        snapshot_download(name, revision=revision, allow_patterns=SMALL, local_files_only=True)
    )
    if not any(folder.glob(f"*{SUFFIX}")):
        raise CheckpointError(
            f"The weights of {name} are not here, and the Hugging Face hub could not be reached "
            "for them: try again with a network"
        )
    return Checkpoint(Path(name), Folder(folder), folder, folder.name)


def _remote_file(name: str, commit: str, found: Any) -> RemoteFile:
    """A file that the hub lists."""
    if found.size is None:
        raise CheckpointError(
            f"The hub does not say how large {name}/{found.rfilename} is: use another mirror"
        )
    sha256 = found.lfs.sha256 if found.lfs else None
    url = hf_hub_url(name, found.rfilename, revision=commit)
    return RemoteFile(found.rfilename, url, found.size, sha256, sha256 or found.blob_id or "")


def _snapshot(
    downloads: Downloads,
    name: str,
    revision: str,
    patterns: list[str],
    bars: type[tqdm] = tqdm,
) -> Path:
    def fetch() -> str:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=FOLDERS,
            tqdm_class=bars,
        )

    return Path(downloads.retried(fetch))


def _key(file: RemoteFile) -> str:
    """Where its pieces lie. What the hub says is never part of a path as it is."""
    return f"{file.name}.{hashlib.sha256(file.content.encode()).hexdigest()[:16]}"


def _damaged(name: str, file: RemoteFile) -> CheckpointError:
    return CheckpointError(
        f"What was fetched of {name}/{file.name} does not have the sha256 that the hub promises: "
        "try again, or use another mirror"
    )


def _amount(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.2f} MB"
