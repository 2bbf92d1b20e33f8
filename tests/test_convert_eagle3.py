"""EAGLE-3 heads: from checkpoints to drafter directories, what is refused, and finding them."""

import importlib
import json
import shutil
from dataclasses import replace
from functools import cache

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from checkpoints import (
    Stored,
    config_of,
    decode,
    encode,
    load,
    reference,
    save,
    weights_of,
)

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.eagle3 import as_offsets, has_head
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.inspection import inspect_path
from mlx_spec.load import drafter_path, find_drafter, load_drafter
from mlx_spec.probe import probe
from mlx_spec.targets import target_for
from models import EAGLE, EAGLE_HEAD, dump, pair

SPECULATORS = "llama-eagle3-speculators"
BOTH = pytest.mark.parametrize("name", [EAGLE_HEAD, SPECULATORS])
VOCAB = 512


def renamed(tensors):
    return {n.replace("midlayer.", "layers.0."): s for n, s in tensors.items() if n != "t2d"}


# Values


@BOTH
def test_the_tensors_are_those_of_the_source(name, tmp_path):
    report = convert(reference(name), tmp_path / "out")
    source = load(name).tensors
    assert weights_of(tmp_path / "out") == renamed(source)
    assert report.tensors == len(source) - 1 == (14 if name == EAGLE_HEAD else 15)
    assert report.unused == ()  # the mask was, for the check
    assert report.norm_evidence is None


def test_the_config_is_flat(tmp_path):
    convert(reference(SPECULATORS), tmp_path / "out")
    config = config_of(tmp_path / "out")
    record = config.pop("mlx_spec")
    assert record.pop("sha256").keys() == weights_of(tmp_path / "out").keys()
    assert record == {
        "format_version": 1,
        "source": str(reference(SPECULATORS)),
        "revision": None,
        "norm_convention": "plain",
    }
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": 320,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 224,
        "max_position_embeddings": 4096,
        "norm_before_residual": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }


@BOTH
def test_converting_again_changes_nothing(name, tmp_path):
    source = load(name)
    source.config["mlx_spec"] = {"layer_ids": "output"}
    source.config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    convert(save(source, tmp_path / "model"), tmp_path / "once", quantize=True, q_bits=4)
    convert(tmp_path / "once", tmp_path / "twice")
    assert weights_of(tmp_path / "once") == weights_of(tmp_path / "twice")
    once, twice = config_of(tmp_path / "once"), config_of(tmp_path / "twice")
    del once["mlx_spec"]["source"], twice["mlx_spec"]["source"]
    assert once == twice
    assert once["mlx_spec"]["layer_ids"] == "output"
    assert once["quantization"]["fc"]["bits"] == 8


def test_speculators_leave_out_what_is_usual(tmp_path):
    source = load(SPECULATORS)
    del source.config["norm_before_residual"]
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert config_of(tmp_path / "out")["norm_before_residual"] is True
    convert(reference(EAGLE_HEAD), tmp_path / "other")
    assert "norm_before_residual" not in config_of(tmp_path / "other")


@BOTH
@pytest.mark.parametrize("packed", [False, True])
def test_a_converted_head_drafts_as_the_released_one(name, packed, tmp_path):
    """Packed in 8 bits, nearly so."""
    convert(reference(name), tmp_path / "out", quantize=packed, dtype="float32")
    target = pair(EAGLE).target
    tokens = mx.array(dump(f"{EAGLE_HEAD}_generate")["greedy"][0, 1:25])
    features = mx.random.normal((1, 24, 384), key=mx.random.key(4))

    def logits(path):
        drafter = load_drafter(path, target)
        rows = []

        def pick(row, drafts):
            rows.append(row.logits[0])
            return row.best()

        drafter.draft(tokens, features, 1, pick, drafter.make_cache(), [])
        return np.array(rows[0])

    got, expected = logits(tmp_path / "out"), logits(reference(name))
    atol = 0.05 * np.abs(expected).max() if packed else 1e-5
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


# The reduced vocabulary


IDS = np.array([0, 1, 2, 5, 6, 9])
MASK = np.isin(np.arange(12), IDS)
OFFSETS = IDS - np.arange(6)


@pytest.mark.parametrize(
    ("stored", "mask", "expected"),
    [
        (OFFSETS, MASK, OFFSETS),
        (OFFSETS, None, OFFSETS),
        (IDS, MASK, OFFSETS),
        (IDS, None, OFFSETS),
        (IDS[::-1], MASK, IDS[::-1] - np.arange(6)),  # in any order, if the mask says so
        (IDS[::-1], None, None),
        (OFFSETS, np.roll(MASK, 1), None),
        (OFFSETS, MASK[:-1], None),
        (OFFSETS + 3, None, None),  # past the end
        (OFFSETS - 1, None, None),
        (np.zeros(6, int), None, np.zeros(6, int)),
        (np.zeros(6, int), MASK, None),
        (np.array([0, 0, -1, 2, 2, 4]), None, None),  # one token twice
    ],
)
def test_offsets_or_ids(stored, mask, expected):
    got = as_offsets(stored, mask, 12)
    assert got is None if expected is None else np.array_equal(got, expected)


def test_ids_are_written_as_offsets(tmp_path):
    source = load(SPECULATORS)
    offsets = decode(source.tensors["d2t"])
    source.tensors["d2t"] = encode(offsets + np.arange(320), "I32")
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    np.testing.assert_array_equal(decode(weights_of(tmp_path / "out")["d2t"]), offsets)
    assert weights_of(tmp_path / "out")["d2t"].dtype == "I64"


# What is refused


def changed(name, **fields):
    def change(source):
        source.config |= fields

    return change, name


def moved(name, old, new=None):
    def change(source):
        stored = source.tensors.pop(old)
        if new:
            source.tensors[new] = stored

    return change, name


def other_map(values):
    def change(source):
        source.tensors["d2t"] = encode(values, "I64")

    return change, EAGLE_HEAD


def twice(source):
    source.tensors["layers.0.mlp.up_proj.weight"] = source.tensors["midlayer.mlp.up_proj.weight"]


def without_size(source):
    del source.config["transformer_layer_config"]["hidden_size"]


def with_bool_norm(source):
    source.tensors["norm.weight"] = Stored("BOOL", (128,), bytes(128))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (moved(EAGLE_HEAD, "fc.weight"), "lacks 1 tensors of its EAGLE-3 head: fc.weight"),
        (moved(EAGLE_HEAD, "d2t"), "lacks 1 tensors of its EAGLE-3 head: d2t"),
        (moved(EAGLE_HEAD, "lm_head.weight"), "lacks 1 tensors of its EAGLE-3 head: lm_head"),
        (
            moved(EAGLE_HEAD, "norm.weight", "final.weight"),
            r"norm.weight \(and has no use for final.weight\)",
        ),
        ((lambda s: s.tensors.update(x=s.tensors["d2t"]), EAGLE_HEAD), "holds x, which no EAGLE-3"),
        ((twice, EAGLE_HEAD), "holds both layers.0.mlp.up_proj.weight and midlayer"),
        ((with_bool_norm, EAGLE_HEAD), "norm.weight .* is stored as BOOL"),
        (other_map(np.ones(320, int)), "d2t .* is no map to distinct tokens of 512 that t2d"),
        (changed(EAGLE_HEAD, target_hidden_size=64), r"shape \(128, 384\) and not \(128, 192\)"),
        (changed(EAGLE_HEAD, draft_vocab_size=300), r"shape \(320, 128\) and not \(300, 128\)"),
        (changed(EAGLE_HEAD, hidden_size="128"), "hidden_size .* is '128' and not a number"),
        (changed(EAGLE_HEAD, hidden_act="gelu"), "its activation is 'gelu'"),
        (changed(EAGLE_HEAD, fc_norm=True), "lacks 3 tensors of its EAGLE-3 head: fc_norm.0"),
        (changed(EAGLE_HEAD, num_hidden_layers=2), "it has 2 layers, and not one"),
        (changed(EAGLE_HEAD, model_type="qwen3"), "its layer is a qwen3 layer"),
        (
            changed(EAGLE_HEAD, eagle_config={"use_aux_hidden_state": False}),
            "it does not look at layers",
        ),
        (changed(SPECULATORS, eagle_aux_hidden_state_layer_ids=["a"]), "its list of layers"),
        ((without_size, SPECULATORS), "lacks hidden_size"),
        (
            changed(
                SPECULATORS,
                eagle_aux_hidden_state_layer_ids=[1, 2, 3],
                mlx_spec={"layer_ids": "x"},
            ),
            "layer_ids .* must be one of",
        ),
    ],
)
def test_what_is_refused(change, words, tmp_path):
    change, name = change
    source = load(name)
    change(source)
    path = save(source, tmp_path / "model")
    assert has_head(Checkpoint.open(path))
    with pytest.raises(CheckpointError, match=words):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(reference(EAGLE_HEAD) / "config.json", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model.bin, a pickle.*save_file\(torch.load"
    ):
        convert(tmp_path / "model", tmp_path / "out")


def test_a_repository_of_pickles(tmp_path, monkeypatch):
    """Pickles are not downloaded, so that nothing is there to be named."""
    loading = importlib.import_module("mlx_spec.load")
    monkeypatch.setattr(loading, "local_path", lambda *_, **__: tmp_path)
    with pytest.raises(CheckpointError, match=r"some/head has no safetensors; .* --from some/head"):
        drafter_path("some/head")


def test_what_it_does_not_need_is_listed(tmp_path):
    source = load(EAGLE_HEAD)
    source.tensors["verifier_norm.weight"] = Stored("F64", (4,), bytes(32))
    source.tensors["t2d"] = replace(source.tensors["t2d"], dtype="I8")  # no mask
    report = convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert report.unused == ("t2d", "verifier_norm.weight")


def test_its_own_vocabulary_cannot_be_reduced_further(tmp_path):
    with pytest.raises(Incompatible, match="vocabulary of its own; leave --draft-vocab out"):
        convert(reference(EAGLE_HEAD), tmp_path / "out", draft_vocab=100)


# Beside a model


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        (EAGLE_HEAD, {"vocab_size": 513}, "its vocab_size is 512 and the model's 513"),
        (SPECULATORS, {"hidden_size": 64}, "its target_hidden_size is 128 and the model's 64"),
        (EAGLE_HEAD, {"hidden_size": 64}, "its hidden_size is 128 and the model's 64"),
        (EAGLE_HEAD, {"num_hidden_layers": 2}, "it looks at layer -1 of the model, which has 2"),
    ],
)
def test_another_model(name, fields, words, tmp_path):
    target = load(EAGLE)
    target.config |= fields
    with pytest.raises(Incompatible, match=words):
        convert(reference(name), tmp_path / "out", target=save(target, tmp_path / "model"))


def test_with_its_model(tmp_path):
    """The fingerprint is recorded; rotary embeddings, which are its own, are no matter."""
    report = convert(reference(EAGLE_HEAD), tmp_path / "out", target=reference(EAGLE))
    assert report.pairing.startswith("Fits ")
    assert "fingerprint" in config_of(tmp_path / "out")["mlx_spec"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# EAGLE-3 head" in card
    assert "| 512 tokens, of which 320 are proposed |" in card
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    again = convert(tmp_path / "out", tmp_path / "again", target=reference(EAGLE))
    assert "the head belongs to this model" in again.pairing


@pytest.fixture
def beside(tmp_path):
    """A model with heads beside it."""
    shutil.copytree(reference(EAGLE), tmp_path / "Tiny-Llama")
    shutil.copytree(reference(EAGLE_HEAD), tmp_path / "Tiny-Llama-EAGLE3")
    return tmp_path / "Tiny-Llama"


def test_it_is_found_beside_its_model(beside):
    head = beside.with_name("Tiny-Llama-EAGLE3")
    assert find_drafter(beside).path == head
    config = config_of(head)
    (head / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    found = find_drafter(beside)
    assert found.path is None
    assert "no *EAGLE3* drafter beside it" in found.why_not
    assert "its vocab_size is 500 and the model's 512" in found.why_not


@cache
def stock_text(path):
    model, tokenizer = mlx_lm.load(path)
    tokenizer.eos_token_ids = []
    return mlx_lm.generate(model, tokenizer, "a b", max_tokens=20)


@pytest.mark.parametrize("draft_model", ["auto", str(reference(EAGLE_HEAD))])
def test_load_takes_it_as_released(draft_model, beside):
    model, tokenizer = mlx_spec.load(str(beside), draft_model=draft_model)
    tokenizer.eos_token_ids = []
    *_, last = mlx_spec.stream_generate(model, tokenizer, "a b", max_tokens=20, num_draft_tokens=3)
    assert last.spec.kind == "eagle3"
    assert last.spec.engaged
    assert mlx_spec.generate(model, tokenizer, "a b", max_tokens=20) == stock_text(str(beside))


def test_a_drafter_of_the_models_own_family_comes_first(tmp_path):
    model = tmp_path / "Tiny-Qwen"
    shutil.copytree(reference("qwen3-5-trained"), model)
    shutil.copytree(reference(EAGLE_HEAD), tmp_path / "Tiny-Qwen-EAGLE3")
    assert find_drafter(model).path == model


def test_inspect(beside):
    facts = inspect_path(str(beside))
    assert (facts.verdict, facts.exit_code) == ("usable", 0)
    assert facts.why == "the drafter fits this model"
    assert (facts.drafter.kind, facts.drafter.layers) == ("eagle3", 1)
    assert "draft vocabulary 320" in facts.as_text()
    assert "layers listed" not in facts.as_text()
    alone = inspect_path(str(reference(SPECULATORS)))
    assert alone.verdict == "unverified"
    assert alone.drafter.kind == "eagle3"


def test_a_probe_names_the_other_meaning_of_layers(tmp_path):
    """A head whose list of layers means outputs, and is read as one of inputs."""
    source = load(EAGLE_HEAD)
    source.config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    p = pair(EAGLE)
    drafter = load_drafter(save(source, tmp_path / "model"), target_for(p.model))
    assert drafter.layers == (1, 3, 4)
    found = probe(p.model, p.tokenizer, drafter, prompts=[p.prompt], max_tokens=32)
    assert found.causes[0].mistake.kind == "layer ids"
    assert "outputs of the listed layers" in found.causes[0].mistake.fault
    assert drafter.layers == (1, 3, 4)
