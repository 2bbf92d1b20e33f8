"""mlx_lm's own functions and commands, with the plugin installed."""

import importlib
import shutil
import subprocess
import sys
from functools import reduce
from types import FunctionType

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import stream_generate as imported_before
from mlx_lm.sample_utils import make_sampler

from mlx_spec import plugin
from mlx_spec.errors import Incompatible
from mlx_spec.options import SpecOptions
from mlx_spec.sliding_window import SlidingWindow
from mlx_spec.upstream import CALLERS, INTERNALS
from models import (
    DEMO,
    EAGLE_HEAD,
    GEMMA_DEMO,
    GEMMA_TRAINED,
    TRAINED,
    checkpoint_path,
    drafter_path,
    pair,
)

FIXED = SpecOptions(3, sampling="stock")
NAMES = [*TRAINED[:1], *GEMMA_TRAINED]
generate_module = importlib.import_module("mlx_lm.generate")


@pytest.fixture
def reports():
    collected = []
    plugin.install(collected.append, FIXED)
    yield collected
    plugin.uninstall()


def loaded(name):
    """As stock programs do; the drafter is in the model or beside it."""
    model, tokenizer = mlx_lm.load(str(checkpoint_path(name)))
    model.set_dtype(mx.float32)
    tokenizer.eos_token_ids = []
    return model, tokenizer


def stock_tokens(name, prompt, count):
    p = pair(name)
    run = mlx_lm.stream_generate(p.model, p.tokenizer, prompt, max_tokens=count)
    return [r.token for r in run]


def hooked():
    return {
        (name, key): getattr(importlib.import_module(name), key)
        for name, key in [
            ("mlx_lm", "stream_generate"),
            ("mlx_lm.generate", "stream_generate"),
            ("mlx_lm.generate", "generate_step"),
            ("mlx_lm.generate", "speculative_generate_step"),
            ("mlx_lm.generate", "BatchGenerator"),
            ("mlx_lm.utils", "load_model"),
            ("mlx_lm.server", "BatchGenerator"),
            ("mlx_lm.server", "ModelProvider"),
            ("mlx_lm.server", "ResponseGenerator"),
            ("mlx_lm.server", "stream_generate"),
        ]
    }


def test_importing_changes_nothing_and_uninstalling_puts_everything_back():
    before = hooked()
    assert all(f.__module__.startswith("mlx_lm") for f in before.values())
    plugin.install()
    plugin.install()
    assert all(f.__module__.startswith("mlx_spec.") for f in hooked().values())
    plugin.uninstall()
    plugin.uninstall()
    assert hooked() == before


@pytest.mark.parametrize("name", NAMES)
def test_stock_load_and_generate(name, reports):
    """A second call of `install` changed who is told, so both were the same installation."""
    prompt = pair(name).prompt
    plugin.uninstall()
    expected = stock_tokens(name, prompt, 40)
    plugin.install(reports.append, FIXED)
    model, tokenizer = loaded(name)
    responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=40))
    assert [r.token for r in responses] == expected
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=40)
    assert text == "".join(r.text for r in responses)
    assert len(reports) == 2
    for stats in reports:
        assert stats.drafted > 20
        assert stats.accepted > 0
    assert sum(r.from_draft for r in responses) == reports[0].accepted


def test_a_function_that_was_imported_before_drafts_too(reports):
    name = "gemma4-dense-trained"
    model, tokenizer = loaded(name)
    prompt = pair(name).prompt
    tokens = [r.token for r in imported_before(model, tokenizer, prompt, max_tokens=30)]
    (stats,) = reports
    assert stats.accepted > 0
    plugin.uninstall()
    assert tokens == stock_tokens(name, prompt, 30)


@pytest.mark.parametrize("run", ["hooked", "imported before"])
def test_a_drafter_directory_as_a_draft_model(run, reports):
    """As stock programs load it: with mlx_lm.load."""
    name = "gemma4-dense-trained"
    p = pair(name)
    draft_model, tokenizer = mlx_lm.load(str(drafter_path(name)))
    assert tokenizer.vocab_size == p.tokenizer.vocab_size
    stream_generate = mlx_lm.stream_generate if run == "hooked" else imported_before
    responses = list(
        stream_generate(
            p.model,
            p.tokenizer,
            p.prompt,
            max_tokens=30,
            draft_model=draft_model,
            num_draft_tokens=2,
        )
    )
    (stats,) = reports
    assert stats.num_draft_tokens == 2
    assert stats.accepted == sum(r.from_draft for r in responses) > 0
    plugin.uninstall()
    assert [r.token for r in responses] == stock_tokens(name, p.prompt, 30)


def test_a_head_without_a_tokenizer_is_one_sentence(reports):
    with pytest.raises(Incompatible, match=r"has no tokenizer, .*: mlx-spec convert --from "):
        mlx_lm.load(str(checkpoint_path(EAGLE_HEAD)))


@pytest.mark.parametrize("kind", ["assistant", "model"])
def test_a_draft_model_that_is_switched_off_leaves_the_text_as_it_is(kind, reports):
    """Also in programs that have mlx_lm's own loop around a step."""
    p = pair("gemma4-dense-trained")
    draft_model = p.model
    if kind == "assistant":
        draft_model, _ = mlx_lm.load(str(drafter_path("gemma4-dense-trained")))
    plugin.install(reports.append, SpecOptions(2, sampling="seed"))
    texts = []
    for n in (3, 0):
        mx.random.seed(4)
        options = {"draft_model": draft_model, "num_draft_tokens": n, "sampler": make_sampler(0.8)}
        run = imported_before(p.model, p.tokenizer, p.prompt, max_tokens=20, **options)
        texts.append([(response.token, response.from_draft) for response in run])
    assert [token for token, _ in texts[0]] == [token for token, _ in texts[1]]
    assert sum(right for _, right in texts[0]) == reports[0].accepted > 0
    assert not any(right for _, right in texts[1])
    assert [stats.sampling for stats in reports] == ["seed", "seed"]
    assert reports[1].reason == "num-draft-tokens-0"


def test_a_programs_own_number_counts_with_a_draft_model_or_if_it_is_0(reports):
    """mlx_lm.generate always gives one, 3 if its user does not; it is meant for a draft model."""
    name = "qwen3-5-trained"
    model, tokenizer = loaded(name)
    prompt = pair(name).prompt
    plugin.install(reports.append, SpecOptions(2, sampling="seed"))
    options = {"max_tokens": 12, "sampler": make_sampler(0.8)}
    for more in ({}, {"num_draft_tokens": 3}, {"num_draft_tokens": 0}):
        list(mlx_lm.stream_generate(model, tokenizer, prompt, **options, **more))
    assert [stats.num_draft_tokens for stats in reports[:2]] == [2, 2]
    assert [stats.sampling for stats in reports] == ["seed"] * 3
    assert reports[2].reason == "num-draft-tokens-0"


def test_a_sampled_text_is_the_same_with_a_drafter_and_without(reports, tmp_path):
    """Under the law `seed`, which is the plugin's default."""
    shutil.copytree(checkpoint_path("gemma4-dense-trained"), tmp_path / "Alone")
    plugin.install(reports.append, SpecOptions(3))
    texts = []
    for path in (tmp_path / "Alone", checkpoint_path("gemma4-dense-trained")):
        model, tokenizer = mlx_lm.load(str(path))
        for stream_generate in (mlx_lm.stream_generate, imported_before):
            mx.random.seed(4)
            options = {"max_tokens": 12, "sampler": make_sampler(0.8)}
            run = stream_generate(model, tokenizer, [1, 2, 3], **options)
            texts.append([response.token for response in run])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert [stats.engaged for stats in reports] == [False, False, True, True]
    assert {stats.sampling for stats in reports} == {"seed"}


def test_without_a_drafter_stock_runs_and_the_reason_is_told(reports, tmp_path):
    shutil.copytree(checkpoint_path("gemma4-dense-trained"), tmp_path / "Alone")
    model, tokenizer = mlx_lm.load(str(tmp_path / "Alone"))
    for _ in mlx_lm.stream_generate(model, tokenizer, [1, 2, 3], max_tokens=10):
        pass
    (stats,) = reports
    assert (stats.drafted, stats.reason) == (0, "no-match")
    assert stats.detail.startswith("no *-assistant* drafter beside it")


def test_a_hook_that_a_module_has_kept_is_stocks_own_after_uninstalling(reports):
    name = "gemma4-dense-trained"
    kept = mlx_lm.stream_generate, generate_module.generate_step
    model, tokenizer = loaded(name)
    plugin.uninstall()
    prompt = pair(name).prompt
    expected = stock_tokens(name, prompt, 10)
    assert [r.token for r in kept[0](model, tokenizer, prompt, max_tokens=10)] == expected
    assert [t for t, _ in kept[1](mx.array(prompt), model, max_tokens=10)] == expected
    assert reports == []


def test_only_processing_a_prompt_is_left_to_stock(reports):
    """As mlx_lm.cache_prompt does."""
    name = "gemma4-dense-trained"
    model, _ = loaded(name)
    cache = model.make_cache()
    prompt = mx.array(pair(name).prompt)
    step = generate_module.generate_step
    assert list(step(prompt, model, max_tokens=0, prompt_cache=cache)) == []
    assert reports == []
    assert cache[0].offset == prompt.size
    assert not any(isinstance(c, SlidingWindow) for c in cache)


@pytest.mark.parametrize("name", NAMES[:2])
def test_batch_generate(name, reports):
    """The last of several is decoded with drafts."""
    prompt = pair(name).prompt
    prompts = [prompt, prompt[:9], prompt[5:20]]
    counts = [5, 30, 12]
    batch_generate = generate_module.batch_generate
    options = {"max_tokens": counts, "return_token_ids": True}
    plugin.uninstall()
    model, tokenizer = loaded(name)
    expected = batch_generate(model, tokenizer, prompts, **options)
    plugin.install(reports.append, FIXED)
    model, tokenizer = loaded(name)
    got = batch_generate(model, tokenizer, prompts, **options)
    assert got.texts == expected.texts
    assert got.token_ids == expected.token_ids
    assert got.stats.generation_tokens == sum(counts)
    assert [stats.reason for stats in reports] == ["batch", "batch", None]
    assert reports[2].drafted >= reports[2].accepted > 0
    assert reports[2].batched == 12


def test_a_prompt_alone_in_batch_generate(reports):
    name = "gemma4-dense-trained"
    model, tokenizer = loaded(name)
    prompt = pair(name).prompt
    got = generate_module.batch_generate(
        model, tokenizer, [prompt], max_tokens=30, return_token_ids=True
    )
    (stats,) = reports
    assert stats.batched == 0
    assert stats.accepted > 0
    plugin.uninstall()
    assert got.token_ids == [stock_tokens(name, prompt, 30)]


def test_a_batch_generator_that_a_module_has_kept_is_stocks_own_after_uninstalling(reports):
    name = "gemma4-dense-trained"
    kept = generate_module.BatchGenerator
    model, tokenizer = loaded(name)
    prompt = pair(name).prompt
    list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=3))  # finds the drafter
    reports.clear()
    plugin.uninstall()
    generator = kept(model, max_tokens=10)
    assert isinstance(generator, generate_module.BatchGenerator)
    generator.insert([prompt])
    tokens = []
    while responses := generator.next_generated():
        tokens += [r.token for r in responses]
        assert len(generator._generation_batch) == (len(tokens) < 10)
    assert tokens == stock_tokens(name, prompt, 10)
    assert reports == []


@pytest.mark.parametrize(("module", "function", "name"), CALLERS + INTERNALS)
def test_a_moved_upstream_is_named_and_nothing_is_replaced(module, function, name, monkeypatch):
    before = hooked()
    moved = FunctionType((lambda: None).__code__, {})
    *path, last = function.split(".")
    monkeypatch.setattr(reduce(getattr, path, importlib.import_module(module)), last, moved)
    with pytest.raises(Incompatible, match=rf"has no {module}.{function} that uses"):
        plugin.install()
    monkeypatch.undo()
    assert hooked() == before


# mlx-spec run


def run(*arguments, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "mlx_spec", "run", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
    )


def test_run_generate_prints_what_it_prints():
    options = ["--model", checkpoint_path(GEMMA_DEMO), "--prompt", "import os", "-m", "20"]
    options += ["--ignore-chat-template", "--verbose", "False", "--temp", "0"]
    stock = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", *map(str, options)],
        capture_output=True,
        text=True,
    )
    result = run("mlx_lm.generate", *options)
    assert result.returncode == stock.returncode == 0, result.stderr
    assert result.stdout == stock.stdout
    assert "Speculation: gemma4-assistant; 1 generations" in result.stderr


def test_run_chat():
    result = run("mlx_lm.chat", "--model", checkpoint_path(DEMO), "-m", 12, stdin="hello\nq\n")
    assert result.returncode == 0, result.stderr
    assert "Speculation: nextn; 1 generations" in result.stderr


def test_run_a_script_and_a_module(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys, mlx_lm\n"
        "model, tokenizer = mlx_lm.load(sys.argv[1])\n"
        "print(mlx_lm.generate(model, tokenizer, 'import os', max_tokens=12))\n"
        "sys.exit(5)\n"
    )
    result = run(tmp_path / "program.py", checkpoint_path(GEMMA_DEMO))
    assert result.returncode == 5, result.stderr
    assert "Speculation: gemma4-assistant; 1 generations" in result.stderr
    result = run("-m", "json.tool", "--help")
    assert result.returncode == 0
    assert "Speculation: not engaged: nothing was generated" in result.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (["nope"], "There is no program 'nope'; give mlx_lm.generate"),
        (["mlx_lm.nope"], "mlx_lm has no command mlx_lm.nope."),
        (["-m"], "After -m the name of a module is missing."),
    ],
)
def test_an_unknown_program_is_one_sentence(program, words):
    result = run(*program)
    assert result.returncode == 1
    assert result.stderr.startswith(f"Error: {words}")
    assert len(result.stderr.splitlines()) == 1
