"""Any model of mlx-lm as the target: its rows, its roll-back, and what is refused by name."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.nn.layers.distributed import AllToShardedLinear
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from tiny_models import DECODED, LLAMA, VOCAB, WINDOWED, prompt_of, tiny

import mlx_spec
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.errors import Incompatible, NotEngaged
from mlx_spec.rollback import Transaction, check_caches
from mlx_spec.sliding_window import in_time_order
from mlx_spec.targets import target_for
from mlx_spec.targets.generic import GenericTarget
from models import assert_same_caches, dump, pair

RING = 1e-4  # past the window, one token of stock sums its rows in another order


def test_the_text_is_that_of_torch():
    reference = dump("llama-eagle3-trained_generate")
    prompt, whole = (reference[name].reshape(-1).tolist() for name in ("prompt", "greedy"))
    steps = mlx_spec.speculative_generate_step(
        mx.array(prompt), tiny(LLAMA), Lookup(), num_draft_tokens=4, max_tokens=96
    )
    got = [(token, drafted) for token, _, drafted in steps]
    assert [token for token, _ in got] == whole[len(prompt) :]
    assert sum(drafted for _, drafted in got) > 10


@pytest.mark.parametrize("name", DECODED)
def test_rows_and_roll_back_are_those_of_single_tokens(name):
    """Blocks of 5 rows, of which 1 to 5 stay; the sliding windows are of 8 tokens."""
    model = tiny(name)
    target = target_for(model)
    assert isinstance(target, GenericTarget)
    prompt = prompt_of(name, 40)
    caches, single = (in_time_order(make_prompt_cache(model)) for _ in range(2))
    ring = make_prompt_cache(model)
    check_caches(target, ring)
    at, rows = 0, 5
    for keep in (1, 5, 2, 4, 3, 5, 1, 4):
        transaction = Transaction(target, caches)
        hidden, logits = transaction.verify(mx.array(prompt[at : at + rows]))
        transaction.commit(keep)
        assert hidden is None
        for k, token in enumerate(prompt[at : at + keep]):
            alone = target(mx.array([[token]]), single)[1]
            np.testing.assert_array_equal(logits[:, k], alone[:, 0])
            stock = model(mx.array([[token]]), cache=ring)
            np.testing.assert_allclose(alone, stock, rtol=0, atol=RING)
        assert_same_caches(caches, single)
        assert_same_caches(caches, ring, RING if name in WINDOWED else 0)
        at += keep


@pytest.mark.parametrize("name", DECODED)
def test_the_size_of_the_vocabulary(name):
    assert target_for(tiny(name)).vocab_size == (512 if name == LLAMA else VOCAB)


def refused(model, caches, words):
    with pytest.raises(Incompatible, match=words):
        check_caches(target_for(model), caches)


def test_caches_that_cannot_be_rolled_back_are_refused_by_name():
    model = tiny("mamba")
    refused(model, make_prompt_cache(model), "recurrent state in an ArraysCache")
    model = tiny("gemma3_text")
    refused(model, [CacheList(KVCache(), KVCache())], "class CacheList")
    refused(model, [RotatingKVCache(16)], "whose window is 8")
    refused(model, [RotatingKVCache(8, keep=4)], "keeps the first 4")


def responses(stream_generate, model, prompt, **options):
    tokenizer = pair("qwen3-5-trained").tokenizer
    return list(stream_generate(model, tokenizer, prompt, max_tokens=16, **options))


@pytest.mark.parametrize(("name", "options"), [("mamba", {}), ("qwen3", {"max_kv_size": 12})])
def test_what_is_refused_is_decoded_as_stock_with_a_reason(name, options):
    """A size for the cache of a model without windows of its own makes one that keeps 4 rows."""
    model, prompt = tiny(name), prompt_of(name)
    expected = responses(mlx_lm.stream_generate, model, prompt, **options)
    got = responses(mlx_spec.stream_generate, model, prompt, draft_kind="lookup", **options)
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.reason == "unsupported-cache"
    with pytest.raises(NotEngaged, match="unsupported-cache"):
        responses(
            mlx_spec.stream_generate, model, prompt, draft_kind="lookup", require_spec=True,
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("spread", ["sharded", "pipelined"])
def test_a_model_spread_over_machines_is_refused(spread):
    args = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
    args |= {"intermediate_size": 8, "num_attention_heads": 1, "rms_norm_eps": 1e-6}
    model = llama.Model(llama.ModelArgs.from_dict(args))
    if spread == "sharded":
        model.layers[1].self_attn.q_proj = AllToShardedLinear(8, 8)
    else:
        model.model.layers[0] = None
    with pytest.raises(Incompatible, match="several machines"):
        target_for(model)


def test_kv_bits():
    model, prompt = tiny(LLAMA), prompt_of(LLAMA) * 3
    options = {"max_tokens": 40, "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 70}
    expected = [t for t, _ in generate_step(mx.array(prompt), model, **options)]
    got = list(
        mlx_spec.speculative_generate_step(
            mx.array(prompt), model, Lookup(), num_draft_tokens=4, **options
        )
    )
    assert [token for token, *_ in got] == expected
    assert any(drafted for *_, drafted in got)
