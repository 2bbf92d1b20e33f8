"""What a drafter can be read from, beside the repositories of Hugging Face."""

import json
import shutil
import sys

import gguf
import numpy as np
import pytest
from checkpoints import (
    Stored,
    config_of,
    decode,
    encode,
    expected,
    load,
    reference,
    rename_token,
    rounded,
    save,
    to_mlx_layout,
    weights_of,
    write_file,
)

from mlx_spec.conversion import convert
from mlx_spec.convert.gguf import open_gguf
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter, SpecError

LAYERS = 4


def bytes_of(path):
    return (path / "model.safetensors").read_bytes()


def fingerprint_of(path):
    return config_of(path)["mlx_spec"]["fingerprint"]


# GGUF

# What llama.cpp calls the tensors outside of the layer (conversion/qwen.py).
RENAMED = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
    "lm_head": "shared_head.head",
}
# The names of Qwen's layers, and those of `nextn`, by the gguf package.
MAPS = [
    gguf.get_tensor_name_map(gguf.MODEL_ARCH[name], LAYERS + 1)
    for name in ("QWEN35", "QWEN35MOE", "GLM4_MOE")
]


def name_in_gguf(stem):
    """Of a tensor of the head, in the layer after the model's own."""
    stem = RENAMED.get(stem, stem).replace("switch_mlp", "experts")
    return next(
        found for names in MAPS if (found := names.get_name(f"model.layers.{LAYERS}.{stem}"))
    )


def as_gguf(source):
    """Tensors as llama.cpp's converter names them, in float32: the head, the trunk's norms, and
    a matrix of the trunk."""
    tensors = {}
    for name, values in expected(source).items():
        stem = name.removeprefix("layers.0.").removesuffix(".weight")
        if stem == "mlp.shared_expert_gate":
            values = values[0]
        tensors[f"{name_in_gguf(stem)}.weight"] = values
    for name, stored in source.tensors.items():
        layer = name.partition("layers.")[2].partition(".")[0]
        if name.startswith("mtp."):
            continue
        if name.endswith("input_layernorm.weight"):
            tensors[f"blk.{layer}.attn_norm.weight"] = decode(stored) + np.float32(1)
        elif name.endswith("model.norm.weight"):
            tensors["output_norm.weight"] = decode(stored) + np.float32(1)
        elif name.endswith("embed_tokens.weight"):
            tensors["token_embd.weight"] = decode(stored)
    return tensors


def write_gguf(path, tensors, kind, layers=1):
    """Matrices of a kind, vectors and routers in float32, as llama.cpp has them."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(LAYERS + layers)
    if layers:
        writer.add_nextn_predict_layers(layers)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        if values.ndim > 1 and "ffn_gate_inp" not in name:
            packed = gguf.quants.quantize(values, quantised)
            writer.add_tensor(name, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe", "qwen3-next"])
def test_a_gguf_file_gives_what_the_original_gives(name, tmp_path):
    path = write_gguf(tmp_path / "head.gguf", as_gguf(load(name)), "BF16")
    convert(reference(name), tmp_path / "original")
    report = convert(path, tmp_path / "out", reference(name))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "original")
    assert "the head belongs to this model" in report.pairing
    assert fingerprint_of(tmp_path / "out") == fingerprint_of(tmp_path / "original")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert report.norm_evidence == "GGUF has the one folded in"
    assert report.source_bytes == path.stat().st_size


@pytest.mark.parametrize(
    ("kind", "dtype", "stored"),
    [
        ("F16", None, "F16"),
        ("F32", None, "F32"),
        ("Q8_0", None, "BF16"),
        ("Q8_0", "float32", "F32"),
        ("BF16", "float16", "F16"),
    ],
)
def test_types_of_gguf(kind, dtype, stored, tmp_path):
    source = load("qwen3-5")
    path = write_gguf(tmp_path / "head.gguf", as_gguf(source), kind)
    report = convert(path, tmp_path / "out", reference("qwen3-5"), dtype=dtype)
    assert report.bytes_read < report.source_bytes  # as many as are in the file
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in weights_of(tmp_path / "out").items():
        values = expected(source)[name]
        if values.ndim > 1:  # llama.cpp's own arithmetic says what the file holds
            values = gguf.quants.dequantize(gguf.quants.quantize(values, quantised), quantised)
        assert tensor.dtype == stored
        np.testing.assert_array_equal(decode(tensor), rounded(values, stored), err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_any_part_of_a_gguf_file_can_be_read(kind, tmp_path):
    path = write_gguf(tmp_path / "head.gguf", as_gguf(load("qwen3-5")), kind)
    files = open_gguf(path, config_of(reference("qwen3-5"))).files
    size = files.size_bytes("tensors.safetensors")
    whole = files.read("tensors.safetensors", 0, size)
    assert len(whole) == size
    rng = np.random.default_rng(0)
    for begin, length in zip(rng.integers(0, size, 30), rng.integers(0, 3000, 30), strict=True):
        end = min(int(begin + length), size)
        assert files.read("tensors.safetensors", int(begin), end) == whole[begin:end]


def test_a_dedicated_embedding_and_an_unknown_number_of_layers(tmp_path):
    source = load("qwen3-5")
    rng = np.random.default_rng(0)
    embedding, output = rng.standard_normal((2, 512, 128)).astype(np.float32)
    tensors = as_gguf(source) | {
        f"blk.{LAYERS}.nextn.embed_tokens.weight": embedding,
        f"blk.{LAYERS}.nextn.shared_head_head.weight": output,
    }
    path = write_gguf(tmp_path / "head.gguf", tensors, "F32", layers=0)
    convert(path, tmp_path / "out", reference("qwen3-5"))
    weights = weights_of(tmp_path / "out")
    np.testing.assert_array_equal(decode(weights["embed_tokens.weight"]), embedding)
    np.testing.assert_array_equal(decode(weights["lm_head.weight"]), output)


def test_gguf_files_that_cannot_be_used(tmp_path):
    source, model = load("qwen3-5"), reference("qwen3-5")
    tensors = as_gguf(source)
    path = write_gguf(tmp_path / "head.gguf", tensors, "BF16")
    with pytest.raises(SpecError, match="give the model with --target"):
        convert(path, tmp_path / "out")
    with pytest.raises(Incompatible, match="the head belongs to another model"):
        convert(path, tmp_path / "out", reference("qwen3-5-tied"))

    packed = write_gguf(tmp_path / "packed.gguf", tensors, "Q4_0")
    with pytest.raises(CheckpointError, match=r"blk.4.* is packed as Q4_0.*Q8_0"):
        convert(packed, tmp_path / "out", model)

    trunk = {name: values for name, values in tensors.items() if "blk.4" not in name}
    with pytest.raises(NoDrafter, match="holds no nextn tensors"):
        convert(write_gguf(tmp_path / "trunk.gguf", trunk, "BF16", 0), tmp_path / "out", model)

    lacking = {name: values for name, values in tensors.items() if "attn_k." not in name}
    lacking["blk.4.attn_qk.weight"] = np.ones((4, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"k_proj.weight \(and has no use for .*attn_qk"):
        convert(write_gguf(tmp_path / "lacking.gguf", lacking, "BF16"), tmp_path / "out", model)

    for size in (3, 100, path.stat().st_size - 9):
        (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"cut.gguf is no GGUF file or damaged"):
            convert(tmp_path / "cut.gguf", tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_without_the_gguf_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "head.gguf").touch()
    with pytest.raises(SpecError, match=r"pip install 'mlx-spec\[gguf\]'"):
        convert(tmp_path / "head.gguf", tmp_path / "out", reference("qwen3-5"))


# One file of safetensors


def test_a_file_of_its_own_with_a_config_beside_it_or_from_the_target(tmp_path):
    source = load("qwen3-5")
    convert(reference("qwen3-5"), tmp_path / "original")
    (tmp_path / "alone").mkdir()
    file = tmp_path / "alone" / "mtp.safetensors"
    write_file(file, source.head(), {"format": "pt"})
    with pytest.raises(SpecError, match=r"no config.json beside .*mtp.safetensors.*--target"):
        convert(file, tmp_path / "out")
    report = convert(file, tmp_path / "out", reference("qwen3-5"))
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "original")
    assert fingerprint_of(tmp_path / "out") == fingerprint_of(tmp_path / "original")
    assert report.norm_evidence == "format pt of mtp.safetensors"
    assert (tmp_path / "out" / "tokenizer.json").is_file()

    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"alone/mtp.safetensors is truncated"):
        convert(file, tmp_path / "cut", reference("qwen3-5"))
    file.write_bytes(whole)

    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(reference("qwen3-5") / name, file.parent / name)
    convert(file, file.parent / "MTP")  # a directory beside the file is no part of the source
    assert bytes_of(file.parent / "MTP") == bytes_of(tmp_path / "original")
    assert (file.parent / "MTP" / "tokenizer.json").is_file()
    assert "fingerprint" not in config_of(file.parent / "MTP")["mlx_spec"]

    convert(file, tmp_path / "reduced", draft_vocab=99)  # by the tokenizer beside it
    assert config_of(tmp_path / "reduced")["mlx_spec"]["draft_vocab"]["size"] == 99
    with pytest.raises(Incompatible, match="holds no model that could be written"):
        convert(file, tmp_path / "drafter", with_target=tmp_path / "model")
    rename_token(file.parent, "$", "another")
    with pytest.raises(Incompatible, match=r"is 'another' in the drafter's tokenizer"):
        convert(file, tmp_path / "other", reference("qwen3-5"))


def test_a_directory_of_gguf_files_alone(tmp_path):
    shutil.copyfile(reference("qwen3-5") / "config.json", tmp_path / "config.json")
    (tmp_path / "a.bin").touch()
    (tmp_path / "head.gguf").touch()
    with pytest.raises(CheckpointError, match=r"\(but head.gguf\): give that file itself"):
        convert(tmp_path, tmp_path / "out")


# Packed trunks, heads in other clothes


def pack_trunk(source, method):
    """The trunk's matrices as AWQ, GPTQ or compressed-tensors leave them; the head stays."""
    suffixes = {
        "awq": {"qweight": "I32", "qzeros": "I32", "scales": "F16"},
        "gptq": {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"},
        "compressed-tensors": {"weight_packed": "I32", "weight_scale": "BF16"},
    }[method]
    for name in [n for n in source.tensors if "mtp." not in n and n.endswith("_proj.weight")]:
        del source.tensors[name]
        stem = name.removesuffix("weight")
        for suffix, dtype in suffixes.items():
            source.tensors[stem + suffix] = encode(np.ones((4, 4), np.float32), dtype)
    source.config["quantization_config"] = {"quant_method": method, "bits": 4}


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_a_plain_head_beside_a_packed_trunk(method, tmp_path):
    source = load("qwen3-5")
    pack_trunk(source, method)
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    convert(reference("qwen3-5"), tmp_path / "original")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "original")
    assert fingerprint_of(tmp_path / "out") == fingerprint_of(tmp_path / "original")
    assert not [key for key in config_of(tmp_path / "out") if "quantization" in key]


@pytest.mark.parametrize(
    ("suffix", "stored"),
    [
        ("qweight", encode(np.ones((16, 256)), "I32")),
        ("weight_packed", encode(np.ones((256, 16)), "I32")),
        ("weight", Stored("I8", (256, 128), bytes(256 * 128))),
    ],
)
def test_a_packed_head_is_refused_by_name(suffix, stored, tmp_path):
    source = load("qwen3-5")
    key = "mtp.layers.0.self_attn.q_proj."
    del source.tensors[f"{key}weight"]
    source.tensors[key + suffix] = stored
    with pytest.raises(CheckpointError, match=rf"{key}{suffix}.*original repository"):
        convert(save(source, tmp_path / "model"), tmp_path / "out")


def test_a_head_inside_an_mlx_model(tmp_path):
    """The whole model by MLX's layout, the head under mlx-lm's prefix."""
    source = load("qwen3-5")
    to_mlx_layout(source)
    trunk_norms = ("input_layernorm.weight", "model.norm.weight")
    source.map(
        lambda n: "mtp." not in n and n.endswith(("language_model.norm.weight", *trunk_norms)),
        lambda w: w + 1,
    )
    source.rename(
        lambda n: (
            f"language_model.{n}"
            if n.startswith(("mtp.", "lm_head"))
            else n.replace("model.language_model", "language_model.model")
        )
    )
    convert(save(source, tmp_path / "model"), tmp_path / "out")
    convert(reference("qwen3-5"), tmp_path / "original")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "original")
    assert fingerprint_of(tmp_path / "out") == fingerprint_of(tmp_path / "original")


@pytest.mark.parametrize("name", ["qwen3-5-tied", "qwen3-6-moe"])
def test_the_drafter_directory_of_mlx_vlm(name, tmp_path):
    """Its splitter writes names without the prefix, folded norms, stacked experts, the target's
    text configuration, and nothing about where it is from."""
    source = load(name)
    text = source.config["text_config"]
    directory = tmp_path / "Qwen-mtp"
    directory.mkdir()
    values = expected(source)
    tensors = {key: encode(value, "BF16") for key, value in values.items()}
    write_file(directory / "model.safetensors", tensors, {"format": "mlx"})
    config = {
        "block_size": 3,
        "model_type": "qwen3_5_mtp",
        "text_config": text,
        "tie_word_embeddings": name.endswith("tied"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    report = convert(directory, tmp_path / "out", reference(name))
    convert(reference(name), tmp_path / "original")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "original")
    assert report.pairing.startswith(f"Fits {reference(name)}")
    assert fingerprint_of(tmp_path / "out") == fingerprint_of(tmp_path / "original")


def test_our_own_output_keeps_its_fingerprint(tmp_path):
    convert(reference("qwen3-5"), tmp_path / "once")
    convert(tmp_path / "once", tmp_path / "twice", reference("qwen3-5"))
    assert bytes_of(tmp_path / "once") == bytes_of(tmp_path / "twice")
    assert fingerprint_of(tmp_path / "once") == fingerprint_of(tmp_path / "twice")
    with pytest.raises(Incompatible, match="another model"):
        convert(tmp_path / "once", tmp_path / "thrice", reference("qwen3-5-tied"))
