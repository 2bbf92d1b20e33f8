"""After a commit of any number of rows, caches are those of a run over just these tokens."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_spec import speculative_generate_step
from mlx_spec.errors import Incompatible
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.rollback import Transaction, check_caches
from mlx_spec.sliding_window import ROOM, in_time_order
from models import (
    DEMOS,
    GEMMA_RANDOM,
    GEMMA_TRAINED,
    RANDOM,
    TRAINED,
    ScriptedDrafter,
    assert_same_caches,
    make_request,
    often_right,
    pair,
    right,
)

ROWS = 6


def plain_run(p, tokens, kv_quantization=None):
    """One token at a time through mlx-lm's model."""
    caches = in_time_order(make_prompt_cache(p.model))
    for token in tokens:
        p.model(mx.array([[token]]), cache=caches)
        if kv_quantization:
            kv_quantization.apply(caches)
        mx.eval([c.state for c in caches])
    return caches


def prefilled(p, tokens):
    caches = in_time_order(make_prompt_cache(p.model))
    if tokens:
        p.model(mx.array([tokens]), cache=caches)
    return caches


@pytest.mark.parametrize("keep", range(1, ROWS + 1))
@pytest.mark.parametrize("name", [*RANDOM, *TRAINED, *DEMOS, *GEMMA_RANDOM, *GEMMA_TRAINED])
def test_commit(name, keep):
    p = pair(name)
    tokens = p.prompt[: 5 + ROWS]
    caches = prefilled(p, tokens[:5])
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array(tokens[5:]))
    transaction.commit(keep)
    assert_same_caches(caches, plain_run(p, tokens[: 5 + keep]))


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("name", ["qwen3-5", "gemma4-e2b"])
def test_abort(name, before):
    p = pair(name)
    tokens = p.prompt[: before + ROWS]
    caches = prefilled(p, tokens[:before])
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array(tokens[before:]))
    transaction.commit(3)
    transaction.abort()
    assert_same_caches(caches, prefilled(p, tokens[:before]))
    assert all(c.empty() for c in caches) == (before == 0)


@pytest.mark.parametrize("before", [5, 19, 19 + ROOM])
@pytest.mark.parametrize("name", ["qwen3-5", "gemma4-dense", "gemma4-e2b"])
def test_abort_in_the_middle_of_a_forward(name, before, monkeypatch):
    """The last of these fills the buffers of sliding windows, so the forward copies them."""
    p = pair(name)
    tokens = (p.prompt * 5)[: before + 3]
    caches = prefilled(p, tokens[:19][:before])
    for token in tokens[19:before]:
        p.model(mx.array([[token]]), cache=caches)
    transaction = Transaction(p.target, caches)
    mlp = type(p.target.text.model.layers[0].mlp)
    calls = iter(range(p.layers))
    original = mlp.__call__

    def fail_in_the_last_layer_with_a_cache(self, x):
        if next(calls) == p.layers - 1:
            raise RuntimeError("after the attention of that layer")
        return original(self, x)

    monkeypatch.setattr(mlp, "__call__", fail_in_the_last_layer_with_a_cache)
    with pytest.raises(RuntimeError):
        transaction.verify(mx.array(tokens[before:]))
    monkeypatch.undo()
    assert caches[p.full].offset == before + 3
    transaction.abort()
    assert_same_caches(caches, prefilled(p, tokens[:before]))


@pytest.mark.parametrize("name", ["qwen3-next", "gemma4-moe"])
def test_commit_may_be_repeated_with_fewer_and_with_more_rows(name):
    p = pair(name)
    tokens = p.prompt[: 5 + ROWS]
    caches = prefilled(p, tokens[:5])
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array(tokens[5:]))
    for keep in (6, 2, 4):
        transaction.commit(keep)
        assert_same_caches(caches, plain_run(p, tokens[: 5 + keep]))


@pytest.mark.parametrize("name", ["qwen3-6-moe", "gemma4-moe"])
def test_rolled_back_caches_go_on_to_the_same_logits(name):
    p = pair(name)
    caches = prefilled(p, p.prompt[:5])
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array([*p.prompt[5:7], 9, 9, 9]))
    transaction.commit(2)
    plain = prefilled(p, p.prompt[:7])
    step = mx.array([p.prompt[7:9]])
    np.testing.assert_array_equal(p.model(step, cache=caches), p.model(step, cache=plain))


def arrays_of(caches):
    """Of KVCache, SlidingWindow and ArraysCache."""
    return [a for c in caches for a in getattr(c, "cache", None) or (c.keys, c.values)]


def operations(arrays, path):
    """How many operations are to be done for the arrays."""
    mx.export_to_dot(str(path), *arrays)
    return path.read_text().count("shape=rectangle")


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next", "gemma4-e2b"])
def test_one_row_is_verified_with_the_operations_of_a_plain_step(name, tmp_path):
    """So that a parked drafter costs nothing."""
    p = pair(name)
    ours, plain = prefilled(p, p.prompt[:5]), prefilled(p, p.prompt[:5])
    mx.eval([c.state for c in ours + plain])
    transaction = Transaction(p.target, ours)
    _, logits = transaction.verify(mx.array(p.prompt[5:6]))
    transaction.commit(1)
    stock = p.model(mx.array(p.prompt[5:6])[None], cache=plain)
    counts = [
        operations([out, *arrays_of(caches)], tmp_path / "graph.dot")
        for out, caches in ((logits, ours), (stock, plain))
    ]
    assert counts[0] == counts[1] > 50


def test_the_rows_past_a_growth_of_the_buffer_are_rolled_back():
    """mlx-lm's KVCache grows in steps of 256 rows."""
    p = pair("qwen3-5")
    tokens = (p.prompt * 20)[:260]
    caches = prefilled(p, tokens[:254])
    transaction = Transaction(p.target, caches)
    transaction.verify(mx.array(tokens[254:]))
    transaction.commit(1)
    expected = prefilled(p, tokens[:254])
    p.model(mx.array([tokens[254:255]]), cache=expected)
    assert_same_caches(caches, expected)


@pytest.mark.parametrize("start", [0, 9, 13])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_caches(bits, start):
    """Quantised from the start, or from a point that rounds must not straddle."""
    p = pair("qwen3-5")
    quantization = KVQuantization(bits, group_size=32, start=start)
    greedy = []
    caches = plain_run(p, p.prompt[:5], quantization)
    token = p.prompt[5]
    for _ in range(16):
        logits = p.model(mx.array([[token]]), cache=caches)
        quantization.apply(caches)
        token = mx.argmax(logits[0, -1]).item()
        greedy.append(token)

    text = p.prompt[:6] + greedy
    drafter = ScriptedDrafter(p.drafter, often_right(text, 512))
    request = make_request(p, p.prompt[:6], 3, drafter, kv_quantization=quantization)
    emitted = []
    while len(emitted) < 14:
        launched = request.launch(None)
        launched.read()
        request.commit(launched)
        quantization.apply(request.caches)
        emitted += launched.tokens
        assert emitted == greedy[: len(emitted)]
        assert_same_caches(
            request.caches, plain_run(p, (p.prompt[:6] + emitted)[:-1], quantization)
        )
    assert type(request.caches[3]).__name__ == "QuantizedKVCache"


QUANTISED = {"kv_bits": 8, "kv_group_size": 32}


@pytest.mark.parametrize("max_tokens", [1, 3, 12])
@pytest.mark.parametrize("start", [24, 25, 27, 30])
def test_quantisation_is_where_stock_has_it(start, max_tokens):
    """No block of rows straddles the point, though all drafts are right."""
    p = pair("qwen3-5-trained")
    options = QUANTISED | {"quantized_kv_start": start, "max_tokens": max_tokens}
    stock, ours = make_prompt_cache(p.model), make_prompt_cache(p.model)
    prompt = mx.array(p.prompt)
    expected = list(generate_step(prompt, p.model, prompt_cache=stock, **options))
    drafter = ScriptedDrafter(p.drafter, right(p.prompt + [t for t, _ in expected]))
    step = speculative_generate_step(
        prompt, p.model, drafter, num_draft_tokens=5, prompt_cache=ours, **options
    )
    got = list(step)
    assert_same_draws(got, expected)
    assert max_tokens == 1 or any(from_draft for _, _, from_draft in got)
    assert_same_caches(ours, stock)


def assert_same_draws(got, expected):
    assert [t for t, *_ in got] == [t for t, _ in expected]
    for (_, a, _), (_, b) in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_kept_cache_is_quantised_after_the_first_forward(turn):
    """As stock: the first token after switching it on sees the rows as they were."""
    p = pair("qwen3-5-trained")
    options = QUANTISED | {"quantized_kv_start": 0, "max_tokens": 5}
    stock, ours = prefilled(p, p.prompt), prefilled(p, p.prompt)
    prompt = mx.array(p.prompt[:turn])
    expected = list(generate_step(prompt, p.model, prompt_cache=stock, **options))
    got = list(
        speculative_generate_step(
            prompt, p.model, p.drafter, prompt_cache=ours, num_draft_tokens=3, **options
        )
    )
    assert_same_draws(got, expected)
    assert_same_caches(ours, stock)


def test_unknown_cache_classes_are_refused_by_name():
    target = pair("gemma4-dense").target
    check_caches(target, [KVCache(), KVCache().to_quantized(), RotatingKVCache(8)])
    check_caches(pair("qwen3-5").target, [ArraysCache(2)])
    with pytest.raises(Incompatible, match="recurrent state in an ArraysCache of this family"):
        check_caches(target, [ArraysCache(2)])
    with pytest.raises(Incompatible, match="ChunkedKVCache cannot be rolled back"):
        check_caches(target, [KVCache(), ChunkedKVCache(8)])


def test_subclasses_are_unknown_too():
    class Other(KVCache):
        pass

    with pytest.raises(Incompatible, match="Other"):
        check_caches(pair("qwen3-5").target, [Other()])


def test_batched_state_is_refused():
    with pytest.raises(Incompatible, match="batched"):
        Transaction(pair("qwen3-5").target, [ArraysCache(2, left_padding=[1])])
