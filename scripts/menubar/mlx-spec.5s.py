#!/usr/bin/env python3
# <xbar.title>mlx-spec</xbar.title>
# <xbar.version>v0.1.0</xbar.version>
# <xbar.author>mlx-spec</xbar.author>
# <xbar.desc>Tokens per second and acceptance of mlx-spec serve; starts and stops it.</xbar.desc>
# <xbar.dependencies>python3</xbar.dependencies>
# <xbar.var>string(VAR_MODEL=""): The model to serve: a directory, or ORG/REPO.</xbar.var>
# <xbar.var>number(VAR_PORT=8484): The port of the server.</xbar.var>
# <xbar.var>string(VAR_MLX_SPEC=""): The mlx-spec command, if it is not found by itself.</xbar.var>
# <xbar.var>string(VAR_KEY_FILE=""): A file with the API key, if clients need one.</xbar.var>
"""Shows `mlx-spec serve` in the menu bar of a Mac, as a plugin of xbar or SwiftBar.

Without an argument it prints the menu. `start`, `stop` and `log` are what the menu's entries call.
It needs nothing but Python 3.9, which is macOS's own. See docs/menubar.md.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAME = "mlx-spec"
HOST = "127.0.0.1"
PLACES = ("/opt/homebrew/bin", "/usr/local/bin", "~/.local/bin")  # beyond a GUI app's PATH
HTTP_S = 1.0  # for a whole answer
START_S = 5.0  # for the server to answer or to fail
STOP_S = 3.0  # for the server to end by itself
MAX_BYTES = 1 << 20  # of an answer
WARNING = "\N{WARNING SIGN} "
UNDRAFTED = ("off", "parked", "standing-down")
UNLOADED = ("starting", "loading", "stopping")
AS_IT_IS = {"emojize": "false", "ansi": "false"}  # a title with text from elsewhere


class Problem(Exception):
    """A sentence for the menu."""


class NoServer(Problem):
    """Nothing listens on the port."""


class NoAnswer(Problem):
    """Something listens, but gives no whole answer in time."""


class Foreign(Problem):
    """Another program listens on the port."""

    def __init__(self, port: int):
        super().__init__(f"Port {port} is used by another program")


# Settings


def setting(name: str) -> str:
    """A variable of the plugin, or "".

    xbar puts them into the environment when the menu is made, but not when an entry is clicked
    (its issue 796). Then they are in the file that xbar and SwiftBar keep beside the plugin.
    """
    if name in os.environ:
        return os.environ[name].strip()
    try:
        saved = json.loads(Path(os.path.abspath(__file__) + ".vars.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    return str(saved.get(name, "")).strip() if isinstance(saved, dict) else ""


def port_setting() -> int:
    text = setting("VAR_PORT") or "8484"
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65536):
        raise Problem(f"VAR_PORT is not a port: {text}")
    return int(text)


def file_setting(name: str) -> str:
    """A path, or ""."""
    return os.path.expanduser(setting(name))


def key_setting() -> str | None:
    path = file_setting("VAR_KEY_FILE")
    if not path:
        return os.environ.get("MLX_SPEC_API_KEY", "").strip() or None
    try:
        key = Path(path).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise Problem(f"VAR_KEY_FILE cannot be read: {path}") from error
    if not (key and key.isascii() and key.isprintable()):
        raise Problem(f"VAR_KEY_FILE holds no key: {path}")
    return key


def serve_command(port: int) -> list[str]:
    """Raises Problem where a setting is missing."""
    model = os.path.expanduser(setting("VAR_MODEL"))
    if not model:
        raise Problem("set VAR_MODEL in the plugin's settings")
    program = file_setting("VAR_MLX_SPEC")
    if program and not shutil.which(program):
        raise Problem(f"VAR_MLX_SPEC is not a program: {program}")
    if not program:
        places = [os.environ.get("PATH", os.defpath), *map(os.path.expanduser, PLACES)]
        program = shutil.which(NAME, path=os.pathsep.join(places)) or ""
    if not program:
        raise Problem("mlx-spec was not found; set VAR_MLX_SPEC")
    command = [os.path.abspath(program), "serve", "--model", model, "--port", str(port)]
    key_setting()
    key_file = file_setting("VAR_KEY_FILE")
    return [*command, "--api-key-file", os.path.abspath(key_file)] if key_file else command


def log_path() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Logs" / "mlx-spec.log"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mlx-spec.log"


# The server


def get(port: int, path: str, key: str | None = None) -> tuple[int, Any]:
    """HTTP status and JSON. All of it takes HTTP_S at most, however slowly the bytes come."""
    outcome: queue.SimpleQueue = queue.SimpleQueue()

    def ask() -> None:
        try:
            outcome.put(request(port, path, key))
        except Exception as error:
            outcome.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        result = outcome.get(timeout=HTTP_S)
    except queue.Empty:
        raise NoAnswer(f"No answer on port {port} within {HTTP_S:.0f} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def request(port: int, path: str, key: str | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(HOST, port, timeout=2 * HTTP_S)  # ends the thread
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as response:
            body = response.read(MAX_BYTES)
            if response.length:
                raise http.client.IncompleteRead(body)
            return response.status, json.loads(body)
    except http.client.IncompleteRead as error:
        raise NoAnswer(f"Half an answer on port {port}") from error
    except ConnectionRefusedError as error:
        raise NoServer(f"No server on port {port}") from error
    except OSError as error:
        raise NoAnswer(f"No answer on port {port}: {error.strerror or error}") from error
    except (http.client.HTTPException, ValueError, RecursionError) as error:
        raise Foreign(port) from error
    finally:
        connection.close()


def ask_health(port: int) -> dict[str, Any]:
    _, body = get(port, "/health")
    if not isinstance(body, dict) or body.get("server") != NAME:
        raise Foreign(port)
    return body


def ask_numbers(port: int) -> dict[str, Any]:
    status, body = get(port, "/v1/spec/status", key_setting())
    if status in (401, 403):
        raise Problem("the server wants its API key; set VAR_KEY_FILE")
    if status != 200 or not isinstance(body, dict):
        raise Problem(f"the server answered {status}")
    return body


# What the menu says


def plain(value: Any, limit: int = 160) -> str:
    """Text that cannot be taken for a line, a parameter or an escape sequence of the menu."""
    if not isinstance(value, str):
        return ""
    text = "".join(c if c.isprintable() else " " for c in value.replace("|", "\N{BROKEN BAR}"))
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def number(value: Any) -> float | None:
    """A finite number that is not negative, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def model_name(path: Any) -> str:
    """The short name of a directory, or ORG/REPO of one in the Hugging Face cache."""
    text = plain(path)
    parts = text.rstrip("/").split("/")
    for part in parts:
        if part.startswith("models--"):
            return part[len("models--") :].replace("--", "/")
    return parts[-1] if text.startswith("/") else text


def rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def size(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def done_and_total(health: dict[str, Any]) -> tuple[float, float] | None:
    progress = health.get("progress")
    if not isinstance(progress, dict):
        return None
    done, total = number(progress.get("done")), number(progress.get("total"))
    return (min(done, total), total) if done is not None and total else None


def spec_of(health: dict[str, Any]) -> dict[str, Any]:
    spec = health.get("spec")
    return spec if isinstance(spec, dict) else {}


def phase_of(health: dict[str, Any]) -> str:
    return plain(health.get("phase"), 20) or "?"


def is_undrafted(health: dict[str, Any]) -> bool:
    return phase_of(health) not in UNLOADED and spec_of(health).get("state") in UNDRAFTED


def bar_title(health: dict[str, Any], numbers: dict[str, Any]) -> str:
    phase = phase_of(health)
    progress = done_and_total(health)
    now = number(numbers.get("tokens_per_second"))
    speed = number(numbers.get("tokens_per_second_average")) if now is None else now
    acceptance = number(numbers.get("acceptance"))
    if phase in ("loading", "prefill") and progress:
        title = f"{phase} {100 * progress[0] / progress[1]:.0f} %"
    elif phase in ("loading", "prefill"):
        title = phase
    elif phase in ("starting", "stopping", "failed") or speed is None:
        title = f"{NAME} {phase}"
    elif acceptance is None:
        title = f"{rate(speed)} t/s"
    else:
        title = f"{rate(speed)} t/s {acceptance:.2f}"
    return WARNING + title if phase == "failed" or is_undrafted(health) else title


def health_items(health: dict[str, Any]) -> list[str]:
    phase, spec, progress = phase_of(health), spec_of(health), done_and_total(health)
    model, drafter = model_name(health.get("model")), model_name(health.get("drafter"))
    items = [item(f"Model: {model}", **AS_IT_IS)] if model else []
    if drafter or (model and phase not in UNLOADED):
        items.append(item(f"Drafter: {drafter or 'none'}", **AS_IT_IS))
    state = f"State: {phase}"
    if phase == "loading" and progress:
        state += f", {size(progress[0])} of {size(progress[1])}"
    elif phase == "prefill" and progress:
        state += f", {progress[0]:.0f} of {progress[1]:.0f} tokens"
    elif phase == "decode" and spec.get("state") == "drafting":
        state += ", drafting"
    items.append(state)
    if is_undrafted(health):
        reasons = filter(None, (plain(spec.get("reason")), plain(spec.get("detail"))))
        items.append(item("No drafts: " + (": ".join(reasons) or "no reason given"), **AS_IT_IS))
    return items


def number_items(numbers: dict[str, Any]) -> list[str]:
    value = {name: number(numbers.get(name)) for name in numbers}.get
    now, average = value("tokens_per_second"), value("tokens_per_second_average")
    speeds = [f"{now:.1f} t/s now"] if now is not None else []
    speeds += [f"{average:.1f} t/s on average"] if average is not None else []
    items = ["Speed: " + ", ".join(speeds)] if speeds else []
    acceptance, drafted, accepted = value("acceptance"), value("draft_n"), value("draft_n_accepted")
    if acceptance is not None:
        counts = ""
        if drafted is not None and accepted is not None:
            counts = f" ({accepted:.0f} of {drafted:.0f} drafts)"
        items.append(f"Acceptance: {acceptance:.2f}{counts}")
    depth, per_round = value("depth"), value("tokens_per_round")
    items += [f"Depth: {depth:.0f}"] if depth else []
    items += [f"Tokens per round: {per_round:.2f}"] if per_round is not None else []
    active, waiting = value("requests_active"), value("requests_waiting")
    if active or waiting:
        items.append(f"Requests: {active or 0:.0f} active, {waiting or 0:.0f} waiting")
    memory, peak = value("memory_active_bytes"), value("memory_peak_bytes")
    if memory is not None:
        items.append(f"Memory: {size(memory)}" + (f", peak {size(peak)}" if peak else ""))
    if plain(numbers.get("last_error")):
        items.append(item(f"Last error: {plain(numbers['last_error'])}", **AS_IT_IS))
    return items


def last_error() -> str:
    """What is wrong, if the log ends with an error; or ""."""
    try:
        with log_path().open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return plain(last[len("Error: ") :]) if last.startswith("Error: ") else ""


# The menu


def item(title: str, **parameters: str) -> str:
    if not parameters:
        return title
    return f"{title} | " + " ".join(f"{name}={value}" for name, value in parameters.items())


def call(title: str, action: str) -> str:
    """An entry that calls this script."""
    path = os.path.abspath(__file__)
    quote = "'" if '"' in path else '"'
    bash = quote + path + quote
    return item(title, bash=bash, param1=action, terminal="false", refresh="true")


def start_item(port: int) -> str:
    try:
        serve_command(port)
    except Problem as problem:
        return item(f"To start the server: {plain(str(problem))}", **AS_IT_IS)
    return call("Start server", "start")


def menu() -> list[str]:
    """Its lines. The first one is what the bar shows."""
    try:
        port = port_setting()
    except Problem as problem:
        return [WARNING + NAME, "---", item(plain(str(problem)), **AS_IT_IS), *last_items()]
    try:
        health = ask_health(port)
    except NoServer as problem:
        error = last_error()
        said = [item(f"Last error: {error}", **AS_IT_IS)] if error else []
        lines = [f"{NAME} off", "---", f"{problem}", *said, "---", start_item(port)]
        return [*lines, *last_items()[1:]]
    except Foreign as problem:
        return [f"{NAME} off", "---", f"{problem}", *last_items()]
    except NoAnswer as problem:
        return [f"{NAME} ?", "---", plain(str(problem)), *last_items()]
    numbers: dict[str, Any] = {}
    items = health_items(health)
    if phase_of(health) not in UNLOADED:
        try:
            numbers = ask_numbers(port)
            items += number_items(numbers)
        except Problem as problem:
            items.append(item(f"No numbers: {plain(str(problem))}", **AS_IT_IS))
    version, pid = plain(health.get("version"), 20), health.get("pid")
    items.append(f"{NAME} {version or '?'}, process {pid if is_pid(pid) else '?'}, port {port}")
    stop_items = ["---", call("Stop server", "stop"), *last_items()[1:]]
    return [bar_title(health, numbers), "---", *items, *stop_items]


def last_items() -> list[str]:
    log = [call("Open log", "log")] if log_path().is_file() else []
    return ["---", *log, item("Refresh", refresh="true")]


# Its entries


def start() -> str:
    port = port_setting()
    try:
        ask_health(port)
    except NoServer:
        pass
    else:
        return f"{NAME} runs already on port {port}."
    command = serve_command(port)
    with open_log() as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path.home(),
                start_new_session=True,
            )
        except OSError as error:
            raise Problem(f"{command[0]} cannot be started: {error.strerror}") from error
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if process.poll() is not None:
            raise Problem(last_error() or f"it ended with {process.returncode}; see {log_path()}")
        try:
            ask_health(port)
            break
        except Problem:
            continue
    return f"Started as process {process.pid}; log: {log_path()}"


def stop() -> str:
    port = port_setting()
    try:
        health = ask_health(port)
    except NoServer:
        return f"No server on port {port}."
    pid, launch_id = health.get("pid"), health.get("launch_id")
    if not is_server(pid):
        raise Problem(f"the server on port {port} is no process of mlx-spec here; not stopped")
    send(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while is_server(pid):
        if time.monotonic() > deadline:
            return kill(port, pid, launch_id)
        time.sleep(0.1)
    return f"Stopped process {pid}."


def kill(port: int, pid: int, launch_id: Any) -> str:
    """Only the very server that was asked to end."""
    try:
        health = ask_health(port)
    except Problem:
        health = {}
    if launch_id is None or (health.get("pid"), health.get("launch_id")) != (pid, launch_id):
        raise Problem(f"process {pid} does not answer any more, but has not ended")
    send(pid, signal.SIGKILL)
    return f"Process {pid} did not stop within {STOP_S:.0f} s; killed it."


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended by itself
    except OSError as error:
        raise Problem(f"process {pid} cannot be stopped: {error.strerror}") from error


def is_pid(value: Any) -> bool:
    """os.kill takes 0 and negative numbers for groups of processes."""
    return type(value) is int and 1 < value < 1 << 31


def is_server(pid: Any) -> bool:
    """Whether the process is alive and was started as `mlx-spec serve`, or `python -m mlx_spec
    serve`. Behind a forwarded port is another machine, whose numbers may be anybody's here."""
    if not is_pid(pid):
        return False
    command = ""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:  # macOS has no /proc
        ps = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        try:
            command = subprocess.run(ps, capture_output=True, timeout=HTTP_S).stdout.decode()
        except (OSError, subprocess.SubprocessError, ValueError):
            return False
    words = command.replace("\0", " ").split()
    programs = [w for w in words if os.path.basename(w).startswith((NAME, "mlx_spec"))]
    return bool(programs) and "serve" in words


def log() -> str:
    path = log_path()
    if not path.is_file():
        raise Problem(f"there is no log at {path} yet")
    if sys.platform == "darwin":
        subprocess.run(["open", str(path)], check=False)
    return str(path)


def open_log() -> Any:
    path = log_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def act(name: str) -> int:
    """A click has no place to show an error, so it goes to the log, whose end the menu shows."""
    try:
        print({"start": start, "stop": stop, "log": log}[name]())
    except (Problem, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        if name != "log" and last_error() != str(error):
            with open_log() as file:
                file.write(f"Error: {error}\n".encode())
        return 1
    return 0


def main(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    if arguments in (["start"], ["stop"], ["log"]):
        return act(arguments[0])
    if arguments:
        print("Error: the argument is start, stop, log or none.", file=sys.stderr)
        return 2
    try:
        lines = menu()
    except Exception as error:  # a traceback would be shown in the bar
        said = plain(f"This plugin failed: {type(error).__name__}: {error}")
        lines = [WARNING + NAME, "---", item(said, **AS_IT_IS), item("Refresh", refresh="true")]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
