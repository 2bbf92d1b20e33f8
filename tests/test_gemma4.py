"""The Gemma-4 target and its assistant against independent torch implementations."""

import copy
import gc
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_spec
from mlx_spec.accept import Greedy
from mlx_spec.candidates import Candidates
from mlx_spec.drafters.gemma4_assistant import (
    AssistantDrafter,
    Gemma4Assistant,
    ModelArgs,
    misfits,
)
from mlx_spec.drafters.wrapped import Wrapped
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.round import speculate
from mlx_spec.sliding_window import in_time_order
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from mlx_spec.targets.gemma4 import SharedKV
from models import (
    GEMMA_DEMO,
    GEMMA_RANDOM,
    GEMMA_TRAINED,
    WINDOW,
    ScriptedDrafter,
    dump,
    make_request,
    pair,
    right,
)

ATOL = 1e-4
KINDS = ("sliding_attention", "full_attention")


def over_vocabulary(logits):
    return logits.over_vocabulary() if isinstance(logits, Candidates) else logits


def reference_kv(reference, length, window):
    """What HF's target shares: the last `window` rows for sliding attention."""
    rows = {
        kind: tuple(mx.array(reference[f"kv_{kind}_{x}"])[:, :, :length] for x in "kv")
        for kind in KINDS
    }
    rows["sliding_attention"] = tuple(x[:, :, -window:] for x in rows["sliding_attention"])
    return SharedKV(length, rows)


@pytest.mark.parametrize("name", GEMMA_RANDOM)
def test_the_target(name):
    p, reference = pair(name), dump(f"{name}_target")
    caches = in_time_order(make_prompt_cache(p.model))
    hidden, logits = p.target(mx.array(reference["input_ids"]), caches)
    np.testing.assert_allclose(hidden, reference["last_hidden"], atol=ATOL)
    np.testing.assert_allclose(logits, reference["logits"], atol=ATOL)
    np.testing.assert_array_equal(
        p.model(mx.array(reference["input_ids"]), cache=make_prompt_cache(p.model)), logits
    )


@pytest.mark.parametrize("chunk", [1, 7, 20])
@pytest.mark.parametrize("name", GEMMA_RANDOM)
def test_what_the_target_shares(name, chunk):
    """Of the last layers that own keys and values: all rows, and those in the window."""
    p, reference = pair(name), dump(f"{name}_target")
    caches = in_time_order(make_prompt_cache(p.model))
    tokens = mx.array(reference["input_ids"])
    for at in range(0, 20, chunk):
        p.target(tokens[:, at : at + chunk], caches)
    kv = p.target.shared_kv(caches)
    assert kv.length == 20
    expected = reference_kv(reference, 20, WINDOW).rows
    for kind in KINDS:
        for got, rows in zip(kv.rows[kind], expected[kind], strict=True):
            assert got.shape == rows.shape
            np.testing.assert_allclose(got, rows, atol=ATOL)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_is_unpacked_for_the_drafter(bits):
    p, reference = pair("gemma4-dense"), dump("gemma4-dense_target")
    caches = in_time_order(make_prompt_cache(p.model))
    p.target(mx.array(reference["input_ids"]), caches)
    expected = p.target.shared_kv(caches)
    caches[p.layers - 1] = caches[p.layers - 1].to_quantized(group_size=32, bits=bits)
    got = p.target.shared_kv(caches)
    assert got.length == expected.length
    for a, b in zip(got.rows["full_attention"], expected.rows["full_attention"], strict=True):
        assert a.shape == b.shape
        error = np.abs(np.array(a) - np.array(b))
        assert 0 < error.mean() < 0.5 * 2 ** (1 - bits) * np.abs(np.array(b)).max()


@pytest.mark.parametrize("tag", ["posP", "posPm1"])
@pytest.mark.parametrize("name", GEMMA_RANDOM)
def test_each_draft_step(name, tag):
    """Steps 1 to 4 from the inputs that transformers had: sees P or P-1, and W + 1 sliding keys."""
    p, reference = pair(name), dump(f"{name}_assistant")
    head = p.drafter.head
    kv = reference_kv(dump(f"{name}_target"), 20, WINDOW + 1)
    position = {"posP": 20, "posPm1": 19}[tag]
    for step in range(4):
        embedding = p.target.embed(mx.array(reference[f"{tag}_s{step}_in_token"]))
        hidden = mx.array(reference[f"{tag}_s{step}_in_hidden"])
        inputs = mx.concatenate([embedding, hidden], axis=-1)
        np.testing.assert_allclose(inputs, reference[f"{tag}_s{step}_inputs_embeds"], atol=1e-5)
        u = head.pre_projection(inputs)
        np.testing.assert_allclose(u, reference[f"{tag}_s{step}_preproj"], atol=1e-5)
        logits, projected = head(embedding, hidden, kv, position)
        np.testing.assert_allclose(projected, reference[f"{tag}_s{step}_projected"], atol=ATOL)
        assert Greedy().pick(logits, []).item() == reference[f"{tag}_s{step}_token"].item()
        assert_logits(logits, reference[f"{tag}_s{step}_logits"][0, 0])


def test_candidates():
    """The head of E2B and E4B looks at the tokens of the best clusters only."""
    p, reference = pair("gemma4-e2b"), dump("gemma4-e2b_assistant")
    kv = reference_kv(dump("gemma4-e2b_target"), 20, WINDOW + 1)
    embedding = p.target.embed(mx.array(reference["bonus"]))
    logits, _ = p.drafter.head(embedding, mx.array(reference["posP_s0_in_hidden"]), kv, 20)
    assert isinstance(logits, Candidates)
    ids = logits.ids.tolist()
    assert len(set(ids)) == len(ids) == 4 * 512 // 32  # top k, of tokens by cluster
    assert logits.logits.shape == (1, len(ids))
    dense = np.array(logits.over_vocabulary())
    np.testing.assert_array_equal(dense[:, ids], logits.logits)
    assert np.all(np.isneginf(np.delete(dense[0], ids)))
    assert (
        logits.best().tolist() == dense.argmax(-1).tolist() == [reference["posP_s0_token"].item()]
    )


CONVENTIONS = {"hf": "P", "vllm_sglang": "P-1", "llamacpp": "P"}


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", GEMMA_RANDOM)
def test_four_chained_drafts_under_each_convention(name, convention):
    """The drafter itself, with the position by its config key and the keys that they see."""
    p, reference = pair(name), dump(f"{name}_conventions")
    tokens = mx.array(dump(f"{name}_target")["input_ids"])
    window = int(reference[f"{convention}_window"])
    kv = reference_kv(dump(f"{name}_target"), tokens.shape[1], window)
    head = copy.copy(p.drafter.head)
    head.args = replace(head.args, query_position=CONVENTIONS[convention])
    drafter = AssistantDrafter(head, p.target)
    drafter.shared_kv = lambda caches: kv

    bonus = mx.array(dump(f"{name}_assistant")["bonus"][0])
    hidden = mx.array(dump(f"{name}_target")["last_hidden"])[:, -1:]
    drafts = drafter.draft(bonus, hidden, 4, Greedy().pick, [], [])
    tokens = reference[f"{convention}_tokens"]
    assert mx.concatenate(drafts).tolist() == tokens.tolist()

    token = bonus
    for step in range(4):
        logits, _ = head(p.target.embed(token[None]), hidden, kv, kv.length + drafter.shift)
        assert_logits(logits, reference[f"{convention}_logits"][step])
        token = mx.array(tokens[step : step + 1])
        hidden = mx.array(reference[f"{convention}_projected"][step])[None, None]


def assert_logits(logits, expected):
    """expected: (V,). transformers gives a token that is no candidate one less than the least."""
    if isinstance(logits, Candidates):
        ids = np.array(logits.ids)
        np.testing.assert_allclose(logits.logits[0], expected[ids], atol=ATOL)
        np.testing.assert_array_equal(np.delete(expected, ids), expected[ids].min() - np.float32(1))
    else:
        np.testing.assert_allclose(logits[0], expected, atol=ATOL)


@pytest.mark.parametrize("name", GEMMA_RANDOM)
def test_four_chained_drafts_stay_close(name):
    """With its own tokens and hidden states fed back; the errors of four steps add up."""
    p, reference = pair(name), dump(f"{name}_conventions")
    kv = reference_kv(dump(f"{name}_target"), 20, int(reference["hf_window"]))
    token = mx.array(dump(f"{name}_assistant")["bonus"][0])
    hidden = mx.array(dump(f"{name}_target")["last_hidden"])[:, -1:]
    for step in range(4):
        logits, hidden = p.drafter.head(p.target.embed(token[None]), hidden, kv, 20)
        assert_logits(logits, reference["hf_logits"][step])
        token = Greedy().pick(logits, [])


@pytest.mark.parametrize("name", GEMMA_TRAINED)
def test_every_round_of_a_reference_generation(name):
    """Drafts and accepted counts of a loop that computes everything anew in torch.

    It lets the drafter see W + 1 sliding keys, one more than mlx-lm keeps; so here the target
    runs on caches that keep all.
    """
    p, reference = pair(name), dump(f"{name}_generate")
    text = reference["greedy"][0].tolist()  # with the prompt
    caches = [KVCache() for _ in range(p.layers)]
    hidden, _ = p.target(mx.array([text]), caches)
    kv = p.target.shared_kv(caches)
    drafter = copy.copy(p.drafter)
    accepted = []
    for length, expected in zip(
        reference["spec_seq_len_before"], reference["spec_drafts"], strict=True
    ):
        newest = int(length) - 1
        rows = {kind: tuple(x[:, :, :newest] for x in kv.rows[kind]) for kind in KINDS}
        rows["sliding_attention"] = tuple(
            x[:, :, -(WINDOW + 1) :] for x in rows["sliding_attention"]
        )
        drafter.shared_kv = lambda caches, rows=rows, newest=newest: SharedKV(newest, rows)
        token, h = mx.array(text[newest : newest + 1]), hidden[:, newest - 1 : newest]
        drafts = mx.concatenate(drafter.draft(token, h, 3, Greedy().pick, [], [])).tolist()
        assert drafts == expected.tolist()
        right = [a == b for a, b in zip(drafts, text[newest + 1 :], strict=False)] + [False]
        accepted.append(right.index(False))
    # the last round may go past the text
    assert accepted[:-1] == reference["spec_accepted"].tolist()[:-1]


@pytest.mark.parametrize("name", GEMMA_RANDOM + GEMMA_TRAINED)
def test_the_text_that_transformers_generates(name):
    """Its greedy text, which its own assisted generation gives too."""
    p, reference = pair(name), dump(f"{name}_generate")
    text = reference["greedy"][0].tolist()
    assert reference.get("assisted", reference["greedy"])[0].tolist() == text
    positions = []

    class Watched(Wrapped):
        def draft(self, *args):
            positions.append(p.target.shared_kv(args[-1]).length)
            return p.drafter.draft(*args)

    got = mlx_spec.stream_generate(
        p.model,
        p.tokenizer,
        p.prompt,
        max_tokens=len(text) - len(p.prompt),
        draft_model=Watched(p.drafter),
        num_draft_tokens=3,
    )
    responses = list(got)
    assert [r.token for r in responses] == text[len(p.prompt) :]
    stats = responses[-1].spec
    assert stats.drafted > 40
    if name in GEMMA_RANDOM:  # nothing is accepted, so every position has a round
        asked = sorted(set(reference["call_positions"].tolist()))
        assert positions == [len(p.prompt) - 1, *asked]
    else:  # the reference lets the drafter see one key more
        assert stats.accepted > 0.9 * reference["spec_accepted"].sum()


@pytest.mark.parametrize("name", GEMMA_TRAINED)
def test_a_prefill_computes_no_more_than_the_caches(name, monkeypatch):
    """As mlx-lm's, but for one hidden state: those of all rows would need the layers that share
    keys and values, which are more than half of those of E2B."""
    p = pair(name)
    evaluated = []
    for function in ("eval", "async_eval"):
        stock = getattr(mx, function)
        monkeypatch.setattr(
            mx, function, lambda *args, stock=stock: (evaluated.append(args), stock(*args))[1]
        )
    request = make_request(p, p.prompt, 3, prefill_step=7)
    (hidden,) = [x for _, x in tree_flatten(evaluated) if x is request.unlearnt.hidden]
    assert hidden.shape == (1, 1, p.target.hidden_size)
    arrays = [x for _, x in tree_flatten(evaluated) if isinstance(x, mx.array) and x is not hidden]
    heads = {request.caches[i].keys.shape[1] for i in range(p.layers)}
    chunks = -(-(len(p.prompt) - 1) // 7) + 1  # the last row goes alone
    assert len(arrays) == 2 * p.layers * chunks
    assert all(array.ndim == 4 and array.shape[1] in heads for array in arrays)
    stats = SpecStats()
    for _ in speculate(request, mx.default_stream(mx.default_device()), 20, stats):
        pass
    assert stats.drafted_by_position[0] >= stats.rounds - 1  # not for a last token


@pytest.mark.parametrize("ordered", [True, False])
def test_the_demo_assistant_is_trained(ordered):
    """On code that it was not trained on, with the real tokens before it: how often its draft is
    the target's choice; with the ordered-embedding head and with all of the vocabulary."""
    p = pair(GEMMA_DEMO)
    text = (Path(__file__).parent.parent / "scripts" / "train_demo.py").read_text()
    tokens = p.tokenizer.encode(text)[:500]
    caches = [KVCache() for _ in range(p.layers)]
    hidden, logits = p.target(mx.array([tokens]), caches)
    choices = mx.argmax(logits[0], axis=-1).tolist()
    kv = p.target.shared_kv(caches)
    window = p.target.text.args.sliding_window
    head = copy.copy(p.drafter.head)
    assert head.args.use_ordered_embeddings
    head.args = replace(head.args, use_ordered_embeddings=ordered)
    hits, positions = 0, range(100, 500, 8)
    for newest in positions:
        rows = {kind: tuple(x[:, :, :newest] for x in kv.rows[kind]) for kind in KINDS}
        rows["sliding_attention"] = tuple(x[:, :, -window:] for x in rows["sliding_attention"])
        embedding = p.target.embed(mx.array([tokens[newest : newest + 1]]))
        before = hidden[:, newest - 1 : newest]
        draft_logits, _ = head(embedding, before, SharedKV(newest, rows), newest)
        hits += Greedy().pick(draft_logits, []).item() == choices[newest]
    assert hits / len(positions) >= 0.5


# What it costs


def span(array):
    """First address of a view and the one after its last byte."""
    mx.eval(array)
    view = np.asarray(memoryview(array))
    begin = view.ctypes.data
    return begin, begin + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))


@pytest.mark.parametrize("name", GEMMA_TRAINED)
def test_the_drafter_reads_the_targets_own_rows(name):
    """Views of the cache, not copies: while a generation is under way, and past the window."""
    p = pair(name)
    request = make_request(p, p.prompt, 3)
    for _ in range(5):
        launched = request.launch(None)
        launched.read()
        request.commit(launched)
    kv = p.target.shared_kv(request.caches)
    assert kv.length == request.caches[0].offset > len(p.prompt)
    for kind, owner in p.target.kv_owners.items():
        cache = request.caches[owner]
        mx.eval(cache.keys, cache.values)
        assert kv.rows[kind][0].shape[2] == (WINDOW if kind == "sliding_attention" else kv.length)
        for view, rows in zip(kv.rows[kind], (cache.keys, cache.values), strict=True):
            begin, end = span(view)
            whole_begin, whole_end = span(rows)
            assert whole_begin <= begin < end <= whole_end


def test_the_drafter_is_never_shown_a_rejected_row(monkeypatch):
    """What it is given in each round is what a plain run over the committed tokens has."""
    p = pair("gemma4-dense-trained")
    text = p.prompt + [t for t, _ in generate_step(mx.array(p.prompt), p.model, max_tokens=60)]
    shown = []
    shared_kv = p.drafter.shared_kv

    def watched(caches):
        kv = shared_kv(caches)
        mx.eval(kv.rows)
        shown.append(kv)
        return kv

    monkeypatch.setattr(p.drafter, "shared_kv", watched)
    list(
        mlx_spec.speculative_generate_step(
            mx.array(p.prompt), p.model, p.drafter, num_draft_tokens=5, max_tokens=50
        )
    )
    assert len(shown) > 10
    caches = in_time_order(make_prompt_cache(p.model))
    fed = 0
    for kv in shown:
        for token in text[fed : kv.length]:
            p.model(mx.array([[token]]), cache=caches)
        fed = kv.length
        expected = shared_kv(caches)
        for kind in KINDS:
            for got, rows in zip(kv.rows[kind], expected.rows[kind], strict=True):
                np.testing.assert_array_equal(got, rows)


def test_greedy_drafts_need_no_row_of_the_whole_vocabulary(monkeypatch):
    p = pair("gemma4-e2b-trained")

    def refuse(self):
        raise AssertionError("scattered to the vocabulary")

    monkeypatch.setattr(Candidates, "over_vocabulary", refuse)
    step = mlx_spec.speculative_generate_step(
        mx.array(p.prompt), p.model, p.drafter, max_tokens=40, num_draft_tokens=3
    )
    assert any(from_draft for _, _, from_draft in step)


def tiny_pair(window):
    """A target and an assistant with random weights, small enough for ten thousand tokens."""
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "vocab_size": 64,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    mx.random.seed(0)
    model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(shape))
    text = shape | {"num_kv_shared_layers": 2}
    head = Gemma4Assistant(ModelArgs.from_config({"backbone_hidden_size": 32, "text_config": text}))
    return model, AssistantDrafter(head, target_for(model))


def test_memory_is_flat_over_thousands_of_tokens():
    """But for the rows of full attention, which stock keeps as well."""
    window, depth = 64, 5
    model, drafter = tiny_pair(window)
    prompt = mx.array([1, 2, 3])
    always_right = ScriptedDrafter(drafter, right([1, 2, 3] + [7] * 5000))
    caches = make_prompt_cache(model)
    generation = mlx_spec.speculative_generate_step(
        prompt,
        model,
        always_right,
        num_draft_tokens=depth,
        max_tokens=4_000,
        prompt_cache=caches,
        sampler=lambda logprobs: mx.argmax(logprobs, axis=-1) * 0 + 7,
    )
    used = []
    for at, _ in enumerate(generation):
        if at % 1000 == 500:
            gc.collect()
            mx.clear_cache()
            used.append(mx.get_active_memory() - 2 * 4 * 16 * at)  # keys and values
    assert len(used) == 4
    assert max(used) - min(used) < 2 * 4 * 16 * 2 * KVCache.step + 20_000
    assert caches[0].offset == 4_003
    assert caches[0].keys.shape[2] == window


# What does not fit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone_hidden_size": 96}, "backbone_hidden_size is 96 and the model's hidden size"),
        ({"text": {"vocab_size": 384}}, "vocab_size is 384 and the model's vocabulary is 512"),
        ({"text": {"head_dim": 64}}, "head_dim is 64 and the model's head size in sliding"),
        ({"text": {"global_head_dim": 32}}, "global_head_dim is 32 and the model's head size in"),
        ({"text": {"num_attention_heads": 3}}, "3 heads cannot share the model's 2 heads"),
        (
            {"text": {"layer_types": ["sliding_attention"] * 3 + ["chunked_attention"]}},
            "it has chunked_attention layers",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused_by_name(changes, words):
    p = pair("gemma4-dense")
    args = p.drafter.head.args
    text = replace(args.text, **changes.pop("text", {}))
    assert misfits(args, p.target) == []
    (fault,) = misfits(replace(args, text=text, **changes), p.target)
    assert words in fault
    head = copy.copy(p.drafter.head)
    head.args = replace(args, text=text, **changes)
    with pytest.raises(Incompatible, match=re.escape(words)):
        AssistantDrafter(head, p.target)


def test_an_unknown_query_position_is_refused():
    config = {"mlx_spec": {"query_position": "P+1"}}
    with pytest.raises(CheckpointError, match=r"'P\+1'; it must be one of P, P-1"):
        ModelArgs.from_config(config)


def test_the_layers_are_mlx_lms_own():
    """Fails when upstream moves: a layer that shares keys and values takes them and a position."""
    p = pair("gemma4-e2b")
    assert {type(layer) for layer in p.drafter.head.model.layers} == {gemma4_text.DecoderLayer}
    names = {name for name, _ in tree_flatten(p.drafter.head.parameters())}
    assert not [name for name in names if "k_proj" in name or "v_proj" in name or "k_norm" in name]
    assert p.drafter.head.model.layers[0].mlp.gate_proj.weight.shape == (128, 64)
