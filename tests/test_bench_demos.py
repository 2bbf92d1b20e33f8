"""scripts/bench_demos.py and scripts/cost_padding.py: their values, never a wall time."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_demos
from cost_padding import parameter_count, widen_mlps

import mlx_spec
from mlx_spec.load import pairing_of

WIDTH = 1024
PRELOAD = "/usr/lib/libopenblas.so.0"
PROMPT = "import os\n\n\ndef read_lines(path):\n"

DEMOS = pytest.mark.parametrize("family", ["qwen3.5", "gemma4"])


def greedy(model, tokenizer, prompt: list[int], length: int) -> list[int]:
    run = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=length)
    return [response.token for response in run]


@DEMOS
def test_widened_mlps_compute_the_same_function(family):
    model, tokenizer = bench_demos.load(family, 0)
    padded, _ = bench_demos.load(family, WIDTH)
    prompt = tokenizer.encode(PROMPT)
    logits, padded_logits = (np.array(m(mx.array([prompt]))) for m in (model, padded))
    np.testing.assert_allclose(padded_logits, logits, rtol=0, atol=1e-5)
    assert greedy(padded, tokenizer, prompt, 32) == greedy(model, tokenizer, prompt, 32)


@DEMOS
def test_widened_mlps_have_the_parameters_of_their_width_and_the_head_keeps_its_own(family):
    model, _ = bench_demos.load(family, 0)
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
    with pytest.raises(SystemExit, match="--mlp-width 128: The MLPs are 384 wide already"):
        bench_demos.load("qwen3.5", 128)


@DEMOS
def test_a_random_drafter_is_asked_for_as_much_and_leaves_the_text_alone(family, monkeypatch):
    model, tokenizer = bench_demos.load(family, 0, random_drafter=True)
    drafter = pairing_of(model).drafter
    prompt = tokenizer.encode(PROMPT)
    asked = []
    original = drafter.inner.draft

    def noted(tokens, hidden, n, *rest):
        drafts = original(tokens, hidden, n, *rest)
        mx.eval(drafts)
        asked.extend(int(draft.item()) for draft in drafts)
        return drafts

    monkeypatch.setattr(drafter.inner, "draft", noted)
    run = mlx_spec.stream_generate(model, tokenizer, prompt, max_tokens=24, num_draft_tokens=2)
    responses = list(run)
    spec = responses[-1].spec
    assert [r.token for r in responses] == greedy(model, tokenizer, prompt, 24)
    assert (spec.kind, spec.accepted) == ("random", 0)
    assert spec.drafted == sum(spec.drafted_by_position) >= 40
    assert len(asked) >= spec.drafted  # a round that was launched and undone is not counted
    assert max(asked) < tokenizer.vocab_size
    assert len(set(asked)) > 0.8 * len(asked)


def test_results_and_tables_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_demos, "use_openblas", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # put back at the end
    out = tmp_path / "two"
    arguments = [
        "--depths",
        "1",
        "auto",
        "--classes",
        "code",
        "--mlp-width",
        "0",
        "--max-tokens",
        "4",
        "--repeats",
        "1",
    ]
    monkeypatch.setattr(
        sys, "argv", ["bench_demos.py", *arguments, "--max-prompt-tokens", "8", "--out", str(out)]
    )
    bench_demos.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "two-gemma4",
        "two-qwen3.5",
        "two.json",
        "two.md",
    ]
    results = json.loads(out.with_suffix(".json").read_text())
    assert [result["setting"]["drafter"] for result in results] == [
        "tiny-qwen3.5-nextn",
        "tiny-gemma4-assistant",
    ]
    for result in results:
        assert [
            (row["prompt_class"], row["depth"], row["prompt_tokens"]) for row in result["rows"]
        ] == [
            ("code", "stock", 8),
            ("code", 1, 8),
            ("code", "auto", 8),
        ]
    tables = out.with_suffix(".md").read_text()
    assert tables.count("| overhead |") == 2
    assert [line.split("|")[2].strip() for line in tables.splitlines()[2:4]] == ["code", "code"]
    assert (tmp_path / "two-qwen3.5" / "speed.png").stat().st_size > 1000
    assert capsys.readouterr().out == tables + "\n"


def test_by_default_both_families_are_measured_with_all_classes():
    options = bench_demos.parse([])
    assert options.families == ["qwen3.5", "gemma4"]
    assert options.classes == list(bench_demos.CLASSES)
    assert (options.repeats, options.random_drafter) == (5, False)
    assert options.out == Path(bench_demos.__file__).parent.parent / "docs" / "bench-demos"


def test_starts_again_with_openblas_where_it_is_installed_and_not_in_use():
    library = Path(PRELOAD)
    environment = {"HOME": "/root", "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "1"}
    assert bench_demos.environment_with_openblas("linux", environment, library) == {
        "HOME": "/root",
        "LD_PRELOAD": PRELOAD,
        "OPENBLAS_NUM_THREADS": "1",
    }
    other = bench_demos.environment_with_openblas("linux", {"LD_PRELOAD": "/a.so"}, library)
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
    assert bench_demos.environment_with_openblas(system, environment, library) is None
