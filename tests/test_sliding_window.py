"""A ring in time order: what stock mlx-lm computes, and rows that can be taken back."""

import copy
import gc

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import mlx_spec
from mlx_spec.errors import Incompatible
from mlx_spec.rollback import Transaction, check_caches
from mlx_spec.sliding_window import ROOM, SlidingWindow, in_time_order, settled
from models import (
    GEMMA_DEMO,
    GEMMA_RANDOM,
    GEMMA_TRAINED,
    WINDOW,
    ScriptedDrafter,
    assert_same_caches,
    make_request,
    often_right,
    pair,
)

W = 5  # of the caches that hold numbers only
ATOL = 2e-4  # a ring sums its rows in another order


def rows(begin: int, end: int) -> mx.array:
    """Row at position i is filled with i + 1."""
    return mx.broadcast_to(mx.arange(begin + 1, end + 1)[:, None], (1, 2, end - begin, 4)) * 1.0


def positions(keys: mx.array) -> list[int]:
    return [int(x) - 1 for x in keys[0, 0, :, 0].tolist()]


def fed(cache, begin, end):
    keys, values = cache.update_and_fetch(rows(begin, end), -rows(begin, end))
    assert positions(keys) == positions(-values)
    return positions(keys)


@pytest.mark.parametrize("sizes", [[1] * 40, [3] * 20, [7, 1, 1, 4], [1, 12, 5, 2], [2, 40, 3, 1]])
def test_an_update_returns_the_rows_that_stock_attends_to(sizes):
    """In time order. mlx-lm's ring has W of them for one token and up to W - 1 + T for several."""
    stock, ours = RotatingKVCache(W), SlidingWindow(RotatingKVCache(W))
    at = 0
    for size in sizes:
        expected = fed(stock, at, at + size)
        got = fed(ours, at, at + size)
        at += size
        assert got == sorted(expected)
        assert got == list(range(max(0, at - size - W + 1), at))
        assert ours.offset == stock.offset == at


@pytest.mark.parametrize("length", range(1, 13))
def test_a_ring_taken_over_and_settled_again(length):
    """Whatever its state: growing, full, turned, or longer than the window after a prompt."""
    for first in range(length + 1):
        ring = RotatingKVCache(W)
        for begin, end in [(0, first)] if first else []:
            fed(ring, begin, end)
        for at in range(first, length):
            fed(ring, at, at + 1)
        (ours,) = in_time_order([ring])
        assert ring.keys is None, "the same rows would be held twice"
        assert positions(ours.keys_and_values()[0]) == list(range(max(0, length - W), length))
        assert settled([ours]) == [ring]
        assert ring.offset == length
        assert ring.keys.shape[2] == min(length, W)
        assert sorted(fed(ring, length, length + 1)) == list(
            range(max(0, length + 1 - W), length + 1)
        )


def test_an_empty_ring():
    ring = RotatingKVCache(W)
    (ours,) = in_time_order([ring])
    assert ours.empty()
    settled([ours])
    assert ring.empty()
    assert fed(ring, 0, 2) == [0, 1]


@pytest.mark.parametrize("rounds", [1, 30])
@pytest.mark.parametrize("new", [1, 2, 4, 9, ROOM + 3])
def test_what_an_update_appended_can_be_dropped_again(new, rounds):
    """All of the last update, and all of the one before it after that: a full window is left."""
    cache = SlidingWindow(RotatingKVCache(W))
    fed(cache, 0, 17)
    at = 17
    for _ in range(rounds):
        fed(cache, at, at + new)  # a round that stays
        at += new
        fed(cache, at, at + new)  # the round ahead of it
        cache.offset = at
        assert positions(cache.keys_and_values()[0]) == list(range(at - W, at))
        cache.offset = at - new
        assert positions(cache.keys_and_values()[0]) == list(range(at - new - W, at - new))
        cache.offset = at


def test_the_buffer_stays_short_and_is_seldom_copied():
    cache = SlidingWindow(RotatingKVCache(W))
    n, copies, at, first = 3, 0, 0, 0
    for _ in range(1000):
        fed(cache, at, at + n + 1)
        assert cache.keys.shape[2] <= W + 2 * (n + 1) + ROOM
        copies += cache.first != first
        first = cache.first
        at += 2  # one draft of three is right
        cache.offset = at
    assert copies <= 2000 / ROOM + 1


@pytest.mark.parametrize(("size", "keep"), [(WINDOW, 4), (WINDOW - 4, 0), (2 * WINDOW, 0)])
def test_a_ring_that_is_not_the_models_is_refused(size, keep):
    """mlx_lm makes rings that keep their first rows with max_kv_size, for models without caches
    of their own. Several tokens at once do not see what each of them sees alone in such rings."""
    p = pair("gemma4-dense-trained")
    words = f"of {size} rows that keeps the first {keep} does not belong to this model, whose win"
    with pytest.raises(Incompatible, match=words):
        check_caches(p.target, [KVCache(), RotatingKVCache(size, keep)])
    cache = [
        c if type(c) is KVCache else RotatingKVCache(size, keep) for c in make_prompt_cache(p.model)
    ]
    (*_, last) = mlx_spec.stream_generate(
        p.model,
        p.tokenizer,
        p.prompt,
        max_tokens=4,
        draft_model=p.drafter,
        prompt_cache=cache,
        num_draft_tokens=3,
    )
    assert last.spec.reason == "unsupported-cache"
    assert words in last.spec.detail


def test_a_window_is_refused_where_the_model_has_none():
    with pytest.raises(Incompatible, match="whose window is None"):
        check_caches(pair("qwen3-5").target, [RotatingKVCache(8)])


@pytest.mark.parametrize("name", GEMMA_RANDOM + GEMMA_TRAINED)
def test_blocks_of_any_width_agree_to_the_bit_and_with_stock(name):
    p = pair(name)
    tokens = mx.array((p.prompt * 4)[: 6 * WINDOW])[None]

    def run(caches, widths):
        logits, at = [], 0
        while at < tokens.shape[1]:
            width = widths[len(logits) % len(widths)]
            logits.append(p.model(tokens[:, at : at + width], cache=caches))
            at += width
        return mx.concatenate(logits, axis=1), settled(caches)

    stock, stock_caches = run(make_prompt_cache(p.model), [1])
    plain, plain_caches = run(in_time_order(make_prompt_cache(p.model)), [1])
    np.testing.assert_allclose(plain, stock, atol=1e-3)
    assert_same_caches(plain_caches, stock_caches, ATOL)
    for widths in ([2], [5], [48], [1, 5, 2]):
        logits, caches = run(in_time_order(make_prompt_cache(p.model)), widths)
        np.testing.assert_array_equal(logits, plain)
        assert_same_caches(caches, plain_caches)


@pytest.mark.parametrize("keep", range(1, 7))
@pytest.mark.parametrize("before", [WINDOW - 5, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_any_roll_back_at_and_past_the_window(before, keep):
    p = pair("gemma4-e2b")
    tokens = (p.prompt * 3)[: before + 6]

    def one_at_a_time(count):
        caches = in_time_order(make_prompt_cache(p.model))
        for token in tokens[:count]:
            p.model(mx.array([[token]]), cache=caches)
        return caches

    caches = in_time_order(make_prompt_cache(p.model))
    p.model(mx.array([tokens[:before]]), cache=caches)
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array(tokens[before:]))
    transaction.commit(keep)
    assert_same_caches(caches, one_at_a_time(before + keep))
    transaction.abort()
    assert_same_caches(caches, one_at_a_time(before))


TOKENS = {16: 100, 24: 130, 32: 170, 64: 330}  # more than five windows


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("gemma4-moe", 16),
        ("gemma4-e2b-trained", 24),
        ("gemma4-dense-trained", 16),
        ("gemma4-dense-trained", 32),
        (GEMMA_DEMO, 64),
    ],
)
def test_the_text_of_stock_far_past_the_window(name, window):
    p = pair(name, window)
    length = TOKENS[window]
    stock_cache = make_prompt_cache(p.model)
    prompt = mx.array(p.prompt)
    expected = [
        t for t, _ in generate_step(prompt, p.model, max_tokens=length, prompt_cache=stock_cache)
    ]
    drafter = ScriptedDrafter(p.drafter, often_right(p.prompt + expected, p.target.vocab_size))
    kept = []
    for depth in (1, 4):
        cache = make_prompt_cache(p.model)
        got = list(
            mlx_spec.speculative_generate_step(
                prompt,
                p.model,
                drafter,
                num_draft_tokens=depth,
                max_tokens=length,
                prompt_cache=cache,
            )
        )
        assert [t for t, *_ in got] == expected
        assert length / 4 < sum(from_draft for *_, from_draft in got) < length
        assert_same_caches(cache, stock_cache, ATOL)
        for ring in cache:
            assert type(ring) is KVCache or ring.keys.shape[2] == window
        kept.append(cache)
    assert_same_caches(*kept)


@pytest.mark.parametrize("prefill_step_size", [5, 2048])
@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_prompts_around_the_window_in_chunks_of_any_size(length, prefill_step_size):
    p = pair("gemma4-dense-trained")
    prompt = p.prompt[:length]
    options = {"max_tokens": 40, "prefill_step_size": prefill_step_size}
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, prompt, **options))
    got = list(
        mlx_spec.stream_generate(
            p.model, p.tokenizer, prompt, draft_model=p.drafter, num_draft_tokens=3, **options
        )
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.accepted > 0


def test_max_kv_size_means_what_it_means_in_stock():
    """Nothing: Gemma-4 makes its own caches."""
    p = pair("gemma4-dense-trained")
    options = {"max_tokens": 40, "max_kv_size": 10}
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, **options))
    got = list(
        mlx_spec.stream_generate(
            p.model, p.tokenizer, p.prompt, draft_model=p.drafter, num_draft_tokens=3, **options
        )
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.accepted > 0


def test_kv_bits_fail_where_stock_fails_and_nothing_is_lost():
    """mlx-lm cannot quantise a ring, and finds out when the cache is as long as it should be."""
    p = pair("gemma4-dense-trained")
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40, "max_tokens": 60}
    expected, got = [], []
    with pytest.raises(NotImplementedError):
        expected.extend(t for t, _ in generate_step(mx.array(p.prompt), p.model, **options))
    assert len(expected) > 10
    cache = make_prompt_cache(p.model)
    step = mlx_spec.speculative_generate_step(
        mx.array(p.prompt), p.model, p.drafter, prompt_cache=cache, num_draft_tokens=3, **options
    )
    with pytest.raises(NotImplementedError, match="sliding windows; leave out kv_bits"):
        got.extend(t for t, *_ in step)
    assert got[: len(expected)] == expected[: len(got)]
    assert abs(len(got) - len(expected)) <= 1
    text = p.prompt + got
    assert cache[0].offset in (len(text) - 1, len(text))
    plain = in_time_order(make_prompt_cache(p.model))
    p.model(mx.array([text[: cache[0].offset]]), cache=plain)
    assert_same_caches(cache, plain)


@pytest.mark.parametrize("max_tokens", [2, 30])
def test_after_a_long_prompt_no_more_is_held_than_stock_holds(max_tokens):
    """Neither while it is read, in three chunks, nor in the caches that are left."""
    p = pair("gemma4-dense-trained")
    prompt = mx.array((p.prompt * 60)[:1300])
    peaks, held = [], []
    for run in (
        lambda cache: generate_step(
            prompt, p.model, prompt_cache=cache, max_tokens=max_tokens, prefill_step_size=512
        ),
        lambda cache: mlx_spec.speculative_generate_step(
            prompt,
            p.model,
            p.drafter,
            prompt_cache=cache,
            max_tokens=max_tokens,
            prefill_step_size=512,
            num_draft_tokens=3,
        ),
    ):
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        cache = make_prompt_cache(p.model)
        list(run(cache))
        peaks.append(mx.get_peak_memory() - before)
        mx.synchronize()
        gc.collect()
        mx.clear_cache()
        held.append(mx.get_active_memory() - before)
    assert peaks[1] < 1.05 * peaks[0]
    assert held[1] < 1.02 * held[0]


def test_a_chunk_of_the_prompt_keeps_only_the_window_before_it():
    p = pair("gemma4-dense-trained")
    request = make_request(p, (p.prompt * 10)[:201], 3, prefill_step=50)
    windows = [c for c in request.caches if isinstance(c, SlidingWindow)]
    assert len(windows) == 4
    assert {c.keys.shape[2] for c in windows} == {WINDOW + 1 + ROOM}  # the last row goes alone
    request.launch(None)
    assert {c.keys.shape[2] for c in windows} == {WINDOW + 1 + ROOM}


def test_an_error_before_the_first_token_leaves_the_rings():
    p = pair("gemma4-dense-trained")
    cache = make_prompt_cache(p.model)
    p.model(mx.array([p.prompt]), cache=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(AttributeError):  # mlx-lm's own takes no list either
        list(mlx_spec.speculative_generate_step([1, 2], p.model, p.drafter, prompt_cache=cache))
    assert_same_caches(cache, before)
