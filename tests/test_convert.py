"""From checkpoints to drafter directories: every value, and every way it can fail."""

import hashlib
import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import (
    INDEX,
    NAMES,
    NORMS,
    Stored,
    config_of,
    decode,
    encode,
    expected,
    fuse_experts,
    load,
    reference,
    rounded,
    save,
    save_grouped,
    save_sharded,
    split_trunk_and_head,
    to_fp8,
    to_mlx_layout,
    weights_of,
    write_file,
)
from reference_files import REFERENCE

from mlx_spec.conversion import convert
from mlx_spec.convert import write as writing
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.qwen_nextn import has_head, read_head
from mlx_spec.drafters.qwen_nextn import ModelArgs, QwenNextN
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter, SpecError

MOE = ["qwen3-5-moe", "qwen3-6-moe", "qwen3-next"]
CONVERTED = {
    "README.md",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


FINGERPRINT_BYTES = 4 * 128 * 2  # of the model's norms, which are read in addition


def bytes_of(path):
    return (path / "model.safetensors").read_bytes()


def assert_holds(path, values, dtype="BF16"):
    """The directory holds these values, rounded once to `dtype`, and nothing else."""
    weights = weights_of(path)
    assert weights.keys() == values.keys()
    for name, stored in weights.items():
        assert stored.dtype == dtype
        np.testing.assert_array_equal(decode(stored), rounded(values[name], dtype), err_msg=name)


def build(path):
    """The module of a drafter directory, packed as its config.json says, as mlx-lm would."""
    weights = mx.load(str(path / "model.safetensors"))
    config = config_of(path)
    module = QwenNextN(ModelArgs.from_config(config, weights))
    if "quantization" in config:
        block = config["quantization"]

        def packed(layer, _):
            return block.get(layer, f"{layer}.scales" in weights)

        nn.quantize(module, block["group_size"], block["bits"], class_predicate=packed)
    module.load_weights(list(weights.items()), strict=True)
    return module


# Values


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_source_with_norms_folded(name, tmp_path):
    convert(reference(name), tmp_path / "out")
    assert_holds(tmp_path / "out", expected(load(name)))


@pytest.mark.parametrize("name", NAMES)
def test_all_norms_of_the_reference_differ_when_folded(name):
    """Otherwise the test above could not see a missing or a doubled one."""
    source = load(name)
    for norm in NORMS:
        raw, folded = decode(source.tensors[f"mtp.{norm}"]), expected(source)[norm]
        assert np.abs(raw).max() > 0.05
        assert not np.array_equal(rounded(folded, "BF16"), raw)


@pytest.mark.parametrize("name", ["qwen3-5", *MOE])
def test_the_module_computes_what_the_torch_reference_computes(name, tmp_path):
    convert(reference(name), tmp_path / "out", dtype="float32")
    dump = np.load(REFERENCE / "dumps" / f"{name}_mtp.npz")
    embedding = decode(
        next(s for k, s in load(name).tensors.items() if k.endswith("embed_tokens.weight"))
    )
    hidden = build(tmp_path / "out")(
        mx.array(embedding[dump["mtp_rows_tokens"]])[None],
        mx.array(dump["target_hidden"])[None],
        layer=0,
        cache=None,
    )
    np.testing.assert_allclose(np.array(hidden)[0], dump["mtp_hidden"], atol=2e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_dtype_on_request_rounds_once(dtype, tmp_path):
    convert(reference("qwen3-6-moe"), tmp_path / "out", dtype=dtype)
    short = {"float16": "F16", "float32": "F32", "bfloat16": "BF16"}[dtype]
    assert_holds(tmp_path / "out", expected(load("qwen3-6-moe")), short)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_dtype_of_the_source_is_kept(dtype, tmp_path):
    source = load("qwen3-5-moe")
    source.tensors = {n: encode(decode(s), dtype) for n, s in source.tensors.items()}
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert_holds(tmp_path / "out", expected(source), dtype)


def test_fused_and_single_experts_give_the_same(tmp_path):
    source = load("qwen3-5-moe")
    convert(save(source, tmp_path / "single"), tmp_path / "out1")
    fuse_experts(source)
    convert(save(source, tmp_path / "fused"), tmp_path / "out2")
    assert bytes_of(tmp_path / "out1") == bytes_of(tmp_path / "out2")


def test_more_than_nine_experts_are_stacked_in_order_of_number(tmp_path):
    source = load("qwen3-5-moe")
    source.config["text_config"]["num_experts"] = 12
    mlp = "mtp.layers.0.mlp."
    gate = decode(source.tensors[f"{mlp}gate.weight"])
    source.tensors[f"{mlp}gate.weight"] = encode(np.concatenate([gate, gate[:4]]), "BF16")
    for e in range(12):
        for projection, shape in (("gate", (64, 128)), ("up", (64, 128)), ("down", (128, 64))):
            values = np.full(shape, e, np.float32)
            source.tensors[f"{mlp}experts.{e}.{projection}_proj.weight"] = encode(values, "BF16")
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    stacked = decode(weights_of(tmp_path / "out")["layers.0.mlp.switch_mlp.up_proj.weight"])
    assert stacked[:, 0, 0].tolist() == list(range(12))


@pytest.mark.parametrize(
    "prefix",
    ["model.mtp.", "language_model.mtp.", "model.language_model.mtp.", "language_model.model.mtp."],
)
def test_prefixes(prefix, tmp_path):
    source = load("qwen3-6-moe")
    values = expected(source)
    source.rename(lambda n: n.replace("mtp.", prefix) if n.startswith("mtp.") else n)
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert_holds(tmp_path / "out", values)


def test_dedicated_embedding_and_output_matrix(tmp_path):
    source = load("qwen3-5")
    rng = np.random.default_rng(0)
    embedding, output = rng.standard_normal((2, 512, 128)).astype(np.float32)
    source.tensors["mtp.embed_tokens.weight"] = encode(embedding, "BF16")
    source.tensors["mtp.shared_head.head.weight"] = encode(output, "BF16")
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    values = expected(source)
    del values["shared_head.head.weight"]
    assert_holds(tmp_path / "out", {**values, "lm_head.weight": output})


def test_two_layers(tmp_path):
    source = load("qwen3-5")
    for name, stored in list(source.head().items()):
        if ".layers.0." in name:
            other = encode(decode(stored) * 2, "BF16")
            source.tensors[name.replace(".layers.0.", ".layers.1.")] = other
    source.config["text_config"]["mtp_num_hidden_layers"] = 2
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    weights = weights_of(tmp_path / "out")
    raw = decode(source.tensors["mtp.layers.0.input_layernorm.weight"])
    assert len(weights) == 15 + 11
    np.testing.assert_array_equal(
        decode(weights["layers.1.input_layernorm.weight"]), rounded(2 * raw + 1, "BF16")
    )
    assert config_of(tmp_path / "out")["block_size"] == 4


# fp8


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize(("dtype", "short"), [(None, "BF16"), ("float32", "F32")])
def test_block_fp8_is_decoded_in_float32(name, dtype, short, tmp_path):
    source = load(name)
    plain = expected(source)
    matrices = to_fp8(source, lambda n: "mtp." in n and "_proj" in n, block=48)
    report = convert(save(source, tmp_path / "model"), tmp_path / "out", dtype=dtype)
    assert report.unused == ()
    head_bytes = sum(len(stored.data) for stored in source.head().values())
    assert report.bytes_read == head_bytes + FINGERPRINT_BYTES
    for key, values in matrices.items():
        source.tensors[key] = encode(values, "F32")
        del source.tensors[f"{key}_scale_inv"]
    assert_holds(tmp_path / "out", expected(source), short)
    for key, values in expected(source).items():  # and packing did not lose the values
        np.testing.assert_allclose(values, plain[key], atol=0.04 * np.abs(plain[key]).max())


def test_fp8_with_the_released_block_size(tmp_path):
    """192 rows are one block and a half."""
    source = load("qwen3-5")
    matrices = to_fp8(source, lambda n: "mtp." in n and "_proj" in n)
    assert source.tensors["mtp.layers.0.mlp.up_proj.weight_scale_inv"].shape == (2, 1)
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    weights = weights_of(tmp_path / "out")
    for key, values in matrices.items():
        np.testing.assert_array_equal(
            decode(weights[key.removeprefix("mtp.")]), rounded(values, "BF16")
        )
    assert "quantization_config" not in config_of(tmp_path / "out")


# Which bytes are read


def test_only_the_bytes_of_the_head_are_read(tmp_path):
    source = load("qwen3-5-moe")
    path = save_grouped(source, tmp_path / "model", split_trunk_and_head(source))
    (path / "model-00001-of-00002.safetensors").write_bytes(b"garbage" * 100)
    report = convert(path, tmp_path / "out")
    assert report.bytes_read == sum(len(stored.data) for stored in source.head().values())
    assert report.source_bytes == sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert_holds(tmp_path / "out", expected(source))

    (path / "model-00001-of-00002.safetensors").unlink()
    convert(path, tmp_path / "out2")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "out2")


@pytest.mark.parametrize("name", ["qwen3-5", *MOE])
@pytest.mark.parametrize("index", [True, False])
def test_sharded_equals_single(name, index, tmp_path):
    convert(reference(name), tmp_path / "single")
    path = save_sharded(load(name), tmp_path / "model", 5, index=index)
    convert(path, tmp_path / "sharded")
    assert bytes_of(tmp_path / "single") == bytes_of(tmp_path / "sharded")


def test_a_head_in_a_file_beside_the_index(tmp_path):
    source = load("qwen3-5")
    trunk, head = split_trunk_and_head(source)
    path = save_grouped(source, tmp_path / "model", [trunk])
    extra = {name: source.tensors[name] for name in head}
    write_file(path / "mtp.safetensors", extra, {"format": "pt"})
    convert(path, tmp_path / "out")
    assert_holds(tmp_path / "out", expected(source))


def test_reading_a_head_writes_nothing_and_leaves_the_seed_alone(tmp_path):
    path = save(load("qwen3-5-moe"), tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    mx.random.seed(0x123456789)
    state = mx.random.state[0].tolist()
    head = read_head(Checkpoint.open(path))
    assert mx.random.state[0].tolist() == state
    assert sorted(tmp_path.rglob("*")) == before
    assert head.provenance.used == tuple(sorted(load("qwen3-5-moe").head()))


# Norms: minus one or folded


def test_a_folded_source_is_not_folded_again(tmp_path):
    source = load("qwen3-5")
    folded = expected(source)
    to_mlx_layout(source)
    report = convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert_holds(tmp_path / "out", folded)
    assert report.norm_evidence == "layout of conv1d in model.safetensors"


@pytest.mark.parametrize("mlx_layout", [True, False])
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "mlx"}])
def test_the_layout_of_the_convolutions_decides_first(mlx_layout, metadata, tmp_path):
    source = load("qwen3-next")
    folded = expected(source)
    if mlx_layout:
        to_mlx_layout(source)
    source.metadata = metadata
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert_holds(tmp_path / "out", folded)


def save_head_apart(source, path, metadata):
    """A trunk with an index, and the head in a file of its own beside it."""
    trunk, head = split_trunk_and_head(source)
    path = save_grouped(source, path, [trunk])
    write_file(path / "mtp.safetensors", {n: source.tensors[n] for n in head}, metadata)
    return path


@pytest.mark.parametrize(
    ("metadata", "mlx_trunk", "added"),
    [({"format": "pt"}, False, 1), ({"format": "pt"}, True, 1), ({"format": "mlx"}, True, 0)],
)
def test_then_the_format_of_the_file_that_holds_the_head(metadata, mlx_trunk, added, tmp_path):
    source = load("qwen3-5")
    raw = decode(source.tensors["mtp.norm.weight"])
    if mlx_trunk:
        to_mlx_layout(source)
        source.tensors["mtp.norm.weight"] = encode(raw, "BF16")
    path = save_head_apart(source, tmp_path / "model", metadata)
    report = convert(path, tmp_path / "out")
    written = decode(weights_of(tmp_path / "out")["norm.weight"])
    np.testing.assert_array_equal(written, rounded(raw + added, "BF16"))
    assert report.norm_evidence == f"format {metadata['format']} of mtp.safetensors"


def test_a_head_that_mlx_wrote_beside_an_unconverted_trunk_is_refused(tmp_path):
    path = save_head_apart(load("qwen3-5"), tmp_path / "model", {"format": "mlx"})
    with pytest.raises(CheckpointError, match="differ in how they store norms"):
        convert(path, tmp_path / "out")


def test_then_the_convolutions_of_another_file(tmp_path):
    source = load("qwen3-5")
    raw = decode(source.tensors["mtp.norm.weight"])
    path = save_head_apart(source, tmp_path / "model", None)
    report = convert(path, tmp_path / "out")
    written = decode(weights_of(tmp_path / "out")["norm.weight"])
    np.testing.assert_array_equal(written, rounded(raw + 1, "BF16"))
    assert report.norm_evidence.startswith("layout of conv1d in model-00001")


def test_a_dedicated_embedding_that_is_announced_but_absent(tmp_path):
    source = load("qwen3-5")
    source.config["text_config"]["mtp_use_dedicated_embeddings"] = True
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


@pytest.mark.parametrize("left_there", [[], [".DS_Store"]])
def test_an_empty_directory_is_written_into(left_there, tmp_path):
    (tmp_path / "out").mkdir()
    for name in left_there:
        (tmp_path / "out" / name).touch()
    convert(reference("qwen3-5"), tmp_path / "out")
    convert(reference("qwen3-5"), tmp_path / "again")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "again")


def test_qwen3_next_keeps_its_rope_scaling(tmp_path):
    source = load("qwen3-next")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    source.config["rope_scaling"] = scaling
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    rope = build(tmp_path / "out").layers[0].self_attn.rope
    assert type(rope).__name__ == "YarnRoPE"


@pytest.mark.parametrize(("recorded", "added"), [("minus_one", 1), ("folded", 0)])
def test_what_is_recorded_decides_above_all(recorded, added, tmp_path):
    source = load("qwen3-5")
    source.config["mlx_spec"] = {"norm_convention": recorded}
    raw = decode(source.tensors["mtp.norm.weight"])
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    written = decode(weights_of(tmp_path / "out")["norm.weight"])
    np.testing.assert_array_equal(written, rounded(raw + added, "BF16"))


def head_without_origin(tmp_path):
    source = load("qwen3-5")
    source.tensors = source.head()
    source.metadata = None
    return save(source, tmp_path / "model")


def test_without_any_evidence_the_user_is_asked(tmp_path):
    path = head_without_origin(tmp_path)
    with pytest.raises(CheckpointError, match="do not say whether") as caught:
        convert(path, tmp_path / "out")
    assert '"mlx_spec": {"norm_convention": "minus_one"}' in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_of_different_origin(tmp_path):
    source = load("qwen3-5")
    names = sorted(source.head())
    path = save_grouped(source, tmp_path / "model", [names[:5]], index=False)
    rest = {name: source.tensors[name] for name in names[5:]}
    write_file(path / "rest.safetensors", rest, {"format": "mlx"})
    with pytest.raises(CheckpointError, match="differ in how they store norms"):
        convert(path, tmp_path / "out")


def test_an_unknown_recorded_convention(tmp_path):
    source = load("qwen3-5")
    source.config["mlx_spec"] = {"norm_convention": "doubled"}
    with pytest.raises(CheckpointError, match="'doubled'"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


def test_a_drafter_directory_of_another_tool(tmp_path):
    """No `mlx_spec` block, no prefix, norms folded, format mlx."""
    source = load("qwen3-6-moe")
    values = expected(source)
    source.tensors = {name: encode(value, "BF16") for name, value in values.items()}
    source.metadata = {"format": "mlx"}
    source.config = {
        "model_type": "qwen3_5_mtp",
        "text_config": source.config["text_config"],
        "block_size": 3,
    }
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert_holds(tmp_path / "out", values)


# Our own output


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-tied", *MOE])
@pytest.mark.parametrize("options", [{}, {"quantize": True, "q_group_size": 32}])
def test_converting_again_changes_nothing(name, options, tmp_path):
    convert(reference(name), tmp_path / "once", **options)
    convert(tmp_path / "once", tmp_path / "twice")
    assert bytes_of(tmp_path / "once") == bytes_of(tmp_path / "twice")
    once, twice = config_of(tmp_path / "once"), config_of(tmp_path / "twice")
    assert once["mlx_spec"].pop("source") == str(reference(name))
    assert twice["mlx_spec"].pop("source") == str(tmp_path / "once")
    assert once == twice


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next"])
def test_the_same_source_gives_the_same_bytes(name, tmp_path):
    for out in ("a", "b"):
        convert(reference(name), tmp_path / out, quantize=True)
    for file in CONVERTED:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "tied"), [("qwen3-5", False), ("qwen3-5-tied", True), ("qwen3-next", False)]
)
def test_config(name, tied, tmp_path):
    source = load(name)
    convert(reference(name), tmp_path / "out")
    config = config_of(tmp_path / "out")
    record = config.pop("mlx_spec")
    assert config == {
        "model_type": "qwen3_5_mtp",
        "text_config": source.config.get("text_config", source.config),
        "tie_word_embeddings": tied,
        "block_size": 3,
    }
    weights = weights_of(tmp_path / "out")
    assert record.pop("sha256") == {
        key: hashlib.sha256(stored.data).hexdigest() for key, stored in weights.items()
    }
    assert record.pop("fingerprint")["norms"].keys() >= {"norm", "layers.0.input_layernorm"}
    assert record == {
        "format_version": 1,
        "source": str(reference(name)),
        "revision": None,
        "norm_convention": "folded",
        "norm_evidence": "layout of conv1d in model.safetensors",
    }


def test_files(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} >= CONVERTED
    for file in ("tokenizer.json", "tokenizer_config.json"):
        original = reference("qwen3-5") / file
        assert (tmp_path / "out" / file).read_bytes() == original.read_bytes()
    weights, metadata = mx.load(str(tmp_path / "out" / "model.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    for name, stored in weights_of(tmp_path / "out").items():
        np.testing.assert_array_equal(np.array(weights[name].astype(mx.float32)), decode(stored))


def test_the_report(tmp_path):
    source = load("qwen3-5-moe")
    source.tensors["mtp.layers.0.self_attn.rotary_emb.inv_freq"] = encode(np.ones(4), "F32")
    report = convert(save(source, tmp_path / "model"), str(tmp_path / "out"))
    values = expected(load("qwen3-5-moe"))
    assert report.out == tmp_path / "out"
    assert report.tensors == len(values)
    assert report.parameters == sum(value.size for value in values.values())
    assert report.unused == ("mtp.layers.0.self_attn.rotary_emb.inv_freq",)
    assert report.quantization is None
    # what is not used is not read
    assert report.bytes_read == 2 * report.parameters + FINGERPRINT_BYTES


# Quantised


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-6-moe"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_values_are_near(name, bits, tmp_path, capsys):
    report = convert(reference(name), tmp_path / "out", quantize=True, q_bits=bits, q_group_size=64)
    assert capsys.readouterr().out == ""
    assert report.quantization["bits"] == bits
    module = build(tmp_path / "out")
    packed = {path: m for path, m in module.named_modules() if hasattr(m, "scales")}
    assert {m.bits for path, m in packed.items() if path != "fc" and "gate" not in path} == {bits}
    assert packed["fc"].bits == 8
    source = expected(load(name))
    matrices = {key.removesuffix(".weight") for key, value in source.items() if value.ndim > 1}
    assert packed.keys() == matrices
    for path, layer in packed.items():
        values = mx.dequantize(
            layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits
        )
        groups = source[f"{path}.weight"].reshape(-1, 64)
        step = (groups.max(-1) - groups.min(-1)) / (2**layer.bits - 1)
        error = np.abs(np.array(values.astype(mx.float32)).reshape(-1, 64) - groups)
        # a step, as mlx moves the grid to hit zero, and the rounding of scale and bias to bfloat16
        assert (error <= (step + 0.01 * np.abs(groups).max(-1))[:, None]).all()
    for norm in NORMS:
        np.testing.assert_array_equal(
            decode(weights_of(tmp_path / "out")[norm]), rounded(source[norm], "BF16")
        )


def test_routers_keep_eight_bits(tmp_path):
    report = convert(reference("qwen3-5-moe"), tmp_path / "out", quantize=True, q_bits=3)
    eight = {k for k, v in report.quantization.items() if isinstance(v, dict) and v["bits"] == 8}
    assert eight == {"fc", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"}


def test_matrices_that_do_not_divide_into_groups_are_left_alone(tmp_path):
    convert(reference("qwen3-5-moe"), tmp_path / "out", quantize=True, q_group_size=128)
    weights = weights_of(tmp_path / "out")
    assert weights["layers.0.mlp.switch_mlp.down_proj.weight"].dtype == "BF16"  # 64 columns
    assert weights["layers.0.mlp.switch_mlp.up_proj.weight"].dtype == "U32"
    build(tmp_path / "out")


def test_the_quantization_of_the_target_is_not_applied(tmp_path):
    source = load("qwen3-5")
    source.config["quantization"] = {"bits": 4, "group_size": 64, "fc": {"bits": 2}}
    source.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    source.config["text_config"]["quantization_config"] = {"quant_method": "gptq"}
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert not [key for key in (*config, *config["text_config"]) if "quantization" in key]
    assert_holds(tmp_path / "out", expected(source))


def test_a_packed_head_inside_an_mlx_model(tmp_path):
    """Its bits are read off the shapes, not from the block about the target."""
    convert(
        reference("qwen3-6-moe"), tmp_path / "drafter", quantize=True, q_bits=4, q_group_size=32
    )
    source = load("qwen3-6-moe")
    to_mlx_layout(source)
    source.tensors = {n: s for n, s in source.tensors.items() if not n.startswith("mtp.")}
    packed = weights_of(tmp_path / "drafter")
    source.tensors |= {f"language_model.mtp.{name}": s for name, s in packed.items()}
    source.config["quantization"] = {"bits": 6, "group_size": 128, "mode": "affine"}
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "drafter")
    module = build(tmp_path / "out")
    assert (module.fc.bits, module.fc.group_size) == (8, 32)
    assert module.layers[0].self_attn.q_proj.bits == 4


# Bad input


def damaged(change, name="qwen3-5"):
    source = load(name)
    change(source)
    return source


def drop(*names):
    def change(source):
        for name in names:
            del source.tensors[name]

    return change


def drop_head(source):
    source.tensors = {n: s for n, s in source.tensors.items() if not n.startswith("mtp.")}


def drop_head_and_announcement(source):
    drop_head(source)
    del source.config["text_config"]["mtp_num_hidden_layers"]


def add(name, shape, dtype="BF16"):
    def change(source):
        source.tensors[name] = encode(np.ones(shape, np.float32), dtype)

    return change


def both_layouts(source):
    original = dict(source.tensors)
    fuse_experts(source)
    source.tensors |= original


def stored_as(name, dtype, size):
    def change(source):
        shape = source.tensors[name].shape
        source.tensors[name] = Stored(dtype, shape, bytes(size * int(np.prod(shape))))

    return change


def fp8_without_scale(source):
    to_fp8(source, lambda n: n == "mtp.fc.weight")
    del source.tensors["mtp.fc.weight_scale_inv"]


def fp8_without_block(source):
    to_fp8(source, lambda n: n == "mtp.fc.weight")
    del source.config["quantization_config"]


def fp8_with_other_block(source):
    to_fp8(source, lambda n: n == "mtp.fc.weight")
    source.config["quantization_config"]["weight_block_size"] = [64, 64]


def configured(**fields):
    def change(source):
        source.config["text_config"] |= fields

    return change


def without_field(name):
    def change(source):
        del source.config["text_config"][name]

    return change


def of_type(model_type):
    def change(source):
        source.config["model_type"] = model_type

    return change


EXPERT = "mtp.layers.0.mlp.experts"
BAD = [
    (drop_head, "qwen3-5", NoDrafter, r"announces a NextN head .* stripped .* original"),
    (drop_head, "qwen3-next", NoDrafter, r"has no NextN head"),
    (drop_head_and_announcement, "qwen3-5", NoDrafter, r"has no NextN head"),
    (of_type("llama"), "qwen3-5", Incompatible, r"model type 'llama' is not supported"),
    (
        drop("mtp.fc.weight", "mtp.norm.weight"),
        "qwen3-5",
        CheckpointError,
        r"lacks 2 tensors .*: mtp.fc.weight, mtp.norm.weight; .* original repository",
    ),
    (
        drop(f"{EXPERT}.7.up_proj.weight", f"{EXPERT}.2.down_proj.weight"),
        "qwen3-5-moe",
        CheckpointError,
        rf"lacks 2 .*{EXPERT}.2.down_proj.weight, {EXPERT}.7.up_proj.weight;",
    ),
    (drop("mtp.layers.0.mlp.gate.weight"), "qwen3-6-moe", CheckpointError, r"0.mlp.gate.weight;"),
    (
        drop(f"{EXPERT}.down_proj"),
        "qwen3-6-moe",
        CheckpointError,
        r"lacks 1 .*mtp.layers.0.mlp.switch_mlp.down_proj.weight",
    ),
    (
        configured(mtp_num_hidden_layers=2),
        "qwen3-5",
        CheckpointError,
        r"lacks 11 tensors .*mtp.layers.1.input_layernorm.weight, .*\.\.\.",
    ),
    (both_layouts, "qwen3-5-moe", CheckpointError, r"more than once, as fused .* per expert"),
    (
        add("model.mtp.norm.weight", (128,)),
        "qwen3-5",
        CheckpointError,
        r"norm.weight twice, as model.mtp.norm.weight and as mtp.norm.weight",
    ),
    (
        add("mtp.fc.weight", (128, 128)),
        "qwen3-5",
        CheckpointError,
        r"mtp.fc.weight gives .* \(128, 128\) and not \(128, 256\)",
    ),
    (
        add(f"{EXPERT}.3.up_proj.weight", (32, 128)),
        "qwen3-5-moe",
        CheckpointError,
        rf"experts .* differ.*{EXPERT}.3.up_proj.weight is \(32, 128\)",
    ),
    (
        add(f"{EXPERT}.8.up_proj.weight", (64, 128)),
        "qwen3-5-moe",
        CheckpointError,
        r"\(9, 64, 128\) and not \(8, 64, 128\)",
    ),
    (
        add(f"{EXPERT}.gate_up_proj", (8, 127, 128)),
        "qwen3-6-moe",
        CheckpointError,
        r"gate_up_proj .* is \(8, 127, 128\)",
    ),
    (
        stored_as("mtp.fc.weight", "F64", 8),
        "qwen3-5",
        CheckpointError,
        r"mtp.fc.weight .* is stored as F64",
    ),
    (
        stored_as("mtp.fc.weight", "U8", 1),
        "qwen3-5",
        CheckpointError,
        r"mtp.fc.weight .* is stored as U8",
    ),
    (
        add("mtp.fc.weight_scale_inv", (1, 2), "F32"),
        "qwen3-5",
        CheckpointError,
        r"mtp.fc.weight_scale_inv without the fp8 weight",
    ),
    (fp8_without_scale, "qwen3-5", CheckpointError, r"fp8 weight mtp.fc.weight without its scale"),
    (fp8_without_block, "qwen3-5", CheckpointError, r"no quantization_config.weight_block_size"),
    (
        fp8_with_other_block,
        "qwen3-5",
        CheckpointError,
        r"weight_scale_inv .* has shape \(1, 2\), and blocks of 64x64 need \(2, 4\)",
    ),
    (
        add("mtp.layers.0.self_attn.q_proj.scales", (256, 3)),
        "qwen3-5",
        CheckpointError,
        r"packed weights that do not fit",
    ),
    (without_field("head_dim"), "qwen3-5", CheckpointError, r"lacks head_dim"),
    (without_field("num_experts_per_tok"), "qwen3-6-moe", CheckpointError, r"num_experts_per_tok"),
    (configured(rope_parameters={}), "qwen3-5", CheckpointError, r"lacks rope_theta"),
    (configured(hidden_size="big"), "qwen3-5", CheckpointError, r"does not describe a NextN head"),
    (configured(hidden_size=2**40), "qwen3-5", CheckpointError, r"does not describe|do not fit"),
    (configured(mtp_num_hidden_layers=10**9), "qwen3-5", CheckpointError, r"the limit is 64"),
    (configured(num_experts=10**9), "qwen3-6-moe", CheckpointError, r"num_experts 1000000000, and"),
]


@pytest.mark.parametrize(("change", "name", "error", "words"), BAD)
def test_bad_input_is_named_and_nothing_is_written(change, name, error, words, tmp_path):
    path = save(damaged(change, name), tmp_path / "model")
    with pytest.raises(error, match=words) as caught:
        convert(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model"]


def test_stripped_and_packed_tensors_are_named(tmp_path):
    source = load("qwen3-5")
    key = "mtp.layers.0.self_attn.q_proj"
    source.tensors[f"{key}.qweight"] = source.tensors.pop(f"{key}.weight")
    with pytest.raises(CheckpointError, match=rf"lacks 1 .*no use for {key}.qweight.*packed"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


def test_damaged_files_leave_nothing_behind(tmp_path):
    source = load("qwen3-5")
    path = save_grouped(source, tmp_path / "model", split_trunk_and_head(source))
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        convert(path, tmp_path / "out")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"which {INDEX} lists"):
        convert(path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model"]


def test_a_head_in_two_files(tmp_path):
    source = load("qwen3-5")
    path = save_sharded(source, tmp_path / "model")
    write_file(path / "mtp.safetensors", source.head(), {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds mtp.* twice, in model-.* and in mtp"):
        convert(path, tmp_path / "out")


def test_a_later_format_version(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "out")
    config = config_of(tmp_path / "out")
    config["mlx_spec"]["format_version"] = 2
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Incompatible, match="format version 2"):
        convert(tmp_path / "out", tmp_path / "again")


def test_has_head(tmp_path):
    assert has_head(Checkpoint.open(reference("qwen3-next")))
    convert(reference("qwen3-5"), tmp_path / "out")
    assert has_head(Checkpoint.open(tmp_path / "out"))
    for i, change in enumerate((drop_head, of_type("llama"))):
        path = save(damaged(change), tmp_path / f"{i}")
        assert not has_head(Checkpoint.open(path))


# Options and the place to write to


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"q_bits": 4}, "without asking for it"),
        ({"quantize": True, "q_bits": 7}, "7 bits"),
        ({"quantize": True, "q_bits": 0}, "0 bits"),
        ({"quantize": True, "q_group_size": 48}, "groups of 48"),
    ],
)
def test_options_that_do_not_fit(options, words, tmp_path):
    with pytest.raises(SpecError, match=words):
        convert(reference("qwen3-5"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_packing_twice_is_refused(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "out", quantize=True)
    with pytest.raises(SpecError, match="quantised already"):
        convert(tmp_path / "out", tmp_path / "again", quantize=True)


@pytest.mark.parametrize("place", [".", "inside", "../model", ".."])
def test_out_and_source_must_lie_apart(place, tmp_path):
    path = save(load("qwen3-5"), tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError, match="lie one in the other"):
        convert(path, path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_something_else_is_never_replaced(tmp_path):
    model = save(load("qwen3-6-moe"), tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    for out in (model, tmp_path / "file"):
        with pytest.raises(SpecError, match="is not a drafter directory"):
            convert(reference("qwen3-5"), out)
    drafter = tmp_path / "drafter"
    convert(reference("qwen3-5"), drafter)
    (drafter / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match=r"also holds notes.txt"):
        convert(reference("qwen3-5"), drafter)
    assert (drafter / "notes.txt").read_text() == "mine"


def test_a_drafter_directory_is_replaced_as_a_whole(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "out")
    (tmp_path / "out" / "merges.txt").write_text("of the former one")
    convert(reference("qwen3-6-moe"), tmp_path / "out")
    assert_holds(tmp_path / "out", expected(load("qwen3-6-moe")))
    assert not (tmp_path / "out" / "merges.txt").exists()
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_keeps_the_former_drafter(error, tmp_path, monkeypatch):
    convert(reference("qwen3-5"), tmp_path / "out")
    before = bytes_of(tmp_path / "out")

    def fail(*_):
        raise error

    monkeypatch.setattr(writing.shutil, "copyfile", fail)
    expected_error = SpecError if isinstance(error, OSError) else KeyboardInterrupt
    for out in ("out", "new"):
        with pytest.raises(expected_error):
            convert(reference("qwen3-6-moe"), tmp_path / out)
    assert bytes_of(tmp_path / "out") == before
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_failed_exchange_puts_the_former_drafter_back(tmp_path, monkeypatch):
    convert(reference("qwen3-5"), tmp_path / "out")
    before = bytes_of(tmp_path / "out")
    rename = writing.Path.rename

    def fail_for_new(self, target):
        if self.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(writing.Path, "rename", fail_for_new)
    with pytest.raises(SpecError, match="Input/output error"):
        convert(reference("qwen3-6-moe"), tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_parent_directories_are_made(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()
    shutil.rmtree(tmp_path / "a")
