"""Two hundred requests, eight at a time, some of which are given up."""

import http.client
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import serving

REQUESTS = 200
AT_ONCE = 8
PROMPTS = [
    "import os\n\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def main():\n    parser = argparse.ArgumentParser()\n",
]
KINDS = [
    {},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 1},
    {"seed": 3, "temperature": 0.8, "top_p": 0.9},
    {"repetition_penalty": 1.2},
    {"stop": ["return"]},
]


def bodies():
    chosen = random.Random(5)
    for number in range(REQUESTS):
        body = {"prompt": chosen.choice(PROMPTS), "max_tokens": chosen.choice([1, 9, 24, 40])}
        body |= chosen.choice(KINDS)
        yield body, chosen.random() < 0.5, number % 5 == 0


def streamed(port, body, events):
    """The text of a streamed answer, or None where the client goes after so many events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    response = connection.getresponse()
    assert response.status == 200
    text, seen = "", 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        answer = json.loads(line[6:])
        assert "error" not in answer, answer
        text += answer["choices"][0]["text"]
        seen += 1
        if seen == events:
            response.close()
            connection.close()
            return None
    connection.close()
    return text


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def server():
    with serving("--prompt-cache-size", 2) as served:
        yield served


def test_every_text_is_right_and_nothing_is_left_behind(server):
    """The expected texts are those of the same requests one after the other."""
    wanted = {}
    for body, _, _ in bodies():
        key = json.dumps(body)
        if key not in wanted:
            wanted[key] = server.post("/v1/completions", body)["choices"][0]["text"]
    before = server.wait_until_idle()
    threads = len(os.listdir(f"/proc/{server.pid}/task"))
    memory = []

    def ask(request):
        body, stream, given_up = request
        if given_up:
            streamed(server.port, body, 1)
            return
        if stream:
            text = streamed(server.port, body, None)
        else:
            text = server.post("/v1/completions", body)["choices"][0]["text"]
        assert text == wanted[json.dumps(body)]

    for half in (slice(None, REQUESTS // 2), slice(REQUESTS // 2, None)):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask, list(bodies())[half]))
        after = server.wait_until_idle()
        memory.append((resident_bytes(server.pid), after["memory_active_bytes"]))
    assert after["requests_total"] - before["requests_total"] == REQUESTS
    assert after["draft_n_accepted"] > before["draft_n_accepted"]
    assert after["last_error"] is None
    assert server.health()["status"] == "ok"
    assert len(os.listdir(f"/proc/{server.pid}/task")) <= threads + 1
    (rss, active), (rss_after, active_after) = memory
    assert rss_after - rss < 30e6
    assert active_after - active < 2e6
    answer = server.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 40})
    assert answer["spec"]["engaged"]
    assert answer["spec"]["batched"] == 0
    assert "Traceback" not in server.stderr_text()
