"""Servers on a free port of 127.0.0.1: processes, as their users start them, and in this one."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlx_spec.server import serve as serve_module
from mlx_spec.server.generation import SpecModelProvider, SpecResponseGenerator
from mlx_spec.server.handler import App, Server
from mlx_spec.server.prompt_cache import PromptCache
from mlx_spec.server.record import Ledger
from mlx_spec.server.status import Status
from models import DEMO, checkpoint_path

COMMAND = [sys.executable, "-m", "mlx_spec", "serve", "--port", "0"]
FIXED = ["--num-draft-tokens", "3", "--sampling", "stock"]  # so that texts and counts are known


class Client:
    """Of a server at `port`; `key` is sent with each request that has none."""

    port: int
    key: str | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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

    def events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Those of a streamed answer, decoded but for the last, "[DONE]". Closing it closes the
        connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)
        finally:
            connection.close()

    def connect(self, request: bytes) -> socket.socket:
        """A connection on which these bytes are sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(request)
        return connection

    def raw(self, request: bytes) -> bytes:
        """All that comes back for these bytes, until the server closes the connection."""
        with self.connect(request) as connection:
            return b"".join(iter(lambda: connection.recv(65536), b""))


@dataclass
class Served(Client):
    """A running `mlx-spec serve`."""

    process: subprocess.Popen
    ready: dict[str, Any]
    log: Path
    key: str | None = None

    @property
    def port(self) -> int:  # type: ignore[override]
        return self.ready["port"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stderr_text(self) -> str:
        return self.log.read_text()


@dataclass
class Local(Client):
    """A server in this process, whose parts tests may reach.

    Attributes:
        failures: with which the decoding thread has ended.
    """

    app: App
    port: int
    key: str | None = None
    failures: list[Exception] = field(default_factory=list)

    @property
    def responses(self) -> SpecResponseGenerator:
        return self.app.status.responses

    @property
    def ledger(self) -> Ledger:
        return self.responses.ledger

    @property
    def model(self) -> Any:
        return self.responses.model_provider.model


def decoded(response: Any) -> Any:
    text = response.read().decode()
    if "json" in (response.headers.get("Content-Type") or ""):
        return json.loads(text)
    return text


@contextmanager
def serving(*options: Any, model: str | Path | None = None, env: dict[str, str] | None = None):
    """`mlx-spec serve` on a demo model, once it is ready; stopped and checked at the end."""
    model = checkpoint_path(DEMO) if model is None else model
    command = [*COMMAND, "--model", str(model), *FIXED, *map(str, options)]
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


def provider_of(*options: Any) -> SpecModelProvider:
    """What `mlx-spec serve` makes of its options, before it listens."""
    made = []

    class Run:
        def __init__(self, host: str, port: int, provider: SpecModelProvider):
            made.append(provider)

        def until_stopped(self) -> None:
            pass

    with patch.object(serve_module, "Run", Run), suppress(SystemExit):
        serve_module.serve([str(option) for option in options])
    return made[0]


@contextmanager
def in_process(
    *options: Any,
    model: str | Path | None = "demo",
    key: str | None = None,
    max_body_bytes: int = 1 << 20,
    wait: bool = True,
) -> Iterator[Local]:
    """A server in this process, without events and signals. It listens at once; `wait` for the
    model to be loaded. None: no default model."""
    model = checkpoint_path(DEMO) if model == "demo" else model
    provider = provider_of(*([] if model is None else ["--model", model]), *FIXED, *options)
    spec_options = provider.cli_args.spec_options
    loaded = threading.Event()
    failures: list[Exception] = []
    responses = SpecResponseGenerator(
        provider,
        PromptCache(10),
        options=lambda args: spec_options,
        loaded=loaded.set,
        failed=failures.append,
    )
    app = App(Status(responses, "local"), key, max_body_bytes, "fingerprint", spec_options)
    app.status.phase = "serving"
    server = Server("127.0.0.1", 0)
    threading.Thread(target=server.serve, args=(app,), daemon=True).start()
    try:
        assert not wait or loaded.wait(30)
        yield Local(app, server.server_port, key, failures)
    finally:
        server.shutdown()
        server.server_close()
        responses.stop(30)


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """The first value that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
