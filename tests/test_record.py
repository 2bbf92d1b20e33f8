"""What is counted of requests, and when."""

import threading
from types import SimpleNamespace

import pytest

from mlx_spec.options import SpecOptions
from mlx_spec.server import record as record_module
from mlx_spec.server.record import Ledger, Record, counted, in_ledger, stoppable
from mlx_spec.stats import SpecStats


@pytest.fixture
def clock(monkeypatch):
    """In seconds; only the test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(record_module.time, "monotonic", lambda: clock.now)
    return clock


def begun(ledger, prompt=10, cached=0, stats=None):
    """A request of which nothing is processed yet."""
    record = Record(SpecOptions(3), stats=stats or SpecStats())
    ledger.begin(record)
    record.started(SimpleNamespace(prompt=[0] * prompt, prompt_cache_count=cached))
    return record


def test_timings_are_those_of_llama_cpp(clock):
    """The first token belongs to the prompt; tokens from the cache were not processed."""
    ledger = Ledger()
    record = begun(ledger, prompt=10, cached=6)
    for seconds in (2, 1, 1):
        clock.now += seconds
        ledger.add_token(record, None)
    record.stats.kind = "nextn"
    record.stats.add_round(3, 2)
    assert record.timings() == {
        "prompt_n": 4,
        "prompt_ms": 2000.0,
        "prompt_per_token_ms": 500.0,
        "prompt_per_second": 2.0,
        "predicted_n": 3,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 1000.0,
        "predicted_per_second": 1.0,
        "draft_n": 3,
        "draft_n_accepted": 2,
        "draft_rounds": 1,
        "draft_kind": "nextn",
    }


@pytest.mark.parametrize("tokens", [0, 1])
def test_there_is_no_rate_without_time(clock, tokens):
    ledger = Ledger()
    record = begun(ledger, prompt=10, cached=10)
    for _ in range(tokens):
        ledger.add_token(record, None)
    timings = record.timings()
    for name in ("prompt_per_token_ms", "prompt_per_second", "predicted_per_second"):
        assert timings[name] is None
    assert ledger.tokens_per_second() is None
    assert Record(SpecOptions(3)).timings()["prompt_ms"] == 0


def test_drafts_after_the_end_of_the_text_count_as_rejected():
    record = Record(SpecOptions(3), stats=SpecStats(accepted_yielded=1))
    record.stats.add_round(3, 3)
    assert record.usage_details() == {
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 2,
    }


def test_a_reason_is_given_until_something_was_drafted():
    record = Record(SpecOptions(3))
    assert (record.spec()["engaged"], record.spec()["reason"]) == (False, "too-short")
    record.stats.reason = "batch"
    assert record.spec()["reason"] == "batch"
    record.stats.add_round(3, 0)
    assert (record.spec()["engaged"], record.spec()["reason"]) == (True, None)


def test_tokens_per_second_are_those_of_the_last_two_seconds(clock):
    ledger = Ledger()
    records = [begun(ledger), begun(ledger)]
    for _ in range(8):
        for record in records:
            ledger.add_token(record, None)
        clock.now += 0.5
    assert ledger.tokens_per_second() == pytest.approx(5 / 1.0)
    clock.now += 2
    assert ledger.tokens_per_second() is None


@pytest.mark.parametrize(
    ("finish_reason", "error", "outcome", "last_error"),
    [
        ("stop", None, "stop", None),
        ("length", None, "length", None),
        ("length", BrokenPipeError(), "length", None),  # it had all tokens
        (None, None, "cancelled", None),
        (None, ConnectionAbortedError(), "cancelled", None),
        (None, RuntimeError("it\nfailed"), "error", "it failed"),
        (None, ValueError("it failed"), "error", "it failed"),
    ],
)
def test_the_outcome_of_a_request(finish_reason, error, outcome, last_error):
    ledger = Ledger()
    record = begun(ledger)
    ledger.add_token(record, finish_reason)
    record.error = error
    ledger.end(record)
    assert record.outcome == outcome
    assert ledger.totals().outcomes == {outcome: 1}
    assert ledger.last_error == last_error
    assert ledger.active() == []


def test_what_is_wrong_with_a_request_is_no_error_of_the_server():
    ledger = Ledger()
    record = Record(SpecOptions(3))
    ledger.begin(record)
    with pytest.raises(ValueError, match="top_k"), in_ledger(ledger, record):
        raise ValueError("top_k is too large")
    assert ledger.totals().outcomes == {"error": 1}
    assert ledger.last_error is None


def test_a_request_ends_once():
    ledger = Ledger()
    record = begun(ledger, stats=SpecStats(drafted=3))
    ledger.add_token(record, "stop")
    for _ in range(2):
        ledger.end(record)
    totals = ledger.totals()
    assert (totals.requests, totals.tokens, totals.drafted) == (1, 1, 3)
    assert totals.outcomes == {"stop": 1}


def test_totals_do_not_change_when_a_request_ends(clock):
    """A counter that went back would look like a restart."""
    ledger = Ledger()
    record = begun(ledger, prompt=10, cached=4)
    record.stats.add_round(3, 1)
    record.prompt_done = 7
    before = ledger.totals()
    assert (before.requests, before.prompt_tokens, before.cached_tokens) == (1, 3, 4)
    for finish_reason in (None, "length"):
        clock.now += 1
        ledger.add_token(record, finish_reason)
    during = ledger.totals()
    ledger.end(record)
    after = ledger.totals()
    assert (during.outcomes, after.outcomes) == ({}, {"length": 1})
    during.outcomes = after.outcomes
    assert during == after
    assert (after.prompt_tokens, after.tokens, after.tokens_after_first) == (6, 2, 1)
    assert (after.prompt_s, after.predicted_s) == (1, 1)
    assert after.drafted_by_position == {0: 1, 1: 1, 2: 1}
    assert after.accepted_by_position == {0: 1, 1: 0, 2: 0}


def test_requests_are_counted_whatever_other_threads_do():
    """As long as requests end, their number neither falls nor is one counted twice."""
    ledger, seen = Ledger(), []

    def serve():
        for _ in range(2000):
            record = begun(ledger)
            ledger.add_token(record, "stop")
            ledger.end(record)

    thread = threading.Thread(target=serve)
    thread.start()
    while thread.is_alive():
        seen.append(ledger.totals().requests)
    assert seen == sorted(seen)
    assert ledger.totals().requests == 2000


def test_the_progress_of_a_prompt_is_told_and_stops_for_a_client_that_has_gone():
    told = []
    record = begun(Ledger(), prompt=10, cached=4)
    progress = counted(record, lambda done, total: told.append((done, total)))
    progress(2, 6)
    assert (record.prompt_done, told) == (6, [(2, 6)])
    record.connected = lambda: False
    with pytest.raises(ConnectionAbortedError):
        progress(4, 6)
    assert told == [(2, 6)]


def test_the_decoding_thread_stops_in_the_prompt_of_a_request_that_has_ended():
    told = []
    ledger = Ledger()
    record = begun(ledger)
    progress = stoppable(record, lambda done, total: told.append(done))
    progress(2, 10)
    ledger.end(record)
    with pytest.raises(ConnectionAbortedError):
        progress(4, 10)
    assert told == [2, 4]
