"""Does a head belong to a model? By values of norms that quantisation leaves alone."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    config_of,
    decode,
    encode,
    load,
    reference,
    rename_token,
    rounded,
    save,
    weights_of,
)
from mlx_lm.utils import load_model, quantize_model, save_model

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.fingerprint import (
    Fingerprint,
    compare,
    fingerprint_of,
    fingerprint_of_model,
    recorded,
)
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.fit import rope_differences
from mlx_spec.inspection import inspect_path
from mlx_spec.load import find_drafter, pairing_of
from models import strip_head

NAME = "qwen3-5-trained"
LAYERS = 4  # of all reference models of Qwen3.5
TRUNK_NORMS = ("layernorm.weight", "language_model.norm.weight")


def expected_norms(source, minus_one=True):
    """The four norms by our own reading of Hugging Face's file, rounded to bfloat16."""
    prefix = "model.language_model."
    names = [f"layers.{i}.input_layernorm" for i in (0, LAYERS // 2, LAYERS - 1)] + ["norm"]
    return {
        name: rounded(
            decode(source.tensors[f"{prefix}{name}.weight"]) + np.float32(minus_one), "BF16"
        )
        for name in names
    }


@dataclass(frozen=True)
class Models:
    source: Path  # of Hugging Face, with its head
    drafter: Path  # converted from it
    quantised: Path  # by mlx-lm, without the head
    half: Path  # the same in float16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    convert(reference(NAME), path / "Qwen-MTP")
    targets = {}
    for name, dtype in (("quantised", mx.bfloat16), ("half", mx.float16)):
        model, config = load_model(reference(NAME))
        model.set_dtype(dtype)
        model, config = quantize_model(model, config, 32, 4)
        targets[name] = path / name
        save_model(targets[name], model)
        config = {key: value for key, value in config.items() if key != "mlx_spec"}
        (targets[name] / "config.json").write_text(json.dumps(config))
        for file in reference(NAME).glob("*token*"):
            shutil.copyfile(file, targets[name] / file.name)
    return Models(reference(NAME), path / "Qwen-MTP", **targets)


def changed(path: Path, change) -> Path:
    """A copy of the reference model whose trunk's norms are changed."""
    source = load(NAME)
    trunk = {n for n in source.tensors if not n.startswith("mtp.") and n.endswith(TRUNK_NORMS)}
    source.map(lambda name: name in trunk, change)
    return save(source, path)


def noise(amount: float):
    rng = np.random.default_rng(1)
    return lambda w: w + amount * rng.standard_normal(w.shape).astype(np.float32)


def another(w: np.ndarray) -> np.ndarray:
    return np.random.default_rng(2).permutation(w)


# What it is


def test_it_is_made_of_four_norms_as_they_are_used(models):
    norms = expected_norms(load(NAME))
    block = config_of(models.drafter)["mlx_spec"]["fingerprint"]
    digest = hashlib.sha256()
    for name, values in norms.items():
        digest.update(f"{name} {values.size}\n".encode() + encode(values, "BF16").data)
    assert block["sha256"] == digest.hexdigest()
    assert list(block["norms"]) == sorted(norms)  # json.dumps sorts
    for name, values in norms.items():
        where = [i * (values.size - 1) // 31 for i in range(32)]
        assert block["norms"][name] == values[where].tolist()
        assert np.unique(values[where]).size > 4  # they do tell something


def test_quantisation_and_dtype_do_not_change_it(models):
    of_source = recorded(Checkpoint.open(models.drafter))
    for path in (models.quantised, models.half):
        assert weights_of(path)["language_model.lm_head.weight"].dtype == "U32"
        assert fingerprint_of(Checkpoint.open(path), minus_one=True) == of_source
        model, _ = load_model(path, lazy=True)
        assert fingerprint_of_model(model) == of_source


def test_only_a_few_norms_are_read(models):
    checkpoint = Checkpoint.open(models.quantised)
    fingerprint_of(checkpoint, minus_one=True)
    assert checkpoint.bytes_read == 4 * 128 * 2


def test_norms_of_gemma_are_plain():
    checkpoint = Checkpoint.open(reference("gemma4-dense"))
    fingerprint = fingerprint_of(checkpoint, minus_one=False)
    model, _ = load_model(reference("gemma4-dense"), lazy=True)
    assert fingerprint_of_model(model) == fingerprint
    raw = decode(load("gemma4-dense").tensors["model.language_model.norm.weight"])
    assert fingerprint.norms["norm"][0] == rounded(raw, "BF16")[0]


def test_a_checkpoint_without_the_norms_has_none(tmp_path):
    source = load(NAME)
    source.tensors = source.head()
    path = save(source, tmp_path / "model")
    assert fingerprint_of(Checkpoint.open(path), minus_one=True) is None
    convert(path, tmp_path / "out")
    assert "fingerprint" not in config_of(tmp_path / "out")["mlx_spec"]


# How models are told apart


def made(values: np.ndarray) -> Fingerprint:
    return Fingerprint(hashlib.sha256(values.tobytes()).hexdigest(), {"norm": tuple(values)})


@pytest.mark.parametrize(
    ("change", "verdict", "difference"),
    [
        (lambda w: w, "same", 0.0),
        (lambda w: np.where(np.arange(32) == 5, w * 1.0078, w), "same", 0.0078 / 32),
        (lambda w: w * 1.004, "fine-tune", 0.004),
        (lambda w: w * 1.03, "fine-tune", 0.03),
        (lambda w: w[::-1], "another", None),
        (lambda w: w * 2, "another", 1.0),
    ],
)
def test_the_mean_relative_difference_decides(change, verdict, difference):
    values = 1 + 0.3 * np.random.default_rng(0).standard_normal(32)
    found = compare(made(values), made(change(values)))
    assert found.verdict == verdict
    if difference is not None:
        assert found.difference == pytest.approx(difference, rel=0.3)


def test_other_layers_are_another_model():
    values = np.ones(32)
    other = Fingerprint("", {"layers.7.input_layernorm": tuple(values)})
    assert compare(made(values), other).verdict == "another"


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("qwen3-5", "same"),
        ("qwen3-5-trained", "fine-tune"),  # training began with the norms of qwen3-5
        ("qwen3-5-tied", "another"),  # the same sizes, norms drawn anew
    ],
)
def test_models_of_the_same_sizes(name, verdict):
    prints = [
        fingerprint_of(Checkpoint.open(reference(other)), minus_one=True)
        for other in ("qwen3-5", name)
    ]
    assert compare(*prints).verdict == compare(*reversed(prints)).verdict == verdict


# Converting for a target


def test_converting_for_the_users_own_quantised_target(models, tmp_path):
    report = convert(models.source, tmp_path / "out", models.quantised)
    assert report.pairing == (
        f"Fits {models.quantised}; the same tokenizer; the head belongs to this model"
    )
    assert config_of(tmp_path / "out") == config_of(models.drafter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (noise(0.002), "a fine-tune or another release of this model: norms differ by 0."),
        (another, "belongs to another model: norms differ by "),
    ],
)
def test_another_generation_is_named_and_allowed_on_request(change, words, models, tmp_path):
    target = changed(tmp_path / "target", change)
    with pytest.raises(Incompatible, match=words) as caught:
        convert(models.source, tmp_path / "out", target)
    assert "--allow-mismatch" in str(caught.value)
    assert not (tmp_path / "out").exists()

    report = convert(models.source, tmp_path / "out", target, allow_mismatch=True)
    assert words in report.pairing
    strip_head(target)
    model, _ = mlx_spec.load(str(target), draft_model=str(tmp_path / "out"))
    assert "which was allowed" in pairing_of(model).detail
    convert(tmp_path / "out", tmp_path / "again")  # it stays allowed
    model, _ = mlx_spec.load(str(target), draft_model=str(tmp_path / "again"))


def test_what_was_allowed_for_one_model_is_not_for_others(models, tmp_path):
    target = changed(tmp_path / "target", another)
    convert(models.source, tmp_path / "out", target, allow_mismatch=True)
    third = changed(tmp_path / "third", lambda w: another(another(w)))
    with pytest.raises(Incompatible, match="belongs to another model"):
        mlx_spec.load(str(third), draft_model=str(tmp_path / "out"))


def test_other_rotary_embeddings_and_another_tokenizer(models, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(models.quantised, target)
    config = config_of(target)
    config["text_config"]["rope_parameters"] |= {"rope_theta": 1e6, "rope_type": "yarn"}
    (target / "config.json").write_text(json.dumps(config))
    rename_token(target, "a", "aa")
    with pytest.raises(Incompatible) as caught:
        convert(models.source, tmp_path / "out", target)
    for words in (
        "its rope_type is default and the model's yarn",
        "its rope_theta is 10000000 and the model's 1000000.0",
        "'a' in the drafter's tokenizer and 'aa' in the model's",
    ):
        assert words in str(caught.value)
    report = convert(models.source, tmp_path / "out", target, allow_mismatch=True)
    assert report.pairing.startswith(f"Does not quite fit {target}: id ")


def test_rotary_embeddings_are_compared_in_all_their_spellings():
    flat = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    nested = {"text_config": {"rope_parameters": flat | {"rope_type": "default"}}}
    assert rope_differences(flat, nested) == rope_differences(nested, flat) == []
    yarn = flat | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rope_differences(yarn, nested) == [
        "its rope_type is yarn and the model's default",
        "its factor is 4.0 and the model's 1.0",
    ]
    gemma = config_of(reference("gemma4-dense"))
    other = config_of(reference("gemma4-dense-assistant"))
    assert rope_differences(other, gemma) == []
    other["text_config"]["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.5
    assert rope_differences(other, gemma) == [
        "its partial_rotary_factor in full_attention is 0.5 and the model's 0.25"
    ]


def test_sizes_are_never_allowed_to_differ(models, tmp_path):
    source = load(NAME)
    source.config["text_config"]["vocab_size"] = 256
    target = save(source, tmp_path / "target")
    with pytest.raises(Incompatible, match="its vocab_size is 512 and the model's 256"):
        convert(models.source, tmp_path / "out", target, allow_mismatch=True)


def test_an_assistant_gets_the_fingerprint_of_its_target(tmp_path):
    model = reference("gemma4-dense")
    convert(reference("gemma4-dense-assistant"), tmp_path / "alone")
    assert "fingerprint" not in config_of(tmp_path / "alone")["mlx_spec"]
    convert(reference("gemma4-dense-assistant"), tmp_path / "out", model)
    block = config_of(tmp_path / "out")["mlx_spec"]["fingerprint"]
    assert block["sha256"] == fingerprint_of(Checkpoint.open(model), minus_one=False).sha256
    assert inspect_path(str(model), str(tmp_path / "out")).fingerprint.verdict == "same"


# Loading


@pytest.fixture
def couple(models, tmp_path):
    """A function that puts a changed model beside the drafter."""

    def put(change) -> Path:
        path = changed(tmp_path / "Qwen-4bit", change)
        strip_head(path)
        shutil.copytree(models.drafter, tmp_path / "Qwen-MTP")
        return path

    return put


def test_the_head_of_another_model_is_passed_over_refused_and_reported(couple):
    model = couple(another)
    drafter = model.parent / "Qwen-MTP"
    found = find_drafter(model)
    assert found.path is None
    assert "Qwen-MTP beside it does not fit: the head belongs to another model" in found.why_not
    with pytest.raises(Incompatible, match="belongs to another model: norms differ by"):
        mlx_spec.load(str(model), draft_model=str(drafter))
    inspection = inspect_path(str(model), str(drafter))
    assert (inspection.verdict, inspection.exit_code) == ("incompatible", 4)
    assert "belongs to another model" in inspection.why


def test_a_fine_tune_is_used_and_said(couple):
    model = couple(noise(0.002))
    drafter = model.parent / "Qwen-MTP"
    loaded, tokenizer = mlx_spec.load(str(model))
    assert pairing_of(loaded).path == drafter
    assert "a fine-tune or another release of this model" in pairing_of(loaded).detail
    *_, last = mlx_spec.stream_generate(loaded, tokenizer, [1, 2, 3], max_tokens=4)
    assert "a fine-tune or another release" in last.spec.as_dict()["detail"]
    inspection = inspect_path(str(model))
    assert (inspection.verdict, inspection.fingerprint.verdict) == ("usable", "fine-tune")
    assert "  fingerprint   fine-tune: the head belongs to" in inspection.as_text()
    assert inspection.as_dict()["fingerprint"] == "fine-tune"


def test_its_own_quantised_model(models):
    inspection = inspect_path(str(models.quantised), str(models.drafter))
    assert (inspection.verdict, inspection.fingerprint.verdict) == ("usable", "same")
    model, _ = mlx_spec.load(str(models.half), draft_model=str(models.drafter))
    assert pairing_of(model).detail is None


def test_the_head_computes_with_the_users_own_quantised_matrices(models, tmp_path):
    """Unless it brings its own."""
    model, _ = mlx_spec.load(str(models.quantised), draft_model=str(models.drafter))
    drafter = pairing_of(model).drafter
    assert drafter.embed is model.language_model.model.embed_tokens
    assert drafter.lm_head is model.language_model.lm_head
    assert "scales" in drafter.embed
    assert "scales" in drafter.lm_head
    assert "embed_tokens" not in drafter.head

    source = load(NAME)
    embedding, output = np.random.default_rng(0).standard_normal((2, 512, 128), np.float32)
    source.tensors["mtp.embed_tokens.weight"] = encode(embedding, "BF16")
    source.tensors["mtp.shared_head.head.weight"] = encode(output, "BF16")
    convert(save(source, tmp_path / "model"), tmp_path / "out", models.quantised)
    model, _ = mlx_spec.load(str(models.quantised), draft_model=str(tmp_path / "out"))
    drafter = pairing_of(model).drafter
    token, state = mx.array([[7]]), mx.array(embedding[3], mx.bfloat16)
    np.testing.assert_array_equal(
        np.array(drafter.embed(token)[0, 0].astype(mx.float32)), rounded(embedding[7], "BF16")
    )
    np.testing.assert_allclose(
        np.array(drafter.lm_head(state).astype(mx.float32)),
        rounded(output, "BF16") @ rounded(embedding[3], "BF16"),
        atol=0.3,
    )


@pytest.mark.parametrize("damage", [[], {"sha256": "x"}, {"sha256": "x", "norms": {"norm": "?"}}])
def test_a_damaged_record(damage, models, tmp_path):
    shutil.copytree(models.drafter, tmp_path / "drafter")
    config = config_of(tmp_path / "drafter")
    config["mlx_spec"]["fingerprint"] = damage
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"fingerprint in config.json of .* cannot be read"):
        mlx_spec.load(str(models.quantised), draft_model=str(tmp_path / "drafter"))


def test_without_a_record_all_is_as_before(models, tmp_path):
    shutil.copytree(models.drafter, tmp_path / "drafter")
    config = config_of(tmp_path / "drafter")
    del config["mlx_spec"]["fingerprint"]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    target = changed(tmp_path / "target", another)
    inspection = inspect_path(str(target), str(tmp_path / "drafter"))
    assert (inspection.verdict, inspection.fingerprint) == ("usable", None)
