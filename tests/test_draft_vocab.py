"""The reduced draft vocabulary: which tokens, what it costs, and that the text stays the same."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import config_of, decode, encode, weights_of, write_file
from mlx_lm import load as stock_load
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from mlx_spec.bench import draft_vocab
from mlx_spec.bench.draft_vocab import advise, recommendation, time_output
from mlx_spec.bench.prompts import CLASSES, read_class
from mlx_spec.bench.result import Row
from mlx_spec.candidates import Candidates
from mlx_spec.conversion import convert
from mlx_spec.convert.draft_vocab import Calibration, likeliest, read_text
from mlx_spec.drafters.draft_vocab import rows_of
from mlx_spec.errors import BadArguments, CheckpointError, Incompatible
from mlx_spec.generate import stream_generate
from mlx_spec.inspection import inspect_path
from mlx_spec.load import load_drafter
from models import DEMO, GEMMA_DEMO, checkpoint_path, drafter_path, pair

SIZE = 300
QWEN = checkpoint_path(DEMO)
DENSE = "gemma4-dense-trained"
PACKED = ("weight", "scales", "biases")


# which tokens


def calibration(counts, always=()):
    return Calibration("a.txt", np.array(counts), np.array([0]), frozenset(always))


def test_tokens_of_chats_are_always_among_them(tmp_path):
    """Those that the template writes, which plain text never has; not what is held in reserve."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(QWEN / name, tmp_path / name)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    for number, text in enumerate(("<think>", "<unused0>", "</think>"), start=2048):
        entry = tokenizer["added_tokens"][0] | {"id": number, "content": text, "special": False}
        tokenizer["added_tokens"].append(entry)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["added_tokens_decoder"]  # else it decides which there are
    settings["chat_template"] += "<think>\n\n</think>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    names = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    thought = {names["<think>"], names["</think>"]}
    chat = {names[text] for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert read_text(tmp_path, 2051, None).always == chat | thought
    assert read_text(tmp_path, 2048, None).always == chat  # the model has no more rows


@pytest.mark.parametrize(
    ("counts", "always", "size", "ids"),
    [
        ([0, 5, 2, 2, 9], [], 2, [1, 4]),
        ([0, 5, 2, 2, 9], [], 3, [1, 2, 4]),  # of two equal ones the lower
        ([0, 5, 2, 2, 9], [3], 3, [1, 3, 4]),  # an end of text, for example, always
        ([0, 0, 0, 0, 1], [], 3, [0, 1, 4]),  # then what was never seen
        ([7, 0, 0, 0, 1], [2, 3], 3, [0, 2, 3]),
    ],
)
def test_the_likeliest_tokens(counts, always, size, ids):
    assert likeliest(calibration(counts, always), size).tolist() == ids


@pytest.mark.parametrize("size", [-1, 0, 2, 5, 6])
def test_impossible_sizes(size):
    with pytest.raises(BadArguments, match="more than 2 and fewer than the model's 5"):
        likeliest(calibration([1, 1, 1, 1, 1], [0, 1]), size)


# a drafter with it


@pytest.fixture(scope="module")
def restricted(tmp_path_factory):
    """Of the demo model's head: a directory, and the report."""
    out = tmp_path_factory.mktemp("drafters") / "Tiny-MTP"
    return out, convert(QWEN, out, draft_vocab=SIZE)


def held_out_and_counted(path):
    """Counted anew: every tenth block of 64 tokens is held out."""
    text = "\n\n".join(read_class(name).text for name in CLASSES)
    tokens = load_tokenizer(path).encode(text, add_special_tokens=False)
    held_out, counted = [], Counter()
    for at, token in enumerate(tokens):
        if at // 64 % 10 == 9:
            held_out.append(token)
        else:
            counted[token] += 1
    return held_out, counted


def test_what_is_written(restricted):
    out, report = restricted
    weights, record = weights_of(out), config_of(out)["mlx_spec"]["draft_vocab"]
    ids, counts = (decode(weights[f"draft_vocab.{name}"]) for name in ("ids", "counts"))
    held_out, counted = held_out_and_counted(QWEN)
    assert weights["draft_vocab.ids"].dtype == weights["draft_vocab.counts"].dtype == "I32"
    assert ids.shape == counts.shape == (SIZE,)
    assert (np.diff(ids) > 0).all()
    assert counts.tolist() == [counted[token] for token in ids]
    tokenizer = stock_load(str(QWEN))[1]
    always = {*tokenizer.eos_token_ids, *tokenizer.all_special_ids}
    assert always
    assert always <= set(ids.tolist())
    left_out = set(counted) - set(ids.tolist())
    chosen = set(ids.tolist()) - always
    assert 1 < max(counted[t] for t in left_out) <= min(counted[t] for t in chosen)
    coverage = sum(token in set(ids.tolist()) for token in held_out) / len(held_out)
    assert 0.3 < coverage < 1
    assert record == {
        "size": SIZE,
        "calibration": "builtin",
        "counted_tokens": sum(counted.values()),
        "held_out_tokens": len(held_out),
        "coverage": pytest.approx(coverage),
    }
    assert f"Acceptance ceiling: {coverage:.3f}, their share" in report.as_text()


def test_inspect_says_so(restricted):
    inspection = inspect_path(str(restricted[0]))
    assert inspection.drafter.draft_vocab == SIZE
    assert f"draft vocabulary {SIZE}" in inspection.as_text()


def test_what_a_draft_reads(restricted):
    """bfloat16, 128 numbers a row; the demo's output matrix is its embedding, of 2048 rows."""
    out, report = restricted
    head = sum(len(s.data) for n, s in weights_of(out).items() if "draft_vocab" not in n)
    itemsize = 2
    before, after = (head + rows * 128 * itemsize for rows in (2048, SIZE))
    line = report.as_text().splitlines()[-1]
    assert line == (
        f"Drafting cost: 2048 -> {SIZE} rows of the output matrix, "
        f"{before / 1e6:.2f} -> {after / 1e6:.2f} MB read a draft"
    )


def test_only_its_rows_are_computed(restricted):
    p = pair(DEMO)
    drafter = load_drafter(restricted[0], p.target)
    ids = decode(weights_of(restricted[0])["draft_vocab.ids"])
    seen = []

    def pick(logits, drafts):
        seen.append(logits)
        return logits.best()

    tokens = mx.array(p.prompt[1:])
    hidden, _ = p.target(mx.array([p.prompt[:-1]]), [None] * p.layers)
    drafter.draft(tokens, hidden, 2, pick, drafter.make_cache(), [])
    whole = []
    p.drafter.draft(
        tokens,
        hidden,
        2,
        lambda x, _: whole.append(x) or mx.array([0]),
        p.drafter.make_cache(),
        [],
    )
    assert all(isinstance(logits, Candidates) for logits in seen)
    assert [logits.logits.shape for logits in seen] == [(1, SIZE)] * 2
    np.testing.assert_array_equal(seen[0].ids, ids)
    np.testing.assert_allclose(seen[0].logits, np.array(whole[0])[:, ids], atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("packing", [None, (8, 64, "affine"), (4, 32, "mxfp4")])
def test_rows_of_a_matrix(kind, packing):
    """numpy on the unpacked matrix; packed rows are not unpacked."""
    mx.random.seed(0)
    make = {
        "linear": lambda: nn.Linear(64, 96, bias=False),
        "embedding": lambda: nn.Embedding(96, 64),
    }
    matrix = make[kind]()
    weight = matrix.weight
    if packing is not None:
        bits, group_size, mode = packing
        packed = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
        weight = mx.dequantize(*packed, group_size=group_size, bits=bits, mode=mode)
        matrix = matrix.to_quantized(group_size=group_size, bits=bits, mode=mode)
    x, ids = mx.random.normal((1, 64)), [0, 5, 6, 95]
    expected = np.array(x) @ np.array(weight.astype(mx.float32))[ids].T
    np.testing.assert_allclose(rows_of(matrix, mx.array(ids))(x), expected, atol=1e-4)


def test_other_matrices_are_refused():
    with pytest.raises(Incompatible, match="a Conv1d"):
        rows_of(nn.Conv1d(4, 4, 1), mx.array([0]))


# the text


def generated(p, drafter, sampler, n):
    mx.random.seed(5)
    responses = list(
        stream_generate(
            p.model, p.tokenizer, p.prompt, 60, drafter, num_draft_tokens=n, sampler=sampler
        )
    )
    return [response.token for response in responses], responses[-1].spec


@pytest.mark.parametrize("temp", [0, 0.8])
def test_the_text_is_the_same(restricted, temp):
    p = pair(DEMO)
    drafter = load_drafter(restricted[0], p.target)
    plain, _ = generated(p, drafter, make_sampler(temp), 0)
    drafted, stats = generated(p, drafter, make_sampler(temp), 3)
    assert drafted == plain
    assert stats.drafted > stats.accepted > 0
    ids = set(decode(weights_of(restricted[0])["draft_vocab.ids"]).tolist())
    inside = sum(token in ids for token in plain)
    assert stats.accepted <= inside < len(plain)


def test_an_assistant_with_its_own_matrix(tmp_path):
    """Of the byte-like tokens of the reference language; quantised as well."""
    p = pair(DENSE)
    text = tmp_path / "text.txt"
    text.write_text(p.tokenizer.decode(p.prompt) * 60)
    report = convert(
        drafter_path(DENSE), tmp_path / "out", draft_vocab=200, calibrate=str(text), quantize=True
    )
    drafter = load_drafter(tmp_path / "out", p.target)
    plain, _ = generated(p, drafter, None, 0)
    drafted, stats = generated(p, drafter, None, 3)
    assert drafted == plain
    assert stats.drafted > stats.accepted > 0
    assert report.draft_vocab.source == "text.txt"
    embedding = weights_of(tmp_path / "out")
    row_bytes = sum(len(embedding[f"model.embed_tokens.{n}"].data) for n in PACKED) / 512
    assert report.draft_vocab.row_bytes == row_bytes


def test_it_stays_when_the_drafter_is_converted_again(restricted, tmp_path):
    out, _ = restricted
    convert(out, tmp_path / "again", quantize=True)
    assert config_of(tmp_path / "again")["mlx_spec"]["draft_vocab"]["size"] == SIZE
    for name in ("draft_vocab.ids", "draft_vocab.counts"):
        assert weights_of(tmp_path / "again")[name] == weights_of(out)[name]
    convert(
        tmp_path / "again", tmp_path / "smaller", draft_vocab=100, calibrate="builtin", target=QWEN
    )
    smaller = weights_of(tmp_path / "smaller")["draft_vocab.ids"]
    assert smaller.shape == (100,)


# what is refused


def test_an_assistant_that_looks_at_clusters(tmp_path):
    with pytest.raises(Incompatible, match="likeliest clusters only"):
        convert(drafter_path(GEMMA_DEMO), tmp_path / "out", draft_vocab=200)
    assert not (tmp_path / "out").exists()


def test_a_calibration_without_a_vocabulary(tmp_path):
    with pytest.raises(BadArguments, match="--draft-vocab"):
        convert(QWEN, tmp_path / "out", calibrate="builtin")


def test_a_text_that_is_too_short(tmp_path):
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(BadArguments, match="give a text of 640 at least"):
        convert(QWEN, tmp_path / "out", draft_vocab=99, calibrate=str(tmp_path / "short.txt"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[::-1], "not ascending ids"),
        (lambda ids: ids - ids[0] - 1, "not ascending ids"),
        (lambda ids: np.append(ids[:-1], 2048), "not ascending ids"),
        (lambda ids: ids[:-1], r"the shape \(299,\)"),
    ],
)
def test_damaged_ids(restricted, tmp_path, change, words):
    path = shutil.copytree(restricted[0], tmp_path / "damaged")
    weights = weights_of(path)
    ids = decode(weights["draft_vocab.ids"])
    weights["draft_vocab.ids"] = encode(change(ids), "I32")
    write_file(path / "model.safetensors", weights, {"format": "mlx"})
    with pytest.raises(CheckpointError, match=words):
        load_drafter(path, pair(DEMO).target)


def test_missing_ids(restricted, tmp_path):
    path = shutil.copytree(restricted[0], tmp_path / "damaged")
    weights = weights_of(path)
    del weights["draft_vocab.ids"]
    write_file(path / "model.safetensors", weights, {"format": "mlx"})
    with pytest.raises(CheckpointError, match=r"draft_vocab\.ids"):
        load_drafter(path, pair(DEMO).target)


# when the benchmark recommends it


def row(**changes):
    """A round of 2.5 tokens that takes 50 ms."""
    return replace(
        Row("code", 3, 10, ratio=1.5, tokens_per_round=2.5, generation_tps=50.0), **changes
    )


def test_it_is_recommended_where_it_pays():
    """Three drafts save 2 ms each: 44 ms instead of 50."""
    line = recommendation(row(), 0.003, 0.001, 32768)
    assert line.startswith("Estimate: a drafter converted with --draft-vocab 32768 would be 14% ")
    assert "3.00 ms" in line
    assert "1.00 ms" in line


@pytest.mark.parametrize("part_s", [0.0026, 0.003, 0.004])
def test_it_is_not_recommended_for_three_percent(part_s):
    """0.4 ms a draft are 1.2 of 50 ms."""
    assert recommendation(row(), 0.003, part_s, 32768) is None


def test_advice_for_drafters_that_read_all_rows_only(restricted, monkeypatch):
    monkeypatch.setattr(draft_vocab, "time_output", lambda matrix, size: (0.003, 0.001))
    p = pair(DEMO)
    rows = [
        row(depth="stock", ratio=1.0),
        row(depth=1, ratio=1.1),
        row(),
        row(depth="auto", ratio=9),
    ]
    assert "at depth 3" in advise(p.drafter, rows, size=256)
    assert "at depth 3" in advise(pair(DENSE).drafter, rows, size=256)
    assert advise(p.drafter, rows, size=1025) is None  # of 2048
    assert advise(p.drafter, rows[:1], size=256) is None
    assert advise(load_drafter(restricted[0], p.target), rows, size=100) is None
    assert advise(pair("gemma4-e2b-trained").drafter, rows, size=100) is None


@pytest.mark.parametrize("packed", [False, True])
def test_the_output_matrix_is_timed(packed):
    matrix = nn.Embedding(512, 128)
    whole, part = time_output(matrix.to_quantized() if packed else matrix, 64)
    assert 0 < whole < 1
    assert 0 < part < 1
