"""Measuring another server: what it sends is read, and whatever is wrong is one sentence."""

import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving import in_process

from mlx_spec.bench.against import (
    Against,
    AgainstRow,
    Answer,
    Endpoint,
    EndpointError,
    make_row,
    measure_against,
    normalised,
    read_key_file,
)
from mlx_spec.bench.prompts import Prompt
from mlx_spec.bench.result import Setting
from mlx_spec.errors import BadArguments

INSTRUCTION = Prompt("prose", "Tell me about rivers.")
TEXT = Prompt("code", "def read(path):", False)
USAGE = {"prompt_tokens": 9, "completion_tokens": 5}
TIMINGS = {"predicted_n": 5, "predicted_per_second": 40.0, "draft_n": 6, "draft_n_accepted": 3}


def chat(text):
    return {"choices": [{"delta": {"content": text}}]}


class Fake(ThreadingHTTPServer):
    """Answers each request with what is set.

    Attributes:
        requests: method, path, headers and decoded body of each.
        lines: of a stream. status, kind, body: of another answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.models = ["tiny"]
        self.lines = []
        self.status, self.kind, self.body = 200, "text/event-stream", None
        self.location = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def send(self, *events):
        self.lines = [f"data: {json.dumps(event)}\n\n" for event in events]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.requests.append(("GET", self.path, self.headers, None))
        listed = {"data": [{"id": name} for name in self.server.models]}
        self.answer(200, "application/json", json.dumps(listed))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(("POST", self.path, self.headers, body))
        text = self.server.body
        if text is None:
            text = "".join([": keep-alive\n\n", *self.server.lines, "data: [DONE]\n\n"])
        self.answer(self.server.status, self.server.kind, text)

    def answer(self, status, kind, text):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def fake():
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def endpoint(server, path="", **options):
    declared = {"quantization": "4bit", "speculation": "none", "timeout_s": 20}
    return Endpoint(server.url + path, **{**declared, **options})


# What is sent


def test_requests_go_to_the_api_of_the_prompt(fake):
    fake.send(chat("a"), chat("b"))
    found = measure_against(endpoint(fake), [INSTRUCTION, TEXT], max_tokens=5, repeats=2, temp=0.5)
    assert [(method, path) for method, path, _, _ in fake.requests] == [
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),  # the warm-up
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/completions"),
    ]
    assert fake.requests[2][3] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": INSTRUCTION.text}],
        "max_tokens": 5,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert fake.requests[4][3]["prompt"] == TEXT.text
    assert fake.requests[1][3]["max_tokens"] == 8
    assert [(row.prompt_class, row.api) for row in found.rows] == [
        ("prose", "chat/completions"),
        ("code", "completions"),
    ]


@pytest.mark.parametrize(
    ("path", "base", "apis"),
    [
        ("", "/v1", ("chat/completions", "completions")),
        ("/", "/v1", ("chat/completions", "completions")),
        ("/v1/", "/v1", ("chat/completions", "completions")),
        ("/api/v1", "/api/v1", ("chat/completions", "completions")),
        ("/v1/chat/completions", "/v1", ("chat/completions", "chat/completions")),
        ("/v1/completions", "/v1", ("completions", "completions")),
    ],
)
def test_addresses(path, base, apis):
    there = Endpoint(f"http://localhost:1234{path}", "4bit", "none")
    assert there.base == f"http://localhost:1234{base}"
    assert (there.api_for(INSTRUCTION), there.api_for(TEXT)) == apis


def test_a_key_is_sent_and_not_shown(fake, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    there = endpoint(fake, model="tiny", key=read_key_file(tmp_path / "key"))
    fake.send(chat("a"))
    found = measure_against(there, [INSTRUCTION], repeats=1)
    assert [headers["Authorization"] for _, _, headers, _ in fake.requests] == ["Bearer secret"] * 2
    assert "secret" not in repr(there) + found.as_text() + json.dumps(found.as_dict())


# What comes back


@pytest.mark.parametrize(
    ("usage", "timings", "rate", "rate_from"),
    [
        ({}, {}, 1.0, "chunks"),  # 3 pieces in 2 s
        (USAGE, {}, 2.0, "usage"),  # 5 tokens in 2 s, the first of them at their beginning
        ({"input_tokens": 9, "output_tokens": 5}, {}, 2.0, "usage"),
        (USAGE, TIMINGS, 40.0, "timings"),
        (USAGE, {"predicted_per_second": "fast"}, 2.0, "usage"),
    ],
)
def test_the_rate_is_the_best_known(usage, timings, rate, rate_from):
    answer = Answer(1.0, 3.0, 3, usage, timings)
    assert (answer.generation_tps, answer.rate_from) == (rate, rate_from)
    assert answer.prompt_tokens == (9 if usage else None)


def test_a_row_sums_up_its_answers():
    lengths, seconds = (9, 5, 7), (4.0, 2.0, 2.0)
    answers = [
        Answer(0.5 + n, 0.5 + n + s, 3, {"completion_tokens": length}, {})
        for n, (length, s) in enumerate(zip(lengths, seconds, strict=True))
    ]
    row = make_row("code", "completions", answers)
    assert row.generated_tokens == 5
    assert (row.generation_tps_low, row.generation_tps, row.generation_tps_high) == (2.0, 2.0, 3.0)
    assert row.time_to_first_token_s == 0.5
    assert (row.draft_n, row.draft_n_accepted) == (None, None)


def test_an_answer_that_comes_at_once_has_no_rate():
    assert Answer(1.0, 1.0, 1, {}, {}).generation_tps is None
    assert Answer(1.0, 1.0, 1, {"completion_tokens": 7}, {}).generation_tps is None


def test_counts_of_the_server_are_reported(fake):
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    fake.send(role, thought, chat("a"), {"choices": [], "usage": usage, "timings": TIMINGS})
    found = measure_against(endpoint(fake, speculation="mtp"), [INSTRUCTION], repeats=3)
    [row] = found.rows
    assert row.time_to_first_token_s > 0
    assert replace(row, time_to_first_token_s=0) == AgainstRow(
        prompt_class="prose",
        api="chat/completions",
        prompt_tokens=9,
        cached_tokens=4,
        time_to_first_token_s=0,
        generated_tokens=5,
        generation_tps=40.0,
        generation_tps_low=40.0,
        generation_tps_high=40.0,
        rate_from="timings",
        draft_n=18,
        draft_n_accepted=9,
    )
    text = found.as_text()
    assert "40.0 tokens/s (40.0-40.0), from timings" in text
    assert "9 prompt tokens, 4 of them cached, 5 generated, 9 of 18 drafts accepted" in text
    assert "could not take turns" in text
    assert "Some of its texts ended before 256 tokens." in text


def test_odd_events_are_no_tracebacks(fake):
    fake.send(
        {"choices": None},
        {"choices": ["a"]},
        {"choices": [{"delta": None, "text": "a"}], "usage": [1], "timings": "none"},
    )
    [row] = measure_against(endpoint(fake), [TEXT], repeats=1).rows
    assert (row.rate_from, row.generation_tps, row.prompt_tokens) == ("chunks", None, None)


def test_mlx_spec_serve():
    with in_process() as server:
        there = endpoint(server, speculation="mtp", timeout_s=60, model="default_model")
        found = measure_against(there, [TEXT], max_tokens=12, repeats=1)
        [row] = found.rows
    assert (row.rate_from, row.generated_tokens) == ("timings", 12)
    assert row.generation_tps > 0
    assert row.draft_n >= row.draft_n_accepted > 0
    assert row.prompt_tokens > 3


# What is not alike


SETTING = Setting(
    "tiny",
    "4 bits, groups of 64",
    "x",
    "mtp",
    "bfloat16",
    "M4",
    "1",
    "1",
    "1",
    "greedy",
    0,
    256,
    3,
    0,
)
AGAINST = Against("http://x", "tiny", "4bit", "none", 256, 0, 3, [])


def test_what_is_alike_goes_without_saying():
    like = replace(AGAINST, speculation="mtp n=3")
    assert like.unlike(SETTING) == []
    assert "Not like with like" not in like.as_text(SETTING)


def test_what_is_not_alike_is_said():
    text = replace(AGAINST, quantization="Q4_K_M", speculation="ngram", temp=0.7).as_text(SETTING)
    assert (
        "Not like with like: its model is quantised as Q4_K_M, this one as 4 bits, groups of 64; "
        "it speculates by ngram, here mtp drafts; "
        "256 tokens at temperature 0.7 there, 256 at 0 here." in text
    )
    assert AGAINST.unlike(SETTING) == [
        "it does not speculate, so only the rows of stock are its like"
    ]


def row_with(draft_n):
    return AgainstRow("code", "completions", 1, 0, 1.0, 1, 1.0, 1.0, 1.0, "timings", draft_n, 0)


@pytest.mark.parametrize(
    ("speculation", "draft_n", "found"),
    [
        ("none", 7, ["said not to speculate, it reports 7 drafts"]),
        ("mtp", 0, ["said to speculate by mtp, it reports no drafts"]),
        ("none", 0, []),
        ("mtp", 7, []),
        ("mtp", None, []),
    ],
)
def test_answers_that_contradict_their_user(speculation, draft_n, found):
    against = replace(AGAINST, speculation=speculation, rows=[row_with(draft_n)])
    assert against.contradictions() == found


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("4bit", "4 bits, groups of 64", True),
        ("4-bit", "4 bits, groups of 64; 6 bits, groups of 64", False),
        ("BF16", "bfloat16", True),
        ("Q4_K_M", "4 bits, groups of 64", False),
        ("8bit", "4 bits, groups of 64", False),
    ],
)
def test_quantisations_by_several_names(one, other, alike):
    assert (normalised(one) == normalised(other)) is alike


# Errors


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"quantization": None}, "--against-quantization"),
        ({"speculation": None}, "--against-speculation"),
        ({"speculation": ""}, "--against-speculation"),
        ({"url": "localhost:1234"}, "is not the address of a server"),
        ({"url": "file:///etc/passwd"}, "is not the address of a server"),
        ({"url": "http://me:secret@host/v1"}, "--against-key-file"),
    ],
)
def test_endpoints_that_are_refused(bad, message):
    with pytest.raises(BadArguments, match=message) as error:
        Endpoint(**{"url": "http://x", "quantization": "4bit", "speculation": "none", **bad})
    assert error.value.exit_code == 2


def test_nobody_listens():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    there = Endpoint(f"http://127.0.0.1:{port}", "4bit", "none", model="tiny")
    with pytest.raises(EndpointError, match=r"Nothing answers at http.*chat/completions \(.*refus"):
        measure_against(there, [INSTRUCTION])


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, "{}", "needs a key; put it into a file and give --against-key-file"),
        (404, '{"error": {"message": "No model tiny."}}', r"404\): No model tiny; check --against"),
        (404, "<html>", r"is not there \(HTTP 404\); check"),
        (500, '{"error": "no memory"}', "answered HTTP 500: no memory."),
        (429, "[1]", r"answered HTTP 429\.$"),
    ],
)
def test_an_http_error(fake, status, body, message):
    fake.status, fake.kind, fake.body = status, "application/json", body
    with pytest.raises(EndpointError, match=message):
        measure_against(endpoint(fake), [INSTRUCTION])


def test_a_refused_key(fake):
    fake.status, fake.body = 403, '{"error": {"message": "unknown key"}}'
    with pytest.raises(EndpointError, match="refuses the key: unknown key"):
        measure_against(endpoint(fake, key="k"), [INSTRUCTION])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>hello</html>", "sent no text as a stream"),
        ('{"choices": [{"message": {"content": "hello"}}]}', "sent no text as a stream"),
        ("data: hello\n\n", "something else than JSON objects"),
        ("data: [1]\n\n", "something else than JSON objects"),
        ("data: [DONE]\n\n", "sent no text as a stream"),
        ('data: {"error": {"message": "out of memory"}}\n\n', "stopped its answer: out of memory"),
    ],
)
def test_an_answer_that_is_no_stream(fake, body, message):
    fake.body = body
    with pytest.raises(EndpointError, match=message):
        measure_against(endpoint(fake), [INSTRUCTION])


def test_a_key_does_not_follow_a_redirect(fake):
    fake.status, fake.location, fake.body = 302, "http://127.0.0.1:9/v1", ""
    with pytest.raises(EndpointError, match=r"has moved to http://127.0.0.1:9/v1; give that"):
        measure_against(endpoint(fake, key="k"), [INSTRUCTION])


@pytest.mark.parametrize(
    ("models", "message"),
    [([], "offers 0 models"), (["a", "b"], r"offers 2 models; .*--against-model.*: a, b\.")],
)
def test_several_models(fake, models, message):
    fake.models = models
    with pytest.raises(EndpointError, match=message):
        measure_against(endpoint(fake), [INSTRUCTION])


def test_a_connection_that_breaks(fake):
    with broken(fake), pytest.raises(EndpointError, match="broke off its answer"):
        measure_against(endpoint(fake, model="tiny"), [INSTRUCTION])


def test_a_server_that_falls_silent(fake):
    with silent(fake), pytest.raises(EndpointError, match=r"sent nothing for 0.2 s"):
        measure_against(endpoint(fake, model="tiny", timeout_s=0.2), [INSTRUCTION])


@contextmanager
def broken(fake):
    def answer(self, status, kind, text):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": []}\n\n')

    with answering(fake, answer):
        yield


@contextmanager
def silent(fake):
    end = threading.Event()

    def answer(self, status, kind, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        end.wait(20)

    with answering(fake, answer):
        yield
        end.set()


@contextmanager
def answering(fake, answer):
    fake.RequestHandlerClass = type("Other", (Handler,), {"answer": answer})
    yield


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_key_file(tmp_path, text):
    (tmp_path / "key").write_text(text)
    with pytest.raises(BadArguments, match="is empty"):
        read_key_file(tmp_path / "key")
    with pytest.raises(BadArguments, match="No such file"):
        read_key_file(tmp_path / "none")
