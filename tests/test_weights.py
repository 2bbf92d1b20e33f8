"""Weights are made one by one: random checkpoints, and the memory that converting them needs."""

import tracemalloc
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    Source,
    config_of,
    decode,
    encode,
    load,
    rounded,
    save,
    save_grouped,
    to_fp8,
    weights_of,
)

from mlx_spec.conversion import DTYPES, convert
from mlx_spec.convert.checkpoint import Checkpoint, Folder
from mlx_spec.convert.qwen_nextn import read_head
from mlx_spec.convert.weights import Parameter, Shared, Weights, cast
from mlx_spec.errors import CheckpointError
from mlx_spec.load import find_drafter

HIDDEN, HEADS, HEAD, MLP, VOCABULARY = 128, 2, 64, 64, 32
PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")
LAYOUTS = ("single", "fused", "stacked")


def shapes(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a head; experts 0 for a dense one."""
    result = {"fc": (HIDDEN, 2 * HIDDEN)}
    result |= dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (HIDDEN,))
    for i in range(layers):
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (2 * HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (HEAD, HIDDEN),
            "self_attn.v_proj": (HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            "self_attn.q_norm": (HEAD,),
            "self_attn.k_norm": (HEAD,),
        }
        for mlp in ("mlp.shared_expert", "mlp.switch_mlp") if experts else ("mlp",):
            stack = (experts,) if mlp == "mlp.switch_mlp" else ()
            layer[f"{mlp}.gate_proj"] = layer[f"{mlp}.up_proj"] = (*stack, MLP, HIDDEN)
            layer[f"{mlp}.down_proj"] = (*stack, HIDDEN, MLP)
        if experts:
            layer |= {"mlp.gate": (experts, HIDDEN), "mlp.shared_expert_gate": (1, HIDDEN)}
        result |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in result.items()}


def lay_out(values: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint, with its experts one by one, fused, or as mlx stacks them."""
    tensors = {}
    for name, value in values.items():
        mlp, _, projection = name.partition(".switch_mlp.")
        if not projection or layout == "stacked":
            tensors[name] = value
        elif layout == "single":
            for e, expert in enumerate(value):
                tensors[f"{mlp}.experts.{e}.{projection}"] = expert
        elif projection == "down_proj.weight":
            tensors[f"{mlp}.experts.down_proj"] = value
        elif projection == "gate_proj.weight":
            both = [value, values[f"{mlp}.switch_mlp.up_proj.weight"]]
            tensors[f"{mlp}.experts.gate_up_proj"] = np.concatenate(both, axis=1)
    return tensors


def random_checkpoint(seed: int, path) -> tuple[Source, dict[str, np.ndarray], str]:
    """Writes one. Returns: it, what a drafter of it must hold, and in which type."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 4))
    experts = int(rng.choice([0, 2, 3, 5]))
    layout, prefix = rng.choice(LAYOUTS), str(rng.choice(PREFIXES))
    dtype = str(rng.choice(["BF16", "F16", "F32", "fp8"]))
    tied, minus_one = rng.random() < 0.5, rng.random() < 0.5

    wanted = shapes(layers, experts)
    if rng.random() < 0.3:
        wanted["embed_tokens.weight"] = wanted["lm_head.weight"] = (VOCABULARY, HIDDEN)
    stored = "BF16" if dtype == "fp8" else dtype
    values = {
        name: rounded(rng.standard_normal(shape).astype(np.float32), stored)
        for name, shape in wanted.items()
    }
    tensors = lay_out(values, layout)
    trunk = {"model.language_model.embed_tokens.weight": np.ones((VOCABULARY, HIDDEN), np.float32)}
    if not tied:
        trunk["lm_head.weight"] = np.ones((VOCABULARY, HIDDEN), np.float32)
    source = Source(
        config=load("qwen3-5-moe" if experts else "qwen3-5").config,
        tensors={prefix + name: encode(value, stored) for name, value in tensors.items()}
        | {name: encode(value, stored) for name, value in trunk.items()},
        metadata={"format": "pt" if minus_one else "mlx"},
    )
    source.config["tie_word_embeddings"] = bool(tied)
    source.config["text_config"] |= {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": MLP,
        "moe_intermediate_size": MLP,
        "shared_expert_intermediate_size": MLP,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": VOCABULARY,
        "mtp_num_hidden_layers": layers,
    }
    if dtype == "fp8":
        packed = to_fp8(source, lambda name: "mtp." in name and "_proj" in name, block=48)
        tensors |= {name.removeprefix(prefix): value for name, value in packed.items()}
        values |= collect(tensors, values, layout)
    if minus_one:
        values = {n: v + np.float32(1) if v.ndim == 1 else v for n, v in values.items()}
    names = [str(name) for name in rng.permutation(list(source.tensors))]
    shards = np.array_split(names, rng.integers(1, 6))
    save_grouped(source, path, [[str(n) for n in s] for s in shards], index=rng.random() < 0.7)
    return source, values, stored


def collect(tensors, values, layout) -> dict[str, np.ndarray]:
    """The inverse of `lay_out`."""
    result = {}
    for name in values:
        mlp, _, projection = name.partition(".switch_mlp.")
        if not projection or layout == "stacked":
            result[name] = tensors[name]
        elif layout == "single":
            experts = range(len(values[name]))
            result[name] = np.stack([tensors[f"{mlp}.experts.{e}.{projection}"] for e in experts])
        elif projection == "down_proj.weight":
            result[name] = tensors[f"{mlp}.experts.down_proj"]
        else:
            half = 0 if projection == "gate_proj.weight" else 1
            result[name] = np.split(tensors[f"{mlp}.experts.gate_up_proj"], 2, axis=1)[half]
    return result


@pytest.fixture
def reads(monkeypatch):
    """What is read of safetensors but headers, and the memory that is in use by then."""
    done: list[tuple[str, int, int]] = []
    in_use: list[int] = []
    read = Folder.read

    def noted(self, name, begin, end):
        data = read(self, name, begin, end)
        if name.endswith(".safetensors") and begin > 8:
            done.append((name, begin, end))
            in_use.append(mx.get_active_memory() + 2 * len(data))  # the bytes, soon an array
        return data

    monkeypatch.setattr(Folder, "read", noted)
    return done, in_use


@pytest.mark.parametrize("seed", range(24))
def test_random_checkpoints(seed, tmp_path, reads):
    source, values, dtype = random_checkpoint(seed, tmp_path / "model")
    done, in_use = reads
    head = {name: s for name, s in source.tensors.items() if "mtp." in name}
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    report = convert(tmp_path / "model", tmp_path / "out")
    peak = max(mx.get_peak_memory(), *in_use) - before

    weights = weights_of(tmp_path / "out")
    assert weights.keys() == values.keys()
    for name, stored in weights.items():
        assert stored.dtype == dtype
        np.testing.assert_array_equal(decode(stored), rounded(values[name], dtype), err_msg=name)
    assert report.bytes_read == sum(len(s.data) for s in head.values())

    checkpoint = Checkpoint.open(tmp_path / "model")
    places = {(t.file, t.begin, t.end) for t in map(checkpoint.tensor, head)}
    assert {place: n for place, n in Counter(done).items() if place in places} == dict.fromkeys(
        places, 1
    )
    assert peak < 3 * max(len(s.data) for s in (*head.values(), *weights.values()))

    convert(tmp_path / "out", tmp_path / "again")
    assert weights_of(tmp_path / "again") == weights
    once, again = config_of(tmp_path / "out"), config_of(tmp_path / "again")
    assert again["mlx_spec"].pop("source") != once["mlx_spec"].pop("source")
    assert again == once


def test_the_random_checkpoints_are_of_all_kinds(tmp_path):
    kinds = set()
    for seed in range(24):
        source, values, _ = random_checkpoint(seed, tmp_path / f"{seed}")
        names = list(source.tensors)
        kinds |= {stored.dtype for stored in source.tensors.values()}
        kinds |= {name.partition("mtp.")[0] for name in names if "mtp." in name}
        kinds |= {"single" for name in names if ".experts.0.gate" in name}
        kinds |= {"fused" for name in names if name.endswith("gate_up_proj")}
        kinds |= {"stacked" for name in names if "mtp." in name and "switch_mlp" in name}
        kinds |= {"layers", sum(name.endswith("input_layernorm.weight") for name in values)}
        kinds |= {("experts", "layers.0.mlp.gate.weight" in values)}
        kinds |= {("own embedding", "embed_tokens.weight" in values)}
        kinds |= {("tied", source.config["tie_word_embeddings"]), source.metadata["format"]}
        kinds |= {len(list((tmp_path / f"{seed}").glob("*.safetensors"))) > 1}
    pairs = {(a, b) for a in ("experts", "own embedding", "tied") for b in (True, False)}
    assert kinds >= pairs | {"BF16", "F16", "F32", "F8_E4M3", "", "model.", "language_model."}
    assert kinds >= {"single", "fused", "stacked", 1, 2, 3, "pt", "mlx", False}


# Memory of conversions in which one tensor is as large as all others together


def large_checkpoint(path, stored: str, layout: str) -> int:
    """Experts of 4 MB in bfloat16. Returns: bytes of the largest tensor of source and drafter."""
    source, _, _ = random_checkpoint(0, path.with_name("small"))
    experts = 128
    source.config["text_config"] |= {"num_experts": experts, "mtp_num_hidden_layers": 1}
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(1, experts).items()
    }
    source.tensors = {
        f"mtp.{name}": encode(value, "BF16" if stored == "fp8" else stored)
        for name, value in lay_out(values, layout).items()
    }
    if stored == "fp8":
        to_fp8(source, lambda name: "_proj" in name, block=48)
    save(source, path)
    return max(len(tensor.data) for tensor in source.tensors.values())


@pytest.mark.parametrize("layout", ["single", "fused"])
@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("BF16", {}),
        ("BF16", {"dtype": "float32"}),
        ("F32", {"dtype": "float16"}),
        ("fp8", {}),
        ("BF16", {"quantize": True}),
        ("BF16", {"quantize": True, "q_mode": "mxfp4"}),
    ],
)
def test_memory(stored, options, layout, tmp_path, reads):
    largest = large_checkpoint(tmp_path / "model", stored, layout)
    dtype = DTYPES[options["dtype"]] if "dtype" in options else None
    unpacked = read_head(Checkpoint.open(tmp_path / "model"), dtype).weights.parameters.values()
    largest = max(largest, *(parameter.nbytes for parameter in unpacked))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(tmp_path / "model", tmp_path / "out", **options)
    peak = max(mx.get_peak_memory(), *reads[1]) - before
    assert peak < 3 * largest


def test_python_holds_the_bytes_of_one_tensor_at_most(tmp_path):
    """Which the test above takes for granted."""
    largest = large_checkpoint(tmp_path / "model", "F32", "fused")
    convert(tmp_path / "model", tmp_path / "first")  # imports and the like
    tracemalloc.start()
    try:
        convert(tmp_path / "model", tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest < peak < largest + 1_000_000


# The parts


def test_a_value_is_made_at_each_look_up():
    made = []

    def make():
        made.append(1)
        return mx.arange(6, dtype=mx.float32).reshape(2, 3)

    weights = Weights(
        {"a": Parameter((2, 3), mx.float32, make), "b": Parameter.of(mx.array([1, 2]))}
    )
    assert (len(weights), list(weights), "a" in weights, "c" in weights) == (
        2,
        ["a", "b"],
        True,
        False,
    )
    parameter = weights.parameters["a"]
    assert (parameter.size, parameter.nbytes, made) == (6, 24, [])
    assert weights["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weights["b"].tolist() == [1, 2]
    assert made == [1]
    assert dict(weights)["a"].shape == (2, 3)
    assert made == [1, 1]


def test_a_value_of_another_shape_than_announced_is_not_written():
    weights = Weights({"a": Parameter((3,), mx.float32, lambda: mx.zeros((4,)))})
    with pytest.raises(AssertionError, match=r"\(4,\)"):
        weights["a"]


def test_what_is_shared_is_kept_until_its_last_use():
    read: list[str] = []
    shared = Shared(lambda name: read.append(name) or name.upper(), ["a", "b", "a"])
    assert [shared(name) for name in "abaa"] == ["A", "B", "A", "A"]
    assert read == ["a", "b", "a"]  # at the third time it is gone


@pytest.mark.parametrize("bad", [65520.0, -7e4, np.inf, -np.inf, np.nan])
def test_what_float16_cannot_hold(bad, tmp_path):
    source = load("qwen3-5")
    name = "mtp.layers.0.mlp.up_proj.weight"
    values = decode(source.tensors[name]).copy()
    values[3, 5] = 65519
    source.tensors[name] = encode(values, "F32")
    convert(save(source, tmp_path / "good"), tmp_path / "out", dtype="float16")
    written = decode(weights_of(tmp_path / "out")["layers.0.mlp.up_proj.weight"])
    assert written[3, 5] == 65504
    assert np.isfinite(written).all()

    values[3, 5] = bad
    source.tensors[name] = encode(values, "F32")
    with pytest.raises(CheckpointError, match=rf"{name} in .* holds .*, and float16 ends at 65504"):
        convert(save(source, tmp_path / "bad"), tmp_path / "out2", dtype="float16")
    assert not (tmp_path / "out2").exists()
    convert(tmp_path / "bad", tmp_path / "out3", dtype="bfloat16")


def test_fp8_that_float16_cannot_hold(tmp_path):
    source = load("qwen3-5")
    to_fp8(source, lambda name: name.startswith("mtp.") and "_proj" in name)
    name = "mtp.layers.0.self_attn.q_proj.weight_scale_inv"
    source.tensors[name] = encode(decode(source.tensors[name]) * 1e7, "F32")
    with pytest.raises(CheckpointError, match=r"q_proj.weight in .* float16 ends at 65504"):
        convert(save(source, tmp_path / "model"), tmp_path / "out", dtype="float16")


def test_cast_leaves_its_own_type_alone():
    value = mx.array([np.inf], mx.float16)
    assert cast(value, mx.float16, "x") is value
    assert cast(mx.zeros((0,)), mx.float16, "x").dtype == mx.float16


# A conversion that is killed


def test_what_a_killed_conversion_leaves_cannot_be_loaded(tmp_path, monkeypatch):
    model = save(load("qwen3-5"), tmp_path / "Model")
    weights = read_head(Checkpoint.open(model)).weights.parameters
    leftovers = []

    def killed(path, **_):
        leftovers.append(path)

    monkeypatch.setattr("mlx_spec.convert.write.shutil.rmtree", killed)
    for after in (0, 1, len(weights) - 1):
        steps = iter(range(-4, len(weights)))  # the fingerprint's four norms are read first

        def read(self, name, begin, end, steps=steps, after=after, real=Folder.read):
            if name.endswith(".safetensors") and begin > 8 and next(steps) == after:
                raise KeyboardInterrupt
            return real(self, name, begin, end)

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "read", read)
            patch.setattr("mlx_spec.convert.write.os.getpid", lambda after=after: after)
            with pytest.raises(KeyboardInterrupt):
                convert(model, tmp_path / "Model-MTP")
    directories = sorted(path for path in leftovers if path.exists())
    assert [path.name for path in directories] == [
        ".Model-MTP.0.new",
        ".Model-MTP.1.new",
        f".Model-MTP.{len(weights) - 1}.new",
    ]
    for path in directories:
        with pytest.raises(CheckpointError):
            Checkpoint.open(path)
    assert not (tmp_path / "Model-MTP").exists()


def test_a_hidden_directory_is_no_drafter_beside_a_model(tmp_path):
    """Such as a conversion that was killed at its very end."""
    source = load("qwen3-5")
    convert(save(source, tmp_path / "Whole"), tmp_path / ".Model-MTP.1.new")
    source.tensors = {n: s for n, s in source.tensors.items() if not n.startswith("mtp.")}
    model = save(source, tmp_path / "Model")
    assert find_drafter(model).path is None
    (tmp_path / ".Model-MTP.1.new").rename(tmp_path / "Model-MTP")
    assert find_drafter(model).path == tmp_path / "Model-MTP"
