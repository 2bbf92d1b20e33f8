"""Reading a directory of safetensors: byte ranges, laziness, and every kind of damage."""

import json
import re
import shutil
import struct

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    INDEX,
    NAMES,
    Source,
    Stored,
    decode,
    encode,
    fp8_table,
    load,
    save,
    save_grouped,
    save_sharded,
    split_trunk_and_head,
    write_file,
)
from reference_files import checkpoints

from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.header import header_bytes, parse_header, render_header
from mlx_spec.errors import CheckpointError

DENSE = checkpoints() / "qwen3-5"


def as_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


@pytest.fixture
def dense(tmp_path):
    """A copy of the dense checkpoint to damage."""
    return save(load("qwen3-5"), tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """Its trunk in the first shard and its head in the second."""
    source = load("qwen3-5")
    return save_grouped(source, tmp_path / "model", split_trunk_and_head(source))


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_reads_as_the_safetensors_library_reads_it(name):
    checkpoint = Checkpoint.open(checkpoints() / name)
    source = load(name)
    assert checkpoint.names == sorted(source.tensors)
    for key, stored in source.tensors.items():
        assert checkpoint.tensor(key).dtype == stored.dtype
        values = as_numpy(checkpoint.read(key))
        assert values.shape == stored.shape
        np.testing.assert_array_equal(values, decode(stored))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("F32", np.float32),
        ("F16", np.float16),
        ("I64", np.int64),
        ("I32", np.int32),
        ("U32", np.uint32),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    ],
)
def test_types_of_numbers(tmp_path, dtype, kind):
    values = np.array([[0, 1, 1], [1, 0, 1]], kind)
    source = Source({}, {"x": Stored(dtype, values.shape, values.tobytes())})
    read = Checkpoint.open(save(source, tmp_path / "m")).read("x")
    assert np.array(read).dtype == kind
    np.testing.assert_array_equal(np.array(read), values)


def test_all_fp8_codes_decode_exactly(tmp_path):
    codes = np.arange(256, dtype=np.uint8)
    source = Source({}, {"x": Stored("F8_E4M3", (16, 16), codes.tobytes())})
    read = Checkpoint.open(save(source, tmp_path / "m")).read("x")
    assert read.dtype == mx.bfloat16
    np.testing.assert_array_equal(as_numpy(read).reshape(-1), fp8_table())


def test_an_unsupported_type_matters_only_when_it_is_read(tmp_path):
    tensors = {"bad": Stored("F64", (1,), bytes(8)), "good": encode(np.ones(2), "F32")}
    checkpoint = Checkpoint.open(save(Source({}, tensors), tmp_path / "m"))
    assert as_numpy(checkpoint.read("good")).tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"bad .* is stored as F64"):
        checkpoint.read("bad")


def test_bytes_are_counted_and_the_size_is_that_of_all_files(sharded):
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.bytes_read == 0
    checkpoint.read("mtp.fc.weight")
    assert checkpoint.bytes_read == 128 * 256 * 2
    assert checkpoint.source_bytes == sum(f.stat().st_size for f in sharded.glob("*.safetensors"))


@pytest.mark.parametrize("index", [True, False])
def test_shards_hold_together_what_the_single_file_holds(tmp_path, index):
    source = load("qwen3-5")
    checkpoint = Checkpoint.open(save_sharded(source, tmp_path / "m", 4, index=index))
    assert checkpoint.names == sorted(source.tensors)
    for key in source.tensors:
        np.testing.assert_array_equal(as_numpy(checkpoint.read(key)), decode(source.tensors[key]))


def test_a_listed_shard_is_opened_only_when_needed(sharded):
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"no safetensors")
    checkpoint = Checkpoint.open(sharded)
    assert as_numpy(checkpoint.read("mtp.norm.weight")).shape == (128,)
    with pytest.raises(CheckpointError, match="corrupt header"):
        checkpoint.tensor("lm_head.weight")


def test_a_file_beside_the_index_is_found(tmp_path):
    source = load("qwen3-5")
    trunk, head = split_trunk_and_head(source)
    path = save_grouped(source, tmp_path / "m", [trunk])
    write_file(path / "extra.safetensors", {k: source.tensors[k] for k in head}, None)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.names == sorted(source.tensors)
    assert checkpoint.tensor("mtp.norm.weight").file == "extra.safetensors"


def test_companion_files_of_macos_are_ignored(dense):
    (dense / "._model.safetensors").write_bytes(b"\0\5\26\7")
    assert "mtp.norm.weight" in Checkpoint.open(dense).names


def test_one_tensor_in_two_files_is_an_error_only_for_that_tensor(dense):
    shutil.copyfile(dense / "model.safetensors", dense / "copy.safetensors")
    checkpoint = Checkpoint.open(dense)
    with pytest.raises(
        CheckpointError,
        match=r"mtp.norm.weight twice, in copy.safetensors and in model.safetensors",
    ):
        checkpoint.tensor("mtp.norm.weight")


def test_missing_path(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        Checkpoint.open(tmp_path / "nowhere")


def test_a_file_is_not_a_directory(dense):
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(dense / "model.safetensors")


def test_no_safetensors(dense):
    (dense / "model.safetensors").rename(dense / "model.gguf")
    with pytest.raises(CheckpointError, match=r"holds no safetensors \(but model.gguf"):
        Checkpoint.open(dense)


def test_tensors_without_config(dense):
    (dense / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json: download it"):
        Checkpoint.open(dense)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("\xff", "is not JSON"), ("[]", "is not a JSON object")],
)
def test_damaged_config(dense, text, words):
    (dense / "config.json").write_text(text, encoding="latin1")
    with pytest.raises(CheckpointError, match=f"config.json {words}.*download it again"):
        Checkpoint.open(dense)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated: 0 bytes cannot hold a header"),
        (b"1234567", "truncated: 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF\3\0\0\0" + bytes(99), "truncated|corrupt"),
        (b"PK\3\4\x14\0\x08\x08" + bytes(99), "corrupt header"),
        (struct.pack("<Q", 100) + b"{}", "truncated: its header needs 100 bytes"),
        (struct.pack("<Q", 2) + b"{!", "corrupt header .*download it again"),
        (struct.pack("<Q", 2) + b"[]", "corrupt header"),
        (struct.pack("<Q", 2) + b"\xff\xff", "corrupt header"),
        (struct.pack("<Q", 8) + b'{"x": 1}', "corrupt header"),
        (struct.pack("<Q", 17) + b'{"x": {}, "x":{}}', "'x' is listed twice"),
    ],
)
def test_a_file_that_is_no_safetensors(dense, data, words):
    (dense / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(dense)
    assert str(dense / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}, r"x with shape \(2,\) of F32"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "impossible entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "impossible entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "impossible entry"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "impossible entry"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "corrupt header"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "truncated: x ends at byte"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "overlaps"),
    ],
)
def test_an_entry_that_cannot_be(dense, entry, words):
    header = {"x": entry, "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}
    text = json.dumps(header).encode()
    (dense / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(dense)


def test_a_truncated_shard_is_an_error_when_it_is_needed(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is truncated"):
        checkpoint.tensor("mtp.fc.weight")


def test_a_listed_shard_that_is_missing(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(
        CheckpointError, match=r"has no model-00002-of-00002.safetensors, which model.*index.json"
    ):
        checkpoint.tensor("mtp.fc.weight")


def test_index_and_shards_disagree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    shard = index["weight_map"]["mtp.norm.weight"]

    index["weight_map"]["mtp.invented.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"does not hold mtp.invented.weight"):
        Checkpoint.open(sharded).tensor("mtp.norm.weight")

    del index["weight_map"]["mtp.invented.weight"], index["weight_map"]["mtp.fc.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"holds mtp.fc.weight, which .* does not place"):
        Checkpoint.open(sharded).tensor("mtp.norm.weight")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"x": "../y"}}'])
def test_damaged_index(sharded, index):
    (sharded / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=re.escape(INDEX) + " has no weight_map"):
        Checkpoint.open(sharded)


def test_a_part_of_the_config_that_is_no_object(dense):
    (dense / "config.json").write_text('{"text_config": [1]}')
    with pytest.raises(CheckpointError, match=r"text_config .* is not an object"):
        Checkpoint.open(dense).section("text_config")


def test_a_rendered_header_parses_to_what_was_rendered():
    tensors = {"b": ("F32", (2, 3), 24), "a": ("BF16", (5,), 10)}
    data = render_header(tensors, {"format": "mlx"})
    length = header_bytes("f", data[:8], len(data) + 34)
    assert length + 8 == len(data)
    assert len(data) % 8 == 0
    header = parse_header("f", "f", data[8:], len(data) + 34)
    assert header.metadata == {"format": "mlx"}
    assert {k: (t.dtype, t.shape, t.nbytes) for k, t in header.tensors.items()} == tensors
    assert header.tensors["a"].begin == header.tensors["b"].end == len(data) + 24
