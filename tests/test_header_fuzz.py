"""Headers of safetensors files that are damaged on purpose: one clear error each, or sound."""

import json
import math
import random
import struct
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors

from mlx_spec.convert import header as limits
from mlx_spec.convert.checkpoint import MAX_JSON_BYTES, MAX_TENSOR_BYTES, NUMPY, Checkpoint
from mlx_spec.errors import CheckpointError

FILE = "model.safetensors"
TENSORS = {
    "mtp.fc.weight": ("F32", [4, 8]),
    "mtp.norm.weight": ("BF16", [16]),
    "mtp.layers.0.mlp.experts.gate_up_proj": ("F16", [2, 4, 3]),
    "codes": ("F8_E4M3", [3, 5]),
    "flags": ("BOOL", [8]),
    "ids": ("I64", [3]),
    "scalar": ("F32", []),
    "empty": ("U8", [0, 7]),
}
SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "BOOL": 1, "I64": 8, "U8": 1}


class Memory:
    """A checkpoint of one file, which may claim another size than it has."""

    def __init__(self, data: bytes, size: int | None = None, config: bytes = b"{}"):
        self.files = {FILE: data, "config.json": config}
        self.sizes = {name: len(content) for name, content in self.files.items()}
        self.sizes[FILE] = len(data) if size is None else size

    def names(self):
        return sorted(self.files)

    def size_bytes(self, name):
        return self.sizes[name]

    def read(self, name, begin, end):
        assert 0 <= begin <= end
        return self.files[name][begin:end]


def entries() -> dict:
    result, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in TENSORS.items():
        end = offset + SIZES[dtype] * math.prod(shape)
        result[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return result


DATA = bytes(i % 2 for i in range(entries()["empty"]["data_offsets"][1]))


def file_of(text: str | bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    text = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def opened(data: bytes, size: int | None = None) -> Checkpoint:
    return Checkpoint(Path("m"), Memory(data, size))


def read_stored(checkpoint: Checkpoint, name: str) -> bytes:
    return bytes(np.array(checkpoint.read_stored(name).reshape(-1).view(mx.uint8)))


def as_the_library_reads(data: bytes) -> dict[str, bytes]:
    return {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(data)}


def test_the_sound_file():
    data = file_of(json.dumps(entries()))
    checkpoint = opened(data)
    found = {name: read_stored(checkpoint, name) for name in checkpoint.names}
    assert found == as_the_library_reads(data)
    assert checkpoint.header(FILE).metadata == {"format": "pt"}


# Named damages


def changed(name: str = "mtp.fc.weight", **fields) -> bytes:
    return file_of(json.dumps(entries() | {name: entries().get(name, {}) | fields}))


def listed(text: str) -> bytes:
    """An entry more, as it is written."""
    return file_of(json.dumps(entries())[:-1] + f", {text}}}")


NAMED = {
    "a bool is no number": (changed(shape=[True, 32]), "impossible entry of mtp.fc.weight"),
    "nor is a float": (changed(shape=[4.0, 8]), "impossible entry of mtp.fc.weight"),
    "nor a string": (changed(shape=["4", 8]), "impossible entry of mtp.fc.weight"),
    "nor NaN": (changed(shape=[float("nan")]), "NaN is no JSON"),
    "nor infinity": (changed(data_offsets=[0, float("inf")]), "Infinity is no JSON"),
    "a shape is a list": (changed(shape="48"), "impossible entry of mtp.fc.weight"),
    "an offset too few": (changed(data_offsets=[0]), "impossible entry of mtp.fc.weight"),
    "an offset too many": (changed(data_offsets=[0, 128, 128]), "impossible entry"),
    "offsets as an object": (changed(data_offsets={"0": 128}), "impossible entry"),
    "a negative size": (changed(shape=[-4, -8]), "impossible entry of mtp.fc.weight"),
    "a negative offset": (changed(data_offsets=[-1, 127]), "impossible entry of mtp.fc.weight"),
    "an end before its begin": (changed(data_offsets=[128, 0]), "impossible entry"),
    "a huge offset": (changed(data_offsets=[0, 2**70]), "impossible entry of mtp.fc.weight"),
    "a huge dimension": (changed(shape=[2**31, 0], data_offsets=[0, 0]), "impossible shape"),
    "sizes whose product is huge": (changed(shape=[2**30] * 8), "cannot be 128 bytes long"),
    "too many dimensions": (changed(shape=[1] * 8 + [32]), "impossible shape"),
    "more digits than Python reads": (
        file_of(json.dumps(entries()).replace("[4, 8]", f"[{'9' * 5000}]")),
        "corrupt header",
    ),
    "a type that is no string": (changed(dtype=32), "impossible entry of mtp.fc.weight"),
    "an unknown type": (changed(dtype="F33"), "mtp.fc.weight is of the unknown type 'F33'"),
    "another type": (changed(dtype="F16"), r"\(4, 8\) of F16 cannot be 128 bytes long"),
    "an entry that is a list": (listed('"x": [1]'), "impossible entry of x"),
    "an entry that is null": (listed('"x": null'), "impossible entry of x"),
    "an entry without a shape": (listed('"x": {"dtype": "U8", "data_offsets": [0, 0]}'), "of x"),
    "a name that is there twice": (listed('"ids": {}'), "'ids' is listed twice"),
    "a field that is there twice": (
        listed('"x": {"dtype": "U8", "dtype": "I8", "shape": [0], "data_offsets": [0, 0]}'),
        "'dtype' is listed twice",
    ),
    "a name with a line end": (listed('"a\\nb": {}'), r"'a\\nb' is no name"),
    "a name with half a character": (listed('"\\ud800": {}'), r"'\\ud800' is no name"),
    "a name without end": (listed(f'"{"n" * 1001}": {{}}'), "is no name"),
    "metadata that is a list": (
        file_of('{"__metadata__": [1]}', b""),
        "__metadata__ is not an object of strings",
    ),
    "metadata with a number": (changed("__metadata__", format=1), "not an object of strings"),
    "a hole": (changed(shape=[3, 8], data_offsets=[0, 96]), "no tensor has the 32 bytes before"),
    "a hole in front": (changed(shape=[3, 8], data_offsets=[32, 128]), "the 32 bytes before mtp"),
    "bytes at the end": (file_of(json.dumps(entries()), DATA + b"1"), "has the last 1 bytes"),
    "a missing byte": (file_of(json.dumps(entries()), DATA[:-1]), "truncated: scalar ends at byte"),
    "an overlap": (changed("ids", data_offsets=[0, 24]), "overlaps"),
    "the same place": (changed("scalar", data_offsets=[0, 4]), "overlaps"),
    "deep lists": (file_of('{"x":' + "[" * 100_000), "nested too deeply"),
    "deep objects": (file_of('{"x":' * 100_000), "nested too deeply"),
    "UTF-16": (file_of(json.dumps(entries()).encode("utf-16")), "it is not a JSON object"),
    "no UTF-8": (file_of(b'{"\xff": {}}'), "can't decode byte 0xff"),
    "half a character": (file_of('{"\ud800": {}}'), "can't decode byte"),
    "a string": (file_of('"text"'), "it is not a JSON object"),
    "nothing": (b"", "truncated: 0 bytes cannot hold a header"),
    "no header": (file_of("", b""), "it is not a JSON object"),
    "a length without end": (file_of("{}", b"", 2**64 - 1), "corrupt header"),
    "a length past the end": (file_of("{}", b"", 3), "truncated: its header needs 3 bytes"),
}


@pytest.mark.parametrize("damage", NAMED)
def test_named_damages(damage):
    data, words = NAMED[damage]
    with pytest.raises(CheckpointError, match=words) as caught:
        opened(data)
    assert_one_clear_line(caught.value)


def assert_one_clear_line(error: CheckpointError) -> None:
    text = str(error)
    assert text.startswith(f"m/{FILE} ")
    assert text.isprintable()
    assert len(text) < 3000
    assert text.endswith(("download it again", "must be downloaded again"))


def test_limits(monkeypatch):
    monkeypatch.setattr(limits, "MAX_TENSORS", len(TENSORS))
    sound = file_of(json.dumps(entries()))
    opened(sound)
    monkeypatch.setattr(limits, "MAX_TENSORS", len(TENSORS) - 2)
    with pytest.raises(CheckpointError, match="lists 9 tensors, and the limit is 6"):
        opened(sound)
    header = {"x": {"dtype": "U8", "shape": [2**18, 2**18 + 1]}}
    header["x"]["data_offsets"] = [0, 2**36 + 2**18]
    text = json.dumps(header)
    checkpoint = opened(file_of(text, b""), 8 + len(text) + 2**36 + 2**18)
    with pytest.raises(CheckpointError, match=f"has {2**36 + 2**18} bytes, and the limit is"):
        checkpoint.read("x")
    assert MAX_TENSOR_BYTES == 2**36
    monkeypatch.undo()
    files = Memory(sound)
    files.sizes["config.json"] = MAX_JSON_BYTES + 1
    with pytest.raises(CheckpointError, match=r"config.json has 100000001 bytes, and the limit"):
        Checkpoint(Path("m"), files)
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        Checkpoint(Path("m"), Memory(sound, config=b'{"x":' * 100_000))


# Ten thousand random damages

NUMBERS = [-1, 0, 1, 2, 7, 128, 2**31, 2**32, 2**63, 2**64, 2**200, True, False, None, 0.5, 1e308]
NUMBERS += [float("nan"), float("-inf"), "1", "", [], [1], {}]
ODD = [None, 1, "x", "", [], {}, [[]], [0, 0], {"dtype": "F32"}, True, float("nan")]
DTYPES = [*limits.BITS, "F5", "f32", "BF16 ", "", None, 3, ["F32"]]


def damage_fields(rng: random.Random, header: dict) -> None:
    """Changes one field of one tensor."""
    name = rng.choice(list(header))
    entry = header[name]
    if not isinstance(entry, dict) or name == "__metadata__":
        header[name] = rng.choice(ODD)
        return
    match rng.randrange(8):
        case 0:
            entry["dtype"] = rng.choice(DTYPES)
        case 1 if isinstance(entry.get("shape"), list) and entry["shape"]:
            entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(NUMBERS)
        case 2 if isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
            entry["data_offsets"][rng.randrange(len(entry["data_offsets"]))] = rng.choice(NUMBERS)
        case 3:
            entry["shape"] = [rng.randrange(6) for _ in range(rng.randrange(10))]
        case 4:
            begin = rng.randrange(len(DATA))
            entry["data_offsets"] = [begin, begin + rng.randrange(-9, 200)]
        case 5:
            entry.pop(rng.choice(list(entry)), None) if entry else None
        case 6:
            entry[rng.choice(["dtype", "shape", "data_offsets", "extra"])] = rng.choice(ODD)
        case _:
            header[rng.choice([name, "new", "a\nb", "\ud83d", "é", ""])] = rng.choice(
                [dict(entry), *ODD]
            )


def damage_text(rng: random.Random, text: bytes) -> bytes:
    """Changes some bytes, or repeats or drops a part."""
    begin = rng.randrange(len(text))
    end = min(len(text), begin + rng.randrange(1, 40))
    match rng.randrange(5):
        case 0:
            return text[:begin] + bytes([rng.randrange(256)]) + text[begin + 1 :]
        case 1:
            return text[:begin] + text[end:]
        case 2:
            return text[:end] + text[begin:]
        case 3:
            return text[:begin] + rng.choice('{}[],:"0 9-e.\\').encode() + text[begin:]
        case _:
            return text[:begin] + rng.choice([b"[", b'{"x":']) * rng.choice([2, 5000]) + text[end:]


def damaged(rng: random.Random) -> bytes:
    header = entries()
    for _ in range(rng.choice([0, 1, 1, 2])):
        damage_fields(rng, header)
    text = json.dumps(header).encode("utf-8")
    if rng.random() < 0.3:
        text = damage_text(rng, text)
    data, length = DATA, None
    match rng.randrange(12):
        case 0:
            data = DATA[: rng.randrange(len(DATA))]
        case 1:
            data = DATA + bytes(rng.randrange(9))
        case 2:
            length = rng.choice([0, 1, len(text) - 1, len(text) + 1, 2**32, 2**63, 2**64 - 1])
    data = file_of(text, data, length)
    return data[: rng.randrange(len(data))] if rng.random() < 0.03 else data


def read_damaged(data: bytes) -> dict[str, bytes] | str:
    """The values of the types that mlx-spec reads, or why it refuses the file."""
    try:
        checkpoint = opened(data)
        return {
            name: read_stored(checkpoint, name)
            for name in checkpoint.names
            if checkpoint.tensor(name).dtype in NUMPY
        }
    except CheckpointError as error:
        assert_one_clear_line(error)
        return str(error)


def test_ten_thousand_random_damages():
    """Each is refused with one line, or read as the safetensors library reads it."""
    rng = random.Random(0)
    sound, refused = 0, set()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for case in range(10_000):
        data = damaged(rng)
        found = read_damaged(data)
        if isinstance(found, str):
            refused.add(" ".join(found.split()[:6]))
            continue
        sound += 1
        library = as_the_library_reads(data)
        assert found.items() <= library.items(), case
        assert opened(data).names == sorted(library), case
    assert 500 < sound < 3000
    assert len(refused) > 20
    assert mx.get_peak_memory() - before < 10_000


def test_damages_take_no_memory():
    """Nor the numbers in them: less than a hundred times the text of the longest."""
    rng = random.Random(1)
    cases = [damaged(rng) for _ in range(300)]
    tracemalloc.start()
    try:
        for data in cases:
            read_damaged(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * max(map(len, cases)) < 4_000_000
