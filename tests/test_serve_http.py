"""The endpoints of `mlx-spec serve`: health, status, metrics, keys, and what is refused."""

import http.client
import json
import socket
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import serving

from models import DEMO, GEMMA_DEMO, checkpoint_path

PROMPT = "import os\n\n\ndef read_lines(path):\n"
LONG = {"prompt": PROMPT, "max_tokens": 100_000}
STATUS_KEYS = {
    "schema_version": int,
    "server": str,
    "version": str,
    "pid": int,
    "launch_id": str,
    "uptime_s": float,
    "phase": str,
    "model": str,
    "drafter": str,
    "requests_total": int,
    "requests_active": int,
    "requests_waiting": int,
    "prompt_done": int,
    "prompt_total": int,
    "tokens": int,
    "tokens_per_second": float,
    "tokens_per_second_average": float,
    "draft_n": int,
    "draft_n_accepted": int,
    "acceptance": float,
    "tokens_per_round": float,
    "depth": int,
    "parked": bool,
    "spec_state": str,
    "spec_reason": str,
    "memory_active_bytes": int,
    "memory_peak_bytes": int,
    "last_error": str,
}


@pytest.fixture(scope="module")
def server():
    with serving() as served:
        yield served


class Streaming:
    """A streamed request of which as much is read as one likes."""

    def __init__(self, server, body, path="/v1/completions"):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        self.connection.request("POST", path, json.dumps(body | {"stream": True}))
        self.response = self.connection.getresponse()
        assert self.response.status == 200

    def events(self, count):
        found = []
        while len(found) < count:
            line = self.response.readline()
            assert line, "the answer ended"
            if line.startswith(b"data: "):
                found.append(line)
        return found

    def close(self):
        self.response.close()
        self.connection.close()


def until(condition, what, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


def test_health_and_status_of_an_idle_server(server):
    status, health = server.ask("/health")
    assert status == 200
    assert (health["status"], health["phase"], health["server"]) == ("ok", "idle", "mlx-spec")
    assert health["spec"] == {
        "engaged": False,
        "state": "idle",
        "reason": None,
        "detail": None,
        "depth": 0,
    }
    values = server.status()
    assert list(values) == list(STATUS_KEYS)
    assert len(values) <= 30
    assert values["schema_version"] == 1
    for name, kind in STATUS_KEYS.items():
        assert values[name] is None or isinstance(values[name], kind), name


def test_an_answer_says_what_was_drafted_and_the_counters_add_up(server):
    before = server.wait_until_idle()
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 40})
    timings, spec, usage = answer["timings"], answer["spec"], answer["usage"]
    assert spec["engaged"]
    assert (spec["reason"], spec["depth"], spec["batched"]) == (None, 3, 0)
    assert timings["draft_n"] > timings["draft_n_accepted"] > 0
    assert timings["draft_kind"] == "nextn"
    assert timings["predicted_n"] == usage["completion_tokens"] == 40
    assert timings["prompt_n"] == (
        usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    )
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"]
    assert sum(details.values()) == timings["draft_n"]
    after = server.wait_until_idle()
    for name in ("draft_n", "draft_n_accepted"):
        assert after[name] - before[name] == timings[name]
    assert after["requests_total"] - before["requests_total"] == 1


@pytest.mark.parametrize("seed", [None, 5])
def test_without_drafts_the_reason_is_told(server, seed):
    body = {"prompt": PROMPT, "max_tokens": 10, "num_draft_tokens": 0, "seed": seed}
    answer = server.post("/v1/completions", body)
    assert answer["timings"]["draft_n"] == answer["timings"]["draft_n_accepted"] == 0
    assert answer["spec"]["engaged"] is False
    assert answer["spec"]["reason"] == "num-draft-tokens-0"
    body = {"prompt": PROMPT, "max_tokens": 1, "seed": seed}
    assert server.post("/v1/completions", body)["spec"]["reason"] == "too-short"


def test_depth_and_law_of_a_request(server):
    """At a seed, the default law gives one text at any depth, stock's gives another."""
    sampled = {"prompt": PROMPT, "max_tokens": 40, "seed": 5, "temperature": 0.9}
    answers = {}
    for depth, law in [(0, "seed"), (3, "seed"), ("auto", "auto"), (3, "stock"), (3, "ratio")]:
        body = sampled | {"num_draft_tokens": depth, "sampling": law}
        answers[depth, law] = server.post("/v1/completions", body)
        spec = answers[depth, law]["spec"]
        assert spec["sampling"] == ("seed" if law == "auto" else law)
        assert spec["num_draft_tokens"] == depth
        assert spec["engaged"] == (depth != 0)
    texts = {key: answer["choices"][0]["text"] for key, answer in answers.items()}
    assert texts[0, "seed"] == texts[3, "seed"] == texts["auto", "auto"]
    assert len({texts[3, law] for law in ("seed", "stock", "ratio")}) == 3
    assert answers["auto", "auto"]["spec"]["state"] in ("active", "probing", "parked")
    assert answers[3, "seed"]["spec"]["state"] == "fixed"
    greedy = server.post("/v1/completions", {"prompt": PROMPT, "sampling": "ratio"})
    assert greedy["spec"]["sampling"] == "greedy"


def test_metrics_are_what_the_status_says(server):
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 40})
    values = server.wait_until_idle()
    families = text_string_to_metric_families(server.metrics())
    samples = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    for prefix in ("mlx_spec:", "llamacpp:"):
        assert samples[f"{prefix}spec_decode_num_draft_tokens_total",] == values["draft_n"]
        accepted = samples[f"{prefix}spec_decode_num_accepted_tokens_total",]
        assert accepted == values["draft_n_accepted"] > 0
        name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
        assert accepted == sum(samples[name, position] for position in "012")
        assert 0 < samples[f"{prefix}spec_decode_num_drafts_total",] <= values["draft_n"]
        assert samples[f"{prefix}requests_processing",] == 0
    outcomes = sum(v for (name, *_), v in samples.items() if name == "mlx_spec:requests_total")
    assert outcomes == values["requests_total"]


def test_phases_states_and_speed_of_health_while_decoding(server):
    """One request drafts; a second one makes both go on in a batch; then the first drafts again."""
    streams = [Streaming(server, LONG)]
    streams[0].events(20)
    health = server.health()
    assert health["phase"] == "decode"
    assert health["spec"]["state"] == "drafting"
    assert (health["spec"]["engaged"], health["spec"]["depth"]) == (True, 3)
    assert server.status()["tokens_per_second"] > 0
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        server.health()
        times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 0.05
    streams.append(Streaming(server, LONG))
    streams[1].events(5)
    health = server.health()
    assert health["spec"]["state"] == "standing-down"
    assert (health["spec"]["engaged"], health["spec"]["reason"]) == (False, "batch")
    assert server.status()["parked"] is True
    streams[1].close()
    drafted = server.status()["draft_n"]
    until(lambda: server.status()["draft_n"] > drafted + 5, "drafting again")
    assert server.health()["spec"]["state"] == "drafting"
    streams[0].close()
    server.wait_until_idle()


def test_a_client_that_goes_away_ends_its_generation(server):
    before = server.wait_until_idle()
    stream = Streaming(server, LONG)
    stream.events(3)
    stream.close()
    server.wait_until_idle()
    body = json.dumps(LONG).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as waiting:
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        waiting.sendall(head.encode() + body)
        until(lambda: server.status()["tokens"] > 3, "decoding")
    after = server.wait_until_idle()
    assert after["requests_total"] - before["requests_total"] == 2
    assert 'mlx_spec:requests_total{outcome="cancelled"}' in server.metrics()
    assert after["last_error"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "The body is not JSON"),
        ({"prompt": ""}, "prompt is not a text, or is empty."),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens must be of type int."),
        ({"prompt": "a", "num_draft_tokens": 33}, "num_draft_tokens must be at most 32."),
        ({"prompt": "a", "top_k": 5000}, "top_k is 5000; the model has 2048 tokens."),
        (
            {"prompt": "a", "logit_bias": {"2048": 1}},
            "logit_bias names token 2048; the model has 2048 tokens.",
        ),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias names token -1;"),
        ({"prompt": "a", "logprobs": 5}, "logprobs must be of type bool."),
    ],
)
def test_a_bad_request_is_400_and_the_next_one_is_served(server, body, words):
    status, answer = server.ask("/v1/completions", body)
    assert status == 400
    assert answer["error"].startswith(words)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})["choices"]


def test_bad_messages_are_400(server):
    for messages in (5, [{"role": "user", "content": [{"type": "video"}]}]):
        status, answer = server.ask("/v1/chat/completions", {"messages": messages})
        assert status == 400
        assert answer["error"]


def raw(server, text):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(text.encode())
        client.shutdown(socket.SHUT_WR)
        return client.makefile("rb").read().decode()


@pytest.mark.parametrize(
    ("length", "status"), [("", 411), ("x", 411), ("-1", 411), (str(33 << 20), 413), ("9", 400)]
)
def test_lengths_that_cannot_be(server, length, status):
    head = f"Content-Length: {length}\r\n" if length else ""
    answer = raw(server, f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{{}}")
    assert answer.startswith(f"HTTP/1.0 {status} ")
    assert '{"error": "' in answer


def test_an_unknown_model_is_404_and_the_server_goes_on(server):
    status, answer = server.ask("/v1/completions", LONG | {"model": "/nope/model"})
    assert (status, answer["error"]) == (
        404,
        "'/nope/model' does not exist; give a directory or ORG/REPO.",
    )
    other = str(checkpoint_path(GEMMA_DEMO))
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "model": other})
    assert answer["timings"]["draft_kind"] == "gemma4-assistant"
    assert server.health()["model"] == other
    body = {"prompt": PROMPT, "max_tokens": 9, "draft_model": "none"}
    answer = server.post("/v1/completions", body)
    assert (answer["spec"]["reason"], answer["spec"]["engaged"]) == ("no-drafter", False)
    assert server.health()["spec"]["state"] == "off"
    status, answer = server.ask("/v1/completions", body | {"draft_model": "/nope/drafter"})
    assert status == 404
    assert "/nope/drafter" in answer["error"]
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9})["spec"]["engaged"]


def test_polls_are_not_in_the_log(server):
    server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    for path in ("/health", "/v1/spec/status", "/metrics"):
        server.get(path)
    text = server.stderr_text()
    assert "POST /v1/completions" in text
    assert "GET" not in text
    assert "Traceback" not in text


def test_with_a_key_only_health_is_open(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with serving("--api-key-file", tmp_path / "key", env={"MLX_SPEC_API_KEY": "other"}) as server:
        assert server.ask("/health")[0] == 200
        for header in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer \xe9"}):
            for path, body in [
                ("/v1/models", None),
                ("/metrics", None),
                ("/v1/spec/status", None),
                ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
            ]:
                status, answer = server.ask(path, body, header)
                assert (status, answer["error"]) == (401, "The API key is missing or wrong.")
        server.key = "secret"
        assert server.status()["requests_total"] == 0
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})["choices"]


def test_the_models_are_listed_also_where_nothing_was_ever_downloaded(tmp_path):
    with serving(env={"HF_HUB_CACHE": str(tmp_path / "nothing")}) as server:
        assert [model["id"] for model in server.get("/v1/models")["data"]] == [
            str(checkpoint_path(DEMO).resolve())
        ]


def test_two_requests_at_once_get_the_same_texts_as_alone(server):
    bodies = [{"prompt": PROMPT + extra, "max_tokens": 60} for extra in ("", "    return")]
    alone = [server.post("/v1/completions", body)["choices"] for body in bodies]
    together: dict[int, list] = {}

    def ask(at):
        together[at] = server.post("/v1/completions", bodies[at])["choices"]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[0], together[1]] == alone
