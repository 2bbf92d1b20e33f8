"""The decoding thread of the server: errors, records, loading."""

import argparse
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
import mlx_lm.server
import pytest
from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from mlx_spec import batch
from mlx_spec.errors import ModelUnavailable, UnusableDrafter
from mlx_spec.generate import bound
from mlx_spec.load import Pairing
from mlx_spec.options import SpecOptions
from mlx_spec.server import generation
from mlx_spec.server.generation import SpecModelProvider, SpecResponseGenerator
from mlx_spec.server.prompt_cache import PromptCache
from mlx_spec.server.record import Record
from mlx_spec.server.status import Status
from models import DEMO, GEMMA_DEMO, checkpoint_path, drafter_path, pair

PROMPT = "import os\n\n\ndef read_lines(path):\n"


def provider_for(*options):
    """As mlx_lm.server's own main makes it."""
    made = []

    class Parser(argparse.ArgumentParser):
        def parse_args(self):
            return super().parse_args([str(option) for option in options])

    bound(
        mlx_lm.server.main,
        argparse=SimpleNamespace(**vars(argparse) | {"ArgumentParser": Parser}),
        ModelProvider=SpecModelProvider,
        run=lambda host, port, provider: made.append(provider),
    )()
    return made[0]


class Decoding(SpecResponseGenerator):
    """With what it was told."""

    def __init__(self, *options):
        self.reports, self.failures, self.is_loaded = [], [], threading.Event()
        super().__init__(
            provider_for(*options),
            PromptCache(5),
            options=lambda args: SpecOptions(args.num_draft_tokens, sampling="stock"),
            ended=self.reports.append,
            loaded=self.is_loaded.set,
            failed=self.failures.append,
        )

    def ask(self, prompt=PROMPT, max_tokens=30, num_draft_tokens=3, seed=None, model=None):
        request = CompletionRequest("text", prompt, [], None, None)
        args = GenerationArguments(
            ModelDescription(model or "default_model", "default_model", None),
            SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
            LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            [],
            max_tokens,
            num_draft_tokens,
            False,
            -1,
            seed,
            None,
        )
        _, responses = self.generate(request, args)
        return request.record, responses

    def text(self, **options):
        record, responses = self.ask(**options)
        return "".join(response.text for response in responses), record


@pytest.fixture
def decoding():
    generators = []

    def start(*options):
        generators.append(Decoding(*(options or ("--model", checkpoint_path(DEMO)))))
        return generators[-1]

    yield start
    for generator in generators:
        generator.stop(10)
        assert not generator._generation_thread.is_alive()


def fail_once(monkeypatch, owner, name):
    original, failed = getattr(owner, name), []

    def fail(*args, **options):
        if not failed:
            failed.append(True)
            raise RuntimeError("this\nfailed")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("name", ["next_token", "next_chunk"])
def test_an_error_of_a_request_alone_is_its_answer_and_the_thread_lives(
    decoding, monkeypatch, name
):
    generator = decoding()
    expected, _ = generator.text()
    fail_once(monkeypatch, batch.Alone, name)
    with pytest.raises(RuntimeError, match="this failed"):
        generator.text(prompt=PROMPT + "a")
    assert generator.text()[0] == expected
    assert generator.is_healthy
    assert generator.failures == []
    assert generator.ledger.last_error == "this failed"
    assert generator.ledger.totals().outcomes == {"length": 2, "error": 1}
    assert generator.ledger.active() == []


def test_an_error_in_a_batch_is_the_answer_to_all_in_it(decoding, monkeypatch):
    generator = decoding()
    expected, _ = generator.text()
    requests = [generator.ask(max_tokens=5000) for _ in range(2)]
    for _, responses in requests:
        next(responses)
    fail_once(monkeypatch, batch.GenerationBatch, "next")
    for _, responses in requests:
        with pytest.raises(RuntimeError, match="this failed"):
            list(responses)
    text, record = generator.text()
    assert text == expected
    assert record.stats.accepted > 0
    assert generator.ledger.totals().outcomes == {"length": 2, "error": 2}


def test_an_error_without_a_request_ends_the_thread_and_health_fails(decoding, monkeypatch):
    generator = decoding()
    generator.text()
    fail_once(monkeypatch, batch.SpecBatchGenerator, "next")
    monkeypatch.setattr(batch.SpecBatchGenerator, "next", None)
    generator.ledger._active.clear()
    fail_once(monkeypatch, generator, "_next_request")
    generator._generation_thread.join(10)
    assert not generator.is_healthy
    assert [str(error) for error in generator.failures] == ["this\nfailed"]
    status = Status(generator, "id", phase="serving")
    code, health = status.health()
    assert (code, health["status"], health["phase"]) == (503, "unavailable", "failed")
    with pytest.raises(RuntimeError, match="generation thread died"):
        generator.ask()


def test_without_a_drafter_it_is_off_unless_a_request_asks_for_lookup():
    model = nn.Module()
    model.mlx_spec = Pairing(None, reason="no-drafter", detail="none was asked for")
    record = Record(context=object())
    provider = SimpleNamespace(model=model, loading=None)
    ledger = SimpleNamespace(active=lambda: [record])
    status = Status(SimpleNamespace(model_provider=provider, ledger=ledger), "id")
    assert (status.spec()["state"], status.spec()["reason"]) == ("off", "no-drafter")
    record.stats.kind, record.stats.depth = "lookup", 2
    record.stats.add_round(2, 1)
    spec = status.spec()
    assert (spec["state"], spec["reason"], spec["depth"]) == ("drafting", None, 2)


def test_the_drafter_is_the_one_that_was_asked_for():
    model = nn.Module()
    provider = SimpleNamespace(model=model, loading=None)
    ledger = SimpleNamespace(active=lambda: [])
    responses = SimpleNamespace(model_provider=provider, ledger=ledger)
    without = Pairing(None, reason="no-drafter", detail="none was asked for")
    head = Pairing(pair(DEMO).drafter, Path("head"))
    for kind, pairing, drafter, state in [
        ("auto", without, None, "off"),
        ("lookup", without, "lookup", "idle"),
        ("auto", head, "head", "idle"),
        ("lookup", head, "lookup", "idle"),
        ("combined", head, "head", "idle"),
    ]:
        model.mlx_spec = pairing
        status = Status(responses, "id", draft_kind=kind)
        assert (status.drafter, status.spec()["state"]) == (drafter, state)


def test_health_while_a_model_is_loaded(decoding, monkeypatch):
    """Its progress is in bytes."""
    go_on, reading = threading.Event(), threading.Event()
    evaluate = generation.mx.eval

    def slowly(*arrays):
        evaluate(*arrays)
        reading.set()
        assert go_on.wait(10)

    monkeypatch.setattr(generation, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(generation.mx, "eval", slowly)
    generator = decoding()
    status = Status(generator, "id", phase="loading")
    assert reading.wait(10)
    code, health = status.health()
    assert (code, health["status"], health["phase"]) == (503, "loading", "loading")
    assert health["model"] == str(checkpoint_path(DEMO))
    assert health["progress"]["done"] == 0
    monkeypatch.setattr(generation.mx, "eval", evaluate)
    go_on.set()
    assert generator.is_loaded.wait(10)
    status.phase = "serving"
    code, health = status.health()
    assert (code, health["phase"], health["progress"]) == (200, "idle", None)


def test_nothing_is_computed_before_a_request(decoding, monkeypatch):
    forwards = []
    layer = type(pair(DEMO).model.layers[0])
    call = layer.__call__

    def counted(*args, **options):
        forwards.append(1)
        return call(*args, **options)

    monkeypatch.setattr(layer, "__call__", counted)
    generator = decoding()
    assert generator.is_loaded.wait(10)
    time.sleep(0.3)
    assert forwards == []
    generator.text()
    assert forwards


def test_requests_with_a_seed_are_served_alone_and_recorded(decoding):
    generator = decoding()
    expected, _ = generator.text()
    text, record = generator.text(seed=3)
    assert text == expected
    assert record.stats.accepted > 0
    assert record.outcome == "length"
    assert [stats.engaged for stats in generator.reports] == [True, True]


@pytest.mark.parametrize("name", [DEMO, GEMMA_DEMO])
def test_a_prompt_that_a_cache_holds_to_its_last_token(decoding, name):
    """mlx_lm.server's decoding thread ends with an error: no token is left to process."""
    generator = decoding("--model", checkpoint_path(name))
    expected, _ = generator.text()
    for seed in (None, 3):
        generator.text(prompt=PROMPT + "a", seed=seed)  # leaves a cache of PROMPT
        text, record = generator.text(seed=seed)
        assert text == expected
        assert record.cached_tokens > 0
        assert record.stats.accepted > 0
    assert generator.ledger.last_error is None


@pytest.mark.parametrize("name", [DEMO, GEMMA_DEMO])
def test_a_further_turn_drafts_at_once_and_says_what_it_would_without_a_cache(decoding, name):
    """What the drafter knows comes along with mlx_lm.server's prompt cache."""
    model = checkpoint_path(name)
    generator = decoding("--model", model)
    text, _ = generator.text(max_tokens=60)
    further = {"prompt": PROMPT + text + "\n\ndef write"}
    again, record = generator.text(**further)
    assert record.cached_tokens > 0
    assert record.stats.unprimed == 0
    assert record.stats.accepted > 0
    fresh, record = decoding("--model", model).text(**further)
    assert record.cached_tokens == 0
    assert again == fresh


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--model", "/nope"), ModelUnavailable),
        (("--model", drafter_path(GEMMA_DEMO)), ModelUnavailable),
        (("--model", checkpoint_path(DEMO), "--draft-model", "/nope"), UnusableDrafter),
    ],
)
def test_a_default_model_that_cannot_be_loaded(decoding, options, kind):
    generator = decoding(*options)
    generator._generation_thread.join(10)
    assert [type(error) for error in generator.failures] == [kind]
    assert not generator.is_healthy
    assert generator.model_provider.model is None


def test_without_a_default_model_a_request_names_one(decoding):
    generator = decoding("--num-draft-tokens", 2)
    assert generator.is_loaded.wait(10)
    with pytest.raises(ModelUnavailable, match="There is no default model"):
        generator.ask()
    _, record = generator.text(model=str(checkpoint_path(DEMO)))
    assert record.stats.accepted > 0


def test_an_explicit_drafter_and_none(decoding):
    explicit = decoding(
        "--model", checkpoint_path(GEMMA_DEMO), "--draft-model", drafter_path(GEMMA_DEMO)
    )
    text, record = explicit.text()
    assert record.stats.accepted > 0
    without = decoding("--model", checkpoint_path(GEMMA_DEMO), "--draft-model", "none")
    plain, record = without.text()
    assert plain == text
    assert (record.stats.drafted, record.stats.reason) == (0, "no-drafter")


def test_a_request_may_bring_its_record(decoding):
    generator = decoding()
    generator.text()
    request = CompletionRequest("text", PROMPT, [], None, None)
    request.record = Record(SpecOptions(3), connected=lambda: False)
    args = SimpleNamespace(num_draft_tokens=3)
    assert generator._record_of(request, args) is request.record
