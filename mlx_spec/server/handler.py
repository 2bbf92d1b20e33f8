"""HTTP: mlx_lm.server's endpoints, with checks before them and additions to their answers."""

import errno
import hmac
import io
import json
import logging
import re
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from types import SimpleNamespace
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from mlx_lm.server import APIHandler

from mlx_spec.errors import OutOfMemory, PortInUse, SpecError, is_out_of_memory, one_line
from mlx_spec.generate import bound
from mlx_spec.options import SpecOptions
from mlx_spec.server import validation
from mlx_spec.server.metrics import CONTENT_TYPE, metrics_text
from mlx_spec.server.record import Record, is_own
from mlx_spec.server.status import Status

POLLED = ("/health", "/metrics", "/v1/spec/status")
READ_TIMEOUT_S = 60.0  # of a request
DISCARD_S = 2.0  # of a body that is not wanted
SEND_TIMEOUT_S = 300.0  # of a client that does not read


@dataclass(frozen=True)
class App:
    """Attributes:
    key: what clients must send as `Authorization: Bearer KEY`, except for /health; None: nothing.
    max_body_bytes: of a request.
    fingerprint: mlx_lm.server's system_fingerprint.
    options: depth and acceptance law of a request that does not say.
    """

    status: Status
    key: str | None
    max_body_bytes: int
    fingerprint: str
    options: SpecOptions


class Handler(APIHandler):
    """One request. Every answer that is not mlx_lm.server's own is JSON, errors as it gives them:
    {"error": sentence}."""

    server_version = "mlx-spec"
    timeout = READ_TIMEOUT_S
    rfile: Any

    def __init__(self, app: App, *args: Any):
        self.app = app
        self.options = app.options
        self.record: Record | None = None
        self.answered = False  # the headers are sent
        self.stream = False
        super().__init__(app.status.responses, *args, system_fingerprint=app.fingerprint)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            return self.guarded(self.handle_health_check)
        if not self.authorized():
            return self.refuse_unread(HTTPStatus.UNAUTHORIZED, "The API key is missing or wrong.")
        if path == "/v1/spec/status":
            return self.guarded(self.handle_status)
        if path == "/metrics":
            return self.guarded(self.handle_metrics)
        return self.guarded(super().do_GET)

    def handle_health_check(self) -> None:
        self.answer(*self.app.status.health())

    def handle_status(self) -> None:
        self.answer(HTTPStatus.OK, self.app.status.as_dict())

    def handle_models_request(self) -> None:
        bound(APIHandler.handle_models_request, scan_cache_dir=downloaded)(self)

    def handle_metrics(self) -> None:
        try:
            text = metrics_text(self.app.status)
        except SpecError as error:
            return self.refuse(HTTPStatus.NOT_IMPLEMENTED, str(error))
        return self.send(HTTPStatus.OK, CONTENT_TYPE, text)

    def do_POST(self) -> None:
        if not self.authorized():
            return self.refuse_unread(HTTPStatus.UNAUTHORIZED, "The API key is missing or wrong.")
        length, limit = self.content_length(), self.app.max_body_bytes
        if length is None:
            return self.refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length must be a number.")
        if length > limit:
            return self.refuse_unread(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body has {length} bytes; at most {limit} are read (--max-body-bytes).",
            )
        raw = self.rfile.read(length)
        self.connection.settimeout(SEND_TIMEOUT_S)
        if len(raw) < length:
            return self.refuse(HTTPStatus.BAD_REQUEST, "The body is shorter than Content-Length.")
        try:
            body = validation.parse(raw)
            self.options = validation.take_options(body, self.app.options)
            if self.path.endswith("/completions"):
                validation.check(body, chat="chat" in self.path)
            checked = validation.encode(body)
        except validation.BadRequest as error:
            return self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        self.rfile = io.BytesIO(checked)
        self.headers.replace_header("Content-Length", str(len(checked)))
        return self.guarded(super().do_POST)

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        self.record = request.record = Record(self.options, self.is_connected)
        try:
            super().handle_completion(request, stop_words)
        finally:
            if self.record.context is not None:
                self.record.context.stop()
            self.response_generator.ledger.end(self.record)

    def guarded(self, respond: Any) -> None:
        """Answer with an error instead of a broken connection, where nothing was sent yet."""
        try:
            respond()
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logging.error("A request failed: %s", one_line(error))
            self._headers_buffer: list[bytes] = []
            if not self.answered:
                record = self.record
                decoding = self.command == "GET" or bool(record and record.context)
                self.refuse(status_for(error, decoding), one_line(error))
            elif self.stream:
                event = json.dumps({"error": one_line(error)})
                self.wfile.write(f"data: {event}\n\n".encode())

    def generate_response(self, text: str, finish_reason: Any, *args: Any, **options: Any) -> dict:
        response = super().generate_response(text, finish_reason, *args, **options)
        if finish_reason is not None and self.record is not None:
            response["timings"] = self.record.timings()
            response["spec"] = self.record.spec()
            self.add_details(response)
        return response

    def completion_usage_response(self, *args: Any, **options: Any) -> dict:
        response = super().completion_usage_response(*args, **options)
        self.add_details(response)
        return response

    def add_details(self, response: dict) -> None:
        if "usage" in response and self.record is not None:
            response["usage"]["completion_tokens_details"] = self.record.usage_details()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """mlx_lm.server answers 404 to all that fails before the first token."""
        if status_code == HTTPStatus.NOT_FOUND and self.record is not None and self.record.error:
            status_code = status_for(self.record.error, decoding=False)
        super()._set_completion_headers(status_code)

    def authorized(self) -> bool:
        if self.app.key is None:
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(given.encode("latin-1"), self.app.key.encode())

    def content_length(self) -> int | None:
        text = self.headers.get("Content-Length", "")
        return int(text) if re.fullmatch("[0-9]{1,18}", text) else None

    def is_connected(self) -> bool:
        """Whether the client still waits for the answer."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return not poll.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except (OSError, ValueError):  # ValueError: it is closed on this side
            return False

    def refuse(self, status: int, sentence: str) -> None:
        self.answer(status, {"error": sentence})

    def refuse_unread(self, status: int, sentence: str) -> None:
        """Before the body is read. It is thrown away, because many a client sends all of it before
        it reads the answer, and would get none from a connection that is closed."""
        self.refuse(status, sentence)
        self.connection.settimeout(DISCARD_S)
        left, until = self.content_length() or 0, time.monotonic() + DISCARD_S
        with suppress(OSError):
            while left > 0 and time.monotonic() < until and (read := self.rfile.read1(1 << 16)):
                left -= len(read)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)

    def flush_headers(self) -> None:
        self.answered = True
        super().flush_headers()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        if getattr(self, "path", "").partition("?")[0] not in POLLED:  # it may have none
            super().log_request(code, size)


def downloaded() -> Any:
    """The hub's cache; as mlx_lm.server wants it also where nothing was ever downloaded."""
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return SimpleNamespace(repos=())


def status_for(error: BaseException, decoding: bool) -> int:
    if isinstance(error, OutOfMemory) or is_out_of_memory(error):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, SpecError):
        return HTTPStatus.NOT_FOUND
    if not decoding and is_own(error):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus.INTERNAL_SERVER_ERROR


class Server(ThreadingHTTPServer):
    """Listens from its making on; each request has a thread of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int):
        """Raises: PortInUse, ValueError for no port, OSError for a host that is not this
        machine's."""
        if not 0 <= port <= 65535:
            raise ValueError(f"{port} is not a port; give 0 to 65535.")
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = infos[0]
        in_use = (
            f"Port {port} of {host} is in use; stop what listens there, or give another --port."
        )
        if port and answers(host, port):  # another address of this port may be free all the same
            raise PortInUse(in_use)
        try:
            super().__init__(address, None)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(in_use) from error
            raise

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of this machine's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def serve(self, app: App) -> None:
        self.RequestHandlerClass = partial(Handler, app)
        self.serve_forever(poll_interval=0.1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("A connection failed.", exc_info=True)


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False
