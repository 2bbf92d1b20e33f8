"""EAGLE-3: the head against independent outputs, and what targets of any family give it."""

import threading
from functools import cache
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny

import mlx_spec
from mlx_spec.candidates import Candidates
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.eagle3 import read_head
from mlx_spec.drafters.combined import Combined
from mlx_spec.drafters.eagle3 import Eagle3, Eagle3Drafter, ModelArgs
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.load import build_head
from mlx_spec.targets import target_for
from mlx_spec.targets.tapped import TappedTarget, record_inputs
from models import (
    EAGLE,
    EAGLE_HEAD,
    GEMMA_TRAINED,
    TRAINED,
    ScriptedDrafter,
    checkpoint_path,
    dump,
    often_right,
    pair,
)

TOLERANCE = 1e-4
SPECULATORS = "llama-eagle3-speculators"


def argmax(logits, drafts):
    return logits.best()


@cache
def released(name):
    """A reference head in float32, beside the trained Llama."""
    head = build_head(read_head(Checkpoint.open(checkpoint_path(name)), mx.float32))
    return Eagle3Drafter(head, pair(EAGLE).target)


# The head


def test_parity_with_torch():
    """In the layout of speculators: own embedding, rotary embeddings and residual after a norm."""
    reference = dump(SPECULATORS)
    drafter = released(SPECULATORS)
    tokens = mx.array(np.append(reference["input_ids"][0, 1:], reference["bonus"]))
    features = mx.array(reference["aux"])[None]

    g = drafter.head.combine(features)
    y, output = drafter.head(drafter.embed(tokens[None]), g, drafter.make_cache()[0])
    logits = drafter.logits(output[0])
    np.testing.assert_allclose(g[0], reference["g"], atol=TOLERANCE)
    np.testing.assert_allclose(y[0], reference["y"], atol=TOLERANCE)
    np.testing.assert_allclose(logits.logits, reference["draft_logits_all"], atol=TOLERANCE)
    np.testing.assert_array_equal(np.sort(logits.ids), np.flatnonzero(reference["t2d"]))
    assert logits.vocab_size == 512

    rows = []

    def pick(row, drafts):
        rows.append(row.logits[0])
        return argmax(row, drafts)

    drafts = drafter.draft(tokens, features, 4, pick, drafter.make_cache(), [])
    assert [d.item() for d in drafts] == reference["target_ids"].tolist()
    np.testing.assert_allclose(mx.stack(rows), reference["draft_logits"], atol=TOLERANCE)


def test_drafts_of_a_trained_head():
    """What a torch loop that recomputes everything proposed, round by round."""
    reference = dump(f"{EAGLE_HEAD}_generate")
    p = pair(EAGLE)
    text = reference["greedy"].reshape(-1)
    target = p.drafter.view(p.target)
    features, _ = target(mx.array(text)[None], make_prompt_cache(p.model))
    rounds = list(zip(reference["spec_seq_len_before"], reference["spec_drafts"], strict=True))
    for length, expected in rounds[:20]:
        known = mx.array(text[1:length])
        caches = p.drafter.make_cache()
        drafts = p.drafter.draft(known, features[:, : length - 1], 3, argmax, caches, [])
        assert [d.item() for d in drafts] == expected.tolist()
        assert caches[0].offset == length - 1


def test_a_whole_generation_accepts_what_the_torch_loop_accepted():
    reference = dump(f"{EAGLE_HEAD}_generate")
    p = pair(EAGLE)
    text = reference["greedy"].reshape(-1).tolist()
    count = len(text) - len(p.prompt)
    got = list(
        mlx_spec.stream_generate(
            p.model,
            p.tokenizer,
            p.prompt,
            max_tokens=count,
            draft_model=p.drafter,
            num_draft_tokens=3,
        )
    )
    assert [r.token for r in got] == text[len(p.prompt) :]
    # by the length before a round; the torch loop begins a token later
    ends = [len(p.prompt) + i + 1 for i, r in enumerate(got) if not r.from_draft]
    accepted = {end: later - end - 1 for end, later in pairwise(ends)}
    pairs = zip(reference["spec_seq_len_before"], reference["spec_accepted"], strict=True)
    theirs = {length: count for length, count in pairs if length in accepted}
    assert len(theirs) > 40
    assert theirs == {length: accepted[length] for length in theirs}


def test_learning_in_chunks_is_learning_at_once():
    drafter = pair(EAGLE).drafter
    tokens = mx.arange(5, 17)
    features = mx.random.normal((1, 12, 384), key=mx.random.key(1))
    whole, parts = drafter.make_cache(), drafter.make_cache()
    expected = drafter.draft(tokens, features, 3, argmax, whole, [])
    drafter.extend(tokens[:1], features[:, :1], parts)
    drafter.extend(tokens[1:8], features[:, 1:8], parts)
    got = drafter.draft(tokens[8:], features[:, 8:], 3, argmax, parts, [])
    assert [d.item() for d in got] == [d.item() for d in expected]
    assert parts[0].offset == whole[0].offset == 12
    np.testing.assert_array_equal(parts[0].keys[..., :12, :], whole[0].keys[..., :12, :])


CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "draft_vocab_size": 40,
    "target_hidden_size": 12,
}


def random_head(config, own=()):
    """With weights away from 0 and 1; `own`: names of weights that are not always there."""
    mx.random.seed(11)
    head = Eagle3(ModelArgs.from_config(config, own))
    head.update(tree_map(lambda w: 0.8 * w + 0.2 * mx.random.normal(w.shape), head.parameters()))
    return head


def numpy_row(w, config, e, a):
    """One row, which attends to itself alone, so that neither positions nor queries matter."""

    def rms(x, name):
        return x / np.sqrt((x * x).mean() + 1e-5) * w[f"{name}.weight"]

    def linear(x, name):
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)

    a = rms(a, "input_norm") if config.get("norm_before_fc") else a
    if config.get("fc_norm"):
        a = np.concatenate([rms(part, f"fc_norm.{i}") for i, part in enumerate(np.split(a, 3))])
    g, at = linear(a, "fc"), "layers.0."
    f = rms(g, f"{at}hidden_norm")
    v = linear(np.concatenate([rms(e, f"{at}input_layernorm"), f]), f"{at}self_attn.v_proj")
    y = f if config.get("norm_before_residual") else g
    y = y + linear(np.concatenate([v, v]), f"{at}self_attn.o_proj")
    x = rms(y, f"{at}post_attention_layernorm")
    gate = linear(x, f"{at}mlp.gate_proj")
    up = linear(x, f"{at}mlp.up_proj")
    y = y + linear(gate / (1 + np.exp(-gate)) * up, f"{at}mlp.down_proj")
    output = rms(y, "norm")
    return (output if config.get("norm_output") else y), output


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "attention_bias": True},
        {"norm_before_fc": True, "norm_output": True},
        {"norm_before_fc": True, "fc_norm": True},
        {"num_aux_hidden_states": 2},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_every_flag_against_numpy(flags):
    config = CONFIG | flags
    head = random_head(config)
    count = {"num_aux_hidden_states": 2, "eagle_aux_hidden_state_layer_ids": 4}
    size = 12 * next((count[name] for name in flags if name in count), 3)
    e, a = mx.random.normal((16,)), mx.random.normal((size,))
    got = head(e[None, None], head.combine(a[None, None]), Eagle3Drafter.make_cache(None)[0])
    weights = {k: np.array(v) for k, v in nn.utils.tree_flatten(head.parameters())}
    for ours, theirs in zip(got, numpy_row(weights, config, np.array(e), np.array(a)), strict=True):
        np.testing.assert_allclose(ours[0, 0], theirs, atol=1e-5)


def test_older_names_of_flags():
    nvidia = ModelArgs.from_config(CONFIG | {"eagle_config": {"norm_before_fc": True}}, ())
    assert (nvidia.norm_before_fc, nvidia.fc_norm) == (True, False)
    assert ModelArgs.from_config(CONFIG | {"use_aux_norm": True}, ()).fc_norm


def test_a_head_with_a_sliding_window():
    """Rows further away are not seen, whether they come at once or one at a time."""
    config = CONFIG | {"sliding_window": 3, "layer_types": ["sliding_attention"]}
    head = random_head(config)
    e, f = mx.random.normal((1, 6, 16)), mx.random.normal((1, 6, 16))
    cache, single = Eagle3Drafter.make_cache(None)[0], Eagle3Drafter.make_cache(None)[0]
    rows, _ = head(e, f, cache)
    alone = [head(e[:, i : i + 1], f[:, i : i + 1], single)[0] for i in range(6)]
    np.testing.assert_allclose(rows, mx.concatenate(alone, axis=1), atol=1e-5)
    cut, _ = head(e[:, 3:], f[:, 3:], Eagle3Drafter.make_cache(None)[0])
    np.testing.assert_allclose(rows[:, 5], cut[:, 2], atol=1e-5)
    whole = random_head(CONFIG | {"sliding_window": 3, "layer_types": ["full_attention"]})
    everything, _ = whole(e, f, Eagle3Drafter.make_cache(None)[0])
    np.testing.assert_allclose(everything[:, :3], rows[:, :3], atol=1e-5)
    assert np.abs(np.array(everything[:, 5] - rows[:, 5])).max() > 1e-3


def test_rotary_embeddings_are_those_of_the_head():
    """Written flat, or as transformers 5 does; 10000 where nothing is said."""

    def rope(**config):
        return ModelArgs.from_config(CONFIG | config, ())

    assert (rope().rope_theta, rope().rope_scaling) == (10000, None)
    assert rope(rope_theta=5e5).rope_theta == 5e5
    parameters = {"rope_type": "default", "rope_theta": 2e5}
    assert rope(rope_parameters=parameters).rope_theta == 2e5
    scaled = rope(rope_parameters=parameters | {"rope_type": "linear", "factor": 4.0})
    assert scaled.rope_scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"mlx_spec": {"layer_ids": "output"}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, (1, 3, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, (1, 3)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 3, 7],
                "mlx_spec": {"layer_ids": "output"},
            },
            (2, 4, 8),
        ),
    ],
)
def test_which_layers_it_looks_at(config, layers):
    assert ModelArgs.from_config(CONFIG | config, ()).layers_of(8) == layers


def test_an_unknown_meaning_of_layers():
    with pytest.raises(CheckpointError, match=r"layer_ids .* 'both'; it must be one of input"):
        ModelArgs.from_config(CONFIG | {"mlx_spec": {"layer_ids": "both"}}, ())


def head_for(model, **changes):
    """A random head for a tiny model, which brings neither embedding nor output matrix."""
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    rows, size = embedding.weight.shape
    config = CONFIG | {
        "hidden_size": size,
        "target_hidden_size": size,
        "vocab_size": rows,
        "draft_vocab_size": rows,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    }
    return random_head(config | changes)


def test_what_it_does_not_bring_is_the_models():
    for name in ("qwen3", "gemma3_text", EAGLE):
        model = tiny(name)
        drafter = Eagle3Drafter(head_for(model), target_for(model))
        hidden = mx.random.normal((1, drafter.head.args.hidden_size), key=mx.random.key(0))
        inner = model.model
        matrix = inner.embed_tokens.weight if name == "qwen3" else model.lm_head.weight
        np.testing.assert_allclose(drafter.logits(hidden), hidden @ matrix.T, atol=1e-5)
        np.testing.assert_array_equal(drafter.embed(mx.array([7]))[0], inner.embed_tokens.weight[7])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 65}, "vocabulary is 65 but the model's is 64"),
        ({"target_hidden_size": 48}, "size of features is 144 but the model's is 96"),
        (
            {"hidden_size": 48, "target_hidden_size": 32},
            "hidden size is 48 but the model's is 32",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, "layer 4 of the model, which has 3"),
    ],
)
def test_what_does_not_fit(changes, words):
    model = tiny("qwen3")
    with pytest.raises(Incompatible, match=words):
        Eagle3Drafter(head_for(model, **changes), target_for(model))


# The target


def residual_before(model, k, tokens):
    """By a model that ends there, and has no final norm."""
    inner = getattr(model, "language_model", model).model
    layers, norm = inner.layers, inner.norm
    try:
        inner.layers, inner.norm = layers[:k], nn.Identity()
        return inner(tokens, cache=[None] * len(layers))
    finally:
        inner.layers, inner.norm = layers, norm


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss", EAGLE, TRAINED[0]])
def test_features_are_the_residual_stream(name):
    """Fails where mlx-lm calls its layers in another way. Logits are the model's own."""
    model = pair(name).model if name == TRAINED[0] else tiny(name)
    count = len(model.layers)
    layers = (count - 1, 1, count)
    target = TappedTarget(target_for(model), layers)
    tokens = mx.array([[5, 9, 3, 17, 30]])
    features, logits = target(tokens, make_prompt_cache(model))
    parts = mx.split(features, 3, axis=-1)
    assert target.feature_size == features.shape[-1]
    for k, part in zip(layers, parts, strict=True):
        np.testing.assert_allclose(part, residual_before(model, k, tokens), atol=1e-5)
    np.testing.assert_array_equal(logits, model(tokens, cache=make_prompt_cache(model)))


def test_features_of_layers_that_return_more():
    """Those of Gemma-4 give their keys and values, too."""
    p = pair(GEMMA_TRAINED[0])
    count = len(p.model.layers)
    target = TappedTarget(p.target, (1, count))
    tokens = mx.array([[5, 9, 3]])
    hidden, _ = p.target(tokens, make_prompt_cache(p.model))
    features, _ = target(tokens, make_prompt_cache(p.model))
    last = mx.split(features, 2, axis=-1)[1]
    np.testing.assert_allclose(p.target.text.model.norm(last), hidden, atol=1e-5)


def test_recording_is_of_this_thread_and_ends():
    model = tiny("qwen3")
    kind = type(model.layers[0])
    original = kind.__call__
    tokens = mx.array([[1, 2]])
    with record_inputs(model.layers, (1, 3)) as inputs:
        other = threading.Thread(target=lambda: model(tokens))
        other.start()
        other.join()
        assert inputs == {}
        model(tokens)
        assert inputs.keys() == {1, 3}
    assert kind.__call__ is original
    with pytest.raises(RuntimeError), record_inputs(model.layers, (1,)):
        raise RuntimeError
    assert kind.__call__ is original


def test_a_call_that_is_inherited_stays_so():
    class Block(llama.TransformerBlock):
        pass

    model = tiny(EAGLE)
    layers = list(model.layers)
    block = Block(layers[0].args)
    with record_inputs([block], (0,)) as inputs:
        block(mx.zeros((1, 1, 128)))
        assert inputs[0].shape == (1, 1, 128)
        layers[0](mx.ones((1, 1, 128)))
        assert inputs[0].max().item() == 0
    assert "__call__" not in vars(Block)


def test_layers_that_are_called_in_another_way():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

        def __call__(self, tokens, cache=None):
            return mx.zeros((1, 1, 8))

    with pytest.raises(Incompatible, match=r"layers of .* cannot be seen from outside"):
        TappedTarget(target_for(Model()), (0,)).feature_size  # noqa: B018


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", TRAINED[0]])
def test_other_targets(name):
    """The text is stock's, with proposals that are often right, and with the head's own, alone
    and beside lookup. The last model has a recurrence and a head of its own, too."""
    model = pair(name).model if name in TRAINED else tiny(name)
    prompt = [3, 8, 21, 40, 8, 21, 3, 9, 33, 12, 8, 21]
    tokenizer = pair(EAGLE).tokenizer

    def tokens_of(generate, **options):
        return list(generate(model, tokenizer, prompt, max_tokens=24, **options))

    expected = [r.token for r in tokens_of(mlx_lm.stream_generate)]
    drafter = Eagle3Drafter(head_for(model), target_for(model))
    scripted = ScriptedDrafter(
        drafter, often_right(prompt + expected, drafter.head.args.vocab_size)
    )
    for drafts in (scripted, drafter, Combined(Lookup(2), drafter)):
        got = tokens_of(mlx_spec.stream_generate, draft_model=drafts, num_draft_tokens=3)
        assert [r.token for r in got] == expected
        assert got[-1].spec.drafted > 0
        assert drafts is not scripted or got[-1].spec.accepted > 6


def test_candidates_are_all_that_is_proposed():
    """For samplers, tokens outside of the reduced vocabulary have no probability."""
    drafter = released(SPECULATORS)
    logits = drafter.logits(mx.random.normal((1, 128), key=mx.random.key(2)))
    assert isinstance(logits, Candidates)
    everywhere = np.array(logits.over_vocabulary()[0])
    marked = dump(SPECULATORS)["t2d"]
    assert np.isfinite(everywhere[marked]).all()
    assert np.isneginf(everywhere[~marked]).all()
