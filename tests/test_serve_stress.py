"""Many requests at once, of all kinds, some of them given up: nothing is mixed up or left over."""

import json
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI
from serving import Served, serving
from test_serve_openai import ASK_TO, CODE, PENALTIES, Answer, answer, check, client, in_float32

from models import DEMO, checkpoint_path

AT_ONCE = 8
REQUESTS = 40  # three times
LEAK = 4 << 20  # in bytes, over REQUESTS: a forgotten cache of each would be ten times as much
GIVEN_UP = {"disconnect", "abort"}


@dataclass
class Job:
    """A request, what its client does, and what has come back if it waits for the answer.

    how: "whole", "stream", "disconnect" (after some chunks) or "abort" (after some time).
    """

    options: dict[str, Any]
    how: str
    after: float
    expected: Answer | None = None
    got: Answer | None = None
    chunks: int = 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = in_float32(checkpoint_path(DEMO), tmp_path_factory.mktemp("models"))
    with serving("--prompt-cache-size", 2, model=model) as server:
        yield server


def some_options() -> list[dict[str, Any]]:
    """Requests with one answer each, whoever else is served."""
    asked: list[dict[str, Any]] = [{"prompt": p} for p in (CODE, "import re\n", "class Set:\n")]
    asked += [{"messages": [{"role": "user", "content": line}]} for line in (ASK_TO, "List names.")]
    ways = [
        {},
        PENALTIES,
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.1, "top_p": 0.9, "seed": 6, "stop": " self"},
        {"stop": [" return", "\n"]},
    ]
    lengths, depths = (6, 11, 16), (3, 1, 0, 3)
    return [
        base | way | {"max_tokens": lengths[i % 3], "num_draft_tokens": depths[(i + j) % 4]}
        for i, base in enumerate(asked)
        for j, way in enumerate(ways)
    ]


def run(server: Served, openai: OpenAI, job: Job) -> None:
    if job.how == "abort":
        abort(server, job)
    elif job.how == "disconnect":
        disconnect(openai, job)
    else:
        job.got = answer(openai, **job.options, stream=job.how == "stream")


def disconnect(openai: OpenAI, job: Job) -> None:
    options = dict(job.options)
    extra = {"num_draft_tokens": options.pop("num_draft_tokens")}
    for name in set(options) & {"top_k", "repetition_penalty"}:
        extra[name] = options.pop(name)
    completions = openai.chat.completions if "messages" in options else openai.completions
    stream = completions.create(model="default_model", stream=True, extra_body=extra, **options)
    for _ in zip(range(int(job.after)), stream, strict=False):
        job.chunks += 1
    stream.close()


def abort(server: Served, job: Job) -> None:
    path = "/v1/chat/completions" if "messages" in job.options else "/v1/completions"
    body = json.dumps(job.options).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(job.after)


def jobs(rng: random.Random, options: list[dict[str, Any]], known: dict[str, Answer]) -> list[Job]:
    made = []
    for _ in range(REQUESTS):
        chosen = rng.choice(options)
        how = rng.choices(["whole", "stream", "disconnect", "abort"], [4, 3, 2, 1])[0]
        after = rng.randint(1, 8) if how == "disconnect" else rng.uniform(0, 0.3)
        made.append(Job(chosen, how, after, known[json.dumps(chosen)]))
    return made


@dataclass
class Reading:
    """Of a server at rest."""

    outcomes: Counter
    counters: dict[str, float]
    threads: int
    rss: int
    active: int


def reading(server: Served, threads: int = 0) -> Reading:
    """Waits a moment for the threads to become so few."""
    status, metrics = server.wait_until_idle(), server.metrics()
    found = re.findall(r'^mlx_spec:requests_total\{outcome="(\w+)"\} (\S+)$', metrics, re.M)
    counters = re.findall(r"^mlx_spec:(\w+)_total (\S+)$", metrics, re.M)
    fewest, deadline = threads_of(server.pid), time.monotonic() + 2
    while fewest > threads and time.monotonic() < deadline:
        time.sleep(0.05)
        fewest = min(fewest, threads_of(server.pid))
    return Reading(
        Counter({name: int(float(value)) for name, value in found}),
        {name: float(value) for name, value in counters},
        fewest,
        rss_of(server.pid),
        status["memory_active_bytes"],
    )


def threads_of(pid: int) -> int:
    with suppress(FileNotFoundError):  # not on a Mac
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def rss_of(pid: int) -> int:
    output = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout
    return 1024 * int(output)


def test_many_requests_at_once(server):
    openai = client(server.url)
    options = some_options()
    known = {json.dumps(chosen): answer(openai, **chosen) for chosen in options}
    rng = random.Random(0)
    seen = Counter()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.1):
            assert server.health()["status"] == "ok"
            seen[server.status()["spec_state"]] += 1

    before = reading(server)
    readings, done = [], []
    with ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(watch)
        try:
            for _ in range(3):  # after the first all is warm
                these = jobs(rng, options, known)
                with ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(lambda job: run(server, openai, job), these))
                done += these
                readings.append(reading(server, before.threads))
        finally:
            finished.set()
    watching.result()

    check_answers(done)
    check_counters(done, before, readings[-1])
    assert seen["standing-down"] > 0
    _, half, end = readings
    assert end.threads <= before.threads
    assert end.active - half.active < LEAK
    assert end.rss - half.rss < 8 * LEAK
    assert server.health()["phase"] == "idle"
    assert server.status()["last_error"] is None

    again = {"prompt": CODE, "max_tokens": 24}
    alone = answer(openai, **again, num_draft_tokens=3)
    check(alone, 3)
    assert alone.content == answer(openai, **again, num_draft_tokens=0).content


def check_answers(done: list[Job]) -> None:
    batched = drafted = 0
    for job in done:
        if job.how in GIVEN_UP:
            continue
        assert job.got.content == job.expected.content, job.options
        assert job.got.tokens == job.expected.tokens
        spec, timings = job.got.body["spec"], job.got.body["timings"]
        details = job.got.usage["completion_tokens_details"]
        assert sum(details.values()) == timings["draft_n"]
        assert timings["predicted_n"] == job.got.tokens[1]
        if "seed" in job.options:
            assert spec["batched"] == 0
            assert spec["engaged"] == (job.options["num_draft_tokens"] > 0) or job.got.tokens[1] < 4
        batched += spec["batched"]
        drafted += timings["draft_n"]
    assert batched > 80
    assert drafted > 40


def check_counters(done: list[Job], before: Reading, end: Reading) -> None:
    """The totals are the sums over the answers, and what those given up may have added."""
    outcomes = end.outcomes - before.outcomes
    complete = Counter(job.got.finish_reason for job in done if job.got)
    given_up = [job for job in done if job.how in GIVEN_UP]
    assert outcomes.total() == len(done)
    assert outcomes["error"] == 0
    assert outcomes["cancelled"] > 0
    assert complete <= outcomes
    assert complete["stop"] > 0
    timings = [job.got.body["timings"] for job in done if job.got]
    for name, field in [
        ("tokens_predicted", "predicted_n"),
        ("prompt_tokens", "prompt_n"),
        ("spec_decode_num_draft_tokens", "draft_n"),
        ("spec_decode_num_accepted_tokens", "draft_n_accepted"),
    ]:
        rest = end.counters[name] - before.counters[name] - sum(t[field] for t in timings)
        assert rest >= 0
        if name == "tokens_predicted":
            assert sum(min(job.chunks, job.expected.tokens[1]) for job in given_up) <= rest
            assert rest <= sum(job.options["max_tokens"] for job in given_up)
        if name == "prompt_tokens":
            assert rest <= sum(job.expected.tokens[0] for job in given_up)


def test_a_seed_is_served_while_others_keep_coming(server):
    """Alone, after the batch that was there; no stream of other requests keeps it waiting."""
    openai = client(server.url)
    others = [{"prompt": f"class {name}:\n", "max_tokens": 16} for name in ("A", "B", "C")]
    expected = [answer(openai, **other).content for other in others]
    seeded = {"prompt": CODE, "max_tokens": 20, "temperature": 0.8, "seed": 11}
    alone = answer(openai, **seeded)
    finished = threading.Event()

    def keep_asking(at: int) -> int:
        count = 0
        deadline = time.monotonic() + 30
        while not finished.is_set() and time.monotonic() < deadline:
            assert answer(openai, **others[at]).content == expected[at]
            count += 1
        return count

    with ThreadPoolExecutor(len(others)) as pool:
        asking = [pool.submit(keep_asking, at) for at in range(len(others))]
        try:
            for _ in range(3):
                time.sleep(0.3)
                among = answer(openai, **seeded)
                assert among.content == alone.content
                check(among, 3)
        finally:
            finished.set()
    assert all(count.result() > 1 for count in asking)
