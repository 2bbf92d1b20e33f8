"""Byte ranges of a repository's files, through the client of huggingface_hub.

Every answer is checked to be of the commit and the bytes that were asked for. What is cut off is
asked for again from where it stopped.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar

from huggingface_hub import constants

# HTTPError is that of httpx or httpx2, whichever this huggingface_hub uses.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from mlx_spec.errors import CheckpointError, NoParts

ATTEMPTS = 6  # in a row without a byte
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
LONGEST_RETRY_AFTER_S = 900.0
TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
MAX_SKIP_BYTES = 1 << 20

T = TypeVar("T")


class Stopped(Exception):
    """Another range has failed, or the user has stopped the program."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository at a commit.

    Attributes:
        name: its name there.
        url: where the hub has it.
        size_bytes: as the hub says.
        sha256: of all of it, in hex; None where the hub does not know.
        content: changes with the content; empty where the hub does not know.
    """

    name: str
    url: str
    size_bytes: int
    sha256: str | None
    content: str


class Downloads:
    """Downloads from one commit.

    Attributes:
        received_bytes: that have travelled so far.
        ranges_ignored: names of files of which the server sent all instead of a range.
        stop: ends all downloads when it is set.
    """

    def __init__(self, commit: str):
        self.commit = commit
        self.received_bytes = 0
        self.ranges_ignored: set[str] = set()
        self.stop = threading.Event()
        self._etags: dict[str, str] = {}
        self._lock = threading.Lock()

    def stream(self, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """Bytes `begin` to `end` of a file, as they come.

        Raises:
            CheckpointError: the answer is not of these bytes.
            HTTPError: it failed for good, or too often.
            Stopped: `stop` is set.
        """
        failures = 0
        while begin < end:
            received = 0
            try:
                with self._ask(file, begin, end) as parts:
                    for data in parts:
                        received += len(data)
                        begin += len(data)
                        yield data
                if not received:
                    raise HTTPError(f"{file.name}: the answer is empty")
            except HTTPError as error:
                failures = 1 if received else failures + 1
                self.wait(seconds_to_wait(error, failures))

    def retried(self, call: Callable[[], T], attempts: int = ATTEMPTS) -> T:
        """What `call` returns, which huggingface_hub itself does not try again."""
        for failures in range(1, attempts + 1):
            try:
                return call()
            except (HTTPError, LocalEntryNotFoundError) as error:
                cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
                if failures == attempts or not isinstance(cause, HTTPError):
                    raise
                self.wait(seconds_to_wait(cause, failures))
        raise AssertionError

    def wait(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped

    @contextmanager
    def _ask(self, file: RemoteFile, begin: int, end: int) -> Iterator[Iterator[bytes]]:
        """One request, whose answer may stop short."""
        headers = build_hf_headers() | {
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",
        }
        with get_session().stream(
            "GET",
            file.url,
            headers=headers,
            follow_redirects=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            skip = self._check(response, file, begin)
            yield self._body(response, skip, end - begin)

    def _check(self, response: Any, file: RemoteFile, begin: int) -> int:
        """Returns: how many bytes come before those that were asked for."""
        hops = [*response.history, response]
        commit = _header(hops, constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
        if commit not in (None, self.commit):
            raise _changed(file, f"its commit is {commit} and not {self.commit}")
        linked = _header(hops, constants.HUGGINGFACE_HEADER_X_LINKED_ETAG)
        if file.sha256 and linked and _plain(linked) != file.sha256:
            raise _changed(file, f"its sha256 is {_plain(linked)} and not {file.sha256}")
        etag = linked or _header(hops, "ETag")
        if etag and self._etags.setdefault(file.name, etag) != etag:
            raise _changed(file, "its ETag is not that of its other parts")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise CheckpointError(
                f"The server sends {file.name} compressed, so that parts of it cannot be had: "
                "use another mirror"
            )
        if response.status_code == 206:
            extent = response.headers.get("Content-Range", "no range")
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", extent)
            if not found or int(found[1]) != begin or found[2] not in ("*", str(file.size_bytes)):
                raise _changed(file, f"the answer has {extent}")
            return 0
        self.ranges_ignored.add(file.name)
        if begin > MAX_SKIP_BYTES:
            raise NoParts(
                f"The server ignores that only a part of {file.name} was asked for: "
                "use another mirror, or download the repository and give its directory"
            )
        return begin

    def _body(self, response: Any, skip: int, length: int) -> Iterator[bytes]:
        for data in response.iter_raw():  # not in chunks, which would be lost if one breaks off
            with self._lock:
                self.received_bytes += len(data)
            if self.stop.is_set():
                raise Stopped
            data, skip = data[skip:], max(skip - len(data), 0)
            if data := data[:length]:
                length -= len(data)
                yield data
            if not length:
                return


def seconds_to_wait(error: HTTPError, failures: int) -> float:
    """How long to wait after so many failures in a row.

    Raises: `error` where trying again is of no use.
    """
    headers: Any = {}
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in TRANSIENT:
            raise error
        headers = error.response.headers
    asked = _asked_to_wait(headers)
    if failures >= ATTEMPTS or (asked or 0) > LONGEST_RETRY_AFTER_S:
        raise error
    return min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S) if asked is None else asked


def _asked_to_wait(headers: Any) -> float | None:
    """Seconds, by `Retry-After` or by the hub's own `RateLimit`."""
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    if value:
        try:
            return max(parsedate_to_datetime(value).timestamp() - time(), 0.0)
        except ValueError:
            return None
    if found := re.search(r"\br=0\s*;\s*t=(\d+)", headers.get("RateLimit", "")):
        return float(found[1])
    return None


def _header(responses: list[Any], name: str) -> str | None:
    """Of the first answer that has it: the hub's own, before the redirection to its storage."""
    return next((r.headers[name] for r in responses if name in r.headers), None)


def _plain(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')


def _changed(file: RemoteFile, how: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} is not the file that was asked for ({how}): try again, or use another mirror"
    )
