"""scripts/bench_decode.py and scripts/cost_padding.py: their values, never a wall time."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_decode
from bench_decode import Run, Runs
from cost_padding import parameter_count, widen_mlps

from mlx_spec.demo import demo_model
from mlx_spec.load import pairing_of
from mlx_spec.stats import SpecStats

WIDTH = 1024
PRELOAD = "/usr/lib/libopenblas.so.0"


DEMOS = pytest.mark.parametrize("family", ["qwen3.5", "gemma4"])


def load(width: int, family: str = "qwen3.5"):
    return bench_decode.load(str(demo_model(family)), width, "float32")


def greedy(model, tokenizer, prompt: list[int], length: int) -> list[int]:
    run = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=length)
    return [response.token for response in run]


@DEMOS
def test_widened_mlps_compute_the_same_function(family):
    model, tokenizer = load(0, family)
    padded, _ = load(WIDTH, family)
    prompt = tokenizer.encode(bench_decode.PROMPTS[0])
    logits, padded_logits = (np.array(m(mx.array([prompt]))) for m in (model, padded))
    np.testing.assert_allclose(padded_logits, logits, rtol=0, atol=1e-5)
    assert greedy(padded, tokenizer, prompt, 32) == greedy(model, tokenizer, prompt, 32)


@DEMOS
def test_widened_mlps_have_the_parameters_of_their_width_and_the_head_keeps_its_own(family):
    model, _ = load(0, family)
    head = pairing_of(model).drafter.head
    before, head_before = parameter_count(model), parameter_count(head)
    mlps = [layer.mlp for layer in model.layers]
    rows, columns = mlps[0].gate_proj.weight.shape
    widths = [mlp.gate_proj.weight.shape[0] for mlp in mlps]  # Gemma's shared layers are wider
    added = widen_mlps(model.layers, WIDTH)
    assert added == sum(3 * columns * (WIDTH - width) for width in widths)
    assert parameter_count(model) == before + added
    assert parameter_count(head) == head_before
    assert {mlp.gate_proj.weight.shape for mlp in mlps} == {(WIDTH, columns)}
    assert {mlp.down_proj.weight.shape for mlp in mlps} == {(columns, WIDTH)}
    assert float(mx.abs(mlps[0].gate_proj.weight[rows:]).min()) > 0  # real work, not zeros


def test_an_mlp_is_not_narrowed():
    model, _ = load(0)
    with pytest.raises(ValueError, match="384 wide already; 128 would be narrower"):
        widen_mlps(model.layers, 128)


def test_ideal_ratio_and_overhead():
    ideal = bench_decode.ideal_ratio(tokens_per_round=2.5, token_s=0.040, round_s=0.050)
    assert ideal == pytest.approx(2.0)
    assert bench_decode.overhead(measured_ratio=1.9, ideal=ideal) == pytest.approx(0.05)
    assert bench_decode.overhead(measured_ratio=2.0, ideal=ideal) == pytest.approx(0.0)


def test_runs_take_the_median_of_each_step_over_repeats():
    runs = Runs()
    for seconds in ([1.0, 0.1], [9.0, 0.3], [2.0, 7.0]):
        stats = SpecStats()
        stats.add_round(3, 1)
        runs.add("a", Run([1, 2], seconds, stats))
    other = SpecStats()
    other.add_round(3, 3)
    other.add_round(1, 0)
    runs.add("b", Run([1, 2, 3, 4, 5, 6], [1.0] * 6, other))
    assert runs.token_s == pytest.approx((2.0 + 0.3 + 6.0) / 8)
    assert runs.texts == [[1, 2], [1, 2, 3, 4, 5, 6]]
    assert (runs.stats.rounds, runs.stats.drafted, runs.stats.accepted) == (3, 7, 4)


def test_a_row_compares_the_loop_with_its_parts():
    stock, spec = Runs(), Runs()
    one_row, timings = bench_decode.Timings(), bench_decode.Timings()
    stock.add("a", Run([1] * 10, [0.1] * 10, None))
    stats = SpecStats()
    for accepted in (1, 1, 1, 1, 0, 1):
        stats.add_round(1, accepted)
    spec.add("a", Run([1] * 10, [0.08] * 10, stats))
    one_row.repeats = [{("forward", 1): [0.10]}]
    for forward in ([0.10, 0.11], [0.5, 0.11], [0.12, 0.12]):  # medians: 0.12, 0.11
        parts = {("forward", 2): forward, ("commit", 1): [0.0, 0.002], ("draft", 1): [0.009]}
        timings.repeats.append(parts)
    row = bench_decode.make_row(1, stock, spec, one_row, timings, None)
    assert row.ratio == pytest.approx(1.25)
    assert row.tokens_per_round == pytest.approx(11 / 6)
    assert row.ideal == pytest.approx(11 / 6 * 0.1 / (0.115 + 0.001 + 0.009))
    assert row.overhead == pytest.approx(1 - 1.25 / row.ideal)
    assert row.identical
    assert f"{row.overhead:.1%}" in bench_decode.table([row])


@DEMOS
def test_parts_are_timed_in_every_round(family):
    model, tokenizer = load(0, family)
    timings = bench_decode.Timings()
    timings.new_repeat()
    prompt = tokenizer.encode(bench_decode.PROMPTS[0])
    bench_decode.time_parts(model, prompt, 2, 8, timings)
    samples = timings.repeats[0]
    rounds = len(samples["draft", 2])
    assert rounds >= 2
    assert len(samples["commit", 2]) == len(samples["forward", 3]) == rounds


def test_starts_again_with_openblas_where_it_is_installed_and_not_in_use():
    library = Path(PRELOAD)
    environment = {"HOME": "/root", "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "1"}
    assert bench_decode.environment_with_openblas("linux", environment, library) == {
        "HOME": "/root",
        "LD_PRELOAD": PRELOAD,
        "OPENBLAS_NUM_THREADS": "1",
    }
    other = bench_decode.environment_with_openblas("linux", {"LD_PRELOAD": "/a.so"}, library)
    assert other is not None
    assert other["LD_PRELOAD"] == f"{PRELOAD}:/a.so"


@pytest.mark.parametrize(
    ("system", "environment", "library"),
    [
        ("darwin", {}, Path(PRELOAD)),
        ("linux", {}, None),
        ("linux", {"LD_PRELOAD": PRELOAD}, Path(PRELOAD)),
    ],
)
def test_goes_on_as_it_is_otherwise(system, environment, library):
    assert bench_decode.environment_with_openblas(system, environment, library) is None
