"""Answers for the server while its model is being loaded, from a process of its own.

Reading a large tokenizer keeps Python's lock for a second and more, in which no thread of the
loading process can answer. The porter has the server's listening socket until the model is there.
It is this file, run by itself: nothing of the package is imported.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

READ_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 0.5
MAX_BODY_BYTES = 1 << 20  # of a request that is turned away; more is not read


class Porter:
    """The process, as its server sees it."""

    def __init__(self, listening: socket.socket):
        fd = listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
        )

    def tell(self, health: dict[str, Any]) -> None:
        """What /health is to answer from now on."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed; the server answers when it has loaded
            self._process.stdin.write(json.dumps(health).encode() + b"\n")
            self._process.stdin.flush()

    def leave(self) -> None:
        """Let it take no further connection; it ends when it has answered those it has. Who is
        told that the server is ready must not meet it, so one that does not listen is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        if not select.select([self._process.stdout], [], [], LEAVE_TIMEOUT_S)[0]:
            self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()


class Door(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, fd: int):
        listening = socket.socket(fileno=fd)
        super().__init__(listening.getsockname(), Visitor, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.health = b""
        self.told = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Visitor(BaseHTTPRequestHandler):
    server: Door
    timeout = READ_TIMEOUT_S

    def do_GET(self) -> None:
        body = json.dumps({"error": "The model is being loaded; try again soon."}).encode()
        if self.path.partition("?")[0] == "/health":
            self.server.told.wait(READ_TIMEOUT_S)
            body = self.server.health
        self.send_response(503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if length.isdigit():  # unread, it would break the connection before the answer is there
            self.rfile.read(min(int(length), MAX_BODY_BYTES))
        self.do_GET()

    def log_message(self, *arguments: Any) -> None:
        pass


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's business
    door = Door(fd)
    threading.Thread(target=door.serve_forever, args=(0.05,)).start()
    for line in sys.stdin.buffer:
        door.health = line.strip()
        door.told.set()
    door.shutdown()
    door.socket.close()
    os.close(1)  # tells the server


if __name__ == "__main__":
    main(int(sys.argv[1]))
