"""The Python API: mlx_lm's names, arguments and results."""

import dataclasses
import importlib
import inspect
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import mlx_spec
from mlx_spec.errors import BadArguments, Incompatible, NotEngaged
from mlx_spec.generate import bound
from models import assert_same_caches, checkpoint_path, pair

stock = importlib.import_module("mlx_lm.generate")
P = "qwen3-5-trained"


def stream(p, **options):
    options = {"num_draft_tokens": 3} | options
    return list(mlx_spec.stream_generate(p.model, p.tokenizer, p.prompt, **options))


@pytest.mark.parametrize("name", ["stream_generate", "generate", "load"])
def test_a_program_changes_only_its_import(name):
    """Every argument of mlx_lm's function is taken, by position too, with the same default."""
    ours = inspect.signature(getattr(mlx_spec, name))
    theirs = inspect.signature(getattr(mlx_lm, name))
    ours.bind(*range(sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in theirs.parameters.values())))
    for parameter in theirs.parameters.values():
        if parameter.name in ours.parameters:
            assert ours.parameters[parameter.name].default == parameter.default
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values())


def test_speculative_generate_step_takes_what_the_stock_steps_take():
    ours = inspect.signature(mlx_spec.speculative_generate_step).parameters
    for function in (stock.generate_step, stock.speculative_generate_step):
        missing = set(inspect.signature(function).parameters) - set(ours)
        assert missing <= {"input_embeddings"}
    for name, parameter in inspect.signature(stock.generate_step).parameters.items():
        if name in ours:
            assert ours[name].default == parameter.default


def test_the_response_is_mlx_lms_with_counters():
    p = pair(P)
    response = stream(p, max_tokens=3, draft_model=p.drafter)[0]
    assert isinstance(response, stock.GenerationResponse)
    own = {f.name for f in dataclasses.fields(response)}
    assert own == {f.name for f in dataclasses.fields(stock.GenerationResponse)} | {"spec"}
    assert response.spec.rounds == 1


def test_counters_of_earlier_responses_stay():
    p = pair(P)
    responses = stream(p, max_tokens=40, draft_model=p.drafter)
    rounds = [r.spec.rounds for r in responses]
    assert rounds == sorted(rounds)
    assert rounds[0] == 1 < rounds[-1]


def test_generate_gives_the_text_and_prints_as_stock(capsys):
    p = pair(P)
    model, tokenizer = mlx_spec.load(str(checkpoint_path(P)))
    text = mlx_spec.generate(model, tokenizer, p.prompt, verbose=True, max_tokens=30)
    ours = capsys.readouterr().out
    expected = mlx_lm.generate(model, tokenizer, p.prompt, verbose=True, max_tokens=30)
    theirs = capsys.readouterr().out
    assert text == expected
    assert ours.split("Prompt:")[0] == theirs.split("Prompt:")[0]


@pytest.mark.parametrize("end", ["stop", "length"])
def test_caches_are_settled_when_the_last_response_arrives(end):
    """The caller may keep the generator and go on with the cache."""
    p = pair(P)
    plain = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=20))
    caches = {}
    try:
        if end == "stop":
            p.tokenizer.eos_token_ids = [plain[8].token]
        for name, module in {"stock": mlx_lm, "ours": mlx_spec}.items():
            caches[name] = make_prompt_cache(p.model)
            more = {"draft_model": p.drafter, "num_draft_tokens": 5} if name == "ours" else {}
            generation = module.stream_generate(
                p.model, p.tokenizer, p.prompt, max_tokens=20, prompt_cache=caches[name], **more
            )
            for response in generation:
                if response.finish_reason:
                    assert response.finish_reason == end
                    break
            if name == "ours":
                assert_same_caches(caches["ours"], caches["stock"])
    finally:
        p.tokenizer.eos_token_ids = []


def test_progress_is_reported_with_drafts_too():
    p = pair(P)
    seen = []
    stream(
        p,
        max_tokens=3,
        draft_model=p.drafter,
        prefill_step_size=10,
        prompt_progress_callback=lambda done, total: seen.append((done, total)),
    )
    expected = []
    list(
        mlx_lm.stream_generate(
            p.model,
            p.tokenizer,
            p.prompt,
            max_tokens=3,
            prefill_step_size=10,
            prompt_progress_callback=lambda done, total: expected.append((done, total)),
        )
    )
    assert seen == expected == [(0, 24), (10, 24), (20, 24), (23, 24), (24, 24)]


REASONS = {
    "num-draft-tokens-0": {"num_draft_tokens": 0},
    "input-embeddings": {"input_embeddings": mx.zeros((24, 128))},
    "unsupported-cache": {"prompt_cache": [object()] * 4},
    "too-short": {"max_tokens": 1},
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_for_not_engaging(reason):
    p = pair(P)
    options = {"max_tokens": 4, "draft_model": p.drafter} | REASONS[reason]
    if reason == "unsupported-cache":
        with pytest.raises(Incompatible, match="class object"):
            list(
                mlx_spec.speculative_generate_step(
                    mx.array(p.prompt), p.model, p.drafter, prompt_cache=[object()] * 4
                )
            )
        with pytest.raises(NotEngaged, match="class object"):
            stream(p, require_spec=True, **options)
        return
    last = stream(p, **options)[-1]
    assert last.spec.reason == reason
    assert not last.spec.engaged
    assert last.generation_tokens == options["max_tokens"]
    with pytest.raises(NotEngaged, match=reason):
        stream(p, require_spec=True, **options)


def test_a_model_that_was_not_loaded_here_says_so():
    model, _ = load_model(checkpoint_path(P))
    last = list(mlx_spec.stream_generate(model, pair(P).tokenizer, [5, 6], max_tokens=3))[-1]
    assert last.spec.reason == "no-drafter"
    assert "not loaded by mlx_spec.load" in last.spec.detail


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True, "automatic"])
def test_a_depth_that_is_none_is_refused(bad):
    p = pair(P)
    with pytest.raises(BadArguments, match="give 0 or more, or 'auto'"):
        stream(p, max_tokens=4, draft_model=p.drafter, num_draft_tokens=bad)


def test_an_empty_prompt_is_refused():
    p = pair(P)
    with pytest.raises(ValueError, match="prompt is empty"):
        next(mlx_spec.speculative_generate_step(mx.array([]), p.model, p.drafter))


# mlx-lm's functions with one name bound to ours: fails when upstream moves


@pytest.mark.parametrize(
    ("function", "names"),
    [
        ("stream_generate", ["speculative_generate_step"]),
        ("generate", ["stream_generate"]),
        ("main", ["setup_arg_parser", "load", "generate"]),
    ],
)
def test_mlx_lm_still_uses_the_names_that_are_bound(function, names):
    bound(getattr(stock, function), **dict.fromkeys(names))


def test_binding_a_name_that_is_not_used_is_an_error():
    with pytest.raises(AttributeError, match="does not use sing"):
        bound(stock.generate, sing=None)


def test_binding_leaves_the_stock_function_alone():
    def step(*args, **kwargs):
        yield 5, mx.zeros(4), True

    p = pair(P)
    copy = bound(stock.stream_generate, speculative_generate_step=step)
    assert [r.token for r in copy(p.model, p.tokenizer, p.prompt, 1, object())] == [5]
    assert stock.stream_generate.__globals__["speculative_generate_step"] is not step
    assert inspect.signature(copy) == inspect.signature(stock.stream_generate)


@pytest.mark.parametrize("sampling", ["stock", "seed"])
def test_a_program_may_end_in_the_middle_of_a_generation(sampling):
    program = f"""
import mlx_spec
from mlx_lm.sample_utils import make_sampler
model, tokenizer = mlx_spec.load({str(checkpoint_path(P))!r})
generation = mlx_spec.stream_generate(
    model, tokenizer, [5, 6], sampler=make_sampler(0.8), sampling={sampling!r}, num_draft_tokens=3
)
for _ in range(3):
    next(generation)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
