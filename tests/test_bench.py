"""mlx_spec/bench: its values, never a wall time."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

import mlx_spec
from mlx_spec.accept import Greedy
from mlx_spec.bench import measure, parts, prompts, report
from mlx_spec.bench.measure import Bench, Plan, Run, bench_loaded, make_row
from mlx_spec.bench.parts import Parts, calibrate
from mlx_spec.bench.prompts import Prompt
from mlx_spec.bench.result import (
    FirstDifference,
    Result,
    Row,
    Setting,
    add_positions,
    break_even,
    write_json,
)
from mlx_spec.bench.setting import drafter_quantization, quantization
from mlx_spec.errors import BadArguments, NoDrafter
from mlx_spec.load import Pairing, pairing_of
from mlx_spec.stats import SpecStats
from models import checkpoint_path

SCHEMA = json.loads((prompts.TEXTS.parent / "schema.json").read_text())
FAMILIES = pytest.mark.parametrize(
    "loaded", ["qwen3-5-trained", "gemma4-e2b-trained"], indirect=True
)
PROMPT = Prompt("greeting", "Is anybody there?")


@pytest.fixture(scope="module")
def loaded(request):
    """A tiny model in float32, with its drafter, and its tokenizer."""
    name = getattr(request, "param", "qwen3-5-trained")
    model, tokenizer = mlx_spec.load(str(checkpoint_path(name)))
    model.set_dtype(mx.float32)
    pairing_of(model).drafter.head.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measure, "WARM_UP_TOKENS", 4)
    monkeypatch.setattr(measure, "ROUNDS_OF_PARTS", 1)


def measured(loaded, **plan) -> Result:
    plan = Plan(**({"depths": (1, 3), "max_tokens": 12, "repeats": 2} | plan))
    return bench_loaded(*loaded, "tiny", [PROMPT], plan)


# ---- prompts -------------------------------------------------------------------------------------


def test_each_class_is_a_text_file():
    assert sorted(path.stem for path in prompts.TEXTS.glob("*.txt")) == sorted(prompts.CLASSES)
    texts = {name: prompts.read_class(name).text for name in prompts.CLASSES}
    assert all(len(text) > 400 for text in texts.values())
    assert len(texts["long"].split()) > 2000  # several thousand tokens of any tokenizer


def test_an_instruction_goes_through_the_chat_template_and_code_does_not(loaded):
    tokenizer = loaded[1]
    inner = tokenizer._tokenizer
    edit, code = prompts.read_class("edit"), prompts.read_class("code")
    chat = inner.apply_chat_template(
        [{"role": "user", "content": edit.text}], tokenize=False, add_generation_prompt=True
    )
    assert prompts.encode(edit, tokenizer) == inner.encode(chat, add_special_tokens=False)
    assert prompts.encode(code, tokenizer) == inner.encode(code.text)


def test_special_tokens_come_from_the_template_or_from_the_tokenizer():
    class WithBeginning:
        has_chat_template = True

        def apply_chat_template(self, messages, **options):
            assert options == {"tokenize": False, "add_generation_prompt": True}
            return f"<{messages[0]['content']}>"

        def encode(self, text, add_special_tokens=True):
            return [-1] * add_special_tokens + [ord(letter) for letter in text]

    tokenizer = WithBeginning()
    assert prompts.encode(Prompt("chat", "a"), tokenizer) == [ord("<"), ord("a"), ord(">")]
    assert prompts.encode(Prompt("code", "a", instruction=False), tokenizer) == [-1, ord("a")]
    tokenizer.has_chat_template = False
    assert prompts.encode(Prompt("chat", "a"), tokenizer) == [-1, ord("a")]


def test_a_long_prompt_loses_its_middle(loaded):
    ids = prompts.encode(prompts.read_class("json"), loaded[1])
    cut = prompts.encode(prompts.read_class("json"), loaded[1], 9)
    assert cut == ids[:4] + ids[-5:]
    assert prompts.encode(prompts.read_class("json"), loaded[1], len(ids)) == ids


def test_a_prompt_file_takes_the_place_of_the_classes(tmp_path):
    path = tmp_path / "question.txt"
    path.write_text("Why?")
    assert prompts.read_file(path) == Prompt("question.txt", "Why?", instruction=True)


def test_a_prompt_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in [
        ("none", "cannot be read \\(No such file or directory\\)"),
        ("empty", "is empty"),
        ("binary", "is not a text file in UTF-8"),
    ]:
        with pytest.raises(BadArguments, match=message):
            prompts.read_file(tmp_path / name)
    with pytest.raises(BadArguments, match="no prompt class 'poem'; choose from code, edit"):
        prompts.read_class("poem")


# ---- figures -------------------------------------------------------------------------------------


def test_break_even_is_the_acceptance_that_pays_for_a_round():
    assert break_even(1, 1.57) == pytest.approx(0.57, abs=1e-6)
    assert break_even(2, 2.75) == pytest.approx((math.sqrt(8) - 1) / 2, abs=1e-6)
    # (1 - a^(n+1)) / (1 - a), and a published table: 0.7 at T(4)/T(1) = 2.38, drafter 0.05 a draft
    assert break_even(4, (1 - 0.6**5) / 0.4) == pytest.approx(0.6, abs=1e-6)
    assert break_even(3, 2.38 + 3 * 0.05) == pytest.approx(0.7, abs=2e-3)
    assert break_even(3, 4.0) == pytest.approx(1.0, abs=1e-6)
    assert break_even(3, 0.9) == 0.0
    assert break_even(3, 4.01) is None


def test_positions_are_added_up():
    assert add_positions([[3, 1], [], [2, 2, 1]]) == [5, 3, 1]
    assert add_positions([]) == []


def some_run(seconds: float, rounds: list[tuple[int, int]] | None, tokens=(1, 2, 3, 4)) -> Run:
    stats = None
    if rounds is not None:
        stats = SpecStats(state="active")
        for drafted, accepted in rounds:
            stats.add_round(drafted, accepted)
    return Run(list(tokens), [2] * len(tokens), 11, 2.0, seconds, int(1e9 * seconds), stats)


def test_a_row_has_medians_and_ratios_within_repeats():
    stock = [some_run(s, None) for s in (4.0, 2.0, 8.0)]
    runs = [some_run(s, r) for s, r in [(1.0, [(2, 1)]), (2.0, [(2, 2)]), (1.6, [(2, 0), (1, 1)])]]
    row = make_row(
        "code", 2, runs, stock, Parts(step_s=0.5, draft_s=0.1, verify_s=0.7, commit_s=0.1)
    )
    assert row.prompt_tps == pytest.approx(5.0)  # the last prompt token is not prefilled
    assert row.generation_tps == pytest.approx(2.5)
    assert (row.generation_tps_low, row.generation_tps_high) == pytest.approx((2.0, 4.0))
    assert row.ratio == pytest.approx(4.0)  # of 4, 1 and 5
    assert (row.ratio_low, row.ratio_high) == pytest.approx((1.0, 5.0))
    assert row.step_s == pytest.approx(1.0)
    assert (row.acceptance, row.tokens_per_round) == pytest.approx((4 / 7, 2.0))
    assert row.drafted_by_position == [4, 3]
    assert row.accepted_by_position == [3, 1]
    assert (row.verify_ratio, row.draft_steps) == pytest.approx((1.6, 0.2))
    assert row.break_even == pytest.approx((math.sqrt(4.2) - 1) / 2, abs=1e-6)
    assert row.peak_memory_bytes == 2_000_000_000
    assert row.state == "active"
    assert row.ideal_ratio == pytest.approx(2.0 / 1.8)
    assert row.overhead == pytest.approx(1 - 4.0 * 1.8 / 2.0)


def test_what_is_not_known_is_none():
    stock = [some_run(2.0, None)]
    row = make_row("code", "stock", stock, stock, None)
    assert row.ratio == 1.0
    names = ("acceptance", "drafted_by_position", "tokens_per_round", "verify_ratio", "draft_steps")
    assert all(getattr(row, name) is None for name in (*names, "break_even", "identical", "state"))
    nothing_drafted = make_row("code", "auto", [some_run(2.0, [(0, 0), (0, 0)])], stock, None)
    assert nothing_drafted.acceptance is None
    assert nothing_drafted.tokens_per_round == 1.0
    assert replace(stock[0], prompt_tokens=1).prompt_tps is None
    assert row.overhead is None


# ---- runs ----------------------------------------------------------------------------------------


@FAMILIES
def test_rows_of_a_real_model(loaded):
    model, tokenizer = loaded
    result = measured(loaded)
    check(result.as_dict(), SCHEMA)
    ids = prompts.encode(PROMPT, tokenizer)
    assert [(row.depth, row.prompt_tokens) for row in result.rows] == [
        (depth, len(ids)) for depth in ("stock", 1, 3)
    ]
    tokenizer.eos_token_ids, ends = [], tokenizer.eos_token_ids
    for row in result.rows[1:]:
        *_, last = mlx_spec.stream_generate(
            model, tokenizer, ids, max_tokens=12, num_draft_tokens=row.depth
        )
        assert row.drafted_by_position == [2 * n for n in last.spec.drafted_by_position]
        assert row.accepted_by_position == [2 * n for n in last.spec.accepted_by_position]
        assert row.acceptance == pytest.approx(last.spec.accepted / last.spec.drafted)
        assert row.identical
        assert row.first_difference is None
        assert row.state == "fixed"
    tokenizer.eos_token_ids = ends
    setting = result.setting
    assert (setting.model, setting.target_quantization, setting.sampling) == (
        "tiny",
        "float32",
        "greedy",
    )
    assert (setting.max_tokens, setting.repeats, setting.temp) == (12, 2, 0)
    assert setting.drafter_kind == pairing_of(model).drafter.kind


def test_stock_opens_each_repeat_and_the_order_of_depths_turns_round(loaded, monkeypatch):
    order, lengths = [], []
    original = Bench.run

    def noted(self, depth, prompt, max_tokens):
        order.append(depth)
        lengths.append(max_tokens)
        return original(self, depth, prompt, max_tokens)

    monkeypatch.setattr(Bench, "run", noted)
    measured(loaded, depths=(2, "auto"), repeats=3, max_tokens=3)
    warm_up, repeats = order[:3], order[3:]
    assert warm_up == ["stock", 2, "auto"]
    assert repeats == ["stock", 2, "auto", "stock", "auto", 2, "stock", 2, "auto"]
    assert lengths == [measure.WARM_UP_TOKENS] * 3 + [3] * 9


def test_end_of_text_does_not_end_a_text(loaded):
    model, tokenizer = loaded
    ends = tokenizer.eos_token_ids
    tokenizer.eos_token_ids = set(range(512))
    try:
        stopped = list(mlx_lm.stream_generate(model, tokenizer, [5, 6], max_tokens=7))
        assert len(stopped) == 1
        runs = []
        with measure.without_end_of_text(tokenizer):
            for depth in ("stock", 2):
                plan = Plan(depths=(2,))
                one = Bench(model, tokenizer, pairing_of(model).drafter, plan)
                runs.append(one.run(depth, [5, 6], 7))
        assert [len(run.tokens) for run in runs] == [7, 7]
        assert tokenizer.eos_token_ids == set(range(512))
    finally:
        tokenizer.eos_token_ids = ends


def test_sampled_text_is_compared_with_that_without_drafts(loaded):
    model, tokenizer = loaded
    result = measured(loaded, temp=0.9, depths=(2,))
    assert result.setting.sampling == "seed"
    assert result.rows[1].identical is True
    one = Bench(model, tokenizer, pairing_of(model).drafter, Plan(temp=0.9))
    stock, plain, drafted = (one.run(depth, [5, 6, 7], 16) for depth in ("stock", 0, 3))
    assert plain.tokens == drafted.tokens
    assert plain.tokens != stock.tokens
    difference = replace_law(one, "seed").first_difference([5, 6, 7], stock.tokens, [drafted])
    assert difference is not None
    assert difference.margin is None


def replace_law(one: Bench, law: str) -> Bench:
    one.law = law
    return one


def test_no_text_is_promised_with_the_ratio_law(loaded):
    result = measured(loaded, temp=0.9, sampling="ratio", depths=(2,))
    assert result.setting.sampling == "ratio"
    assert [row.identical for row in result.rows] == [None, None]


def test_the_first_difference_of_any_repeat_is_told(loaded):
    model, tokenizer = loaded
    prompt = [5, 6, 7, 8]
    one = Bench(model, tokenizer, pairing_of(model).drafter, Plan())
    with measure.without_end_of_text(tokenizer):
        expected = one.run("stock", prompt, 8).tokens
        run = one.run(2, prompt, 8)
    other = [*run.tokens[:5], (run.tokens[5] + 1) % 512, *run.tokens[6:]]
    wrong = replace(run, tokens=other, depths=[2, 2, 2, 1, 1, 1, 0, 0])
    assert one.first_difference(prompt, expected, [run, run]) is None
    logits = np.array(model(mx.array([prompt + expected[:5]]))[0, -1])
    second, first = np.sort(logits)[-2:]
    difference = one.first_difference(prompt, expected, [run, wrong])
    assert difference == FirstDifference(5, pytest.approx(float(first - second), abs=1e-4), 1)


def test_a_text_that_differs_is_not_called_identical(loaded, monkeypatch):
    original = Bench.run

    def spoilt(self, depth, prompt, max_tokens):
        run = original(self, depth, prompt, max_tokens)
        return replace(run, tokens=[*run.tokens[:-1], -1]) if depth == 3 else run

    monkeypatch.setattr(Bench, "run", spoilt)
    rows = measured(loaded).rows
    assert [row.identical for row in rows] == [None, True, False]
    assert rows[2].first_difference.token == 11


def test_the_depth_of_each_tokens_round_is_noted(loaded):
    model, tokenizer = loaded
    one = Bench(model, tokenizer, pairing_of(model).drafter, Plan())
    with measure.without_end_of_text(tokenizer):
        run = one.run(3, [5, 6, 7], 9)
    assert len(run.depths) == 9
    assert run.depths[0] == 3
    assert run.depths[-1] <= 3
    rounds, token = [], 0
    while token < len(run.depths):  # a round of n drafts yields n + 1 tokens at most
        rounds.append(run.depths[token])
        token += 1 + min(rounds[-1], len(run.depths) - token - 1)
    assert max(rounds) == 3


@FAMILIES
def test_parts_are_timed_in_every_round_at_its_depth(loaded, monkeypatch):
    model, _ = loaded
    drafts: list[int] = []
    drafter = pairing_of(model).drafter
    original = drafter.draft

    def noted(tokens, hidden, n, *rest):
        drafts.append(n)
        return original(tokens, hidden, n, *rest)

    monkeypatch.setattr(drafter, "draft", noted)
    watches = []

    class Noted(parts.Stopwatch):
        def __init__(self):
            super().__init__()
            watches.append(self)

    monkeypatch.setattr(parts, "Stopwatch", Noted)
    times = parts.time_parts(model, drafter, Greedy(), [5, 6], [1, 3], 2)
    assert list(times) == [1, 3]
    for watch, n in zip(watches, (1, 3), strict=True):
        counts = {part: len(samples) for part, samples in watch.samples.items()}
        assert counts["draft"] == counts["commit"] == counts["verify"] == drafts.count(n)
        assert drafts.count(n) >= 2 * (2 + 2)  # twice: so many rounds, and two before them
    assert len(drafts) == drafts.count(1) + drafts.count(3)
    assert min(times[1].step_s, times[1].draft_s, times[1].verify_s, times[1].commit_s) > 0


def test_calibration_knows_each_depth(loaded):
    model, _ = loaded
    times = calibrate(model, pairing_of(model).drafter, [5, 6, 7], depths=range(4), rounds=2)
    assert list(times) == [0, 1, 2, 3]
    assert all(seconds > 0 for seconds in times.values())


# ---- what cannot be measured ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"depths": ()}, "from 1 on, or 'auto'"),
        ({"depths": (0,)}, "from 1 on, or 'auto'"),
        ({"max_tokens": 1}, "at least 2 tokens"),
        ({"repeats": 0}, "1 repeat"),
        ({"cooldown_s": -1}, "cooldown"),
        ({"temp": -0.1}, "temperature"),
        ({"max_prompt_tokens": 0}, "at least 1 token"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan, message):
    with pytest.raises(BadArguments, match=message):
        Plan(**plan)


def test_without_a_drafter_there_is_nothing_to_measure():
    alone = nn.Linear(2, 2)
    alone.mlx_spec = Pairing(None, reason="no-drafter", detail="none was asked for")
    with pytest.raises(NoDrafter, match=r"nothing to measure for tiny: none was asked for"):
        measure.drafter_of(alone, "tiny")


@pytest.mark.parametrize("kind", ["lookup", "combined"])
def test_what_drafts_is_as_it_was_asked_for(kind, loaded):
    model, tokenizer = loaded
    pairing = pairing_of(model)
    setting = measured(loaded, draft_kind=kind, depths=(3,), repeats=1).setting
    if kind == "lookup":
        assert (setting.drafter_kind, setting.drafter) == ("lookup", None)
        assert setting.drafter_quantization is None
        assert "; drafts by lookup; " in report.head_line(setting, [])
    else:
        assert (setting.drafter_kind, setting.drafter) == ("lookup+nextn", str(pairing.path))
    one = Bench(model, tokenizer, pairing.drafter, Plan(draft_kind=kind))
    assert one.run(3, [5, 6, 7, 8, 9, 10, 11, 12, 13] * 2, 4).stats.by_kind["lookup"][0] > 0


# ---- what is said of it --------------------------------------------------------------------------


def test_quantization_is_that_of_the_layers():
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128))
    module.set_dtype(mx.bfloat16)
    assert quantization(module) == "bfloat16"
    nn.quantize(module, group_size=32, bits=4, class_predicate=lambda path, _: path.endswith("1"))
    assert quantization(module) == "4 bits, groups of 32"
    nn.quantize(module, group_size=64, bits=8)
    assert quantization(module) == "4 bits, groups of 32; 8 bits, groups of 64"


def test_quantization_of_a_drafter(loaded):
    assert drafter_quantization(pairing_of(loaded[0]).drafter) == "float32"
    assert drafter_quantization(SimpleNamespace(head=None)) is None


SETTING = Setting(
    model="M",
    target_quantization="4 bits, groups of 64",
    drafter="D",
    drafter_kind="nextn",
    drafter_quantization="bfloat16",
    device="Chip (gpu)",
    mlx="1",
    mlx_lm="2",
    mlx_spec="3",
    sampling="seed",
    temp=0.6,
    max_tokens=256,
    repeats=3,
    cooldown_s=5,
)
DRAFTED = Row(
    "edit",
    2,
    315,
    prompt_tps=1000.0,
    generation_tps=45.67,
    generation_tps_low=44.0,
    generation_tps_high=47.0,
    ratio=1.83,
    ratio_low=1.7,
    ratio_high=1.9,
    acceptance=0.75,
    drafted_by_position=[100, 80, 0],
    accepted_by_position=[90, 45, 0],
    tokens_per_round=2.35,
    step_s=0.04,
    verify_ratio=1.2,
    draft_steps=0.1,
    break_even=0.25,
    peak_memory_bytes=2_500_000_000,
    identical=False,
    first_difference=FirstDifference(17, 0.00123, 2),
    state="fixed",
)


def test_tables_show_every_figure():
    result = Result(SETTING, [Row("edit", "stock", 315), DRAFTED])
    shown = ["edit", "2", "1000.0", "45.7 (44.0-47.0)", "1.83 (1.70-1.90)", "0.75", "0.90 0.56"]
    shown += ["2.35", "40.00", "1.20", "0.10", "0.25", "2.50"]
    shown += ["NO: token 17, margin 1.2e-03, depth 2", "fixed"]
    lines = report.as_markdown(result).splitlines()
    assert lines[0] == (
        "M (4 bits, groups of 64); drafter D (nextn, bfloat16); Chip (gpu); "
        "mlx 1, mlx-lm 2, mlx-spec 3; prompt tokens: edit 315; seed, temp 0.6; "
        "256 tokens a text, 3 repeats, cooldown 5 s"
    )
    assert lines[4] == "| edit | stock |" + " - |" * 13
    assert lines[5] == "| " + " | ".join(shown) + " |"
    text = report.as_text(result).splitlines()
    assert text[0] == lines[0]
    assert re.split(" {2,}", text[4].strip()) == shown
    assert len({len(line) for line in text[2:5]}) == 1
    same = replace(DRAFTED, identical=True, first_difference=None)
    assert report.same_text(same) == "yes"


def test_json_is_written_beside_and_renamed(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("old")
    result = Result(SETTING, [DRAFTED])
    write_json(path, result.as_dict())
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]
    read = json.loads(path.read_text())
    check(read, SCHEMA)
    assert read["schema"] == "mlx-spec/bench/1"
    assert read["setting"]["cooldown_s"] == 5
    assert read["rows"][0]["first_difference"] == {"token": 17, "margin": 0.00123, "depth": 2}


# ---- the schema ----------------------------------------------------------------------------------

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
KNOWN = {"type", "const", "enum", "anyOf", "properties", "required", "additionalProperties"} | {
    "items",
    "minimum",
    "maximum",
    "description",
    "title",
    "$schema",
}


def check(value, schema) -> None:
    """The part of JSON Schema that schema.json uses. Raises AssertionError."""
    assert set(schema) <= KNOWN
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        fitting = [kind for kind in kinds if isinstance(value, TYPES[kind])]
        if isinstance(value, bool):
            fitting = [kind for kind in fitting if kind == "boolean"]
        assert fitting, (value, kinds)
    if "anyOf" in schema:
        assert any(fits(value, other) for other in schema["anyOf"]), value
    assert "const" not in schema or value == schema["const"]
    assert "enum" not in schema or value in schema["enum"]
    if isinstance(value, int | float):
        assert value >= schema.get("minimum", value)
        assert value <= schema.get("maximum", value)
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value)
        assert schema["additionalProperties"] or set(value) <= set(schema["properties"])
        for name, part in value.items():
            check(part, schema["properties"][name])
    if isinstance(value, list):
        for item in value:
            check(item, schema["items"])


def fits(value, schema) -> bool:
    try:
        check(value, schema)
    except AssertionError:
        return False
    return True


def changed(**values):
    result = Result(SETTING, [DRAFTED]).as_dict()
    result["rows"][0] |= values
    return result


def test_the_schema_accepts_results_and_nothing_else():
    assert fits(changed(), SCHEMA)
    for null in ("ratio", "acceptance", "first_difference", "identical", "break_even", "why"):
        assert fits(changed(**{null: None}), SCHEMA)
    for wrong in [
        {"depth": "parked"},
        {"depth": 0},
        {"acceptance": 1.2},
        {"prompt_tokens": None},
        {"identical": "yes"},
        {"drafted_by_position": [1.5]},
        {"first_difference": {"token": 3}},
        {"more": 1},
    ]:
        assert not fits(changed(**wrong), SCHEMA), wrong
    assert not fits(changed() | {"schema": "mlx-spec/bench/2"}, SCHEMA)
    for name in DRAFTED.__dataclass_fields__:
        result = changed()
        del result["rows"][0][name]
        assert not fits(result, SCHEMA), name
