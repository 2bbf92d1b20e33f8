"""What goes wrong in a server, and what others notice of it: requests that cannot be decoded,
errors of the decoding thread, clients that go away, connections that are no requests."""

import json
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx_lm.server
import pytest
from mlx_lm.server import TimeBudget
from serving import in_process, wait_until

from mlx_spec import batch
from mlx_spec.errors import UnusableDrafter, one_line
from mlx_spec.server import handler, metrics
from mlx_spec.server.generation import SpecModelProvider
from mlx_spec.server.record import Record
from mlx_spec.server.status import Status
from models import DEMO, GEMMA_DEMO, checkpoint_path, strip_head

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = {"prompt": "import os\n", "max_tokens": 12}
LONG = TEXT | {"max_tokens": 100_000}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def shared():
    with in_process("--prefill-step-size", 16) as server:
        server.responses._time_budget = TimeBudget(0.02)  # until it looks for further requests
        server.text = server.post(COMPLETIONS, TEXT)["choices"][0]["text"]
        yield server


@pytest.fixture
def server(shared):
    """Whatever a test does to it, no request is left over, and the next one is served."""
    shared.ledger.last_error = None
    yield shared
    wait_until(lambda: not shared.ledger.active())
    assert shared.post(COMPLETIONS, TEXT)["choices"][0]["text"] == shared.text
    assert shared.responses.is_healthy
    assert shared.failures == []


def post(body, path=COMPLETIONS):
    """The bytes of a request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def only_record(server):
    (record,) = wait_until(server.ledger.active)
    return record


def outcomes(server):
    return server.ledger.totals().outcomes.copy()


# Requests that cannot be decoded


def nested(depth):
    return b'{"prompt": "a", "max_tokens": 1, "other": ' + b"[" * depth + b"]" * depth + b"}"


UNDECODABLE = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, TEXT | {"prompt": "\ud800"}),
    (COMPLETIONS, TEXT | {"stop": ["\ud800"]}),
    (COMPLETIONS, TEXT | {"temperature": 10**400}),
    (COMPLETIONS, TEXT | {"logit_bias": {"5": 10**400}}),
    (COMPLETIONS, TEXT | {"logit_bias": {"\u00b2": 1}}),
    (COMPLETIONS, TEXT | {"logit_bias": {"9" * 5000: 1}}),
    (COMPLETIONS, TEXT | {"logit_bias": {"2048": 1}}),
    (COMPLETIONS, TEXT | {"top_k": 2048}),
    (COMPLETIONS, TEXT | {"repetition_penalty": 1.1, "repetition_context_size": 10**30}),
    (COMPLETIONS, TEXT | {"num_draft_tokens": 33}),
    (CHAT, HELLO | {"chat_template_kwargs": {"chat_template": ""}}),
    (CHAT, HELLO | {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}),
    (CHAT, HELLO | {"chat_template_kwargs": {"return_tensors": "np"}}),
    (CHAT, HELLO | {"chat_template_kwargs": {"tokenize": False}}),
    (CHAT, HELLO | {"tools": [5]}),
    (CHAT, HELLO | {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    *[(COMPLETIONS, nested(depth)) for depth in (990, 2_000, 100_000)],
]


def test_a_request_that_cannot_be_decoded_harms_no_other(server):
    """It would, if it failed in the decoding thread."""
    with server.connect(post(LONG)):
        record = only_record(server)
        for path, body in UNDECODABLE:
            status, answer = server.ask(path, body)
            assert status == 400, (path, body, answer)
            assert isinstance(answer["error"], str)
            tokens = record.tokens
            wait_until(lambda: record.tokens > tokens)  # noqa: B023
    wait_until(lambda: record.outcome)
    assert record.outcome == "cancelled"
    assert server.ledger.last_error is None


def test_what_is_odd_but_can_be_decoded_is(server):
    for options in [
        {"presence_penalty": 10**30},
        {"temperature": 1e-320},
        {"repetition_penalty": 1.1, "repetition_context_size": 0},
        {"seed": 2**64 - 1},
        {"stop": [""]},
        {"prompt": "\0"},
        {"max_tokens": 10**30, "stop": "\n"},
        {"user": {"nested": [None]}},
    ]:
        assert server.post(COMPLETIONS, TEXT | options)["choices"][0]["finish_reason"]


def test_nesting_at_the_limit_is_taken_or_refused(server):
    """Somewhere here Python can read the body, but not go on with it."""
    statuses = {server.ask(COMPLETIONS, nested(depth))[0] for depth in range(955, 990)}
    assert statuses == {200, 400}


# Errors in the decoding thread


def fail_once(monkeypatch, owner, name, error):
    original, errors = getattr(owner, name), [error]

    def fail(*args, **options):
        if errors:
            raise errors.pop()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("seed", [None, 5])
def test_an_error_while_a_text_is_made_is_500(server, monkeypatch, seed):
    """Also of a kind that means a bad request at other times. With a seed, mlx_lm.server decodes
    the request by itself."""
    error = ValueError("this\nfailed")
    if seed is None:
        fail_once(monkeypatch, batch.Alone, "next_token", error)
    else:
        fail_once(monkeypatch, mlx_lm.server, "_make_sampler", error)
    before = outcomes(server)
    status, answer = server.ask(COMPLETIONS, TEXT | {"seed": seed})
    assert (status, answer) == (500, {"error": "this failed"})
    assert outcomes(server) - before == {"error": 1}
    assert server.status()["last_error"] == "this failed"


@pytest.mark.parametrize("seed", [None, 5])
def test_an_error_while_a_text_is_streamed_is_an_event(server, monkeypatch, seed):
    if seed is None:
        fail_once(monkeypatch, batch.Alone, "next_token", RuntimeError("this failed"))
    else:
        fail_once(monkeypatch, mlx_lm.server, "_make_sampler", RuntimeError("this failed"))
    assert list(server.events(COMPLETIONS, TEXT | {"seed": seed})) == [{"error": "this failed"}]


def test_out_of_memory_is_503(server, monkeypatch):
    error = RuntimeError("[metal::malloc] Attempting to allocate 9 bytes")
    fail_once(monkeypatch, batch.Alone, "next_token", error)
    assert server.ask(COMPLETIONS, TEXT)[0] == 503


def test_an_error_in_a_batch_is_told_to_each_that_is_in_it(server, monkeypatch):
    streams = [server.events(COMPLETIONS, LONG) for _ in range(2)]
    for stream in streams:
        next(stream)
    wait_until(lambda: all(record.stats.batched for record in server.ledger.active()))
    fail_once(monkeypatch, batch.GenerationBatch, "next", RuntimeError("this failed"))
    for stream in streams:
        assert list(stream)[-1] == {"error": "this failed"}


def test_an_error_is_not_told_to_who_has_not_been_heard_yet(server, monkeypatch):
    """The decoding thread has not taken that request, so it takes it afterwards."""
    arrived = threading.Event()

    def fail(self):
        assert arrived.wait(20)
        monkeypatch.undo()
        raise RuntimeError("this failed")

    monkeypatch.setattr(batch.Alone, "next_token", fail)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.ask, COMPLETIONS, TEXT)
        wait_until(lambda: only_record(server).context)
        second = pool.submit(server.ask, COMPLETIONS, TEXT)
        wait_until(server.responses.requests.qsize)
        arrived.set()
        assert first.result() == (500, {"error": "this failed"})
        status, answer = second.result()
    assert (status, answer["choices"][0]["text"]) == (200, server.text)


def test_a_request_may_end_while_it_is_to_be_told_of_an_error(server):
    class Ending(Record):
        """Whose own thread forgets the queue between two looks at it."""

        looks = iter([queue.Queue()])

        @property
        def queue(self):
            return next(self.looks, None)

        @queue.setter
        def queue(self, value):
            pass

    record = Ending(3)
    server.ledger.begin(record)
    try:
        assert server.responses._answer_with(RuntimeError("this failed"))
    finally:
        server.ledger.end(record)


def test_once_the_decoding_thread_has_ended_everyone_is_told(monkeypatch):
    """Also the request that it was decoding, which waits for more."""
    with in_process() as server:
        stream = server.events(COMPLETIONS, LONG)
        next(stream)
        monkeypatch.setattr(server.responses, "_answer_with", lambda error: False)
        fail_once(monkeypatch, batch.Alone, "next_token", RuntimeError("this failed"))
        assert "died" in list(stream)[-1]["error"]
        assert [str(error) for error in server.failures] == ["this failed"]
        status, health = server.ask("/health")
        assert (status, health["status"], health["phase"]) == (503, "unavailable", "failed")
        status, answer = server.ask(COMPLETIONS, TEXT)
        assert (status, answer["error"]) == (
            500,
            "The generation thread died; start the server again.",
        )
        values = server.status()
        assert (values["requests_total"], values["requests_active"]) == (2, 0)
        assert outcomes(server) == {"error": 2}


# Clients that go away


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_generation(server, stream, seed):
    before = outcomes(server)
    with server.connect(post(LONG | {"stream": stream, "seed": seed})):
        record = only_record(server)
        wait_until(lambda: record.tokens > 3)
    wait_until(lambda: not server.ledger.active())
    assert outcomes(server) - before == {"cancelled": 1}
    assert server.ledger.last_error is None
    assert record.tokens < 20_000


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_processing_of_its_prompt(server, stream, seed):
    prompt = f"# {seed} {stream}\n" + "import os\n" * 4000
    with server.connect(post(LONG | {"prompt": prompt, "stream": stream, "seed": seed})):
        record = only_record(server)
        wait_until(lambda: record.prompt_done)
        reports = record.queue
    wait_until(lambda: not server.ledger.active())
    server.post(COMPLETIONS, TEXT)  # when this is done, so is that one
    assert (record.outcome, record.tokens) == ("cancelled", 0)
    assert record.prompt_done < record.prompt_tokens
    assert all(isinstance(report, tuple | Exception) for report in reports.queue)  # no tokens


def test_for_a_client_that_gives_up_waiting_nothing_is_done(server):
    loaded = server.model
    other = post(TEXT | {"model": str(checkpoint_path(GEMMA_DEMO))})
    with server.connect(post(LONG | {"seed": 5})):
        first = only_record(server)
        wait_until(lambda: first.tokens)
        with server.connect(other):
            wait_until(server.responses.requests.qsize)
            _, waiting = server.ledger.active()
            status = server.status()
    assert (status["requests_active"], status["requests_waiting"]) == (1, 1)
    wait_until(lambda: not server.ledger.active())
    assert (waiting.outcome, waiting.context) == ("cancelled", None)
    assert server.model is loaded


# Models of their own


def test_requests_that_come_while_another_model_is_loaded_are_served(server):
    other = TEXT | {"model": str(checkpoint_path(GEMMA_DEMO))}
    with ThreadPoolExecutor(4) as pool:
        bodies = [TEXT, other, TEXT]
        answers = list(pool.map(lambda body: server.post(COMPLETIONS, body), bodies))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[2] == server.text != texts[1]
    assert answers[1]["timings"]["draft_kind"] == "gemma4-assistant"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/nope"}, "'/nope' does not exist"),
        ({"model": ""}, "'' does not exist"),
        ({"model": "a\0b"}, "does not exist"),
        ({"draft_model": "/nope"}, "'/nope' does not exist"),
        ({"draft_model": ""}, "The name of the drafter is empty"),
        ({"model": str(checkpoint_path(DEMO)), "adapters": "/nope"}, "/nope"),
    ],
)
def test_a_model_that_is_not_there_is_404_with_a_sentence(server, options, words):
    status, answer = server.ask(COMPLETIONS, TEXT | options)
    assert status == 404, answer
    assert words in answer["error"]


@pytest.mark.parametrize("drafter", ["damaged", "a model without a head", "of another width"])
def test_a_drafter_that_was_named_and_does_not_fit(drafter, model_dir, tmp_path):
    """The server ends with the exit code of this error, and loads nothing in its place."""
    if drafter == "damaged":
        (model_dir / "model.safetensors").write_bytes(b"no weights")
    elif drafter == "a model without a head":
        strip_head(model_dir)
    with in_process("--draft-model", model_dir, wait=False) as server:
        wait_until(lambda: server.failures)
        assert not server.responses.is_healthy
        assert server.model is None
    (error,) = server.failures
    assert isinstance(error, UnusableDrafter)
    assert error.exit_code == 4
    assert "\n" not in one_line(error)


def test_without_a_model_a_request_must_name_one():
    with in_process(model=None) as server:
        assert server.ask(COMPLETIONS, TEXT) == (
            404,
            {"error": "There is no default model; name one as the request's model."},
        )
        health = server.health()
        assert (health["status"], health["model"], health["drafter"]) == ("ok", None, None)
        assert (health["spec"]["state"], health["spec"]["reason"]) == ("off", None)


# What the server says of itself meanwhile


def test_health_while_a_model_is_loaded(monkeypatch):
    go_on = threading.Event()
    read = SpecModelProvider._read_weights

    def slowly(provider):
        provider.loading = (30, 90)
        assert go_on.wait(20)
        read(provider)

    monkeypatch.setattr(SpecModelProvider, "_read_weights", slowly)
    with in_process(wait=False) as server:
        wait_until(lambda: server.responses.model_provider.loading == (30, 90))
        status, health = server.ask("/health")
        assert (status, health["status"], health["phase"]) == (503, "loading", "loading")
        assert health["progress"] == {"done": 30, "total": 90}
        assert (health["spec"]["state"], health["spec"]["reason"]) == ("off", None)  # not known yet
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.post, COMPLETIONS, TEXT)
            wait_until(lambda: server.status()["requests_waiting"])
            go_on.set()
            assert answer.result()["spec"]["engaged"]
        assert server.health()["phase"] == "idle"


def test_health_while_the_model_is_replaced():
    """The decoding thread may do so between two looks at it."""

    class Replacing:
        cli_args = SimpleNamespace(model="default")
        model = loading = None
        keys = iter([("model", None, None)])

        @property
        def model_key(self):
            return next(self.keys, None)

    status = Status(SimpleNamespace(model_provider=Replacing()), "id")
    assert status.model == "model"
    assert status.model == "default"


def test_health_in_the_prompt_and_after_the_stop(server):
    prompt = "# prompt\n" + "import os\n" * 4000
    with server.connect(post(LONG | {"prompt": prompt})):
        record = only_record(server)
        wait_until(lambda: record.prompt_done)
        status, health = server.status(), server.health()
    assert (health["status"], health["phase"]) == ("ok", "prefill")
    assert 0 < health["progress"]["done"] < health["progress"]["total"] == record.prompt_tokens
    assert 0 < status["prompt_done"] < status["prompt_total"] == record.prompt_tokens
    assert (status["requests_active"], status["tokens"]) == (1, 0)
    stopping = Status(server.responses, "id", phase="stopping")
    code, health = stopping.health()
    assert (code, health["status"], health["phase"]) == (503, "unavailable", "stopping")


def test_numbers_never_go_back_and_add_up(server):
    """While requests come, go on in a batch, and end."""
    rising = ("requests_total", "draft_n", "draft_n_accepted")
    before, seen, stop = server.wait_until_idle(), [], threading.Event()

    def watch():
        while not stop.is_set():
            status = server.status()
            seen.append([status[name] for name in rising])
            time.sleep(0.005)

    def ask(at):
        options = [{}, {"seed": at}, {"stop": "\n"}, {"num_draft_tokens": 1}][at % 4]
        return server.post(COMPLETIONS, TEXT | {"max_tokens": 2 + at} | options)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, range(16)))
    stop.set()
    watcher.join()
    after = server.wait_until_idle()
    for values in zip(*seen, strict=True):
        assert list(values) == sorted(values)
    assert after["requests_total"] - before["requests_total"] == 16
    for name in ("draft_n", "draft_n_accepted"):
        assert after[name] - before[name] == sum(answer["timings"][name] for answer in answers)
    for answer in answers:
        timings, usage = answer["timings"], answer["usage"]
        assert timings["predicted_n"] == usage["completion_tokens"]
        assert answer["spec"]["engaged"] == (timings["draft_n"] > 0)
        details = usage["completion_tokens_details"]
        assert sum(details.values()) == timings["draft_n"]
        assert details["accepted_prediction_tokens"] <= timings["draft_n_accepted"]


def test_without_prometheus_client_metrics_say_how_to_get_it(server, monkeypatch):
    monkeypatch.setattr(metrics, "AVAILABLE", False)
    status, answer = server.ask("/metrics")
    assert status == 501
    assert "pip install 'mlx-spec[server]'" in answer["error"]


def test_an_error_in_an_answer_about_the_server_is_500(server, monkeypatch):
    monkeypatch.setattr(Status, "as_dict", lambda status: {}["nothing"])
    for path in ("/v1/spec/status", "/metrics"):
        assert server.ask(path) == (500, {"error": "'nothing'"})


# Connections


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://[ HTTP/1.1", 404),
        ("GET /nope HTTP/1.1", 404),
        ("POST /nope HTTP/1.1\r\nContent-Length: 2", 404),
        ("PUT /v1/completions HTTP/1.1", 501),
        ("nonsense", 400),
        ("GET /health HTTP/x", 400),
        (f"GET /{'x' * 70_000} HTTP/1.1", 414),
    ],
)
def test_what_is_asked_for_in_vain_has_an_answer(server, request_line, status):
    answer = server.raw(f"{request_line}\r\n\r\n{{}}".encode())
    assert f" {status} ".encode() in answer.splitlines()[0] or f"code: {status}".encode() in answer


def test_the_connection_is_closed_after_an_answer(server):
    """As mlx_lm.server does, which speaks HTTP/1.0."""
    for path in ("/health", "/v1/models"):
        head = server.raw(f"GET {path} HTTP/1.1\r\nConnection: keep-alive\r\n\r\n".encode())
        assert head.startswith(b"HTTP/1.0 200 ")
    assert server.raw(post(TEXT)).startswith(b"HTTP/1.0 200 ")


def test_pages_of_other_origins_may_ask_as_in_mlx_lm(server):
    answer = server.raw(b"OPTIONS /v1/completions HTTP/1.1\r\nOrigin: http://x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 204 ")
    for request in (b"GET /health HTTP/1.1\r\n\r\n", b"GET /v1/spec/status HTTP/1.1\r\n\r\n"):
        answer += server.raw(request)
    assert answer.count(b"Access-Control-Allow-Origin: *\r\n") == 3


def test_allowed_origins_are_told_from_others():
    with in_process("--allowed-origins", "http://a,http://b", model=None) as server:
        for origin in ("http://a", "http://c"):
            answer = server.raw(f"GET /health HTTP/1.1\r\nOrigin: {origin}\r\n\r\n".encode())
            allowed = f"Access-Control-Allow-Origin: {origin}\r\n".encode() in answer
            assert allowed == (origin == "http://a")


def test_a_large_body_that_is_not_wanted_does_not_hide_the_answer():
    """urllib sends all of it before it reads."""
    with in_process(model=None, key="secret", max_body_bytes=1000) as server:
        status, answer = server.ask(COMPLETIONS, b"x" * 20_000_000)
        assert (status, answer["error"]) == (
            413,
            "The body has 20000000 bytes; at most 1000 are read (--max-body-bytes).",
        )
        wrong = {"Authorization": "Bearer wrong"}
        assert server.ask(COMPLETIONS, b"x" * 20_000_000, wrong)[0] == 401
        begin = time.monotonic()
        request = b"POST / HTTP/1.1\r\nContent-Length: 5000\r\n\r\n"  # and then nothing
        assert server.raw(request).startswith(b"HTTP/1.0 401 ")
        assert time.monotonic() - begin < handler.DISCARD_S + 2


@pytest.mark.parametrize("begun", [b"", b"POST /v1/completions HT", b"GET / HTTP/1.1\r\nA: b\r\n"])
def test_who_says_nothing_is_not_waited_for_for_ever(server, monkeypatch, begun):
    assert handler.Handler.timeout == handler.READ_TIMEOUT_S
    monkeypatch.setattr(handler.Handler, "timeout", 0.2)
    begin = time.monotonic()
    assert server.raw(begun) == b""
    assert time.monotonic() - begin < 5


def test_a_body_that_never_comes_is_not_waited_for_for_ever(server, monkeypatch):
    monkeypatch.setattr(handler.Handler, "timeout", 0.2)
    assert server.raw(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{}") == b""
    with server.connect(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{}") as half:
        half.close()


def test_a_key_may_be_sent_in_any_letters(server):
    with in_process(model=None, key="schlüssel") as server:
        for sent, status in [("schlüssel", 200), ("schlussel", 401), ("\xff\xfe", 401)]:
            head = f"GET /v1/spec/status HTTP/1.1\r\nAuthorization: Bearer {sent}\r\n\r\n"
            assert f" {status} ".encode() in server.raw(head.encode()).splitlines()[0], sent
