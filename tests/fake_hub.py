"""A Hugging Face hub on 127.0.0.1 that serves local directories, and can be made to misbehave.

Like the real one it redirects for weights to a storage server, which is another origin.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


@dataclass
class Fault:
    """What goes wrong with the next GETs of a file.

    Attributes:
        file: its name.
        status: answer with this.
        cut: of each answer send only so many bytes; the connection is closed early.
        times: how many answers.
        headers: of the answer, or instead of its own.
    """

    file: str
    status: int | None = None
    cut: int | None = None
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class FakeHub:
    """The state of a hub.

    Attributes:
        repositories: directories by ORG/NAME.
        ranges: whether parts of files can be had.
        gated: names of repositories whose files nobody may read.
        weights_commit: what it says the weights are of.
        faults: what is to go wrong.
        endpoint: the value for HF_ENDPOINT.
        signature: what is added to addresses of its storage.
        sent: bytes of bodies that were sent, by name of file.
        asked: (server, method, file, Range, Authorization) of each request for a file.
    """

    repositories: dict[str, Path]
    ranges: bool = True
    gated: frozenset[str] = frozenset()
    weights_commit: str = COMMIT
    faults: list[Fault] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""
    signature: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str, str, str | None, str | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self, file: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.file == file and fault.times:
                    fault.times -= 1
                    return fault
        return None

    @property
    def weights_sent(self) -> int:
        return sum(count for file, count in self.sent.items() if file.endswith(".safetensors"))


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[str]:
    """`repositories` are directories by ORG/NAME. Yields the value for HF_ENDPOINT."""
    with serving(FakeHub(repositories)) as hub:
        yield hub.endpoint


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    with ExitStack() as stack:
        hub.storage = stack.enter_context(_listening(_handler(hub, "storage")))
        hub.endpoint = stack.enter_context(_listening(_handler(hub, "hub")))
        yield hub


@contextmanager
def _listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@cache
def sha256(path: Path, changed_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _handler(hub: FakeHub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) > 5:
                self.describe("/".join(parts[2:4]), parts[4], parts[5])
            elif parts[2:3] == ["resolve"]:
                self.resolve("/".join(parts[:2]), parts[3], parts[4])
            else:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def describe(self, name: str, what: str, revision: str) -> None:
            if name not in hub.repositories:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if revision not in ("main", COMMIT):
                return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = sorted(path for path in hub.repositories[name].iterdir() if path.is_file())
            if what == "tree":
                body = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                    for f in files
                ]
            else:
                siblings = [self.sibling(f) for f in files]
                body = {"id": name, "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def sibling(self, file: Path) -> dict:
            size = file.stat().st_size
            found = {"rfilename": file.name, "size": size, "blobId": f"{file.name}-{size}"}
            if file.suffix == ".safetensors":
                digest = sha256(file, file.stat().st_mtime_ns)
                found["lfs"] = {"sha256": digest, "size": size, "pointerSize": 130}
            return found

        def resolve(self, name: str, revision: str, file_name: str) -> None:
            authorization = self.headers["Authorization"]
            asked = (server, self.command, file_name, self.headers["Range"], authorization)
            hub.asked.append(asked)
            if name in hub.gated:
                return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
            directory = hub.repositories.get(name)
            file = directory / file_name if directory else None
            if file is None or not file.is_file():
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            size = file.stat().st_size
            headers = {"ETag": f'"{file.name}-{size}"'}
            # Older clients follow to another port for HEAD, as they would within a host.
            if server == "hub" or self.command == "HEAD":
                headers["X-Repo-Commit"] = COMMIT
                if file.suffix == ".safetensors":
                    headers["X-Repo-Commit"] = hub.weights_commit
                    headers["X-Linked-Etag"] = f'"{sha256(file, file.stat().st_mtime_ns)}"'
                    headers["X-Linked-Size"] = str(size)
            if server == "hub" and file.suffix == ".safetensors":
                place = hub.storage + self.path + hub.signature
                return self.send(302, b"", headers | {"Location": place})
            self.send_file(file, size, headers)

        def send_file(self, file: Path, size: int, headers: dict[str, str]) -> None:
            fault = hub.fault(file.name) if self.command == "GET" else None
            headers |= fault.headers if fault else {}
            if fault and fault.status:
                return self.send(fault.status, b"", headers)
            cut = fault.cut if fault else None
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
            data = file.read_bytes()
            if found and hub.ranges:
                begin, end = int(found[1]), int(found[2]) + 1
                headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"} | headers
                if "gzip" in self.headers["Accept-Encoding"]:
                    headers["Content-Encoding"] = "gzip"  # whoever asks for parts must not want it
                self.send(206, data[begin:end], headers, file.name, cut)
            else:
                self.send(200, data, headers, file.name, cut)

        def send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            file: str = "",
            cut: int | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            body = body[:cut]
            with suppress(OSError):  # whoever has read enough hangs up
                for start in range(0, len(body), 1 << 16):
                    part = body[start : start + (1 << 16)]
                    self.wfile.write(part)
                    with hub.lock:
                        hub.sent[file] += len(part)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
