"""The cache of measured costs: what it is keyed by, and that nothing can go wrong with it."""

import json
import os

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_spec import depth_cache
from mlx_spec.costs import Knowledge
from mlx_spec.depth import Adaptive
from tests.models import DEMO, pair

KEY = "0" * 64


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-spec" / "depth"


def measured() -> Knowledge:
    """After 200 rounds with drafts that are all right, at 30 ms and 3 more for each draft."""
    knowledge = Knowledge()
    depth = Adaptive(knowledge, 4)
    for i in range(200):
        n = depth.choose(100 + i)
        depth.observe(n, n, 100 + i, 0.030 + 0.003 * n)
    return knowledge


def test_what_was_written_is_read(folder):
    knowledge = measured()
    depth_cache.write(KEY, knowledge)
    again = depth_cache.read(KEY)
    assert again.as_dict() == knowledge.as_dict()
    assert again.costs.depths == [0, 1, 2, 3, 4]
    assert again.costs.seconds(0, 200) == pytest.approx(0.030, rel=0.01)
    assert again.costs.ratio(4, 200) == pytest.approx(1.4, rel=0.02)
    assert again.rates.tokens(4)[4] > 4.5


def test_it_is_one_small_file_of_json_and_nothing_beside_it(folder):
    depth_cache.write(KEY, measured())
    depth_cache.write(KEY, measured())
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]
    text = (folder / f"{KEY}.json").read_text()
    assert len(text) < 2000
    assert json.loads(text)["version"] == 1


def test_without_xdg_it_is_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    depth_cache.write(KEY, measured())
    assert (tmp_path / ".cache" / "mlx-spec" / "depth" / f"{KEY}.json").exists()


GOOD = {
    "version": 1,
    "seconds": {"0": 0.03, "1": 0.04},
    "seconds_per_context_token": 1e-7,
    "right": [3.0],
    "offered": [4.0],
}
DAMAGED = {
    "empty": "",
    "cut": json.dumps(GOOD)[:-20],
    "list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "binary": "\x00\x01",
    "other version": json.dumps({**GOOD, "version": 2}),
    "missing": json.dumps({"version": 1}),
    "negative": json.dumps({**GOOD, "seconds": {"0": -1.0}}),
    "infinite": json.dumps({**GOOD, "seconds": {"0": float("inf")}}),
    "not a number": json.dumps({**GOOD, "seconds_per_context_token": float("nan")}),
    "no depth": json.dumps({**GOOD, "seconds": {"one": 0.03}}),
    "more right than offered": json.dumps({**GOOD, "right": [5.0]}),
    "lengths differ": json.dumps({**GOOD, "right": [1.0, 1.0]}),
    "seconds is a list": json.dumps({**GOOD, "seconds": [0.03]}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_cache_is_a_fresh_start(folder, text):
    folder.mkdir(parents=True)
    path = folder / f"{KEY}.json"
    path.write_text(json.dumps(GOOD))
    assert depth_cache.read(KEY).costs.depths == [0, 1]
    path.write_text(text)
    assert depth_cache.read(KEY).as_dict() == Knowledge().as_dict()


def test_no_cache_is_a_fresh_start(folder):
    assert depth_cache.read(KEY).as_dict() == Knowledge().as_dict()


def test_a_cache_that_cannot_be_written_is_no_error(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    depth_cache.write(KEY, measured())
    assert depth_cache.read(KEY).as_dict() == Knowledge().as_dict()


def test_a_write_that_fails_halfway_leaves_what_was_there(folder, monkeypatch):
    depth_cache.write(KEY, measured())
    before = (folder / f"{KEY}.json").read_text()

    def full(*paths):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    depth_cache.write(KEY, Knowledge())
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]
    assert (folder / f"{KEY}.json").read_text() == before


def test_costs_from_the_cache_are_corrected_quickly(folder):
    """On battery all is half as quick, and two rows cost 1.6 instead of 1.1 steps."""
    depth_cache.write(KEY, measured())
    costs = depth_cache.read(KEY).costs
    for _ in range(4):
        costs.add(0, 200, 0.060)
    assert costs.ratio(1, 200) == pytest.approx(1.1, rel=0.05)
    for n in (1, 1, 1, 0, 0):
        costs.add(n, 200, 0.096 if n else 0.060)
    assert costs.ratio(1, 200) == pytest.approx(1.6, rel=0.1)


def net(words: int = 64, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Embedding(words, width), nn.Linear(width, width))


def test_the_fingerprint_depends_on_shapes_and_types_not_on_values():
    one = depth_cache.fingerprint(net(), None)
    assert len(one) == 64
    assert depth_cache.fingerprint(net(), None) == one
    half = net()
    half.set_dtype(mx.float16)
    quantized = net()
    nn.quantize(quantized, group_size=64, bits=4)
    eight = net()
    nn.quantize(eight, group_size=64, bits=8)
    others = [
        depth_cache.fingerprint(net(words=65), None),
        depth_cache.fingerprint(net(), net()),
        depth_cache.fingerprint(net(), net(width=32)),
        depth_cache.fingerprint(half, None),
        depth_cache.fingerprint(quantized, None),
        depth_cache.fingerprint(eight, None),
    ]
    assert len({one, *others}) == 7


def test_the_fingerprint_depends_on_the_machine(monkeypatch):
    one = depth_cache.fingerprint(net(), None)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M9"})
    assert depth_cache.fingerprint(net(), None) != one


@pytest.mark.parametrize("package", ["mlx", "mlx-lm"])
def test_the_fingerprint_depends_on_the_software(package, monkeypatch):
    one = depth_cache.fingerprint(net(), None)
    true = depth_cache.version
    monkeypatch.setattr(
        depth_cache, "version", lambda name: "99" if name == package else true(name)
    )
    assert depth_cache.fingerprint(net(), None) != one


def test_a_real_pair_has_a_fingerprint():
    demo = pair(DEMO)
    with_head = depth_cache.fingerprint(demo.model, demo.drafter.head)
    assert with_head != depth_cache.fingerprint(demo.model, None)
