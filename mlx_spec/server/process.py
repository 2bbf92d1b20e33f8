"""The server as a process that another program starts: events, its parent, signals."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCH_S = 0.5  # between two looks at the parent


class Events:
    """One JSON line each on what was stdout at the start. From then on all that is printed goes
    to stderr, so nothing else can be among them."""

    def __init__(self, verbose: bool):
        self.verbose = verbose
        self._out = os.fdopen(os.dup(1), "w")
        sys.stdout.flush()
        os.dup2(2, 1)

    def ready(self, values: dict[str, Any]) -> None:
        self._write("ready", values)

    def progress(self, event: str, values: dict[str, Any]) -> None:
        if self.verbose:
            self._write(event, values)

    def _write(self, event: str, values: dict[str, Any]) -> None:
        try:
            print(json.dumps({"event": event, **values}), file=self._out, flush=True)
        except OSError:  # nobody reads any more
            self.verbose = False


def write_ready_file(path: Path, values: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps({"event": "ready", **values}) + "\n")
    os.replace(beside, path)


def watch_parent(pid: int, gone: Callable[[], None]) -> None:
    """Call `gone` when process `pid` has ended, from a thread of its own."""
    is_parent = pid == os.getppid()

    def watch() -> None:
        while is_alive(pid) and (not is_parent or os.getppid() == pid):
            time.sleep(WATCH_S)
        gone()

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def on_stop_signals(stop: Callable[[], None]) -> None:
    """SIGTERM and SIGINT call `stop`; a second one ends the process at once."""

    def handle(number: int, frame: Any) -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, frame: os._exit(0))
        stop()

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, handle)
