"""Probing: heads that are broken on purpose, and what is said of them."""

import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import NORMS, Source, config_of, decode, encode, read_file, save
from click.testing import CliRunner
from mlx_lm.utils import load_model

from mlx_spec.bench.prompts import encode as encode_prompt
from mlx_spec.bench.prompts import read_class
from mlx_spec.cli import cli
from mlx_spec.convert.quantize import quantize_head
from mlx_spec.drafters import Drafter
from mlx_spec.errors import BadArguments, Incompatible, NotEngaged, SpecError
from mlx_spec.families import mistakes_of
from mlx_spec.load import build_head, load_drafter, read_drafter
from mlx_spec.mistakes import Mistake
from mlx_spec.probe import Cause, Probe, Trial, parse_bits, precisions, probe
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from models import DEMO, GEMMA_DEMO, Pair, checkpoint_path, drafter_path, pair

QWEN, GEMMA = "qwen3-5-trained", "gemma4-dense-trained"


def short_prompts(p: Pair) -> list[list[int]]:
    """What the model can go on with, so that a sound drafter is often right."""
    if p.path in (checkpoint_path(DEMO), checkpoint_path(GEMMA_DEMO)):
        return [encode_prompt(read_class("code"), p.tokenizer, 40)]
    return [p.prompt]


def probed(p: Pair, drafter: Drafter, max_tokens: int = 20) -> Probe:
    return probe(p.model, p.tokenizer, drafter, prompts=short_prompts(p), max_tokens=max_tokens)


@cache
def sound(name: str) -> Probe:
    return probed(pair(name), pair(name).drafter)


def source_of(path: Path) -> Source:
    return Source(config_of(path), read_file(path / "model.safetensors"), path=path)


def drafter_bytes(path: Path) -> int:
    """Of the head's tensors."""
    return sum(len(stored.data) for stored in source_of(path).head().values())


def change(source: Source, name: str, values) -> None:
    """`values`: from the old ones to the new ones, of one tensor."""
    source.tensors[name] = encode(values(decode(source.tensors[name])), "BF16")


def add_to_qwen_norms(by: float):
    def breaking(source: Source) -> None:
        source.map(lambda name: name.removeprefix("mtp.") in NORMS, lambda w: w + by)

    return breaking


def add_to_gemma_norms(by: float):
    return lambda source: source.map(lambda name: "norm" in name, lambda w: w + by)


def swap_halves(name: str):
    return lambda source: change(source, name, lambda w: np.roll(w, w.shape[1] // 2, axis=1))


def scale_embeddings(power: float):
    """By a power of the factor that Gemma scales them with."""

    def breaking(source: Source) -> None:
        width = source.config["backbone_hidden_size"]
        scale = np.where(np.arange(2 * width) < width, width ** (power / 2), 1)
        change(source, "pre_projection.weight", lambda w: w * scale)

    return breaking


LACK, TOO_MUCH = "its norms lack the one that is to be added", "its norms have one too much"
FC = "its fc takes the hidden state first and the embedding second"
PROJECTION = "its pre_projection takes the hidden state first and the embedding second"
NOT_SCALED = "its pre_projection takes embeddings that are not scaled"
SCALED_TWICE = "its pre_projection takes embeddings that are scaled twice"
BREAKS = {
    (QWEN, LACK): add_to_qwen_norms(-1),
    (QWEN, FC): swap_halves("mtp.fc.weight"),
    (DEMO, TOO_MUCH): add_to_qwen_norms(1),
    (GEMMA_DEMO, LACK): add_to_gemma_norms(-1),
    (GEMMA_DEMO, TOO_MUCH): add_to_gemma_norms(1),
    (GEMMA_DEMO, PROJECTION): swap_halves("pre_projection.weight"),
    (GEMMA_DEMO, NOT_SCALED): scale_embeddings(1),
    (GEMMA_DEMO, SCALED_TWICE): scale_embeddings(-1),
}


def broken(name: str, fault: str, out: Path) -> Drafter:
    source = source_of(drafter_path(name))
    BREAKS[name, fault](source)
    return load_drafter(save(source, out), pair(name).target)


@pytest.mark.parametrize(
    ("name", "fault", "kind", "max_tokens"),
    [
        (QWEN, LACK, "norms", 20),
        (QWEN, FC, "concat order", 20),
        (DEMO, TOO_MUCH, "norms", 32),
        (GEMMA_DEMO, PROJECTION, "concat order", 16),
    ],
)
def test_a_drafter_that_is_broken_on_purpose(name, fault, kind, max_tokens, tmp_path):
    """Of all the mistakes that are tried, the one that was made comes first."""
    result = probed(pair(name), broken(name, fault, tmp_path / "broken"), max_tokens)
    assert result.verdict != "works"
    assert result.causes[0].mistake.fault == fault
    assert result.cause == kind
    assert result.explanation.startswith(f"likely {fault} ({kind}; with that undone ")


@pytest.mark.parametrize(("name", "fault"), BREAKS)
def test_an_undone_mistake(name, fault, tmp_path):
    """The drafter is right as often as the sound one, up to the rounding of bfloat16."""
    p = pair(name)
    drafter = broken(name, fault, tmp_path / "broken")
    (mistake,) = (m for m in mistakes_of(drafter) if m.fault == fault)
    with mistake.undone(drafter, p.target):
        undone = probed(p, drafter).trial
    assert undone.first == pytest.approx(sound(name).trial.first, abs=0.1)
    assert undone.tokens_per_round == pytest.approx(sound(name).trial.tokens_per_round, abs=0.3)


def test_a_head_for_hidden_states_before_the_norm(tmp_path):
    """In a model with a strong final norm: its weights times s, the output matrix over s. The
    norm of the head has the model's former one in it, as that is missing from its input."""
    source = source_of(checkpoint_path(QWEN))
    norm = "model.language_model.norm.weight"
    g = 1 + decode(source.tensors[norm])
    s = 2.0 ** np.random.default_rng(0).integers(-3, 4, g.shape).astype(np.float32)
    change(source, norm, lambda w: (1 + w) * s - 1)
    change(source, "lm_head.weight", lambda w: w / s)
    change(source, "mtp.pre_fc_norm_hidden.weight", lambda w: (1 + w) * g - 1)
    path = save(source, tmp_path / "broken")
    model, _ = load_model(path)
    tokenizer, prompt = pair(QWEN).tokenizer, pair(QWEN).prompt
    drafter = load_drafter(path, target_for(model))
    result = probe(model, tokenizer, drafter, prompts=[prompt], max_tokens=24)
    assert result.verdict == "does not work"
    assert result.cause == "hidden variant"
    assert "before the final norm (hidden variant; with that undone 0." in result.explanation


def test_the_other_query_position(tmp_path):
    """Contested, and mild: undone, it is the drafter of the released configuration."""
    source = source_of(drafter_path(GEMMA))
    source.config["mlx_spec"] = {"query_position": "P-1"}
    p = pair(GEMMA)
    other = load_drafter(save(source, tmp_path / "other"), p.target)
    assert probed(p, other).trial.stats != sound(GEMMA).trial.stats
    (mistake,) = (m for m in mistakes_of(other) if m.kind == "query position")
    with mistake.undone(other, p.target):
        assert probed(p, other).trial.stats == sound(GEMMA).trial.stats


@pytest.mark.parametrize(
    ("name", "other", "tried"),
    [
        (QWEN, "qwen3-5", "norms, concat order, hidden variant"),
        (GEMMA, "gemma4-dense", "norms, concat order, query position, embedding scale"),
    ],
)
def test_the_head_of_another_model(name, other, tried):
    p = pair(name)
    result = probed(p, load_drafter(drafter_path(other), p.target))
    assert (result.verdict, result.cause) == ("does not work", "wrong target")
    assert not any(cause.helps for cause in result.causes)
    assert {cause.mistake.kind for cause in result.causes} == set(tried.split(", "))
    with pytest.raises(Incompatible, match="likely a wrong target"):
        result.check()


@pytest.mark.parametrize("name", [DEMO, GEMMA_DEMO])
def test_a_sound_drafter(name):
    """It works, and what is tried leaves nothing behind."""
    p = pair(name)
    first = sound(name)
    assert (first.verdict, first.causes, first.cause) == ("works", (), None)
    first.check()
    for mistake in mistakes_of(p.drafter):
        with mistake.undone(p.drafter, p.target):
            pass
    assert probed(p, p.drafter).trial.stats == first.trial.stats


# the verdict


def trial(form: str, *accepted: int, offered: int = 20) -> Trial:
    """By position, each of `offered` rounds with as many drafts."""
    stats = SpecStats()
    for round_number in range(offered):
        stats.add_round(len(accepted), sum(round_number < count for count in accepted))
    return Trial(form, stats)


@pytest.mark.parametrize(
    ("first", "verdict"), [(10, "works"), (9, "weak"), (6, "weak"), (5, "does not work")]
)
def test_verdicts(first, verdict):
    result = Probe(trial("as it is", first, first), causes=(cause("norms", 3, helps=False),))
    assert result.verdict == verdict
    if verdict == "does not work":
        with pytest.raises(Incompatible, match=r"5 of 20 first drafts were right \(0\.25, and the"):
            result.check()
    else:
        result.check()


@pytest.mark.parametrize(
    ("first", "second", "verdict"), [(16, 5, "works"), (16, 4, "weak"), (9, 0, "works")]
)
def test_second_drafts(first, second, verdict):
    """Of 16 that come after a right one, 0.3 should be right, as of the first ones."""
    result = Probe(trial("as it is", first, second, offered=18))
    assert result.verdict == verdict
    assert ("but only 0.25 of the second ones after them" in result.summary) == (verdict == "weak")
    lost = Probe(trial("as it is", 20, 0, offered=80), causes=(cause("norms", 3, helps=False),))
    assert "second" not in lost.summary  # as already the first ones are wrong


def cause(kind: str, first: int, helps: bool) -> Cause:
    fault = f"its {kind} are wrong"
    return Cause(Mistake(kind, fault, None), trial(fault, first), helps)


def test_what_a_probe_says():
    """13 of 40 drafts: 1 + 13 / 20 tokens a round."""
    causes = (cause("norms", 15, True), cause("hidden variant", 9, False))
    result = Probe(trial("as it is", 9, 4), causes=causes)
    assert result.as_text().splitlines() == [
        "Probe: weak; 9 of 20 first drafts were right (0.45); likely its norms are wrong (norms; "
        "with that undone 0.75 are right)",
        "  as it is  0.33 of the drafts accepted, by position 0.45 0.20; 1.65 tokens a round",
    ]
    assert json.loads(json.dumps(result.as_dict())) == {
        "verdict": "weak",
        "floor": 0.3,
        "cause": "norms",
        "form": "as it is",
        "acceptance": 0.325,
        "acceptance_by_position": [0.45, 0.2],
        "tokens_per_round": 1.65,
        "rounds": 20,
        "causes": [
            {
                "cause": kind,
                "helps": helps,
                "form": f"its {kind} are wrong",
                "acceptance": first / 20,
                "acceptance_by_position": [first / 20],
                "tokens_per_round": 1 + first / 20,
                "rounds": 20,
            }
            for kind, first, helps in [("norms", 15, True), ("hidden variant", 9, False)]
        ],
        "precisions": [],
    }


def test_a_weak_drafter_without_a_cause():
    result = Probe(trial("as it is", 9), causes=(cause("norms", 3, False),))
    assert result.cause is None
    assert "none of the usual causes explains it (tried: norms)" in result.summary


def test_numbers_of_bits_side_by_side():
    """4 bits hold with 98 % of the tokens a round: 1.9208 of 1.96."""
    other, whole, eight, four, two = (
        trial(form, first, offered=10000)
        for form, first in [
            ("as it is", 5000),
            ("not quantised", 9600),
            ("8 bits", 9500),
            ("4 bits", 9208),
            ("2 bits", 9207),
        ]
    )
    text = Probe(other, (whole, eight, four, two)).as_text().splitlines()
    assert [line.split("  ")[1] for line in text[2:6]] == [
        "not quantised",
        "8 bits",
        "4 bits",
        "2 bits",
    ]
    assert text[6:] == [
        "as it is: loses, 1.50 of 1.96 tokens a round; take more bits",
        "8 bits: holds, 1.95 of 1.96 tokens a round",
        "4 bits: holds, 1.92 of 1.96 tokens a round",
        "2 bits: loses, 1.92 of 1.96 tokens a round; take more bits",
    ]
    assert Probe(eight, (four,)).advice() == ["4 bits: holds, 1.92 of 1.95 tokens a round"]


def test_quantised_forms_of_a_head():
    """Those that quantising and loading it by hand would give."""
    p = pair(QWEN)
    head = read_drafter(p.path, p.target)
    forms = dict(precisions(head, (4, 8), 64, p.target, whole=True))
    assert list(forms) == ["not quantised", "8 bits", "4 bits"]
    result = probe(
        p.model, p.tokenizer, p.drafter, forms.items(), prompts=[p.prompt], max_tokens=24
    )
    assert result.precisions[0].stats == result.trial.stats
    gate = forms["4 bits"].head.layers[0].mlp.gate_proj
    assert (gate.bits, gate.group_size) == (4, 64)
    assert forms["8 bits"].head.layers[0].mlp.gate_proj.bits == 8
    assert [form for form, _ in precisions(head, (4,), None, p.target)] == ["4 bits"]
    packed = quantize_head(head, build_head(head), 8, 64)
    assert not list(precisions(packed, (), 64, p.target))
    assert [form for form, _ in precisions(head, (), 64, p.target, whole=True)] == ["not quantised"]
    with pytest.raises(SpecError, match="quantised already"):
        list(precisions(packed, (4,), 64, p.target))


@pytest.mark.parametrize(("text", "bits"), [("4,8", (4, 8)), ("4", (4,)), (None, ())])
def test_lists_of_bits(text, bits):
    assert parse_bits(text) == bits


def test_what_is_no_list_of_bits():
    with pytest.raises(BadArguments, match="4,8"):
        parse_bits("4-8")


def test_an_end_of_text_ends_a_text():
    """After the first token nothing can be drafted any more."""
    p = pair(QWEN)
    tokenizer = SimpleNamespace(eos_token_ids=[])
    whole = probe(p.model, tokenizer, p.drafter, prompts=[p.prompt], max_tokens=40)
    tokenizer.eos_token_ids = list(range(512))
    ended = probe(p.model, tokenizer, p.drafter, prompts=[p.prompt], max_tokens=40)
    assert ended.trial.stats.rounds < whole.trial.stats.rounds
    with pytest.raises(NotEngaged, match="before a draft could be made"):
        probe(p.model, tokenizer, p.drafter, prompts=[p.prompt], max_tokens=1)


# the commands


def run(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def one_text(monkeypatch):
    """A short one."""
    monkeypatch.setattr("mlx_spec.probe.CLASSES", ("code",))
    for name in ("mlx_spec.probe.probe", "mlx_spec.inspection.probe_drafter"):
        monkeypatch.setattr(name, partial(probe, max_tokens=16))


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    """The demo model with a broken head."""
    source = source_of(checkpoint_path(DEMO))
    BREAKS[QWEN, LACK](source)
    return save(source, tmp_path_factory.mktemp("models") / "Broken")


def test_a_drafter_that_works_is_written(one_text, tmp_path):
    demo = checkpoint_path(DEMO)
    options = ["--target", demo, "-q", "--q-bits", 4, "--probe-bits", "8"]
    result = run("convert", "--from", demo, "--to", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    lines = result.output.split("Probe: works; ")[1].splitlines()
    assert [line.split("  ")[1] for line in lines[1:4]] == ["as it is", "not quantised", "8 bits"]
    assert [line.split(", ")[0] for line in lines[4:6]] == ["as it is: holds", "8 bits: holds"]
    read = float(result.output.split("\nRead ")[1].split()[0]) * 1e6
    assert read == pytest.approx(drafter_bytes(demo), abs=10_000)  # once, whatever was tried
    assert config_of(tmp_path / "out")["quantization"]["bits"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_drafter_is_probed_with_the_model_of_the_same_run(one_text, tmp_path):
    demo, model = checkpoint_path(DEMO), tmp_path / "model"
    options = ["--with-target", model, "--target-q-bits", 8, "--probe", "--draft-vocab", 400]
    result = run("convert", "--from", demo, "--to", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    assert result.output.count("Probe: works; ") == 1
    text = result.output.split("read a draft")[0].split(", ")[-1]
    packed = 2048 * 128 * (1 + 4 / 64)  # of the model that was written: 8 bits, scale and bias
    head = (drafter_bytes(demo)) / 1e6
    assert text == f"{head + packed / 1e6:.2f} -> {head + packed * 400 / 2048 / 1e6:.2f} MB "


def test_a_drafter_that_does_not_work_is_not_written(one_text, broken_model, tmp_path):
    """And `inspect` says of it what `convert` says."""
    out = tmp_path / "out"
    command = ["convert", "--from", broken_model, "--to", out, "--target", broken_model]
    assert run(*command, "--dtype", "float32").exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    result = run(*command, "--probe")
    assert result.exit_code == 4
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("Error: The drafter does not work with this model: ")
    assert f"; likely {LACK} (norms; with that undone 0." in sentence
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    result = run("inspect", broken_model, "--draft-model", out, "--probe", "--json")
    assert result.exit_code == 4
    found = json.loads(result.output)
    assert found["verdict"] == "incompatible"
    assert (found["probe"]["verdict"], found["probe"]["cause"]) == ("does not work", "norms")
    assert found["why"] == "The drafter does not work with this model; likely cause: norms."


def test_a_probe_that_is_impossible(tmp_path):
    demo = checkpoint_path(DEMO)
    result = run("convert", "--from", demo, "--to", tmp_path / "out", "--probe")
    assert (result.exit_code, "give --target" in result.stderr) == (2, True)
    result = run("inspect", drafter_path(GEMMA_DEMO), "--probe")
    assert (result.exit_code, "probe it with its model" in result.stderr) == (2, True)
