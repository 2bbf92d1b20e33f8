"""The head against independent torch outputs, and how it learns and drafts."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.qwen_nextn import read_head
from mlx_spec.drafters.nextn import NextNDrafter
from mlx_spec.drafters.qwen_nextn import ModelArgs, QwenNextN
from mlx_spec.errors import Incompatible
from mlx_spec.load import build_head
from models import DEMO, RANDOM, TRAINED, dump, pair, recomputed_drafts

TOLERANCE = 1e-4


def argmax(logits, drafts):
    return mx.argmax(logits, axis=-1)


@pytest.mark.parametrize("name", RANDOM)
def test_parity_with_torch(name):
    reference = dump(f"{name}_mtp")
    drafter = pair(name).drafter
    tokens = mx.array(reference["mtp_rows_tokens"])
    hidden = mx.array(reference["target_hidden"])[None]

    m = drafter.head(drafter.embed(tokens[None]), hidden, 0, drafter.make_cache()[0])
    np.testing.assert_allclose(m[0], reference["mtp_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(drafter.lm_head(m)[0], reference["mtp_logits"], atol=TOLERANCE)

    logits = []

    def pick(row, drafts):
        logits.append(row[0])
        return argmax(row, drafts)

    drafts = drafter.draft(tokens, hidden, 4, pick, drafter.make_cache(), [])
    assert [d.item() for d in drafts] == reference["draft_tokens"].tolist()
    np.testing.assert_allclose(mx.stack(logits), reference["draft_logits"], atol=TOLERANCE)


@pytest.mark.parametrize("name", TRAINED)
def test_drafts_and_acceptance_of_a_trained_head(name):
    """What a torch loop that recomputes everything proposed, round by round."""
    reference = dump(f"{name}_generate")
    drafter, target = pair(name).drafter, pair(name).target
    text = reference["greedy"].reshape(-1)
    hidden, _ = target(mx.array(text)[None], [None] * len(target.model.layers))
    for length, expected in list(
        zip(reference["spec_seq_len_before"], reference["spec_drafts"], strict=True)
    )[:8]:
        known = mx.array(text[1:length])
        drafts = drafter.draft(known, hidden[:, : length - 1], 3, argmax, drafter.make_cache(), [])
        assert [d.item() for d in drafts] == expected.tolist()


@pytest.mark.parametrize("name", [*RANDOM, DEMO])
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [1, 10, 1], [3, 3, 3, 3]])
def test_learning_in_chunks_is_learning_at_once(name, chunks):
    drafter = pair(name).drafter
    tokens = mx.arange(5, 17)
    hidden = mx.random.normal((1, 12, drafter.head.args.hidden_size), key=mx.random.key(1))
    whole, parts = drafter.make_cache(), drafter.make_cache()
    expected = drafter.draft(tokens, hidden, 3, argmax, whole, [])
    start = 0
    for rows in chunks[:-1]:
        end = start + rows
        drafter.extend(tokens[start:end], hidden[:, start:end], parts)
        start = end
    got = drafter.draft(tokens[start:], hidden[:, start:], 3, argmax, parts, [])
    assert [d.item() for d in got] == [d.item() for d in expected]
    assert parts[0].offset == whole[0].offset == 12
    np.testing.assert_array_equal(parts[0].keys[..., :12, :], whole[0].keys[..., :12, :])


def two_layer_drafter() -> NextNDrafter:
    """The head of qwen3-5 with a second, different layer."""
    p = pair("qwen3-5")
    weights = dict(tree_flatten(p.drafter.head.parameters()))
    for key, value in list(weights.items()):
        if key.startswith("layers.0."):
            other = value * 0.8 + 0.05 * mx.random.normal(value.shape, key=mx.random.key(len(key)))
            weights[key.replace("layers.0.", "layers.1.")] = other
    config = Checkpoint.open(p.path).config
    head = QwenNextN(ModelArgs.from_config(config, weights))
    head.update(tree_unflatten(list(weights.items())))
    return NextNDrafter(head, p.target)


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [8, 1]])
def test_two_layers(chunks):
    drafter = two_layer_drafter()
    tokens = mx.arange(40, 49)
    hidden = mx.random.normal((1, 9, 128), key=mx.random.key(3))
    caches = drafter.make_cache()
    start = 0
    for rows in chunks:
        end = start + rows
        drafts = drafter.draft(tokens[start:end], hidden[:, start:end], 2, argmax, caches, [])
        expected = recomputed_drafts(drafter, tokens[:end], hidden[:, :end], 2)
        assert [d.item() for d in drafts] == expected
        assert [c.offset for c in caches[:2]] == [end, end - 1]
        start = end


def test_second_layer_matters():
    drafter = two_layer_drafter()
    tokens, hidden = mx.arange(40, 49), mx.random.normal((1, 9, 128), key=mx.random.key(3))
    two = drafter.draft(tokens, hidden, 6, argmax, drafter.make_cache(), [])
    one = pair("qwen3-5").drafter
    assert [d.item() for d in two] != [
        d.item() for d in one.draft(tokens, hidden, 6, argmax, one.make_cache(), [])
    ]


def test_rewind_forgets():
    drafter = two_layer_drafter()
    tokens, hidden = mx.arange(40, 49), mx.random.normal((1, 9, 128), key=mx.random.key(3))
    caches = drafter.make_cache()
    drafter.extend(tokens[:4], hidden[:, :4], caches)
    position = drafter.position(caches)
    drafter.extend(mx.array([1, 2, 3]), hidden[:, 1:4], caches)
    drafter.rewind(caches, position)
    got = drafter.draft(tokens[4:], hidden[:, 4:], 2, argmax, caches, [])
    assert [d.item() for d in got] == recomputed_drafts(drafter, tokens, hidden, 2)


def test_dedicated_embedding_and_output_matrix_are_used():
    p = pair("qwen3-5")
    weights = dict(tree_flatten(p.drafter.head.parameters()))
    embedding = p.target.text.model.embed_tokens.weight
    weights["embed_tokens.weight"] = embedding[::-1]
    weights["lm_head.weight"] = p.target.text.lm_head.weight[::-1]
    config = Checkpoint.open(p.path).config
    head = QwenNextN(ModelArgs.from_config(config, weights))
    head.load_weights(list(weights.items()))
    dedicated = NextNDrafter(head, p.target)
    tokens, hidden = mx.array([7, 8]), mx.random.normal((1, 2, 128), key=mx.random.key(3))
    flipped = p.drafter.draft(511 - tokens, hidden, 1, argmax, p.drafter.make_cache(), [])
    got = dedicated.draft(tokens, hidden, 1, argmax, dedicated.make_cache(), [])
    assert got[0].item() == 511 - flipped[0].item()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("hidden_size", 64, "hidden size is 64"), ("vocab_size", 500, "vocabulary is 500")],
)
def test_a_drafter_of_another_shape_is_refused(key, value, words):
    p = pair("qwen3-5")
    source = read_head(Checkpoint.open(p.path))
    head = build_head(source)
    setattr(head.args, key, value)
    with pytest.raises(Incompatible, match=words):
        NextNDrafter(head, p.target)


def test_the_demo_head_is_trained():
    """On code that it was not trained on (that which trained it): how often its draft is the
    target's choice, with the real tokens before it."""
    p = pair(DEMO)
    text = (Path(__file__).parent.parent / "scripts" / "train_demo.py").read_text()
    tokens = mx.array(p.tokenizer.encode(text)[:700])
    hidden, logits = p.target(tokens[None], [None] * 4)
    embeddings = p.drafter.embed(tokens[None, 1:])
    m = p.drafter.head(embeddings, hidden[:, :-1], 0, p.drafter.make_cache()[0])
    drafts = mx.argmax(p.drafter.lm_head(m)[0], axis=-1)
    choices = mx.argmax(logits[0, 1:], axis=-1)
    assert mx.mean(drafts == choices).item() >= 0.55
