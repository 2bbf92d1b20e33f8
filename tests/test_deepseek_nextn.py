"""Heads in the layout of DeepSeek: against independent torch outputs, and how they are read."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import config_of, decode, load, reference, rounded, save, save_grouped, weights_of
from mlx.utils import tree_flatten

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.deepseek_nextn import has_head, read_head
from mlx_spec.convert.fingerprint import fingerprint_of, fingerprint_of_model
from mlx_spec.drafters.deepseek_nextn import DeepSeekNextN, DeepSeekNextNDrafter, ModelArgs
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter
from mlx_spec.families import family_of
from mlx_spec.inspection import inspect_path
from mlx_spec.load import find_drafter, load_drafter
from mlx_spec.mistakes import DEEPSEEK_NEXTN
from models import DEEPSEEK, DEEPSEEK_RANDOM, dump, pair, recomputed_drafts

TOLERANCE = 1e-4
LAYER = "model.layers.4."  # the head of all but MiMo


def argmax(logits, drafts):
    return mx.argmax(logits, axis=-1)


def rows_of(reference):
    """Tokens and hidden states that were given to the head."""
    tokens = np.append(reference["input_ids"][0, 1:], reference["bonus"])
    return mx.array(tokens), mx.array(reference["target_hidden"])[None]


def random_hidden(rows):
    return mx.random.normal((1, rows, 128), key=mx.random.key(3))


def drafts_of(drafter, tokens, hidden, n=4):
    return [d.item() for d in drafter.draft(tokens, hidden, n, argmax, drafter.make_cache(), [])]


# What it computes


@pytest.mark.parametrize("name", DEEPSEEK_RANDOM)
def test_parity_with_torch(name):
    reference = dump(f"{name}_mtp")
    drafter = pair(name).drafter
    tokens, hidden = rows_of(reference)

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


@pytest.mark.parametrize("name", ["glm4-moe", "mimo"])  # mlx-lm decodes fp8 in bfloat16
def test_parity_of_the_target(name):
    reference = dump(f"{name}_target")
    tokens = mx.array(reference["input_ids"])
    hidden, logits = pair(name).target(tokens, [None] * 4)
    np.testing.assert_allclose(hidden, reference["last_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(logits, reference["logits"], atol=TOLERANCE)


def test_drafts_of_a_trained_head():
    """What a torch loop that recomputes everything proposed, round by round."""
    reference = dump(f"{DEEPSEEK}_generate")
    drafter, target = pair(DEEPSEEK).drafter, pair(DEEPSEEK).target
    text = reference["greedy"].reshape(-1)
    hidden, _ = target(mx.array(text)[None], [None] * 4)
    rounds = zip(reference["spec_seq_len_before"], reference["spec_drafts"], strict=True)
    for length, expected in list(rounds)[:12]:
        known = mx.array(text[1:length])
        assert drafts_of(drafter, known, hidden[:, : length - 1], 3) == expected.tolist()


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [1, 10, 1]])
@pytest.mark.parametrize("name", [DEEPSEEK, "mimo"])
def test_learning_in_chunks_is_learning_at_once(name, chunks):
    """Latent attention computes one row in another way than several."""
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
    for a, b in zip(parts[0].keys_and_values(), whole[0].keys_and_values(), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def two_layers(name="deepseek-v3-fp8"):
    """A checkpoint whose head has a second, different layer."""
    source = load(name)
    again = {
        n.replace(LAYER, "model.layers.5."): replace(s, data=perturbed(s))
        for n, s in source.tensors.items()
        if n.startswith(LAYER) and "embed_tokens" not in n and "shared_head.head" not in n
    }
    source.config["num_nextn_predict_layers"] = 2
    source.tensors |= again
    return source


def perturbed(stored):
    """Other numbers of the same size: rows in the opposite order."""
    rows = stored.shape[0]
    return b"".join(reversed([bytes(r) for r in np.split(np.frombuffer(stored.data, "u1"), rows)]))


@pytest.mark.parametrize("chunks", [[9], [4, 5], [8, 1]])
def test_two_layers(chunks, tmp_path):
    """Step k drafts with layer k."""
    p = pair("deepseek-v3-fp8")
    drafter = load_drafter(save(two_layers(), tmp_path / "two"), p.target)
    assert len(drafter.head.layers) == 2
    tokens = mx.arange(40, 49)
    hidden = mx.random.normal((1, 9, 192), key=mx.random.key(3))
    caches = drafter.make_cache()
    start = 0
    for rows in chunks:
        end = start + rows
        drafts = drafter.draft(tokens[start:end], hidden[:, start:end], 2, argmax, caches, [])
        expected = recomputed_drafts(drafter, tokens[:end], hidden[:, :end], 2)
        assert [d.item() for d in drafts] == expected
        start = end
    assert expected[1] != recomputed_drafts(p.drafter, tokens, hidden, 2)[1]


def test_glm4_moe_lite_has_the_layout_of_deepseek(tmp_path):
    """GLM-4.7-Flash: the very weights under the other type; here mlx-lm leaves the head out."""
    source = load(DEEPSEEK)
    source.config["model_type"] = "glm4_moe_lite"
    path = save(source, tmp_path / "lite")
    model, tokenizer = mlx_spec.load(str(path))
    model.set_dtype(mx.float32)
    p = pair(DEEPSEEK)
    tokens, hidden = mx.array(p.prompt), random_hidden(24)
    drafter = load_drafter(path, mlx_spec.targets.target_for(model))
    assert drafter.head.args.model_type == "glm4_moe_lite"
    assert drafts_of(drafter, tokens, hidden) == drafts_of(p.drafter, tokens, hidden)
    last = list(mlx_spec.stream_generate(model, tokenizer, p.prompt, max_tokens=20))[-1]
    assert last.spec.engaged
    assert last.spec.accepted > 0


# How it is read


def expected_weights(name):
    """What a drafter directory must hold, in float32, by another reading of the source."""
    tensors = {n.removeprefix(LAYER): s for n, s in load(name).tensors.items() if LAYER in n}
    values = {n: decode(s) for n, s in tensors.items() if not n.endswith("_scale_inv")}
    for n in values:
        if scale := tensors.get(f"{n}_scale_inv"):
            rows, columns = values[n].shape
            blocks = np.kron(decode(scale), np.ones((128, 128), np.float32))
            values[n] = values[n] * blocks[:rows, :columns]
    made = {n: values.pop(n) for n in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    made["norm.weight"] = values.pop("shared_head.norm.weight")
    del values["embed_tokens.weight"], values["shared_head.head.weight"]
    for part in ("gate", "up", "down"):
        experts = [values.pop(f"mlp.experts.{e}.{part}_proj.weight") for e in range(8)]
        values[f"mlp.switch_mlp.{part}_proj.weight"] = np.stack(experts)
    if (kv_b := values.pop("self_attn.kv_b_proj.weight", None)) is not None:
        heads = kv_b.reshape(4, 64, 64)  # 32 rows for queries and 32 for the output
        values["self_attn.embed_q.weight"] = heads[:, :32].transpose(0, 2, 1)
        values["self_attn.unembed_out.weight"] = heads[:, 32:]
    made |= {f"mtp_block.{n}": v for n, v in values.items()}
    return {f"layers.0.{n}": v for n, v in made.items()}


@pytest.mark.parametrize("name", ["deepseek-v3-fp8", "glm4-moe"])
def test_a_drafter_directory_holds_the_layer(name, tmp_path):
    """Without the copies of the model's embedding and output matrix; the routers' bias stays."""
    report = convert(reference(name), tmp_path / "out", dtype="bfloat16")
    weights, values = weights_of(tmp_path / "out"), expected_weights(name)
    assert weights.keys() == values.keys()
    for key, stored in weights.items():
        dtype = "F32" if key.endswith("e_score_correction_bias") else "BF16"
        assert stored.dtype == dtype, key
        np.testing.assert_array_equal(decode(stored), rounded(values[key], dtype), err_msg=key)
    assert {LAYER + "embed_tokens.weight", LAYER + "shared_head.head.weight"} == set(report.unused)
    config = config_of(tmp_path / "out")
    assert config["model_type"] == f"{config['text_config']['model_type']}_mtp"
    assert config["mlx_spec"]["norm_convention"] == "plain"


@pytest.mark.parametrize("name", [DEEPSEEK, "glm4-moe", "mimo"])
def test_from_a_drafter_directory_it_drafts_the_same(name, tmp_path):
    p = pair(name)
    path = tmp_path / "model-MTP"
    convert(reference(name), path, reference(name))
    assert (tmp_path / "model-MTP" / "README.md").read_text().count("NextN (MTP) head")
    drafter = load_drafter(path, p.target)
    tokens, hidden = mx.array(p.prompt), random_hidden(len(p.prompt))
    assert drafts_of(drafter, tokens, hidden) == drafts_of(p.drafter, tokens, hidden)

    packed = tmp_path / "packed"
    convert(path, packed, quantize=True)  # from the directory that was written
    head = load_drafter(packed, p.target).head
    own, other = (h(hidden, hidden, 0, None) for h in (head, drafter.head))
    assert "scales" in head.layers[0].eh_proj
    assert 0 < mx.abs(own - other).max().item() < 0.2


def test_packed_latent_attention_is_read(tmp_path):
    convert(reference(DEEPSEEK), tmp_path / "out", quantize=True, q_bits=4, q_group_size=32)
    head = load_drafter(tmp_path / "out", pair(DEEPSEEK).target).head
    attention = head.layers[0].mtp_block.self_attn
    assert (attention.embed_q.bits, attention.embed_q.group_size) == (4, 32)
    assert head.layers[0].eh_proj.bits == 8
    assert "scales" not in head.layers[0].mtp_block.mlp.gate


@pytest.mark.parametrize("matrix", ["embed_tokens", "shared_head.head"])
def test_matrices_of_its_own_are_kept(matrix, tmp_path):
    source = load("glm4-moe")
    source.map(lambda name: name == f"{LAYER}{matrix}.weight", lambda w: w[::-1])
    own = decode(source.tensors[f"{LAYER}{matrix}.weight"])
    target = pair("glm4-moe").target
    drafter = load_drafter(save(source, tmp_path / "own"), target)
    kept = drafter.embed if matrix == "embed_tokens" else drafter.lm_head
    np.testing.assert_array_equal(kept.weight, own)
    theirs = (drafter.embed is target.embed, drafter.lm_head is target.lm_head)
    assert theirs == ((False, True) if matrix == "embed_tokens" else (True, False))


def test_without_copies_the_model_has_them(tmp_path):
    source = load("glm4-moe")
    for matrix in ("embed_tokens", "shared_head.head"):
        del source.tensors[f"{LAYER}{matrix}.weight"]
    head = read_head(Checkpoint.open(save(source, tmp_path / "without")))
    assert head.weights.keys() == expected_weights("glm4-moe").keys()


def test_copies_are_kept_where_the_model_is_not_here(tmp_path):
    """Of a large repository only the last shard may have been downloaded."""
    source = load("glm4-moe")
    head = [name for name in source.tensors if LAYER in name]
    trunk = [name for name in source.tensors if LAYER not in name]
    path = save_grouped(source, tmp_path / "part", [trunk, head])
    (path / "model-00001-of-00002.safetensors").unlink()
    weights = read_head(Checkpoint.open(path)).weights
    copies = {"embed_tokens.weight", "lm_head.weight"}
    assert weights.keys() == expected_weights("glm4-moe").keys() | copies
    np.testing.assert_array_equal(
        weights["lm_head.weight"].astype(mx.float32), decode(source.tensors["lm_head.weight"])
    )


def test_gguf_files_of_other_models_than_qwens_are_refused(tmp_path):
    (tmp_path / "head.gguf").write_bytes(b"GGUF")
    with pytest.raises(Incompatible, match="for a glm4_moe model, as of GGUF files only Qwen's"):
        convert(tmp_path / "head.gguf", tmp_path / "out", reference("glm4-moe"))


def test_layers_with_different_matrices_are_refused(tmp_path):
    source = two_layers()
    for layer, order in (("model.layers.4.", -1), ("model.layers.5.", 1)):
        stored = load("deepseek-v3-fp8").tensors["lm_head.weight"]
        source.tensors[f"{layer}shared_head.head.weight"] = stored
        source.map(lambda n, own=layer: own + "shared_head.head" in n, lambda w, o=order: w[::o])
    source.map(lambda n: n == "lm_head.weight", lambda w: w * 2)
    with pytest.raises(CheckpointError, match="whose layers have different embeddings"):
        read_head(Checkpoint.open(save(source, tmp_path / "different")))


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        (DEEPSEEK, LAYER + "self_attn.kv_b_proj.weight", "lacks 1 tensors"),
        (DEEPSEEK, LAYER + "shared_head.norm.weight", "lacks 1 tensors"),
        (DEEPSEEK, LAYER + "mlp.experts.3.up_proj.weight", "lacks 1 tensors"),
        ("mimo", "model.mtp_layers.0.token_layernorm.weight", "lacks 1 tensors"),
        ("mimo", "model.mtp_layers.0.mlp.up_proj.weight", "lacks 1 tensors"),
    ],
)
def test_what_is_missing_is_named(name, lost, said, tmp_path):
    source = load(name)
    del source.tensors[lost]
    with pytest.raises(CheckpointError, match=said) as error:
        read_head(Checkpoint.open(save(source, tmp_path / "lost")))
    assert lost in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_nextn_predict_layers": 2}, "model.layers.5.eh_proj.weight"),
        ({"v_head_dim": 16}, "kv_b_proj.weight in .* is .256, 64., and by config.json it should"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"n_group": None}, "lacks n_group"),
        ({"n_routed_experts": 10**6}, "has n_routed_experts 1000000, and the limit is"),
        ({"q_lora_rank": 64}, "q_a_proj.weight gives"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(change, said, tmp_path):
    source = load(DEEPSEEK)
    source.config |= change
    with pytest.raises(CheckpointError, match=said):
        read_head(Checkpoint.open(save(source, tmp_path / "changed")))


def test_a_model_whose_head_was_left_out(tmp_path):
    source = load(DEEPSEEK)
    source.tensors = {n: s for n, s in source.tensors.items() if LAYER not in n}
    path = save(source, tmp_path / "stripped")
    assert not has_head(Checkpoint.open(path))
    with pytest.raises(NoDrafter, match="announces 1 such layers, and its weights hold none"):
        read_head(Checkpoint.open(path))
    assert "no layer for drafts" in find_drafter(path).why_not

    drafter = tmp_path / "stripped-MTP"
    convert(reference(DEEPSEEK), drafter)
    found = inspect_path(str(path))  # a model that mlx-lm loads as it is
    assert (found.verdict, found.drafter.path) == ("usable", str(drafter))
    assert found.fingerprint.verdict == "same"

    convert(reference("glm4-moe"), drafter)
    assert "its model_type is glm4_moe and the model's deepseek_v3" in find_drafter(path).why_not


def test_other_layouts_are_refused(tmp_path):
    source = load("mimo")
    source.config["model_type"] = "mimo_v2_flash"
    with pytest.raises(Incompatible, match="'mimo_v2_flash' is not supported"):
        family_of(Checkpoint.open(save(source, tmp_path / "v2")))


def test_a_head_of_another_kind_of_model_is_refused():
    with pytest.raises(Incompatible, match="for models of type glm4_moe, and the model is a deep"):
        DeepSeekNextNDrafter(pair("glm4-moe").drafter.head, pair(DEEPSEEK).target)


@pytest.mark.parametrize("name", [DEEPSEEK, "mimo"])
def test_the_fingerprint_is_the_models_without_the_head(name):
    found = fingerprint_of(Checkpoint.open(reference(name)), minus_one=False)
    assert found == fingerprint_of_model(pair(name).model)
    assert "layers.3.input_layernorm" in found.norms


def test_usual_mistakes_are_undone():
    """A head whose eh_proj was made for the other order drafts as it should, undone."""
    p = pair(DEEPSEEK)
    weights = dict(tree_flatten(p.drafter.head.parameters()))
    left, right = mx.split(weights["layers.0.eh_proj.weight"], 2, axis=-1)
    weights["layers.0.eh_proj.weight"] = mx.concatenate([right, left], axis=-1)
    head = DeepSeekNextN(ModelArgs.from_config(read_head(Checkpoint.open(p.path)).config, weights))
    head.load_weights(list(weights.items()))
    drafter = DeepSeekNextNDrafter(head, p.target)
    tokens, hidden = mx.array(p.prompt), random_hidden(24)
    expected = drafts_of(p.drafter, tokens, hidden)
    assert drafts_of(drafter, tokens, hidden) != expected
    order = next(m for m in DEEPSEEK_NEXTN if m.kind == "concat order")
    with order.undone(drafter, p.target):
        assert drafts_of(drafter, tokens, hidden) == expected
    assert drafts_of(drafter, tokens, hidden) != expected
