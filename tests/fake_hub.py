"""A Hugging Face hub on 127.0.0.1 that serves local directories."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[str]:
    """`repositories` are directories by ORG/NAME. Yields the value for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and len(parts) > 5:
                self.describe("/".join(parts[2:4]), parts[4])
            elif parts[2:3] == ["resolve"]:
                directory = repositories.get("/".join(parts[:2]))
                file = directory / parts[4] if directory else None
                if file is None or not file.is_file():
                    return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                headers = {"ETag": f'"{file.name}-{file.stat().st_size}"', "X-Repo-Commit": COMMIT}
                self.send(200, file.read_bytes(), headers, with_body)
            else:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def describe(self, name: str, what: str) -> None:
            if name not in repositories:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            files = sorted(path for path in repositories[name].iterdir() if path.is_file())
            if what == "tree":
                body = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
                    for f in files
                ]
            else:
                siblings = [{"rfilename": f.name} for f in files]
                body = {"id": name, "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def send(
            self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True
        ) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
