"""Servers as their users start them: processes on a free port of 127.0.0.1."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import DEMO, checkpoint_path

COMMAND = [sys.executable, "-m", "mlx_spec", "serve", "--port", "0"]


@dataclass
class Served:
    """A running `mlx-spec serve`."""

    process: subprocess.Popen
    ready: dict[str, Any]
    log: Path
    key: str | None = None

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def port(self) -> int:
        return self.ready["port"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stderr_text(self) -> str:
        return self.log.read_text()

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None):
        """Returns HTTP status and body, decoded where it is JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        if self.key is not None and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, decoded(response)
        except urllib.error.HTTPError as error:
            return error.code, decoded(error)

    def get(self, path: str) -> Any:
        return self.ask(path)[1]

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def health(self) -> dict[str, Any]:
        return self.get("/health")

    def status(self) -> dict[str, Any]:
        return self.get("/v1/spec/status")

    def metrics(self) -> str:
        return self.get("/metrics")

    def wait_until_idle(self) -> dict[str, Any]:
        """The status once no request is under way."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            status = self.status()
            if status["requests_active"] == status["requests_waiting"] == 0:
                return status
            time.sleep(0.05)
        raise AssertionError(f"still busy: {status}")


def decoded(response: Any) -> Any:
    text = response.read().decode()
    if "json" in (response.headers.get("Content-Type") or ""):
        return json.loads(text)
    return text


@contextmanager
def serving(*options: Any, model: str | Path | None = None, env: dict[str, str] | None = None):
    """`mlx-spec serve` on a demo model, once it is ready; stopped and checked at the end."""
    model = checkpoint_path(DEMO) if model is None else model
    command = [*COMMAND, "--model", str(model), *map(str, options)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | (env or {}),
            )
        try:
            line = process.stdout.readline()
            assert line, log.read_text()
            yield Served(process, json.loads(line), log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            finally:
                process.kill()
                process.stdout.close()
