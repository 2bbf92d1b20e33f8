"""The menu-bar script, run as xbar runs it, against made-up servers and against the real one."""

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from serving import serving

from mlx_spec.demo import demo_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "menubar" / "mlx-spec.5s.py"
DOCUMENT = Path(__file__).parent.parent / "docs" / "menubar.md"
REFRESH = "Refresh | refresh=true"
STOP = f'Stop server | bash="{SCRIPT}" param1=stop terminal=false refresh=true'
START = f'Start server | bash="{SCRIPT}" param1=start terminal=false refresh=true'
# The script itself gives a server one second, which a busy machine may need to start a thread.
PATIENT = """
import sys
sys.argv.pop(0)
with open(sys.argv[0], encoding="utf-8") as file:
    source = file.read().replace("HTTP_S = 1.0", "HTTP_S = 10.0")
names = {"__name__": "__main__", "__file__": sys.argv[0]}
exec(compile(source, sys.argv[0], "exec"), names)
"""
LOG = f'Open log | bash="{SCRIPT}" param1=log terminal=false refresh=true'
AS_IT_IS = " | emojize=false ansi=false"
KEY = "secret"

HEALTH = {
    "status": "ok",
    "server": "mlx-spec",
    "phase": "idle",
    "progress": None,
    "pid": 4242,
    "version": "0.1.0",
    "launch_id": "a1",
    "started_at": 1.0,
    "model": "/models/Qwen3.5-9B-4bit",
    "drafter": "/models/Qwen3.5-9B-MTP",
    "spec": {"engaged": False, "state": "idle", "reason": None, "detail": None, "depth": 0},
}
NUMBERS = {
    "schema_version": 1,
    "requests_active": 0,
    "requests_waiting": 0,
    "tokens_per_second": None,
    "tokens_per_second_average": 40.14,
    "draft_n": 1000,
    "draft_n_accepted": 710,
    "acceptance": 0.71,
    "tokens_per_round": 2.844,
    "depth": 0,
    "memory_active_bytes": 5_240_000_000,
    "memory_peak_bytes": 6_000_000_000,
    "last_error": None,
}
NOTHING_YET = {
    "tokens_per_second_average": None,
    "draft_n": 0,
    "draft_n_accepted": 0,
    "acceptance": None,
    "tokens_per_round": None,
}
MODEL_ITEMS = [f"Model: Qwen3.5-9B-4bit{AS_IT_IS}", f"Drafter: Qwen3.5-9B-MTP{AS_IT_IS}"]
NUMBER_ITEMS = [
    "Speed: 40.1 t/s on average",
    "Acceptance: 0.71 (710 of 1000 drafts)",
    "Tokens per round: 2.84",
    "Memory: 5.2 GB, peak 6.0 GB",
]


class FakeServer(ThreadingHTTPServer):
    """Answers /health and /v1/spec/status with what it is given: objects, or raw bytes.

    Attributes:
        announced: bytes that Content-Length promises beyond the body.
        delay_s: before an answer.
        drip_s: after each of its bytes.
    """

    daemon_threads = True

    def __init__(self, health=HEALTH, numbers=NUMBERS, *, code=200, key=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.health, self.numbers, self.code, self.key = health, numbers, code, key
        self.delay_s = self.drip_s = self.announced = 0
        self.paths = []
        self.port = self.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        time.sleep(server.delay_s)
        code, body = server.code, server.health
        if self.path == "/v1/spec/status":
            code, body = 200, server.numbers
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                code, body = 401, {"error": "The API key is missing or wrong."}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data) + server.announced))
        self.end_headers()
        for byte in [data[i : i + 1] for i in range(len(data))] if server.drip_s else [data]:
            self.wfile.write(byte)
            time.sleep(server.drip_s)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def home(tmp_path):
    path = tmp_path / "home"
    path.mkdir()
    return path


@pytest.fixture
def call(home):
    """Runs the script with a GUI app's bare environment; returns the finished process."""

    def run(*arguments, script=SCRIPT, patient=True, **variables):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "LC_ALL": "C"}
        environment |= {name: str(value) for name, value in variables.items()}
        return subprocess.run(
            [sys.executable, *(["-c", PATIENT] if patient else []), script, *arguments],
            capture_output=True,
            encoding="utf-8",
            env=environment,
            timeout=60,
        )

    return run


@pytest.fixture
def menu(call):
    """The lines that the script prints."""

    def lines(server=None, patient=True, **variables):
        if server is not None:
            variables["VAR_PORT"] = server.port
        process = call(patient=patient, **variables)
        assert (process.returncode, process.stderr) == (0, "")
        return process.stdout.splitlines()

    return lines


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def last_items(server):
    return [f"mlx-spec 0.1.0, process 4242, port {server.port}", "---", STOP, REFRESH]


# The file


def test_it_compiles_without_warnings(tmp_path):
    copy = shutil.copy(SCRIPT, tmp_path)
    subprocess.run([sys.executable, "-W", "error", "-m", "py_compile", copy], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_it_needs_only_the_python_of_macos():
    source = SCRIPT.read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules <= sys.stdlib_module_names
    assert "from __future__ import annotations" in source  # types may be newer


def test_metadata():
    head = SCRIPT.read_text().partition('"""')[0]
    for tag in ("title", "version", "author", "desc", "dependencies"):
        assert head.count(f"<xbar.{tag}>") == head.count(f"</xbar.{tag}>") == 1
    for variable in ('VAR_MODEL=""', "VAR_PORT=8484", 'VAR_MLX_SPEC=""', 'VAR_KEY_FILE=""'):
        assert f"({variable}): " in head


# The menu of a running server


def test_idle(menu):
    with FakeServer() as server:
        assert menu(server) == [
            "40 t/s 0.71",
            "---",
            *MODEL_ITEMS,
            "State: idle",
            *NUMBER_ITEMS,
            *last_items(server),
        ]


def test_idle_before_the_first_request(menu):
    with FakeServer(numbers=NUMBERS | NOTHING_YET) as server:
        assert menu(server) == [
            "mlx-spec idle",
            "---",
            *MODEL_ITEMS,
            "State: idle",
            "Memory: 5.2 GB, peak 6.0 GB",
            *last_items(server),
        ]


def test_decode(menu):
    spec = {"engaged": True, "state": "drafting", "reason": None, "detail": None, "depth": 3}
    now = {"tokens_per_second": 42.4, "depth": 3, "requests_active": 1, "requests_waiting": 2}
    with FakeServer(HEALTH | {"phase": "decode", "spec": spec}, NUMBERS | now) as server:
        assert menu(server) == [
            "42 t/s 0.71",
            "---",
            *MODEL_ITEMS,
            "State: decode, drafting",
            "Speed: 42.4 t/s now, 40.1 t/s on average",
            "Acceptance: 0.71 (710 of 1000 drafts)",
            "Depth: 3",
            "Tokens per round: 2.84",
            "Requests: 1 active, 2 waiting",
            "Memory: 5.2 GB, peak 6.0 GB",
            *last_items(server),
        ]


def test_prefill(menu):
    health = HEALTH | {"phase": "prefill", "progress": {"done": 300, "total": 1000}}
    with FakeServer(health) as server:
        lines = menu(server)
        assert lines[0] == "prefill 30 %"
        assert "State: prefill, 300 of 1000 tokens" in lines


@pytest.mark.parametrize(
    ("phase", "progress", "title", "state"),
    [
        (
            "loading",
            {"done": 1_200_000_000, "total": 3_000_000_000},
            "loading 40 %",
            "State: loading, 1.2 GB of 3.0 GB",
        ),
        ("loading", {"done": 0, "total": 0}, "loading", "State: loading"),
        ("starting", None, "mlx-spec starting", "State: starting"),
        ("stopping", None, "mlx-spec stopping", "State: stopping"),
    ],
)
def test_not_serving(menu, phase, progress, title, state):
    health = HEALTH | {"status": "loading", "phase": phase, "progress": progress}
    health |= {"drafter": None, "spec": HEALTH["spec"] | {"state": "off"}}
    with FakeServer(health, code=503) as server:
        assert menu(server) == [title, "---", MODEL_ITEMS[0], state, *last_items(server)]
        assert server.paths == ["/health"]


def test_failed(menu):
    error = {"last_error": "[metal::malloc] 9 | 8\nbytes"}
    health = HEALTH | {"status": "unavailable", "phase": "failed"}
    with FakeServer(health, NUMBERS | error, code=503) as server:
        lines = menu(server)
        assert lines[0] == "⚠ mlx-spec failed"
        assert f"Last error: [metal::malloc] 9 ¦ 8 bytes{AS_IT_IS}" in lines


def test_no_drafter(menu):
    reason = {"state": "off", "reason": "no-drafter", "detail": "none in /m|n\nor beside it"}
    health = HEALTH | {"drafter": None, "spec": HEALTH["spec"] | reason}
    undrafted = {"draft_n": 0, "draft_n_accepted": 0, "acceptance": None, "tokens_per_round": None}
    with FakeServer(health, NUMBERS | undrafted) as server:
        assert menu(server) == [
            "⚠ 40 t/s",
            "---",
            MODEL_ITEMS[0],
            f"Drafter: none{AS_IT_IS}",
            "State: idle",
            f"No drafts: no-drafter: none in /m¦n or beside it{AS_IT_IS}",
            "Speed: 40.1 t/s on average",
            "Memory: 5.2 GB, peak 6.0 GB",
            *last_items(server),
        ]


def test_standing_down(menu):
    spec = HEALTH["spec"] | {"state": "standing-down", "reason": "batch"}
    health = HEALTH | {"phase": "decode", "spec": spec}
    with FakeServer(health, NUMBERS | {"tokens_per_second": 4.24}) as server:
        lines = menu(server)
        assert lines[0] == "⚠ 4.2 t/s 0.71"
        assert f"No drafts: batch{AS_IT_IS}" in lines


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/repo", "org/repo"),
        ("/a b/m:x/", "m:x"),
        ("/c/hub/models--google--gemma-4-assistant/snapshots/0a1b", "google/gemma-4-assistant"),
        ("a" * 300, "a" * 159 + "…"),
    ],
)
def test_names_of_models(menu, path, name):
    with FakeServer(HEALTH | {"model": path}) as server:
        assert menu(server)[2] == f"Model: {name}{AS_IT_IS}"


def test_an_api_key(menu, home):
    (home / "key file").write_text(f"{KEY}\n")
    with FakeServer(key=KEY) as server:
        without = menu(server)
        assert without[0] == "mlx-spec idle"
        assert f"No numbers: the server wants its API key; set VAR_KEY_FILE{AS_IT_IS}" in without
        assert without[-3:] == ["---", STOP, REFRESH]
        assert menu(server, VAR_KEY_FILE="~/key file")[0] == "40 t/s 0.71"
        assert menu(server, MLX_SPEC_API_KEY=KEY)[0] == "40 t/s 0.71"
        missing = menu(server, VAR_KEY_FILE="/no/key")
        assert f"No numbers: VAR_KEY_FILE cannot be read: /no/key{AS_IT_IS}" in missing


# The menu of other things on the port


def test_no_server(menu):
    port = free_port()
    assert menu(VAR_PORT=port) == [
        "mlx-spec off",
        "---",
        f"No server on port {port}",
        "---",
        f"To start the server: set VAR_MODEL in the plugin's settings{AS_IT_IS}",
        REFRESH,
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>It works</html>",
        b'{"server": "mlx-spec", ',
        b"[" * 100_000,
        b"\xff\xfe",
        {"status": "ok", "server": "other"},
        ["mlx-spec"],
    ],
)
def test_another_server(menu, body):
    with FakeServer(body) as server:
        assert menu(server, VAR_MODEL="m", VAR_MLX_SPEC=sys.executable) == [
            "mlx-spec off",
            "---",
            f"Port {server.port} is used by another program",
            "---",
            REFRESH,
        ]
        assert server.paths == ["/health"]


@pytest.mark.parametrize("trouble", [{"delay_s": 1.5}, {"drip_s": 0.1}])
def test_a_slow_server(menu, trouble):
    with FakeServer() as server:
        vars(server).update(trouble)
        assert menu(server, patient=False) == [
            "mlx-spec ?",
            "---",
            f"No answer on port {server.port} within 1 s",
            "---",
            REFRESH,
        ]


def test_half_an_answer(menu):
    with FakeServer() as server:
        server.announced = 10
        assert menu(server)[:3] == ["mlx-spec ?", "---", f"Half an answer on port {server.port}"]


def test_no_numbers(menu):
    with FakeServer(numbers=b"{") as server:
        lines = menu(server)
        assert lines[0] == "mlx-spec idle"
        assert f"No numbers: Port {server.port} is used by another program{AS_IT_IS}" in lines


def test_values_that_make_no_sense(menu):
    health = {name: {"a": [1]} for name in HEALTH} | {"server": "mlx-spec"}
    numbers = {name: float("nan") for name in NUMBERS} | {"depth": 10**400, "acceptance": True}
    with FakeServer(health, numbers) as server:
        assert menu(server) == [
            "mlx-spec ?",
            "---",
            "State: ?",
            f"mlx-spec ?, process ?, port {server.port}",
            "---",
            STOP,
            REFRESH,
        ]
    health = HEALTH | {"phase": "\ud800 | bash=x\n---", "model": "\x1b[31m\u202e"}
    with FakeServer(health, numbers) as server:
        assert menu(server)[:3] == ["mlx-spec ¦ bash=x ---", "---", f"Model: [31m{AS_IT_IS}"]


@pytest.mark.parametrize("port", ["0", "70000", "84|84", "٣"])
def test_a_port_that_is_none(menu, port):
    said = f"VAR_PORT is not a port: {port.replace('|', '¦')}{AS_IT_IS}"
    assert menu(VAR_PORT=port) == ["⚠ mlx-spec", "---", said, "---", REFRESH]


def test_unknown_argument(call):
    process = call("restart")
    assert process.returncode == 2
    assert process.stderr == "Error: the argument is start, stop, log or none.\n"


# Start, stop and log, with a stand-in for the command

STAND_IN = """#!{python}
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

if "FAIL" in os.environ:
    sys.exit("Error: The model is missing.")
port = int(sys.argv[sys.argv.index("--port") + 1])
about = dict(argv=sys.argv[1:], pid=os.getpid(), session=os.getsid(0), cwd=os.getcwd())
Path(__file__ + ".started").write_text(json.dumps(about))
print("on stdout", flush=True)
print("on stderr", file=sys.stderr)
stop = signal.SIG_IGN if "STUBBORN" in os.environ else lambda *_: os._exit(0)
signal.signal(signal.SIGTERM, stop)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({health} | dict(pid=os.getpid())).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


not_installed = pytest.mark.skipif(
    shutil.which("mlx-spec", path="/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin") is not None,
    reason="this machine has an mlx-spec of its own, which the script finds first",
)


class StandIn:
    """A program that serves /health, ~/.local/bin/mlx-spec."""

    def __init__(self, home):
        self.port = free_port()
        logs = "Library/Logs" if sys.platform == "darwin" else ".local/state"
        self.log = home / logs / "mlx-spec.log"
        self.path = home / ".local" / "bin" / "mlx-spec"
        self.path.parent.mkdir(parents=True)
        self.path.write_text(STAND_IN.format(python=sys.executable, health=HEALTH))
        self.path.chmod(0o755)

    @property
    def started(self):
        return json.loads(Path(f"{self.path}.started").read_text())

    def answers(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except ConnectionRefusedError:
            return False
        return True


@pytest.fixture
def stand_in(home):
    stand_in = StandIn(home)
    yield stand_in
    if stand_in.answers():
        os.kill(stand_in.started["pid"], signal.SIGKILL)


@not_installed
def test_start_and_stop(call, menu, stand_in, home):
    variables = {"VAR_PORT": stand_in.port, "VAR_MODEL": "~/a model"}
    assert menu(**variables)[3:] == ["---", START, REFRESH]
    (home / "key").write_text(KEY)

    process = call("start", **variables, VAR_KEY_FILE="~/key")
    assert process.returncode == 0, process.stderr
    started = stand_in.started
    assert process.stdout == f"Started as process {started['pid']}; log: {stand_in.log}\n"
    port, key = str(stand_in.port), str(home / "key")
    assert started["argv"] == [
        "serve", "--model", str(home / "a model"), "--port", port, "--api-key-file", key,
    ]  # fmt: skip
    assert started["session"] == started["pid"]
    assert started["cwd"] == str(home)
    assert stand_in.log.read_text().startswith("on stdout\non stderr\n")
    assert stand_in.log.stat().st_mode & 0o777 == 0o600
    assert menu(**variables)[-4:] == ["---", STOP, LOG, REFRESH]

    again = call("start", **variables)
    assert again.stdout == f"mlx-spec runs already on port {port}.\n"
    assert stand_in.started == started

    stopped = call("stop", VAR_PORT=port)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout == f"Stopped process {started['pid']}.\n"
    assert not stand_in.answers()
    assert menu(**variables) == [
        "mlx-spec off", "---", f"No server on port {port}", "---", START, LOG, REFRESH,
    ]  # fmt: skip
    assert call("stop", VAR_PORT=port).stdout == f"No server on port {port}.\n"


def test_a_server_that_does_not_stop_is_killed(call, stand_in):
    variables = {"VAR_PORT": stand_in.port, "VAR_MODEL": "m", "VAR_MLX_SPEC": stand_in.path}
    assert call("start", **variables, STUBBORN=1).returncode == 0
    pid = stand_in.started["pid"]
    process = call("stop", **variables)
    assert process.stdout == f"Process {pid} did not stop within 3 s; killed it.\n"
    assert not stand_in.answers()


def test_a_start_that_fails(call, menu, stand_in):
    variables = {"VAR_PORT": stand_in.port, "VAR_MODEL": "m", "VAR_MLX_SPEC": stand_in.path}
    process = call("start", **variables, FAIL=1)
    assert process.returncode == 1
    assert process.stderr == "Error: The model is missing.\n"
    assert stand_in.log.read_text() == "Error: The model is missing.\n"
    lines = menu(**variables)
    assert lines[0] == "mlx-spec off"
    assert lines[3] == f"Last error: The model is missing.{AS_IT_IS}"


@pytest.mark.skipif(sys.platform == "darwin", reason="it would open a window")
def test_log(call, home):
    path = home / ".local" / "state" / "mlx-spec.log"
    assert call("log").stderr == f"Error: there is no log at {path} yet\n"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert call("log", XDG_STATE_HOME=path.parent).stdout == f"{path}\n"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "set VAR_MODEL in the plugin's settings"),
        pytest.param(
            {"VAR_MODEL": "m"}, "mlx-spec was not found; set VAR_MLX_SPEC", marks=not_installed
        ),
        ({"VAR_MODEL": "m", "VAR_MLX_SPEC": "/no"}, "VAR_MLX_SPEC is not a program: /no"),
        (
            {"VAR_MODEL": "m", "VAR_MLX_SPEC": sys.executable, "VAR_KEY_FILE": "/no"},
            "VAR_KEY_FILE cannot be read: /no",
        ),
        (
            {"VAR_MODEL": "m", "VAR_MLX_SPEC": sys.executable, "VAR_KEY_FILE": os.devnull},
            f"VAR_KEY_FILE holds no key: {os.devnull}",
        ),
    ],
)
def test_a_setting_that_start_needs(menu, variables, sentence):
    lines = menu(VAR_PORT=free_port(), **variables)
    assert lines[-2] == f"To start the server: {sentence}{AS_IT_IS}"


def test_a_click_on_start_without_a_model(call, menu):
    port, sentence = free_port(), "set VAR_MODEL in the plugin's settings"
    process = call("start", VAR_PORT=port)
    assert (process.returncode, process.stderr) == (1, f"Error: {sentence}\n")
    assert menu(VAR_PORT=port)[3] == f"Last error: {sentence}{AS_IT_IS}"


def test_settings_of_a_click(call, stand_in, home):
    """xbar passes no variables then; they are in the file that it keeps beside the plugin."""
    script = home / "Application Support" / "mlx-spec.5s.py"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    variables = {
        "VAR_PORT": stand_in.port,
        "VAR_MODEL": "/in/file",
        "VAR_MLX_SPEC": "~/.local/bin/mlx-spec",
    }
    Path(f"{script}.vars.json").write_text(json.dumps(variables))
    menu = call(script=script).stdout
    assert f'Start server | bash="{script}" param1=start terminal=false refresh=true' in menu
    assert call("start", script=script).returncode == 0
    assert "/in/file" in stand_in.started["argv"]
    assert call("stop", script=script).stdout == f"Stopped process {stand_in.started['pid']}.\n"


@pytest.fixture
def bystander():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_stop_leaves_other_servers_alone(call, bystander):
    with FakeServer({"server": "other", "pid": bystander.pid}) as server:
        process = call("stop", VAR_PORT=server.port)
        assert process.returncode == 1
        assert process.stderr == f"Error: Port {server.port} is used by another program\n"
        assert bystander.poll() is None


@pytest.mark.parametrize("pid", [None, 0, -1, True, "7"])
def test_stop_takes_only_a_process_number(call, pid):
    with FakeServer(HEALTH | {"pid": pid}) as server:
        assert "not stopped" in call("stop", VAR_PORT=server.port).stderr


def test_stop_takes_only_a_process_of_mlx_spec(call, bystander):
    """A port that is forwarded from another machine gives that machine's numbers."""
    with FakeServer(HEALTH | {"pid": bystander.pid}) as server:
        process = call("stop", VAR_PORT=server.port)
        assert process.returncode == 1
        assert "is no process of mlx-spec here; not stopped" in process.stderr
        assert bystander.poll() is None


# The real server


@pytest.fixture
def real_server():
    """`mlx-spec serve` with the demo model, ready. Tests against it belong here."""
    with serving() as served:
        yield served


def documented(heading):
    """The names in the first column of the tables below a heading of docs/menubar.md."""
    section = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return set(re.findall(r"`([\w.]+)`", " ".join(cells)))


def test_the_real_server(menu, call, real_server):
    port, pid = real_server.port, real_server.pid
    assert menu(real_server)[0] == "mlx-spec idle"

    body = {"messages": [{"role": "user", "content": "def main():"}], "max_tokens": 60}
    timings = real_server.post("/v1/chat/completions", body)["timings"]
    real_server.wait_until_idle()
    drafted, accepted = timings["draft_n"], timings["draft_n_accepted"]
    assert accepted > 0
    lines = menu(real_server)
    speed, unit, acceptance = lines[0].split()
    assert float(speed) == pytest.approx(timings["predicted_per_second"], rel=0.1)
    assert (unit, acceptance) == ("t/s", f"{accepted / drafted:.2f}")
    assert f"Acceptance: {acceptance} ({accepted} of {drafted} drafts)" in lines
    name = f"{demo_model().name}{AS_IT_IS}"
    assert lines[2:5] == [f"Model: {name}", f"Drafter: {name}", "State: idle"]
    assert lines[-4] == f"mlx-spec {real_server.ready['version']}, process {pid}, port {port}"

    assert documented("Numbers") == set(real_server.status())
    health = real_server.health()
    assert documented("Health") == {f"spec.{name}" for name in health.pop("spec")} | set(health)
    names = set(re.findall(r"^mlx_spec:(\w+)", real_server.metrics(), re.MULTILINE))
    ours = {"requests_total", "memory_active_bytes", "memory_peak_bytes"}
    assert documented("Metrics") == names - ours

    assert call("stop", VAR_PORT=port).stdout == f"Stopped process {pid}.\n"
    assert real_server.process.wait(timeout=30) == 0
