"""Promise 1: token for token what stock mlx_lm.stream_generate yields at the same seed."""

from functools import cache

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_spec
from models import (
    DEEPSEEK,
    DEEPSEEK_RANDOM,
    DEMO,
    EAGLE,
    GEMMA_DEMO,
    RANDOM,
    TRAINED,
    ScriptedDrafter,
    often_right,
    pair,
    right,
)

TOKENS = 80
GEMMA_TOKENS = 48
FEWER_TOKENS = 48
DEPTHS = [1, 2, 3, 5]
SEED = 7


def opaque_sampler():
    """A user's closure: two draws a token, and none of mlx-lm's own functions."""

    def sample(logprobs):
        temperature = mx.random.uniform(0.5, 1.2)
        return mx.random.categorical(logprobs / temperature)

    return sample


SAMPLING = {
    "greedy": {},
    "top-p": {"sampler": lambda: make_sampler(0.8, top_p=0.9)},
    "top-k": {"sampler": lambda: make_sampler(0.7, top_k=20)},
    "min-p": {"sampler": lambda: make_sampler(1.0, min_p=0.1)},
    "xtc": {"sampler": lambda: make_sampler(0.8, xtc_probability=0.5, xtc_threshold=0.05)},
    "repetition": {"processors": {"repetition_penalty": 1.3}},
    "presence": {"processors": {"presence_penalty": 0.7}},
    "frequency": {
        "sampler": lambda: make_sampler(0.8, top_p=0.9),
        "processors": {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
    },
    "opaque": {"sampler": opaque_sampler},
}


def options(sampling):
    made = {}
    if "sampler" in SAMPLING[sampling]:
        made["sampler"] = SAMPLING[sampling]["sampler"]()
    if "processors" in SAMPLING[sampling]:
        made["logits_processors"] = make_logits_processors(**SAMPLING[sampling]["processors"])
    return made


def depths_for(names, name, sampling, count):
    """So many of the depths, in turns: each sampling and each model is run at all of them."""
    cell = names.index(name) + list(SAMPLING).index(sampling)
    step = len(DEPTHS) // count
    return DEPTHS[cell % step :: step]


def every_other(names):
    return [(n, s) for i, n in enumerate(names) for j, s in enumerate(SAMPLING) if (i + j) % 2]


def run(stream_generate, p, sampling, tokens=TOKENS, **more):
    if stream_generate is mlx_spec.stream_generate:
        more = {"sampling": "stock", "num_draft_tokens": 3} | more
    mx.random.seed(SEED)
    return list(
        stream_generate(
            p.model, p.tokenizer, p.prompt, max_tokens=tokens, **options(sampling), **more
        )
    )


@cache
def stock(name, sampling, tokens=TOKENS):
    """What mlx_lm yields, and the state in which it leaves the random generator."""
    expected = run(mlx_lm.stream_generate, pair(name), sampling, tokens)
    return expected, mx.random.state[0].tolist()


def assert_identical(got, expected, atol=0.0):
    assert [r.token for r in got] == [r.token for r in expected]
    assert [r.text for r in got] == [r.text for r in expected]
    assert got[-1].finish_reason == expected[-1].finish_reason == "length"
    assert len(got) == len(expected)
    for at in (0, len(got) // 2, len(got) - 1):
        np.testing.assert_allclose(got[at].logprobs, expected[at].logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize(("name", "sampling"), every_other([*TRAINED, DEMO]))
def test_trained_heads(name, sampling):
    p = pair(name)
    expected, state = stock(name, sampling)
    for depth in depths_for([*TRAINED, DEMO], name, sampling, 1):
        got = run(
            mlx_spec.stream_generate, p, sampling, draft_model=p.drafter, num_draft_tokens=depth
        )
        assert_identical(got, expected)
        assert mx.random.state[0].tolist() == state
        stats = got[-1].spec
        assert stats.drafted > 0
        assert stats.accepted > 0
        assert stats.accepted == sum(r.from_draft for r in got)
        assert stats.rounds + stats.accepted == TOKENS


@pytest.mark.parametrize(("name", "sampling"), every_other(RANDOM))
def test_random_heads(name, sampling):
    """A head with random weights is hardly ever right, so its proposals are replaced by ones
    that are often right: blocks are accepted in part, in full and not at all."""
    p = pair(name)
    expected, state = stock(name, sampling)
    text = p.prompt + [r.token for r in expected]
    drafter = ScriptedDrafter(p.drafter, often_right(text, p.target.vocab_size))
    for depth in depths_for(RANDOM, name, sampling, 1):
        got = run(
            mlx_spec.stream_generate, p, sampling, draft_model=drafter, num_draft_tokens=depth
        )
        assert_identical(got, expected)
        assert mx.random.state[0].tolist() == state
        stats = got[-1].spec
        assert stats.drafted > stats.accepted > TOKENS // 5


@pytest.mark.parametrize(
    ("sampling", "depth"), [("greedy", 1), ("greedy", 8), ("top-p", 3), ("frequency", 5)]
)
def test_eagle3(sampling, depth):
    """A head that proposes tokens of a reduced vocabulary."""
    p = pair(EAGLE)
    expected, state = stock(EAGLE, sampling, FEWER_TOKENS)
    got = run(
        mlx_spec.stream_generate,
        p,
        sampling,
        FEWER_TOKENS,
        draft_model=p.drafter,
        num_draft_tokens=depth,
    )
    assert_identical(got, expected)
    assert mx.random.state[0].tolist() == state
    stats = got[-1].spec
    assert stats.kind == "eagle3"
    assert stats.drafted > stats.accepted > 0
    assert stats.rounds + stats.accepted == FEWER_TOKENS


RING = 1e-3  # past the window, one token of stock sums its rows in another order


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *(("gemma4-e2b-trained", sampling) for sampling in list(SAMPLING)[::2]),
        *(("gemma4-dense-trained", sampling) for sampling in ("greedy", "top-p", "repetition")),
        *((GEMMA_DEMO, sampling) for sampling in ("greedy", "min-p", "frequency")),
    ],
)
def test_gemma_past_its_window(name, sampling):
    """The windows are of 8, 8 and 64 tokens. Two drafters have an ordered-embedding head.
    Greedy, all depths must agree to the bit."""
    p = pair(name)
    expected, state = stock(name, sampling, GEMMA_TOKENS)
    logprobs = []
    depths = (2, 5) if sampling == "greedy" else (2 + 3 * (list(SAMPLING).index(sampling) % 2),)
    for depth in depths:
        got = run(
            mlx_spec.stream_generate,
            p,
            sampling,
            GEMMA_TOKENS,
            draft_model=p.drafter,
            num_draft_tokens=depth,
        )
        assert_identical(got, expected, RING)
        assert mx.random.state[0].tolist() == state
        stats = got[-1].spec
        assert stats.drafted > stats.accepted > 0
        assert stats.accepted == sum(r.from_draft for r in got)
        assert stats.rounds + stats.accepted == GEMMA_TOKENS
        logprobs.append([r.logprobs for r in got])
    for rows in logprobs[1:]:
        np.testing.assert_array_equal(np.array(mx.stack(rows)), np.array(mx.stack(logprobs[0])))


@pytest.mark.parametrize("sampling", ["greedy", "top-p", "frequency"])
def test_gemma_with_a_mixture_of_experts(sampling):
    p = pair("gemma4-moe")
    expected, _ = stock("gemma4-moe", sampling, GEMMA_TOKENS)
    drafter = ScriptedDrafter(
        p.drafter, often_right(p.prompt + [r.token for r in expected], p.target.vocab_size)
    )
    got = run(
        mlx_spec.stream_generate,
        p,
        sampling,
        GEMMA_TOKENS,
        draft_model=drafter,
        num_draft_tokens=3,
    )
    assert_identical(got, expected, RING)
    assert got[-1].spec.drafted > got[-1].spec.accepted > GEMMA_TOKENS // 5


ROWS = 1e-4  # latent attention computes one row in another way than several


@pytest.mark.parametrize(
    ("sampling", "depth"), [("greedy", 3), ("top-p", 2), ("frequency", 5), ("opaque", 1)]
)
def test_a_trained_head_of_deepseek(sampling, depth):
    p = pair(DEEPSEEK)
    expected, state = stock(DEEPSEEK, sampling, FEWER_TOKENS)
    more = {"draft_model": p.drafter, "num_draft_tokens": depth}
    got = run(mlx_spec.stream_generate, p, sampling, FEWER_TOKENS, **more)
    assert_identical(got, expected, ROWS)
    assert mx.random.state[0].tolist() == state
    stats = got[-1].spec
    assert stats.drafted > stats.accepted > 0
    assert stats.rounds + stats.accepted == FEWER_TOKENS


@pytest.mark.parametrize("sampling", ["greedy", "repetition"])
@pytest.mark.parametrize("name", DEEPSEEK_RANDOM)
def test_random_heads_in_the_layout_of_deepseek(name, sampling):
    p = pair(name)
    expected, _ = stock(name, sampling, FEWER_TOKENS)
    text = p.prompt + [r.token for r in expected]
    drafter = ScriptedDrafter(p.drafter, often_right(text, p.target.vocab_size))
    more = {"draft_model": drafter, "num_draft_tokens": 3}
    got = run(mlx_spec.stream_generate, p, sampling, FEWER_TOKENS, **more)
    assert_identical(got, expected, ROWS)
    assert got[-1].spec.drafted > got[-1].spec.accepted > FEWER_TOKENS // 5


@pytest.mark.parametrize("name", RANDOM)
def test_random_heads_with_their_own_proposals(name):
    p = pair(name)
    expected, _ = stock(name, "top-p", FEWER_TOKENS)
    got = run(
        mlx_spec.stream_generate,
        p,
        "top-p",
        FEWER_TOKENS,
        draft_model=p.drafter,
        num_draft_tokens=3,
    )
    assert_identical(got, expected)
    assert got[-1].spec.drafted > FEWER_TOKENS


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("script", ["perfect", "always the same", "random"])
@pytest.mark.parametrize("sampling", ["greedy", "frequency"])
def test_a_drafter_made_wrong_on_purpose(script, sampling, depth):
    p = pair("qwen3-5-trained")
    expected, _ = stock("qwen3-5-trained", sampling, FEWER_TOKENS)
    text = p.prompt + [r.token for r in expected]
    random = np.random.default_rng(3)
    scripts = {
        "perfect": right(text),
        "always the same": lambda position, n: [5] * n,
        "random": lambda position, n: random.integers(0, 512, n).tolist(),
    }
    drafter = ScriptedDrafter(p.drafter, scripts[script])
    got = run(
        mlx_spec.stream_generate,
        p,
        sampling,
        FEWER_TOKENS,
        draft_model=drafter,
        num_draft_tokens=depth,
    )
    assert_identical(got, expected)
    stats = got[-1].spec
    if script == "perfect":
        assert stats.accepted == stats.drafted == FEWER_TOKENS - stats.rounds
        assert stats.rounds == -(-FEWER_TOKENS // (depth + 1))
    else:
        assert stats.accepted < stats.drafted / 4


@pytest.mark.parametrize("kv_bits", [4, 8])
@pytest.mark.parametrize("start", [0, 60])
def test_quantised_kv_cache(kv_bits, start):
    p = pair("qwen3-5-trained")
    quantised = {"kv_bits": kv_bits, "kv_group_size": 32, "quantized_kv_start": start}
    expected = run(mlx_lm.stream_generate, p, "greedy", **quantised)
    for depth in (1, 5):
        got = run(
            mlx_spec.stream_generate,
            p,
            "greedy",
            draft_model=p.drafter,
            num_draft_tokens=depth,
            **quantised,
        )
        assert_identical(got, expected)
        assert got[-1].spec.accepted > 0


@pytest.mark.parametrize("prefill_step_size", [1, 5, 2048])
@pytest.mark.parametrize("length", [1, 2, 3, 24])
def test_prompts_of_any_length_in_chunks_of_any_size(length, prefill_step_size):
    p = pair("qwen3-5-trained")
    chunks = {"max_tokens": 30, "prefill_step_size": prefill_step_size}
    prompt = p.prompt[:length]
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, prompt, **chunks))
    got = list(
        mlx_spec.stream_generate(
            p.model, p.tokenizer, prompt, draft_model=p.drafter, num_draft_tokens=3, **chunks
        )
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.drafted > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_the_cap_is_exact(max_tokens):
    p = pair("qwen3-5-trained")
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=max_tokens))
    got = list(
        mlx_spec.stream_generate(
            p.model,
            p.tokenizer,
            p.prompt,
            max_tokens=max_tokens,
            draft_model=p.drafter,
            num_draft_tokens=3,
        )
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert len(got) == max_tokens
    assert got[-1].finish_reason == "length"
    assert got[-1].spec.drafted <= max_tokens - 1


@pytest.mark.parametrize("index", [0, 1, 2, 5, 8])
@pytest.mark.parametrize(
    ("name", "depth"), [("qwen3-5-trained", 3), ("qwen3-5-trained", 5), ("gemma4-dense-trained", 5)]
)
def test_an_end_token_at_any_index_of_a_block(name, depth, index):
    """The token that stands at `index` of the plain continuation is made an end token."""
    p = pair(name)
    plain = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=40))
    try:
        p.tokenizer.eos_token_ids = [plain[index].token]
        expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=40))
        got = list(
            mlx_spec.stream_generate(
                p.model,
                p.tokenizer,
                p.prompt,
                max_tokens=40,
                draft_model=p.drafter,
                num_draft_tokens=depth,
            )
        )
    finally:
        p.tokenizer.eos_token_ids = []
    assert [(r.token, r.text, r.finish_reason) for r in got] == [
        (r.token, r.text, r.finish_reason) for r in expected
    ]
    assert got[-1].finish_reason == "stop"
    assert got[-1].generation_tokens == expected[-1].generation_tokens


@pytest.mark.parametrize("name", ["qwen3-5-trained", "gemma4-e2b-trained"])
def test_two_requests_do_not_touch_each_other(name):
    p = pair(name)
    alone = [run(mlx_spec.stream_generate, p, "greedy", draft_model=p.drafter) for _ in range(2)]
    assert [r.token for r in alone[0]] == [r.token for r in alone[1]]
    assert alone[0][-1].spec == alone[1][-1].spec
    other = p.prompt[::-1]
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, other, max_tokens=50))
    streams = [
        mlx_spec.stream_generate(
            p.model, p.tokenizer, prompt, max_tokens=50, draft_model=p.drafter, num_draft_tokens=3
        )
        for prompt in (p.prompt, other)
    ]
    interleaved = list(zip(*streams, strict=True))
    assert [a.token for a, _ in interleaved] == [r.token for r in alone[0][:50]]
    assert [b.token for _, b in interleaved] == [r.token for r in expected]
