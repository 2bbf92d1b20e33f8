"""Quantised drafters: every mode and number of bits, decoded without mlx."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from checkpoints import (
    config_of,
    decode,
    expected,
    fp8_table,
    load,
    reference,
    rounded,
    weights_of,
)
from mlx_lm.utils import load_model, load_tokenizer
from reference_files import REFERENCE

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.convert import quantize
from mlx_spec.convert.head import Head, Provenance
from mlx_spec.convert.quantize import BITS, quantize_head
from mlx_spec.convert.weights import Parameter, Weights
from mlx_spec.errors import SpecError
from mlx_spec.inspection import inspect_path
from mlx_spec.load import load_drafter
from mlx_spec.targets import target_for

MOE, ASSISTANT = "qwen3-6-moe-trained", "gemma4-e2b-trained-assistant"
MODES = {"mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
FINER = {
    MOE: {"fc", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"},
    ASSISTANT: {"pre_projection", "masked_embedding.centroids"},
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # OCP Microscaling formats, table 5
E2M1 = np.concatenate([E2M1, -E2M1])


def codes(packed, bits: int) -> np.ndarray:
    """Rows of numbers that follow each other bit by bit, the lowest bit first."""
    rows = np.frombuffer(packed.data, np.uint8).reshape(-1, packed.shape[-1] * 4)
    stream = np.unpackbits(rows, axis=-1, bitorder="little").reshape(len(rows), -1, bits)
    return stream @ (1 << np.arange(bits))


def unpack_affine(weights, path: str, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups of values, and the step of each group."""
    scale, bias = (decode(weights[f"{path}.{name}"]) for name in ("scales", "biases"))
    groups = codes(weights[f"{path}.weight"], bits).reshape(scale.size, -1)
    return groups * scale.reshape(-1, 1) + bias.reshape(-1, 1), np.abs(scale.reshape(-1, 1))


def unpack(weights, path: str, mode: str) -> np.ndarray:
    """Groups of values; mxfp4, mxfp8: OCP Microscaling formats; nvfp4: scales in E4M3."""
    stored = np.frombuffer(weights[f"{path}.scales"].data, np.uint8)
    scale = fp8_table()[stored] if mode == "nvfp4" else 2.0 ** (stored.astype(np.float32) - 127)
    group_size, bits = MODES[mode]
    values = (E2M1 if bits == 4 else fp8_table())[codes(weights[f"{path}.weight"], bits)]
    return values.reshape(-1, group_size) * scale.reshape(-1, 1)


def matrices(name: str) -> dict[str, np.ndarray]:
    """Of a reference checkpoint's drafter."""
    assistant = name == ASSISTANT
    values = (
        {key: decode(stored) for key, stored in load(name).tensors.items()}
        if assistant
        else expected(load(name))
    )
    return {key.removesuffix(".weight"): v for key, v in values.items() if v.ndim > 1}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_affine(bits, group_size, tmp_path):
    convert(
        reference("qwen3-5"), tmp_path / "out", quantize=True, q_bits=bits, q_group_size=group_size
    )
    block = config_of(tmp_path / "out")["quantization"]
    finer = {"fc": {"group_size": group_size, "bits": 8, "mode": "affine"}} if bits < 8 else {}
    assert block == {"group_size": group_size, "bits": bits, "mode": "affine"} | finer
    weights = weights_of(tmp_path / "out")
    for path, values in matrices("qwen3-5").items():
        if values.shape[-1] % group_size:
            assert weights[f"{path}.weight"].dtype == "BF16"
            continue
        unpacked, step = unpack_affine(weights, path, 8 if path in finer else bits)
        groups = values.reshape(-1, group_size)
        # a step, as mlx moves the grid to hit zero, and the rounding of scale and bias to bfloat16
        bound = step + 0.01 * np.abs(groups).max(-1, keepdims=True)
        assert (np.abs(unpacked - groups) <= bound).all(), path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [MOE, ASSISTANT])
def test_modes(mode, name, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "STEP", 1000)  # a few rows at a time
    report = convert(reference(name), tmp_path / "out", quantize=True, q_mode=mode)
    group_size, bits = MODES[mode]
    config = config_of(tmp_path / "out")
    assert report.quantization == config["quantization"] == config["quantization_config"]
    finer = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert config["quantization"] == {"group_size": group_size, "bits": bits, "mode": mode} | {
        path: finer for path in FINER[name]
    }
    weights = weights_of(tmp_path / "out")
    for path, values in matrices(name).items():
        if path in FINER[name]:
            unpacked, step = unpack_affine(weights, path, 8)
            groups = values.reshape(-1, 64)
            bound = step + 0.01 * np.abs(groups).max(-1, keepdims=True)
        else:
            assert weights[f"{path}.scales"].dtype == "U8"
            assert f"{path}.biases" not in weights
            unpacked, groups = unpack(weights, path, mode), values.reshape(-1, group_size)
            # Half the widest gap, of 4 to 6 in E2M1 and of 416 to 448 in E4M3, or what is cut
            # off above the largest number, and the rounding of the scale (E8M0: to a power of 2).
            largest = np.abs(groups).max(-1, keepdims=True)
            bound = largest * (0.26 if bits == 4 else 0.13)
        assert (np.abs(unpacked - groups) <= bound).all(), path
    for key, stored in weights.items():
        if stored.dtype in ("BF16", "I64") and "scales" not in key and "biases" not in key:
            assert stored.shape == (load(name).tensors.get(key) or stored).shape

    convert(tmp_path / "out", tmp_path / "again")
    assert weights_of(tmp_path / "again") == weights
    assert config_of(tmp_path / "again")["quantization"] == config["quantization"]


@cache
def trained(name: str):
    """A model in float32, its tokenizer without end tokens, a prompt, and stock mlx-lm's text."""
    model_name = name.removesuffix("-assistant")
    model, _ = load_model(reference(model_name))
    model.set_dtype(mx.float32)
    tokenizer = load_tokenizer(reference(model_name))
    tokenizer.eos_token_ids = []
    dump = np.load(REFERENCE / "dumps" / f"{model_name}_generate.npz")
    prompt = dump["prompt"].reshape(-1).tolist()
    stock = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)
    return model, tokenizer, prompt, [response.token for response in stock]


def acceptance(name: str, path) -> float:
    """Of the drafter in `path`, whose text is stock's."""
    model, tokenizer, prompt, tokens = trained(name)
    responses = list(
        mlx_spec.stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=24,
            draft_model=load_drafter(path, target_for(model)),
            num_draft_tokens=2,
        )
    )
    assert [response.token for response in responses] == tokens
    return responses[-1].spec.acceptance


@cache
def acceptance_of_the_reference(name: str) -> float:
    return acceptance(name, reference(name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [MOE, ASSISTANT])
def test_quantised_drafters_draft(mode, name, tmp_path):
    convert(reference(name), tmp_path / "out", quantize=True, q_mode=mode)
    drafter = load_drafter(tmp_path / "out", target_for(trained(name)[0]))
    modes = {layer.mode for _, layer in drafter.head.named_modules() if hasattr(layer, "scales")}
    assert modes == {mode, "affine"}
    plain = acceptance_of_the_reference(name)
    assert acceptance(name, tmp_path / "out") > 0.5 * plain > 0.1


def test_float16(tmp_path):
    """Nothing of bfloat16 is left, scales included."""
    convert(reference("qwen3-6-moe"), tmp_path / "out", quantize=True, dtype="float16")
    weights = weights_of(tmp_path / "out")
    assert {stored.dtype for stored in weights.values()} == {"F16", "U32"}
    for path, values in matrices("qwen3-6-moe").items():
        unpacked, step = unpack_affine(weights, path, 8)
        groups = rounded(values, "F16").reshape(-1, 64)
        assert (np.abs(unpacked - groups) <= 1.5 * step).all(), path


@pytest.mark.parametrize(
    ("options", "kind", "advised"),
    [
        ({}, "8 bits", False),
        ({"q_bits": 6}, "6 bits", True),
        ({"q_mode": "mxfp8"}, "mxfp8", False),
        ({"q_mode": "nvfp4"}, "nvfp4", True),
    ],
)
def test_fewer_than_eight_bits_are_to_be_probed(options, kind, advised, tmp_path):
    report = convert(reference("qwen3-5"), tmp_path / "out", quantize=True, **options)
    first, *others = report.as_text().splitlines()
    assert first.endswith(f"parameters, {kind}")
    assert ["--probe" in line for line in others] == [False] + [True] * advised
    assert kind in inspect_path(str(tmp_path / "out")).as_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_mode": "mxfp4"}, "without asking for it"),
        ({"quantize": True, "q_mode": "int4"}, "mode 'int4' is not one of affine, mxfp4"),
        ({"quantize": True, "q_mode": "mxfp4", "q_bits": 8}, "mxfp4 always has 4 bits .* of 32"),
        ({"quantize": True, "q_mode": "nvfp4", "q_group_size": 32}, "nvfp4 .* in groups of 16"),
        ({"quantize": True, "q_bits": 1}, "1 bits in groups of 64 are not supported"),
    ],
)
def test_options_that_do_not_fit(options, words, tmp_path):
    with pytest.raises(SpecError, match=words):
        convert(reference("qwen3-5"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


class Odd(nn.Module):
    """Matrices of 48 and 96 columns; those called `finer` want eight bits."""

    def __init__(self):
        super().__init__()
        for name, columns in (("a", 48), ("finer48", 48), ("finer96", 96), ("c", 40)):
            self[name] = nn.Linear(columns, 8, bias=False)

    quant_predicate = staticmethod(lambda path, _: {"bits": 8} if "finer" in path else True)


def odd_head(dtype=mx.bfloat16) -> Head:
    parameters = {
        f"{name}.weight": Parameter.of(mx.random.normal(layer.weight.shape, dtype))
        for name, layer in Odd().children().items()
    }
    return Head(
        {"model_type": "odd"}, Weights(parameters), Provenance("odd", None, Path("odd"), (), (), ())
    )


def test_what_is_to_be_finer_and_cannot_be_packed_in_eight_bits_is_left_alone():
    head = quantize_head(odd_head(), Odd(), mode="nvfp4")
    assert head.config["quantization"] == {
        "group_size": 16,
        "bits": 4,
        "mode": "nvfp4",
        "finer96": {"group_size": 32, "bits": 8, "mode": "affine"},
    }
    dtypes = {name: parameter.dtype for name, parameter in head.weights.parameters.items()}
    assert dtypes == {
        "a.weight": mx.uint32,
        "a.scales": mx.uint8,
        "finer48.weight": mx.bfloat16,
        "finer96.weight": mx.uint32,
        "finer96.scales": mx.bfloat16,
        "finer96.biases": mx.bfloat16,
        "c.weight": mx.bfloat16,
    }
    with pytest.raises(SpecError, match="no matrix of odd divides into groups of 64"):
        quantize_head(odd_head(), Odd())


def test_the_generator_is_left_alone_and_a_matrix_is_made_once():
    head = odd_head()
    made = []

    def counted(name, parameter):
        return replace(parameter, make=lambda: made.append(name) or parameter.make())

    parameters = {name: counted(name, p) for name, p in head.weights.parameters.items()}
    module = Odd()
    mx.random.seed(7)
    state = mx.random.state[0].tolist()
    packed = quantize_head(replace(head, weights=Weights(parameters)), module, mode="mxfp4")
    assert mx.random.state[0].tolist() == state
    assert made == []
    values = dict(packed.weights)
    assert sorted(made) == sorted(parameters)
    stock = mx.quantize(head.weights["finer96.weight"], 32, 8)
    for name, value in zip(("weight", "scales", "biases"), stock, strict=True):
        assert mx.array_equal(values[f"finer96.{name}"], value)
