"""`mlx-spec bench` and `mlx-spec verify` from the command line."""

import json

import pytest
from click.testing import CliRunner

from mlx_spec import depth_cache, knowledge
from mlx_spec.bench import command, plots
from mlx_spec.bench.prompts import Prompt
from mlx_spec.cli import cli
from mlx_spec.load import load, pairing_of
from models import checkpoint_path

MODEL = str(checkpoint_path("qwen3-5-trained"))
QUICK = ["--model", MODEL, "--repeats", "1", "--max-tokens", "8"]


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def assert_one_sentence(result, exit_code, words):
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_bench_prints_a_table_and_writes_files(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "read_class", lambda name: Prompt(name, f"Some {name}.", False))
    out = tmp_path / "result.json"
    result = run(
        "bench", *QUICK, "--prompt-class", "code", "--prompt-class", "json", "--depth", "2",
        "--depth", "auto", "--json", out, "--html", tmp_path / "page.html", "--png", tmp_path / "p",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["prompt_class"], row["depth"]) for row in rows] == [
        (name, depth) for name in ("code", "json") for depth in ("stock", 2, "auto")
    ]
    assert all(row["identical"] for row in rows if row["depth"] != "stock")
    assert MODEL in result.stdout.splitlines()[0]
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == [
        "acceptance.png",
        "cost.png",
        "speed.png",
    ]
    assert (tmp_path / "page.html").read_text().count("data:image/png;base64,") == 3
    assert not list(tmp_path.glob("*.new"))


def test_a_prompt_file_in_markdown(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("Why?")
    result = run("bench", *QUICK, "--prompt-file", path, "--depth", 1, "--markdown")
    assert result.exit_code == 0
    lines = [line.split("|")[1:3] for line in result.stdout.splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line] for line in lines[2:]] == [
        ["question.txt", "stock"],
        ["question.txt", "1"],
    ]


def test_calibrate_leaves_what_rounds_cost_to_auto(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(knowledge, "_known", type(knowledge._known)())
    monkeypatch.setattr(command, "CALIBRATION_CLASSES", ("code",))
    monkeypatch.setattr(command, "read_class", lambda name: Prompt(name, "def f(x):", False))
    result = run("bench", *QUICK, "--prompt-class", "code", "--depth", "1", "--calibrate")
    assert result.exit_code == 0
    model, _ = load(MODEL)
    head = pairing_of(model).drafter.head
    known = depth_cache.read(depth_cache.fingerprint(model, head))
    assert known.costs.depths == list(range(9))


@pytest.mark.parametrize(
    ("options", "exit_code", "words"),
    [
        (["--depth", "many"], 2, "num_draft_tokens is 'many'; give 0 or more, or 'auto'"),
        (["--depth", "0"], 2, "Depths are numbers from 1 on, or 'auto'"),
        (["--prompt-class", "code", "--prompt-file", "x"], 2, "not both"),
        (["--prompt-file", "nowhere.txt"], 2, "prompt file nowhere.txt cannot be read"),
        (["--json", "nowhere/result.json"], 2, "folder of nowhere/result.json does not exist"),
        (["--draft-model", "none"], 2, "There is nothing to measure"),
        (["--against", "http://127.0.0.1:1"], 2, "--against-quantization"),
        (["--repeats", "0"], 2, "1 repeat"),
    ],
)
def test_what_cannot_be_measured(options, exit_code, words):
    assert_one_sentence(run("bench", "--model", MODEL, *options), exit_code, words)


def test_pictures_without_matplotlib_fail_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    monkeypatch.setattr(command, "load", None)
    with pytest.raises(plots.NotDrawn):
        plots.require_matplotlib()
    result = run("bench", "--model", MODEL, "--png", tmp_path / "p")
    assert_one_sentence(result, 1, "pip install 'mlx-spec[plot]'")


def test_verify(monkeypatch):
    monkeypatch.setattr(command, "read_class", lambda name: Prompt(name, "def f(x):", False))
    result = run("verify", "--model", MODEL, "--prompt-class", "code", "--max-tokens", 20)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "identical"
    result = run(
        "verify", "--model", MODEL, "--prompt-class", "code", "--max-tokens", 20, "--temp", 0.8,
        "--depth", 3, "--json",
    )  # fmt: skip
    verdict = json.loads(result.stdout)
    assert (verdict["law"], verdict["verdict"], result.exit_code) == ("seed", "identical", 0)
    assert verdict["runs"][0]["drafted"] > 0


def test_the_kind_of_drafts(tmp_path):
    path, out = tmp_path / "list.txt", tmp_path / "result.json"
    path.write_text("one two three " * 4)
    options = ["--draft-kind", "lookup", "--prompt-file", path, "--depth", 2]
    assert run("bench", *QUICK, *options, "--json", out).exit_code == 0
    assert json.loads(out.read_text())["setting"]["drafter_kind"] == "lookup"
    result = run("verify", "--model", MODEL, *options, "--max-tokens", 8, "--draft-model", "none")
    assert (result.exit_code, result.stdout.split()[-1]) == (3, "no-match")
    assert_one_sentence(
        run("bench", *QUICK, *options, "--calibrate"),
        2,
        "lookup drafts only where the text repeats",
    )


def test_verify_where_nothing_can_be_drafted():
    result = run("verify", "--model", MODEL, "--draft-model", "none")
    assert result.exit_code == 3
    assert "There is nothing to verify" in result.stderr
    result = run("verify", "--model", MODEL, "--depth", "0")
    assert_one_sentence(result, 2, "from 1 on, or 'auto'")
