"""Assistants of Gemma-4: from checkpoints to drafter directories, and what is refused."""

import json
import shutil
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from checkpoints import (
    ASSISTANTS,
    MISFITS,
    Source,
    Stored,
    config_of,
    decode,
    encode,
    load,
    reference,
    rename_token,
    rounded,
    save,
    save_misfit,
    save_sharded,
    weights_of,
    write_file,
)
from mlx_lm.utils import load_model, load_tokenizer
from reference_files import REFERENCE

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.convert import write as writing
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.gemma4_assistant import has_head, misfits, read_head
from mlx_spec.drafters.gemma4_assistant import Gemma4Assistant, ModelArgs
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter, SpecError
from mlx_spec.load import build_head, load_drafter
from mlx_spec.targets import target_for

UNKNOWN = "no fingerprint tells whether the drafter belongs to this very model"
DENSE, E2B = "gemma4-dense-assistant", "gemma4-e2b-assistant"
ORDERING, CENTROIDS = "masked_embedding.token_ordering", "masked_embedding.centroids.weight"


def files_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def build(path):
    """The module of a drafter directory, packed as its config.json says, as mlx-lm would."""
    weights = mx.load(str(path / "model.safetensors"))
    config = config_of(path)
    module = Gemma4Assistant(ModelArgs.from_config(config))
    if block := config.get("quantization"):

        def packed(layer, _):
            return block.get(layer, f"{layer}.scales" in weights)

        nn.quantize(module, block["group_size"], block["bits"], class_predicate=packed)
    module.load_weights(list(weights.items()), strict=True)
    return module


# Values


@pytest.mark.parametrize("name", ASSISTANTS)
def test_the_tensors_are_those_of_the_source(name, tmp_path):
    report = convert(reference(name), tmp_path / "out")
    source = load(name)
    assert weights_of(tmp_path / "out") == source.tensors
    assert report.tensors == len(source.tensors) == (50 if "e2b" in name else 48)
    assert report.parameters == sum(np.prod(s.shape) for s in source.tensors.values())
    assert report.bytes_read == sum(len(s.data) for s in source.tensors.values())
    assert (report.unused, report.quantization, report.norm_evidence) == ((), None, None)
    build(tmp_path / "out")


@pytest.mark.parametrize("index", [True, False])
def test_sharded_equals_single(index, tmp_path):
    convert(reference(E2B), tmp_path / "single")
    path = save_sharded(load(E2B), tmp_path / "model", 4, index=index)
    convert(path, tmp_path / "sharded")
    assert weights_of(tmp_path / "sharded") == load(E2B).tensors
    assert (tmp_path / "single" / "model.safetensors").read_bytes() == (
        tmp_path / "sharded" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype_on_request_leaves_integers_alone(dtype, tmp_path):
    convert(reference(E2B), tmp_path / "out", dtype=dtype)
    short = {"float16": "F16", "float32": "F32"}[dtype]
    source, weights = load(E2B).tensors, weights_of(tmp_path / "out")
    assert weights.pop(ORDERING) == source.pop(ORDERING)
    assert {stored.dtype for stored in weights.values()} == {short}
    assert weights.keys() == source.keys()
    for name, stored in source.items():
        np.testing.assert_array_equal(decode(weights[name]), rounded(decode(stored), short))


def test_an_ordering_of_32_bits_keeps_its_type(tmp_path):
    source = load(E2B)
    source.tensors[ORDERING] = encode(decode(source.tensors[ORDERING]), "I32")
    convert(save(source, tmp_path / "model"), tmp_path / "out", dtype="float32")
    assert weights_of(tmp_path / "out")[ORDERING] == source.tensors[ORDERING]


def test_set_dtype_leaves_the_ordering_alone(tmp_path):
    convert(reference(E2B), tmp_path / "out")
    module = build(tmp_path / "out")
    module.set_dtype(mx.float16)
    assert module.masked_embedding.token_ordering.dtype == mx.int64
    assert module.pre_projection.weight.dtype == mx.float16


def test_files(tmp_path):
    convert(reference(E2B), tmp_path / "out")
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files_of(tmp_path / "out").keys() == names | {"special_tokens_map.json", "README.md"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (reference(E2B) / name).read_bytes()


@pytest.mark.parametrize("name", [DENSE, E2B])
def test_the_config_is_that_of_the_source(name, tmp_path):
    source = load(name)
    source.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    source.config["text_config"]["quantization"] = {"bits": 4}
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    config = config_of(tmp_path / "out")
    record = config.pop("mlx_spec")
    assert config == load(name).config
    assert record.pop("sha256").keys() == source.tensors.keys()
    assert record == {
        "format_version": 1,
        "source": str(tmp_path / "model"),
        "revision": None,
        "norm_convention": "plain",
        "query_position": "P",
    }


@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_bits": 4}])
@pytest.mark.parametrize("position", ["P", "P-1"])
def test_converting_again_changes_nothing(options, position, tmp_path):
    source = load(E2B)
    source.config["mlx_spec"] = {"query_position": position}
    convert(save(source, tmp_path / "model"), tmp_path / "once", **options)
    convert(tmp_path / "once", tmp_path / "twice")
    once, twice = files_of(tmp_path / "once"), files_of(tmp_path / "twice")
    configs = [json.loads(files.pop("config.json")) for files in (once, twice)]
    assert once == twice
    for config in configs:
        del config["mlx_spec"]["source"]
        assert config["mlx_spec"]["query_position"] == position
    assert configs[0] == configs[1]


def test_the_unified_assistant(tmp_path):
    source = load(DENSE)
    source.config["model_type"] = "gemma4_unified_assistant"
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert weights_of(tmp_path / "out") == source.tensors
    assert config_of(tmp_path / "out")["model_type"] == "gemma4_unified_assistant"


def test_unused_tensors_are_listed_and_not_read(tmp_path):
    source = load(DENSE)
    unused = ["lm_head.weight", "masked_embedding.token_ordering"]
    unused.append("model.layers.3.self_attn.k_proj.weight")
    for name in unused:
        source.tensors[name] = Stored("F64", (4,), bytes(32))
    report = convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert report.unused == tuple(unused)
    assert weights_of(tmp_path / "out") == load(DENSE).tensors
    assert f"Not used: {', '.join(unused)}" in report.as_text()


def per_layer(source: Source) -> None:
    """As transformers 5.24 writes a configuration."""
    text = source.config["text_config"]
    layer = {"head_dim": text.pop("global_head_dim")}
    if heads := text.pop("num_global_key_value_heads"):
        layer["num_key_value_heads"] = heads
    text["per_layer_config"] = {"3": layer}


@pytest.mark.parametrize("name", [DENSE, E2B])
def test_per_layer_config_is_written_as_released(name, tmp_path):
    source = load(name)
    per_layer(source)
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert config_of(tmp_path / "out")["text_config"] == load(name).config["text_config"]
    args = build_head(read_head(Checkpoint.open(tmp_path / "model"))).args
    assert (args.text.global_head_dim, args.text.head_dim) == (64, 32)


@pytest.mark.parametrize(
    "layers",
    [
        {"0": {"head_dim": 64}, "3": {"head_dim": 64}},
        {"0": {"head_dim": 64}},
        [{"head_dim": 64}],
        {"3": 64},
    ],
)
def test_an_unknown_per_layer_config(layers, tmp_path):
    source = load(DENSE)
    per_layer(source)
    source.config["text_config"]["per_layer_config"] = layers
    with pytest.raises(CheckpointError, match=r"per_layer_config .* is not the same for all"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


# Quantised


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_packed(bits, tmp_path):
    report = convert(reference(E2B), tmp_path / "out", quantize=True, q_bits=bits, q_group_size=32)
    assert report.quantization["bits"] == bits
    module = build(tmp_path / "out")
    packed = {path: layer for path, layer in module.named_modules() if hasattr(layer, "scales")}
    source = load(E2B).tensors
    matrices = {name for name, stored in source.items() if len(stored.shape) == 2}
    assert {f"{path}.weight" for path in packed} == matrices
    keep_eight = {"pre_projection", "masked_embedding.centroids"}
    for path, layer in packed.items():
        assert layer.bits == (8 if path in keep_eight else bits), path
        values = mx.dequantize(layer.weight, layer.scales, layer.biases, 32, layer.bits)
        groups = decode(source[f"{path}.weight"]).reshape(-1, 32)
        step = (groups.max(-1) - groups.min(-1)) / (2**layer.bits - 1)
        error = np.abs(np.array(values.astype(mx.float32)).reshape(-1, 32) - groups)
        # a step, as mlx moves the grid to hit zero, and the rounding of scale and bias to bfloat16
        assert (error <= (step + 0.01 * np.abs(groups).max(-1))[:, None]).all(), path
    weights = weights_of(tmp_path / "out")
    for name in source.keys() - matrices:  # norms, layer scalars, the ordering
        assert weights[name] == source[name]


def test_a_packed_assistant_is_read_as_it_is(tmp_path):
    """MLX files without our block, with their own `quantization`, or without even that."""
    convert(reference(E2B), tmp_path / "ours", quantize=True, q_bits=4, q_group_size=32)
    config = config_of(tmp_path / "ours")
    del config["mlx_spec"]
    for name in ("theirs", "bare"):
        source = Source(config, weights_of(tmp_path / "ours"), {"format": "mlx"})
        convert(save(source, tmp_path / name), tmp_path / f"{name}-out")
        assert weights_of(tmp_path / f"{name}-out") == source.tensors
        module = build(tmp_path / f"{name}-out")
        assert (module.model.embed_tokens.bits, module.model.embed_tokens.group_size) == (4, 32)
        assert module.pre_projection.bits == module.masked_embedding.centroids.bits == 8
        config = {k: v for k, v in config.items() if "quantization" not in k}


def test_a_packed_output_matrix_is_not_used(tmp_path):
    convert(reference(DENSE), tmp_path / "packed", quantize=True)
    source = Source(config_of(tmp_path / "packed"), weights_of(tmp_path / "packed"))
    expected = dict(source.tensors)
    for name in ("weight", "scales", "biases"):
        source.tensors[f"lm_head.{name}"] = expected[f"model.embed_tokens.{name}"]
    report = convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert report.unused == ("lm_head.biases", "lm_head.scales", "lm_head.weight")
    assert weights_of(tmp_path / "out") == expected


def test_packing_twice_is_refused(tmp_path):
    convert(reference(DENSE), tmp_path / "once", quantize=True)
    with pytest.raises(SpecError, match="quantised already"):
        convert(tmp_path / "once", tmp_path / "twice", quantize=True)


@cache
def trained():
    """Model, tokenizer without end tokens, prompt, and what stock mlx-lm says."""
    path = reference("gemma4-e2b-trained")
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    tokenizer = load_tokenizer(path)
    tokenizer.eos_token_ids = []
    dump = np.load(REFERENCE / "dumps" / "gemma4-e2b-trained_generate.npz")
    prompt = dump["prompt"].reshape(-1).tolist()
    stock = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=96)
    return model, tokenizer, prompt, [response.token for response in stock]


def acceptance(path):
    """Of the drafter in a directory, whose text is stock's."""
    model, tokenizer, prompt, expected = trained()
    drafter = load_drafter(path, target_for(model))
    responses = list(
        mlx_spec.stream_generate(
            model, tokenizer, prompt, max_tokens=96, draft_model=drafter, num_draft_tokens=3
        )
    )
    assert [response.token for response in responses] == expected
    return responses[-1].spec.acceptance


def test_quantised_drafters_draft(tmp_path):
    """transformers accepts 60 of 108 drafts of this prompt."""
    source = reference("gemma4-e2b-trained-assistant")
    convert(source, tmp_path / "plain")
    convert(source, tmp_path / "8", quantize=True, q_bits=8)
    convert(source, tmp_path / "4", quantize=True, q_bits=4)
    plain = acceptance(tmp_path / "plain")
    assert plain == pytest.approx(60 / 108, abs=0.03)
    assert acceptance(tmp_path / "8") == pytest.approx(plain, abs=0.05)
    assert acceptance(tmp_path / "4") > 0.5 * plain


# Bad input


def drop(*names):
    def change(source):
        for name in names:
            del source.tensors[name]

    return change


def store(name, shape, dtype="BF16"):
    def change(source):
        source.tensors[name] = encode(np.ones(shape, np.float32), dtype)

    return change


def stored_as(name, dtype, size):
    def change(source):
        shape = source.tensors[name].shape
        source.tensors[name] = Stored(dtype, shape, bytes(size * int(np.prod(shape))))

    return change


def ordering(**places):
    def change(source):
        values = decode(source.tensors[ORDERING]).copy()
        for place, token in places.items():
            values[int(place[1:])] = token
        source.tensors[ORDERING] = encode(values, "I64")

    return change


def configured(**fields):
    def change(source):
        source.config |= fields

    return change


def text_configured(**fields):
    def change(source):
        source.config["text_config"] |= fields

    return change


def without(*path):
    def change(source):
        *outer, last = path
        config = source.config
        for name in outer:
            config = config[name]
        del config[last]

    return change


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
BAD = [
    (drop(Q_PROJ), DENSE, rf"lacks 1 tensors of its assistant: {Q_PROJ}; download it again"),
    (
        drop("model.layers.2.layer_scalar", "model.norm.weight"),
        E2B,
        r"lacks 2 .*: model.layers.2.layer_scalar, model.norm.weight;",
    ),
    (drop(ORDERING, CENTROIDS), E2B, rf"lacks 2 .*: {CENTROIDS}, {ORDERING};"),
    (drop(ORDERING), E2B, rf"lacks 1 .*: {ORDERING};"),
    (configured(use_ordered_embeddings=True, num_centroids=32), DENSE, rf"lacks 2 .*{ORDERING};"),
    (text_configured(hidden_size_per_layer_input=8), DENSE, r"lacks 12 .*per_layer_input_gate"),
    (
        lambda source: source.rename(lambda name: name.replace("post_projection", "project_out")),
        DENSE,
        r"lacks 1 .*post_projection.weight \(and has no use for project_out.weight\)",
    ),
    (store(Q_PROJ, (128, 32)), DENSE, rf"{Q_PROJ} gives .* \(128, 32\) and not \(128, 64\)"),
    (text_configured(vocab_size=1024), DENSE, r"embed_tokens.* \(512, 64\) and not \(1024, 64\)"),
    (text_configured(vocab_size=1024), E2B, r"token_ordering .* \(512,\) and not \(1024,\)"),
    (configured(num_centroids=64), E2B, r"centroids.weight .* \(32, 64\) and not \(64, 64\)"),
    (configured(backbone_hidden_size=64), E2B, r"\(64, 256\) and not \(64, 128\)"),
    (stored_as(Q_PROJ, "F64", 8), DENSE, rf"{Q_PROJ} .* is stored as F64, which is not supported"),
    (stored_as(Q_PROJ, "F8_E4M3", 1), DENSE, rf"{Q_PROJ} .* is stored as F8_E4M3"),
    (stored_as(Q_PROJ, "I64", 8), DENSE, rf"{Q_PROJ} .* is stored as I64"),
    (stored_as(ORDERING, "F32", 4), E2B, rf"{ORDERING} .* is stored as F32"),
    (ordering(_3=512), E2B, rf"{ORDERING} in .*model.safetensors is not a permutation"),
    (ordering(_3=-1), E2B, "is not a permutation of the vocabulary"),
    (lambda source: ordering(_3=decode(source.tensors[ORDERING])[4])(source), E2B, "permutation"),
    (configured(num_centroids=30), E2B, r"its 512 tokens do not divide into 30 clusters"),
    (configured(centroid_intermediate_top_k=33), E2B, r"it chooses 33 of 32 clusters"),
    (configured(num_centroids="many"), E2B, r"does not describe an assistant"),
    (without("text_config"), DENSE, r"config.json .* lacks text_config: download it"),
    (configured(text_config=None), DENSE, r"lacks text_config"),
    (configured(text_config=[1]), DENSE, r"text_config .* is not an object"),
    (without("backbone_hidden_size"), DENSE, r"lacks backbone_hidden_size"),
    (without("num_centroids"), E2B, r"lacks num_centroids"),
    (without("text_config", "head_dim"), DENSE, r"lacks text_config.head_dim"),
    (without("text_config", "layer_types"), DENSE, r"lacks text_config.layer_types"),
    (without("text_config", "global_head_dim"), DENSE, r"lacks text_config.global_head_dim"),
    (
        without("text_config", "rope_parameters", "full_attention"),
        DENSE,
        r"lacks text_config.rope_parameters.full_attention.rope_theta",
    ),
    (text_configured(hidden_size="big"), DENSE, r"hidden_size .* is 'big' and not a number"),
    (text_configured(layer_types=5), DENSE, r"lacks a list in text_config.layer_types"),
    (
        text_configured(layer_types=["full_attention"]),
        DENSE,
        r"it has 4 layers, but layer_types has 1",
    ),
    (text_configured(num_kv_shared_layers=2), DENSE, r"2 of its 4 layers use the model's keys"),
    (configured(tie_word_embeddings=False), DENSE, r"tie_word_embeddings is false"),
    (configured(mlx_spec={"query_position": "P+1"}), DENSE, r"'P\+1'; it must be one of P, P-1"),
    (
        store("model.layers.0.mlp.up_proj.scales", (128, 3)),
        DENSE,
        r"packed weights that do not fit",
    ),
]


@pytest.mark.parametrize(("change", "name", "words"), BAD)
def test_bad_input_is_named_and_nothing_is_written(change, name, words, tmp_path):
    source = load(name)
    change(source)
    path = save(source, tmp_path / "model")
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(path, tmp_path / "out")
    assert len(str(caught.value)) < 600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


def test_a_tensor_in_two_files(tmp_path):
    source = load(DENSE)
    path = save_sharded(source, tmp_path / "model")
    write_file(path / "more.safetensors", {Q_PROJ: source.tensors[Q_PROJ]}, None)
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} twice, in model-.* and in more"):
        convert(path, tmp_path / "out")


def test_a_truncated_file(tmp_path):
    path = save_sharded(load(DENSE), tmp_path / "model")
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors is truncated"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_in_place_of_its_assistant(tmp_path):
    path = reference("gemma4-e2b")
    for model in (None, path):
        with pytest.raises(NoDrafter, match=r"gemma4-e2b .*'gemma4'.* name ends in -assistant"):
            convert(path, tmp_path / "out", target=model)


def test_an_assistant_that_calls_itself_something_else(tmp_path):
    source = load(DENSE)
    source.config["model_type"] = "gemma5_assistant"
    with pytest.raises(
        Incompatible, match=r"'gemma5_assistant' is not supported: .*gemma4_unified_assistant"
    ):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


def test_has_head():
    assert has_head(Checkpoint.open(reference(DENSE)))
    assert not has_head(Checkpoint.open(reference("gemma4-dense")))


def test_a_later_format_version(tmp_path):
    source = load(DENSE)
    source.config["mlx_spec"] = {"format_version": 2}
    with pytest.raises(Incompatible, match="format version 2"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


# The place to write to


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_keeps_the_former_drafter(error, tmp_path, monkeypatch):
    convert(reference(DENSE), tmp_path / "out")
    before = files_of(tmp_path / "out")

    def fail(*_):
        raise error

    monkeypatch.setattr(writing.shutil, "copyfile", fail)
    with pytest.raises(SpecError if isinstance(error, OSError) else KeyboardInterrupt):
        convert(reference(E2B), tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("block", [{}, {"mlx_spec": {"query_position": "P-1"}}])
def test_a_downloaded_assistant_is_never_replaced(block, tmp_path):
    source = load(E2B)
    source.config |= block
    path = save(source, tmp_path / "downloaded")
    before = files_of(path)
    with pytest.raises(SpecError, match="is not a drafter directory of mlx-spec"):
        convert(reference(DENSE), path)
    assert files_of(path) == before


# For which model


@pytest.mark.parametrize("name", ASSISTANTS)
def test_it_fits_its_model(name, tmp_path):
    model = reference(name.removesuffix("-assistant"))
    report = convert(reference(name), tmp_path / "out", target=model)
    assert report.pairing == f"Fits {model}; the same tokenizer; {UNKNOWN}"
    assert report.pairing in report.as_text()


@pytest.mark.parametrize("fault", MISFITS)
def test_an_assistant_of_another_model_is_refused_by_name(fault, tmp_path):
    path = save_misfit(fault, tmp_path / "assistant")
    with pytest.raises(Incompatible) as caught:
        convert(path, tmp_path / "out", target=reference("gemma4-dense"))
    assert MISFITS[fault][1] in str(caught.value)
    assert "tokenizer" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    convert(path, tmp_path / "out")  # for the model that it is made for


def test_all_misfits_are_named_at_once(tmp_path):
    source = load(DENSE)
    faults = ("hidden size", "vocabulary", "number of heads")
    for fault in faults:
        MISFITS[fault][0](source)
    with pytest.raises(Incompatible) as caught:
        convert(
            save(source, tmp_path / "assistant"), tmp_path / "out", target=reference("gemma4-dense")
        )
    assert all(MISFITS[fault][1] in str(caught.value) for fault in faults)


@pytest.mark.parametrize(
    ("source", "model"), [(DENSE, "qwen3-5"), ("qwen3-5", "gemma4-dense"), (E2B, E2B)]
)
def test_another_family_is_refused(source, model, tmp_path):
    words = r"does not fit .*: it is for models of type .*, and the model is a"
    with pytest.raises(Incompatible, match=words):
        convert(reference(source), tmp_path / "out", target=reference(model))
    assert not (tmp_path / "out").exists()


def test_a_model_whose_config_does_not_describe_one(tmp_path):
    source = load("gemma4-dense")
    source.config["text_config"]["hidden_size"] = "big"
    model = save(source, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model does not describe a Gemma-4 model"):
        convert(reference(DENSE), tmp_path / "out", target=model)


def test_comparing_configurations_changes_neither_them_nor_the_seed(tmp_path):
    source = load("gemma4-dense")
    del source.config["text_config"]["vocab_size"]  # mlx-lm takes that of the whole model
    model = Checkpoint.open(save(source, tmp_path / "model"))
    mx.random.seed(7)
    state = mx.random.state[0].tolist()
    assert misfits(Checkpoint.open(reference(DENSE)), model) == []
    assert mx.random.state[0].tolist() == state
    assert model.config == source.config


# Tokenizers


@pytest.fixture
def couple(tmp_path):
    """A copy of an assistant beside its model."""
    for name in ("gemma4-e2b", E2B):
        shutil.copytree(reference(name), tmp_path / name)
    return tmp_path / E2B, tmp_path / "gemma4-e2b"


def test_the_same_tokens_in_another_file(couple, tmp_path):
    assistant, model = couple
    file = assistant / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))
    report = convert(assistant, tmp_path / "out", target=model)
    assert report.pairing == f"Fits {model}; the same tokens in both tokenizers; {UNKNOWN}"


def test_the_first_token_that_differs_is_named(couple, tmp_path):
    assistant, model = couple
    rename_token(assistant, "a", "aa")
    rename_token(assistant, "z", "zz")
    first = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["a"]
    words = f"id {first} is 'aa' in the drafter's tokenizer and 'a' in the model's"
    with pytest.raises(Incompatible, match=words):
        convert(assistant, tmp_path / "out", target=model)
    assert not (tmp_path / "out").exists()


def test_a_token_more(couple, tmp_path):
    assistant, model = couple
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 261, "content": "<x>"})
    file.write_text(json.dumps(tokenizer))
    words = "id 261 is no token in the drafter's tokenizer and '<x>' in the model's"
    with pytest.raises(Incompatible, match=words):
        convert(assistant, tmp_path / "out", target=model)


@pytest.mark.parametrize("missing", [0, 1])
def test_without_a_tokenizer_it_is_not_compared(missing, couple, tmp_path):
    (couple[missing] / "tokenizer.json").unlink()
    report = convert(couple[0], tmp_path / "out", target=couple[1])
    assert report.pairing == (
        f"Fits {couple[1]}; {couple[missing]} has no tokenizer.json to compare; {UNKNOWN}"
    )


def test_a_damaged_tokenizer(couple, tmp_path):
    (couple[0] / "tokenizer.json").write_text('{"version":')
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read .*download it again"):
        convert(couple[0], tmp_path / "out", target=couple[1])
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_of_a_qwen_head_is_checked_as_well(tmp_path):
    source, model = reference("qwen3-5"), tmp_path / "model"
    shutil.copytree(source, model)
    report = convert(source, tmp_path / "out", target=model)
    assert report.pairing == f"Fits {model}; the same tokenizer; the head belongs to this model"
    rename_token(model, "a", "aa")
    with pytest.raises(Incompatible, match="'a' in the drafter's tokenizer and 'aa' in the model"):
        convert(source, tmp_path / "again", target=model)
    config = config_of(model)
    config["text_config"]["num_hidden_layers"] = 64
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(Incompatible, match="its num_hidden_layers is 4 and the model's 64; id"):
        convert(source, tmp_path / "again", target=model)
    assert not (tmp_path / "again").exists()
