"""`mlx-spec serve` as a process: what the program that starts it can rely on."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from fake_hub import fake_hub
from serving import COMMAND, serving

from mlx_spec.errors import (
    BadArguments,
    OutOfMemory,
    UnusableDrafter,
    is_out_of_memory,
    reported_as,
)
from mlx_spec.server import process as process_module
from mlx_spec.server.serve import KEY_VARIABLE, ServeParser, read_key
from models import DEMO, GEMMA_DEMO, checkpoint_path, drafter_path


def failing(*options, env=None):
    """Exit code and stderr of a server that should not start. Nothing is on stdout."""
    result = subprocess.run(
        [sys.executable, "-m", "mlx_spec", "serve", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (env or {}),
    )
    assert result.stdout == ""
    return result.returncode, result.stderr


@contextmanager
def started(*options, model=None):
    """A server as a process, with all pipes in hand."""
    model = model or checkpoint_path(DEMO)
    process = subprocess.Popen(
        [*COMMAND, "--model", str(model), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended_within(seconds, pid):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if os.path.exists(f"/proc/{pid}/stat"):
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        time.sleep(0.05)
    return False


def test_ready_is_the_one_line_on_stdout_and_the_ready_file(tmp_path):
    ready_file, log_file = tmp_path / "ready.json", tmp_path / "log"
    options = ["--ready-file", ready_file, "--launch-id", "abc", "--log-file", log_file]
    with started(*options) as process:
        ready = json.loads(process.stdout.readline())
        assert json.loads(ready_file.read_text()) == ready
        assert (ready["event"], ready["schema_version"]) == ("ready", 1)
        assert (ready["server"], ready["launch_id"]) == ("mlx-spec", "abc")
        assert (ready["host"], ready["pid"]) == ("127.0.0.1", process.pid)
        assert ready["url"] == f"http://127.0.0.1:{ready['port']}"
        assert ready["model"] == ready["drafter"] == str(checkpoint_path(DEMO))
        with urllib.request.urlopen(f"{ready['url']}/health") as answer:
            health = json.load(answer)
        assert {k: health[k] for k in ("pid", "launch_id", "model")} == {
            k: ready[k] for k in ("pid", "launch_id", "model")
        }
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert (out, err) == ("", "")
    assert not ready_file.exists()
    assert "Listening on" in log_file.read_text()


def test_log_json_tells_the_port_before_the_model_is_there(tmp_path):
    """The ready file is there between `ready` and `stopping`, whatever else happens then."""
    ready_file = tmp_path / "ready.json"
    with started("--log-json", "--ready-file", ready_file) as process:
        events = []
        while not events or events[-1]["event"] != "ready":
            events.append(json.loads(process.stdout.readline()))
            assert ready_file.exists() == (events[-1]["event"] == "ready")
        process.send_signal(signal.SIGINT)
        events.append(json.loads(process.stdout.readline()))
        assert not ready_file.exists()
        out, _ = process.communicate(timeout=30)
    events += map(json.loads, out.splitlines())
    kinds = [event["event"] for event in events]
    assert kinds[0] == "listening"
    assert kinds[-2:] == ["ready", "stopping"]
    assert set(kinds[1:-2]) <= {"loading"}
    assert events[0]["port"] == events[-2]["port"] > 0
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_process_in_the_middle_of_a_generation(name):
    with serving() as server:
        body = json.dumps({"prompt": "import os\n", "max_tokens": 100_000, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body)
        answer = urllib.request.urlopen(request, timeout=10)
        for _ in range(10):
            answer.readline()
        server.process.send_signal(getattr(signal, name))
        assert server.process.wait(timeout=30) == 0  # 100,000 tokens take much longer
        assert "Traceback" not in server.stderr_text()


def test_a_signal_while_the_model_is_loading():
    """The listening event comes before; there is nothing to wait for."""
    with started("--log-json") as process:
        assert json.loads(process.stdout.readline())["event"] == "listening"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_second_signal_does_not_wait_for_the_first():
    code = (
        "import os, runpy, signal, time\n"
        f"names = runpy.run_path({process_module.__file__!r})\n"
        "names['on_stop_signals'](lambda: print('stopping', flush=True))\n"
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=10
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "stopping\n", "")


def test_the_server_ends_with_its_parent():
    """The parent is killed with SIGKILL, so it cannot tell anyone."""
    parent = (
        "import subprocess, sys, os, time\n"
        "command = sys.argv[1:] + ['--watchdog-ppid', str(os.getpid())]\n"
        "print(subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline().decode())\n"
        "sys.stdout.flush(); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent, *COMMAND, "--model", str(checkpoint_path(DEMO))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        server = json.loads(process.stdout.readline())["pid"]
    finally:
        process.kill()
    assert ended_within(3, server)  # its parent is a zombie yet
    process.communicate()


def test_the_watched_process_may_be_another_than_the_parent():
    with subprocess.Popen(["sleep", "60"]) as watched:
        try:
            with serving("--watchdog-ppid", watched.pid) as server:
                assert server.health()["status"] == "ok"
                watched.kill()
                watched.wait()
                assert server.process.wait(timeout=30) == 0
        finally:
            watched.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "99999"], "99999 is not a port; give 0 to 65535."),
        (["--nope"], "unrecognized arguments: --nope"),
        (["--port", "0", "--host", "192.0.2.1"], "192.0.2.1, port 0: "),
        (["--port", "0", "--api-key-file", "/nope/key"], "No such file"),
        (["--port", "0", "--ready-file", "/nope/ready"], "The folder of --ready-file /nope/ready"),
    ],
)
def test_bad_arguments_are_2_and_one_line(options, words):
    code, text = failing(*options)
    assert code == 2
    assert text.startswith("Error: ")
    assert words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("process", ["0", "-1", "99999999999", "x"])
def test_the_watched_process_must_be_one(process, capfd):
    """Signals to 0 and -1 would reach others; nobody has the rest."""
    with pytest.raises(SystemExit) as end:
        ServeParser().parse_args(["--watchdog-ppid", process])
    assert end.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"Error: argument --watchdog-ppid: {process} is not the ID of a process;")


def test_where_a_key_comes_from(tmp_path, monkeypatch):
    """Without the end of its line. The file comes first."""
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "from the environment\n")
    assert read_key(None) == "from the environment"
    (tmp_path / "key").write_text("from a file\r\n")
    assert read_key(tmp_path / "key") == "from a file"
    for empty in ("", " \n"):
        monkeypatch.setenv(KEY_VARIABLE, empty)
        with pytest.raises(BadArguments, match="The API key is empty"):
            read_key(None)
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(BadArguments):
        read_key(tmp_path / "key")


def test_an_empty_key_is_refused(tmp_path):
    """It would let everybody in."""
    (tmp_path / "key").write_text("\n")
    code, text = failing("--port", "0", "--api-key-file", tmp_path / "key")
    assert (code, text.splitlines()) == (
        2,
        ["Error: The API key is empty; check --api-key-file or MLX_SPEC_API_KEY."],
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_7_and_nothing_is_loaded(address):
    """The other program may listen at another address of the same port."""
    with socket.create_server((address, 0)) as other:
        port = other.getsockname()[1]
        code, text = failing("--model", "/nope/model", "--port", port)
    assert code == 7
    assert text.startswith(f"Error: Port {port} of 127.0.0.1 is in use")
    assert len(text.splitlines()) == 1


def damaged_model(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint_path(DEMO), path)
    (path / "model.safetensors").write_bytes(b"not weights")
    return path


@pytest.mark.parametrize("model", ["missing", "damaged", "a drafter", "unreachable"])
def test_a_model_that_cannot_be_loaded_is_5(model, tmp_path):
    name = {
        "missing": "/nope/model",
        "damaged": damaged_model(tmp_path),
        "a drafter": drafter_path(GEMMA_DEMO),
        "unreachable": "someone/some-model",
    }[model]
    code, text = failing("--model", name, "--port", 0, env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert code == 5, text
    assert text.startswith("Error: ")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--model", "org/none"], 5, "Error: The model org/none does not exist, neither here nor"),
        (
            ["--model", checkpoint_path(DEMO), "--draft-model", "org/none"],
            4,
            "Error: The drafter org/none does not exist, neither here nor on the Hugging Face hub",
        ),
    ],
)
def test_a_repository_that_the_hub_does_not_have(options, code, words, tmp_path):
    """The hub's client writes to the log, too."""
    with fake_hub({}) as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        got, text = failing(*options, "--port", 0, env=env)
    assert got == code, text
    assert [line.startswith(words) for line in text.splitlines() if "INFO" not in line] == [True]


@pytest.mark.parametrize("drafter", ["missing", "of another model"])
def test_a_drafter_that_cannot_be_used_is_4(drafter):
    path = "/nope/drafter" if drafter == "missing" else drafter_path(GEMMA_DEMO)
    code, text = failing("--model", checkpoint_path(DEMO), "--draft-model", path, "--port", 0)
    assert code == 4, text
    assert text.startswith("Error: ")
    assert len(text.splitlines()) == 1


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[metal::malloc] Attempting to allocate 99 bytes which is greater than 9 bytes."),
    RuntimeError("[malloc] Unable to allocate 99 bytes."),
    RuntimeError(
        "[METAL] Command buffer execution failed: Insufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    ),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory_is_told_from_other_errors(error):
    assert is_out_of_memory(error)
    with pytest.raises(OutOfMemory), reported_as(UnusableDrafter):
        raise error
    with pytest.raises(UnusableDrafter, match="cannot be used"), reported_as(UnusableDrafter):
        raise RuntimeError("This cannot be used.")


def test_out_of_memory_while_loading_is_6(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import mlx.core as mx\n"
        "def fail(*arrays):\n"
        "    raise RuntimeError('[metal::malloc] Attempting to allocate 9 bytes')\n"
        "mx.eval = fail\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    code, text = failing("--model", checkpoint_path(DEMO), "--port", 0, env=env)
    assert code == 6, text
    assert text.startswith("Error: [metal::malloc] Attempting to allocate")
    assert len(text.splitlines()) == 1
