"""Who answers while the server's process cannot."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from mlx_spec.server import porter
from mlx_spec.server.porter import Porter


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def at_the_door(listening):
    made = Porter(listening)
    yield made
    made.leave()
    made._process.wait(timeout=30)


def ask(listening, path, body=None):
    port = listening.getsockname()[1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=10)
    assert error.value.code == 503
    return json.load(error.value)


def test_health_is_what_it_was_told_last(listening, at_the_door):
    for done in (0, 5):
        at_the_door.tell({"phase": "loading", "progress": {"done": done, "total": 9}})
        deadline = time.monotonic() + 5
        while ask(listening, "/health?x=1").get("progress") != {"done": done, "total": 9}:
            assert time.monotonic() < deadline


def test_health_waits_until_it_is_told(listening, at_the_door):
    """Half an answer would look like another program's."""
    threading.Timer(0.5, at_the_door.tell, [{"phase": "loading"}]).start()
    assert ask(listening, "/health") == {"phase": "loading"}


def test_other_requests_are_turned_away_with_a_reason(listening, at_the_door):
    expected = {"error": "The model is being loaded; try again soon."}
    assert ask(listening, "/v1/models") == expected
    assert ask(listening, "/v1/chat/completions", b"x" * 300_000) == expected


def test_after_it_has_left_the_server_takes_the_connections(listening, at_the_door):
    ask(listening, "/v1/models")
    at_the_door.leave()
    at_the_door._process.wait(timeout=30)
    listening.settimeout(5)
    with socket.create_connection(listening.getsockname()) as client:
        connection, _ = listening.accept()
        assert connection.getpeername() == client.getsockname()
        connection.close()


def test_once_it_has_left_it_answers_nobody(listening, at_the_door):
    """However slow it is: who was told that the server is ready must not meet it."""
    ask(listening, "/v1/models")
    at_the_door._process.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, at_the_door._process.send_signal, [signal.SIGCONT]).start()
    at_the_door.leave()
    with socket.create_connection(listening.getsockname()) as client:
        at_the_door._process.wait(timeout=30)
        listening.settimeout(5)
        connection, _ = listening.accept()
        assert connection.getpeername() == client.getsockname()
        connection.close()


def test_it_ends_with_its_server(listening, at_the_door):
    """Whose end closes the pipe; nothing else would tell it."""
    at_the_door._process.stdin.close()
    assert at_the_door._process.wait(timeout=30) == 0


def test_nothing_of_the_package_is_imported():
    """It must be there at once."""
    code = f"import runpy, sys; runpy.run_path({porter.__file__!r}); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert not {"mlx", "mlx_spec", "numpy"} & {name.split(".")[0] for name in result.stdout.split()}
