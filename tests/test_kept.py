"""What the drafter knows is kept with a prompt cache: a further turn drafts as well as a first."""

import copy
import subprocess
import sys
from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    LRUPromptCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import mlx_spec
from models import (
    DEEPSEEK,
    DEMO,
    EAGLE,
    GEMMA_DEMO,
    GEMMA_TRAINED,
    TRAINED,
    assert_same_caches,
    checkpoint_path,
    pair,
)

NAME = "qwen3-5-trained"
GEMMA = "gemma4-dense-trained"
BOTH = pytest.mark.parametrize("name", [NAME, GEMMA])
ATOL = 1e-4  # past the window, mlx_lm's ring sums its rows in another order
SECOND = slice(3, 12)  # of the model's prompt: the prompt of a further turn


class Watched:
    """A drafter, and all that it proposes."""

    def __init__(self, inner):
        self.inner = inner
        self.drafts = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    @property
    def parts(self):
        return (self,)

    def draft(self, *args):
        self.drafts.append(self.inner.draft(*args))
        return self.drafts[-1]

    def taken(self):
        taken, self.drafts = self.drafts, []
        return [mx.concatenate(drafts).tolist() for drafts in taken]


@cache
def watched(name):
    return Watched(pair(name).drafter)


def responses(name, caches, prompt, max_tokens=12, **options):
    p = pair(name)
    options = {"draft_model": watched(name), "num_draft_tokens": 3} | options
    return mlx_spec.stream_generate(
        p.model,
        p.tokenizer,
        prompt,
        max_tokens=max_tokens,
        prompt_cache=caches,
        **options,
    )


def turn(name, caches, prompt, max_tokens=12, **options):
    """Its tokens, all drafts, and the counters."""
    watched(name).taken()
    got = list(responses(name, caches, prompt, max_tokens, **options))
    return [r.token for r in got], watched(name).taken(), got[-1].spec


def fresh_turn(name, history, prompt, max_tokens=12, **options):
    """The same after one prefill of all."""
    caches = make_prompt_cache(pair(name).model)
    return turn(name, caches, history + prompt, max_tokens, **options)


def stock_turn(name, caches, prompt, max_tokens=12, **options):
    model = pair(name).model
    options |= {"prompt_cache": caches, "max_tokens": max_tokens}
    return [t for t, _ in generate_step(mx.array(prompt), model, **options)]


def new_cache(name):
    return make_prompt_cache(pair(name).model)


def kept_cache(name, max_tokens=9, **options):
    """After a turn with drafts; and what it holds."""
    caches, prompt = new_cache(name), pair(name).prompt
    tokens, _, stats = turn(name, caches, prompt, max_tokens, **options)
    assert stats.unprimed == 0
    return caches, prompt + tokens


def learnt(caches):
    """The drafter's caches that are kept with a prompt cache."""
    return vars(caches[0])["mlx_spec"].caches


def assert_as_fresh(name, caches, history, prompt, max_tokens=12):
    """Text, drafts, counters, and what the drafter has learnt; returns what the caches hold."""
    tokens, drafts, stats = turn(name, caches, prompt, max_tokens)
    fresh = new_cache(name)
    assert (tokens, drafts, stats) == turn(name, fresh, history + prompt, max_tokens)
    assert_same_caches(learnt(caches), learnt(fresh), ATOL)
    assert stats.unprimed == 0
    assert stats.drafted > 0
    return history + prompt + tokens


# Turn after turn


@pytest.mark.parametrize("name", [*TRAINED, *GEMMA_TRAINED, DEEPSEEK, EAGLE, DEMO, GEMMA_DEMO])
def test_three_turns(name):
    """The last one goes on with the model's own next token, which is all of its prompt."""
    caches, history = kept_cache(name)
    history = assert_as_fresh(name, caches, history, pair(name).prompt[SECOND])
    following = stock_turn(name, new_cache(name), history, 13)
    tokens, _, stats = turn(name, caches, following[:1])
    assert tokens == following[1:]
    assert stats.accepted > 0


@BOTH
def test_after_a_turn_of_any_length(name):
    for max_tokens in (1, 2, 4, 6):
        caches, history = kept_cache(name, max_tokens)
        assert_as_fresh(name, caches, history, [5], 4)


@pytest.mark.parametrize(
    ("name", "end"),
    [(NAME, "end token"), (NAME, "closed"), (NAME, "let go"), (GEMMA, "closed")],
)
def test_after_a_turn_that_ends_within_a_block(name, end):
    """By a token of the model, or by the caller."""
    p = pair(name)
    text = stock_turn(name, new_cache(name), p.prompt)
    within = 0
    for yields in (1, 2, 4, 7):
        caches, got = new_cache(name), []
        try:
            if end == "end token":
                p.tokenizer.eos_token_ids = text[yields - 1 : yields]
            generation = responses(name, caches, p.prompt, 40)
            for response in generation:
                got.append(response.token)
                if response.finish_reason or (end != "end token" and len(got) == yields):
                    break
            if end == "closed":
                generation.close()
            del generation
        finally:
            p.tokenizer.eos_token_ids = []
        assert got == text[: len(got)]
        within += response.spec.accepted > response.spec.accepted_yielded
        assert_as_fresh(name, caches, p.prompt + got, p.prompt[SECOND], 4)
    assert within > 1


@pytest.mark.parametrize("length", [1, 9])
@BOTH
def test_no_token_passes_twice(name, length, monkeypatch):
    """Through the target or through the drafter, for what the drafter has to know."""
    p = pair(name)
    rows = {}

    def count(key, owner, method):
        function = getattr(owner, method)

        def counted(self, tokens, *args):
            rows[key] += tokens.size
            return function(self, tokens, *args)

        monkeypatch.setattr(owner, method, counted)

    def rows_of(run, *args):
        rows.update(target=0, drafter=0)
        run(name, *args, p.prompt[:length])
        return dict(rows)

    caches, history = kept_cache(name)
    count("target", type(p.target), "__call__")
    count("drafter", type(p.drafter), "extend")
    count("drafter", type(p.drafter), "draft")
    fresh = rows_of(fresh_turn, history)
    kept = rows_of(turn, caches)
    assert kept["target"] == fresh["target"] - len(history)
    # the first token has no pair
    learnt = len(history) - 1 if p.drafter.learns else 0
    assert kept["drafter"] == fresh["drafter"] - learnt


# What is not kept


def test_another_drafter_knows_nothing_of_it():
    p = pair(NAME)
    caches, history = kept_cache(NAME)
    other = type(p.drafter)(p.drafter.head, p.target)
    prompt = p.prompt[SECOND]
    tokens, _, stats = turn(NAME, caches, prompt, draft_model=other)
    assert stats.unprimed == len(history)
    assert stats.accepted > 0
    assert tokens == fresh_turn(NAME, history, prompt)[0]
    # what it has learnt is kept in turn, and is no longer of use to the first
    assert turn(NAME, copy.deepcopy(caches), [5], draft_model=other)[-1].unprimed == 0
    assert turn(NAME, caches, [5])[-1].unprimed == len(history + prompt + tokens)


@pytest.mark.parametrize("by", ["stock", "no drafts"])
def test_a_turn_without_drafts_in_between(by):
    caches, history = kept_cache(NAME)
    if by == "stock":
        tokens = stock_turn(NAME, caches, [7])
    else:
        tokens, _, stats = turn(NAME, caches, [7], num_draft_tokens=0)
        assert stats.reason == "num-draft-tokens-0"
    history += [7, *tokens]
    prompt = pair(NAME).prompt[SECOND]
    tokens, _, stats = turn(NAME, caches, prompt)
    assert stats.unprimed == len(history)
    assert tokens == fresh_turn(NAME, history, prompt)[0]


def test_a_cache_that_mlx_lm_has_filled():
    caches, prompt = new_cache(NAME), pair(NAME).prompt
    stock_turn(NAME, caches, prompt, 0)
    tokens, _, stats = turn(NAME, caches, prompt[SECOND])
    assert stats.unprimed == len(prompt)
    assert stats.accepted > 0
    assert tokens == fresh_turn(NAME, prompt, prompt[SECOND])[0]
    assert turn(NAME, caches, [5])[-1].unprimed == 0


@pytest.mark.parametrize("length", [1, 9])
def test_trimming_a_kept_cache(length):
    """Gemma's can be trimmed before the window is full; then nothing old is drafted from."""
    caches, history = kept_cache(GEMMA_DEMO)
    assert trim_prompt_cache(caches, 5) == 5
    plain = new_cache(GEMMA_DEMO)
    stock_turn(GEMMA_DEMO, plain, history[:-5], 0)
    prompt = pair(GEMMA_DEMO).prompt[:length]
    got = turn(GEMMA_DEMO, caches, prompt)
    assert got == turn(GEMMA_DEMO, plain, prompt)
    assert got[-1].accepted > 0
    assert got[0] == fresh_turn(GEMMA_DEMO, history[:-5], prompt)[0]


def test_trimming_does_nothing_to_a_recurrent_state():
    caches, history = kept_cache(NAME)
    assert trim_prompt_cache(caches, 5) == 0
    assert_as_fresh(NAME, caches, history, pair(NAME).prompt[SECOND])


# Copies


@BOTH
def test_copies_keep_it_and_do_not_disturb_each_other(name):
    caches, history = kept_cache(name)
    copies = [caches, copy.deepcopy(caches), copy.deepcopy(caches)]
    prompts = [pair(name).prompt[SECOND], [5], pair(name).prompt[:7]]
    assert_as_fresh(name, copies.pop(), history, prompts.pop())
    generations = [
        responses(name, caches, prompt) for caches, prompt in zip(copies, prompts, strict=True)
    ]
    interleaved = list(zip(*generations, strict=True))
    for prompt, got in zip(prompts, zip(*interleaved, strict=True), strict=True):
        tokens, _, stats = fresh_turn(name, history, prompt)
        assert [r.token for r in got] == tokens
        assert got[-1].spec == stats


@BOTH
def test_the_prompt_caches_of_mlx_lms_server(name):
    """An entry serves several conversations."""
    entries = LRUPromptCache()
    caches, history = kept_cache(name)
    entries.insert_cache("model", history, caches)
    for prompt in (pair(name).prompt[SECOND], [5], pair(name).prompt[SECOND]):
        fetched, rest = entries.fetch_nearest_cache("model", history + prompt)
        assert rest == prompt
        longer = assert_as_fresh(name, fetched, history, prompt)
        entries.insert_cache("model", longer, fetched)


# Files


@pytest.mark.parametrize("name", [NAME, GEMMA, GEMMA_DEMO])
def test_a_file_holds_what_mlx_lm_would_save(name, tmp_path):
    """mlx_lm alone goes on with the same text from it; and mlx_spec from mlx_lm's."""
    caches, history = kept_cache(name)
    plain = new_cache(name)
    stock_turn(name, plain, pair(name).prompt, 9)
    paths = [str(tmp_path / f"{kind}.safetensors") for kind in ("ours", "stock")]
    for path, saved in zip(paths, (caches, plain), strict=True):
        save_prompt_cache(path, saved, {"model": "m"})
    (ours, our_metadata), (stock, stock_metadata) = [
        mx.load(path, return_metadata=True) for path in paths
    ]
    assert our_metadata == stock_metadata
    assert {k: a.dtype for k, a in ours.items()} == {k: a.dtype for k, a in stock.items()}
    if name != GEMMA_DEMO:  # before its window is full, mlx_lm's ring has empty rows to spare
        assert {k: a.shape for k, a in ours.items()} == {k: a.shape for k, a in stock.items()}
    loaded_ours, loaded_stock = map(load_prompt_cache, paths)
    assert_same_caches(loaded_ours, loaded_stock, ATOL)

    prompt = pair(name).prompt[SECOND]
    expected, _, _ = fresh_turn(name, history, prompt)
    assert stock_turn(name, loaded_ours, prompt) == expected
    tokens, drafts, stats = turn(name, loaded_stock, prompt)
    assert tokens == expected
    assert stats.unprimed == (len(history) if name == NAME else 0)
    assert stats.accepted > 0
    assert turn(name, load_prompt_cache(paths[0]), prompt) == (tokens, drafts, stats)
    assert_as_fresh(name, caches, history, prompt)  # saving has changed nothing


def test_the_commands_of_mlx_lm(tmp_path):
    """cache_prompt, then generate from its file: stock and under `mlx-spec run`."""

    def output(*arguments):
        result = subprocess.run(
            [sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result

    files = [tmp_path / "stock.safetensors", tmp_path / "ours.safetensors"]
    model = checkpoint_path(DEMO)
    results = []
    for file, start in zip(files, (["mlx_lm"], ["mlx_spec", "run"]), strict=True):
        prefix = "mlx_lm." if start[-1] == "run" else ""
        options = ["--prompt", "import os", "--model", model, "--prompt-cache-file", file]
        output(*start, f"{prefix}cache_prompt", *options)
        options = ["--prompt", "\n\ndef ", "--prompt-cache-file", file, "-m", 20]
        options += ["--verbose", "False", "--ignore-chat-template"]
        results.append(output(*start, f"{prefix}generate", *options))
    assert files[0].read_bytes() == files[1].read_bytes()
    stock, ours = results
    tokens = load_prompt_cache(str(files[0]))[pair(DEMO).full].offset
    assert ours.stdout == stock.stdout
    assert "Speculation: nextn; 1 generations" in ours.stderr
    assert f"The drafter has not seen {tokens} tokens" in ours.stderr


# Quantised


@pytest.mark.parametrize("start", [0, 30])
def test_quantised_caches(start):
    """From the beginning, or from a token of the first turn on."""
    prompt = pair(NAME).prompt[SECOND]
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    caches, _ = kept_cache(NAME, 16, **quantised)
    assert any(isinstance(c, QuantizedKVCache) for c in caches)
    plain = new_cache(NAME)
    stock_turn(NAME, plain, pair(NAME).prompt, 16, **quantised)
    tokens, _, stats = turn(NAME, caches, prompt, **quantised)
    assert tokens == stock_turn(NAME, plain, prompt, **quantised)
    assert_same_caches(caches, plain)
    assert stats.unprimed == 0
    assert stats.accepted > 0
