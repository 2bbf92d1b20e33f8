"""The command line, in processes of its own where that matters and in this one elsewhere."""

import importlib
import json
import math
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from checkpoints import MISFITS, load, rename_token, save, save_misfit
from click.testing import CliRunner

from mlx_spec.cli import cli, generation_parser
from mlx_spec.demo import demo_model
from models import checkpoint_path, strip_head

stock = importlib.import_module("mlx_lm.generate")
TRAINED = str(checkpoint_path("qwen3-5-trained"))
GEMMA = checkpoint_path("gemma4-e2b-trained")
ASSISTANT = checkpoint_path("gemma4-e2b-trained-assistant")


def run(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def assert_one_sentence(result, exit_code, words):
    assert result.exit_code == exit_code, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert words in lines[0]
    assert "Traceback" not in result.output


# generate


def test_generate_has_every_option_of_mlx_lm():
    ours = {a.dest: a for a in generation_parser()._actions}
    theirs = {a.dest: a for a in stock.setup_arg_parser()._actions}
    assert set(theirs) <= set(ours)
    own = {"draft_kind", "max_draft_tokens", "require_spec", "sampling", "stats"}
    assert set(ours) - set(theirs) == own
    for name, action in theirs.items():
        assert ours[name].option_strings == action.option_strings
        if name not in ("draft_model", "num_draft_tokens"):
            assert ours[name].default == action.default


def test_generate_help():
    result = run("generate", "--help")
    assert result.exit_code == 0
    for option in ("--draft-model", "--num-draft-tokens", "--require-spec", "--temp", "--seed"):
        assert option in result.output
    assert "-assistant (Gemma-4)" in " ".join(result.output.split())


def test_generate_with_an_assistant_beside_the_model():
    options = ["--model", GEMMA, "-p", "a b", "-m", 20, "--ignore-chat-template"]
    options += ["--num-draft-tokens", 3, "--require-spec", "--stats", "text"]
    result = run("generate", *options)
    assert result.exit_code == 0
    assert "Speculation: gemma4-assistant, 3 drafts a round, greedy sampling" in result.stderr


def test_generate_prints_what_mlx_lm_prints():
    """Two processes, sampling with a seed: the same text on stdout."""
    options = ["--model", TRAINED, "--prompt", "some words", "--max-tokens", "40"]
    options += ["--seed", "3", "--temp", "0.8", "--verbose", "False", "--ignore-chat-template"]
    ours = subprocess.run(
        [
            sys.executable,
            "-m",
            "mlx_spec",
            "generate",
            *options,
            "--sampling",
            "stock",
            "--num-draft-tokens",
            "3",
            "--stats",
            "json",
        ],
        capture_output=True,
        check=True,
    )
    theirs = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", *options], capture_output=True, check=True
    )
    assert ours.stdout == theirs.stdout
    stats = json.loads(ours.stderr.splitlines()[-1])
    assert stats["engaged"] is True
    assert stats["draft_n"] > stats["draft_n_accepted"] > 0
    assert stats["rounds"] + stats["draft_n_accepted"] == 40


def test_generate_without_a_model_uses_the_demo():
    result = run("generate", "--max-tokens", 6, "--stats", "text", "--require-spec")
    assert result.exit_code == 0
    assert "Speculation: nextn, auto depth (" in result.stderr


def test_generate_says_why_nothing_was_drafted(model_dir):
    strip_head(model_dir)
    result = run("generate", "--model", model_dir, "-p", "x", "-m", 3, "--stats", "json")
    assert result.exit_code == 0
    stats = json.loads(result.stderr.splitlines()[-1])
    assert (stats["engaged"], stats["reason"]) == (False, "no-match")
    assert stats["detail"].startswith("no mtp.* weights")
    assert stats["acceptance"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft-model", "none"], "no-drafter"),
        (["--num-draft-tokens", "0"], "num-draft-tokens-0"),
        (["--max-tokens", "1"], "too-short"),
    ],
)
def test_require_spec(options, words):
    result = run(
        "generate", "--model", TRAINED, "--require-spec", "-p", "a",
        *(["--num-draft-tokens", 3, *options]),
    )  # fmt: skip
    assert_one_sentence(result, 3, words)


def test_a_drafter_directory_by_name(model_dir, tmp_path):
    assert run("convert", "--from", model_dir, "--to", tmp_path / "d").exit_code == 0
    strip_head(model_dir)
    result = run(
        "generate", "--model", model_dir, "--draft-model", tmp_path / "d", "-m", 9,
        "--num-draft-tokens", 3, "--require-spec", "--stats", "json",
    )  # fmt: skip
    assert result.exit_code == 0
    assert json.loads(result.stderr.splitlines()[-1])["draft_n"] > 0


# Bad input: one sentence, an exit code that means something, nothing half-written


def damaged(path, how):
    file = path / "model.safetensors"
    if how == "missing path":
        shutil.rmtree(path)
    elif how == "no safetensors":
        file.unlink()
    elif how == "corrupt header":
        file.write_bytes(b"\x10\0\0\0\0\0\0\0not a header at all")
    elif how == "truncated shard":
        file.write_bytes(file.read_bytes()[:100_000])
    elif how == "tensors without config":
        (path / "config.json").unlink()
    elif how == "head stripped":
        strip_head(path)
    elif how == "wrong shapes":
        config = json.loads((path / "config.json").read_text())
        config["text_config"]["num_attention_heads"] = 8
        (path / "config.json").write_text(json.dumps(config))


FAULTS = {
    "missing path": (1, "does not exist"),
    "no safetensors": (1, "safetensors"),
    "corrupt header": (1, "model.safetensors"),
    "truncated shard": (1, "model.safetensors"),
    "tensors without config": (1, "config.json"),
    "wrong shapes": (1, "shape"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", ["generate", "inspect", "convert"])
def test_bad_input(command, fault, model_dir, tmp_path):
    damaged(model_dir, fault)
    arguments = {
        "generate": ["--model", model_dir, "-m", 3],
        "inspect": [model_dir],
        "convert": ["--from", model_dir, "--to", tmp_path / "out"],
    }[command]
    exit_code, words = FAULTS[fault]
    assert_one_sentence(run(command, *arguments), exit_code, words)
    assert not (tmp_path / "out").exists()


def test_convert_a_model_whose_head_was_stripped(model_dir, tmp_path):
    strip_head(model_dir)
    result = run("convert", "--from", model_dir, "--to", tmp_path / "out")
    assert_one_sentence(result, 2, "stripped")
    assert not (tmp_path / "out").exists()


def test_drafter_given_as_model_and_model_given_as_drafter(model_dir, tmp_path):
    run("convert", "--from", model_dir, "--to", tmp_path / "drafter")
    assert_one_sentence(run("generate", "--model", tmp_path / "drafter"), 4, "is a drafter")
    strip_head(model_dir)
    result = run("generate", "--model", TRAINED, "--draft-model", model_dir)
    assert_one_sentence(result, 2, "no")


def test_drafter_of_another_vocabulary(tmp_path):
    run("convert", "--from", demo_model(), "--to", tmp_path / "drafter")
    result = run("generate", "--model", TRAINED, "--draft-model", tmp_path / "drafter")
    assert_one_sentence(result, 4, "vocabulary is 2048 but the model's is 512")


def test_drafter_of_another_width(model_dir, tmp_path):
    """Matrices of half the width, in every shape that names the hidden size."""
    run("convert", "--from", model_dir, "--to", tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config["text_config"]["hidden_size"] //= 2
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(tmp_path / "drafter" / "model.safetensors"))
    hidden = {128: 64, 256: 128}
    for name, value in weights.items():
        inner = ("o_proj", "down_proj")
        rows, *columns = value.shape
        if value.ndim == 1 and "_norm.weight" in name and ("q_norm" in name or "k_norm" in name):
            continue
        if value.ndim == 1 or any(part in name for part in (*inner, "fc")):
            rows = hidden[rows]
        if columns and not any(part in name for part in inner):
            columns = [hidden[columns[0]]]
        weights[name] = value[tuple(slice(n) for n in (rows, *columns))]
    mx.eval(weights)
    mx.save_safetensors(
        str(tmp_path / "drafter" / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    result = run("generate", "--model", model_dir, "--draft-model", tmp_path / "drafter")
    assert_one_sentence(result, 4, "hidden size is 64 but the model's is 128")


def test_generate_with_a_missing_prompt_cache():
    result = run("generate", "--model", TRAINED, "--prompt-cache-file", "nowhere.safetensors")
    assert_one_sentence(result, 1, "nowhere.safetensors")


def test_a_prompt_cache_file_brings_its_model(tmp_path):
    """As with mlx_lm.generate, --model may be left out."""
    file = tmp_path / "cache.safetensors"
    prompt = ["--model", TRAINED, "--prompt", "a b c", "--prompt-cache-file", str(file)]
    subprocess.run(
        [sys.executable, "-m", "mlx_lm", "cache_prompt", *prompt],
        check=True,
        capture_output=True,
    )
    options = ["--prompt-cache-file", str(file), "-p", "x", "-m", "12", "--verbose", "F"]
    theirs = subprocess.run(
        [sys.executable, "-m", "mlx_lm", "generate", *options], capture_output=True, check=True
    )
    required = ["--num-draft-tokens", "3", "--require-spec"]
    ours = subprocess.run(
        [sys.executable, "-m", "mlx_spec", "generate", *options, *required],
        capture_output=True,
        check=True,
    )
    assert ours.stdout == theirs.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--chat-template-config", "[1]"], "not a JSON object"),
        (["--chat-template-config", "{"], ""),
        (["--draft-model", ""], "drafter is empty"),
        (["--kv-bits", "3", "--quantized-kv-start", "0", "--kv-group-size", "7"], ""),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    result = run("generate", "--model", TRAINED, "-m", 4, "--verbose", "F", *options)
    assert_one_sentence(result, 1, words)


def test_inspect_nothing():
    assert_one_sentence(run("inspect", ""), 1, "does not exist")


def test_an_unknown_option_is_a_usage_error():
    result = subprocess.run(
        [sys.executable, "-m", "mlx_spec", "generate", "--no-such-option"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "unrecognized arguments: --no-such-option" in result.stderr


# convert


def test_convert_help():
    text = " ".join(run("convert", "--help").stdout.split())
    assert "of a model's NextN head, a Gemma-4 assistant, an EAGLE-3 head" in text
    options = ("--from SOURCE", "--to OUT", "--target, --model MODEL", "--quantize", "--q-bits")
    for option in (*options, "--with-target OUT", "--target-q-bits", "--allow-mismatch"):
        assert option in text
    assert "--q-mode [affine|mxfp4|nvfp4|mxfp8]" in text


def test_convert_an_assistant_for_its_model(tmp_path):
    arguments = ["--from", ASSISTANT, "--to", tmp_path / "out", "--model", GEMMA, "-q"]
    result = run("convert", *arguments)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"Wrote {tmp_path / 'out'}: 98 tensors, 0.24 M parameters, 8 bits",
        "Read 0.49 of 0.49 MB",
        f"Fits {GEMMA}; the same tokenizer; no fingerprint tells whether the drafter belongs to "
        "this very model",
    ]


def test_convert_for_another_model(tmp_path):
    arguments = ["--from", ASSISTANT, "--to", tmp_path / "out", "--model", TRAINED]
    assert_one_sentence(run("convert", *arguments), 4, "and the model is a qwen3_5")
    assert_one_sentence(run("convert", *arguments[:-1], tmp_path / "no"), 1, "does not exist")
    assert not (tmp_path / "out").exists()


def test_convert_a_model_in_place_of_its_assistant(tmp_path):
    result = run("convert", "--from", GEMMA, "--to", tmp_path / "out")
    assert_one_sentence(result, 2, "its assistant is a repository of its own")


# inspect


def inspect_json(path):
    result = run("inspect", path, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_inspect_a_model_with_its_head():
    exit_code, facts = inspect_json(TRAINED)
    assert exit_code == 0
    assert (facts["verdict"], facts["engages"]) == ("usable", True)
    assert facts["family"] == "qwen3_5"
    assert facts["num_draft_tokens"] == "auto"
    drafter = facts["drafter"]
    assert (drafter["kind"], drafter["layers"], drafter["path"]) == ("nextn", 1, TRAINED)
    tensors = mx.load(TRAINED + "/model.safetensors")
    assert drafter["parameters"] == sum(v.size for k, v in tensors.items() if "mtp." in k)


def test_inspect_text():
    result = run("inspect", TRAINED)
    assert result.exit_code == 0
    assert "verdict       usable" in result.stdout


def test_inspect_help():
    text = " ".join(run("inspect", "--help").stdout.split())
    assert "PATH is a model, alone or beside its drafter, or a drafter to be described." in text
    assert "0 usable, 2 no drafter, 3 unverified, 4 incompatible, 1 damaged files" in text
    assert "--draft-model DIR" in text


def test_a_nextn_head_has_no_choice_of_positions():
    _, facts = inspect_json(TRAINED)
    assert facts["tokenizer"] == "same"
    assert facts["drafter"]["ordered_embedding"] is facts["drafter"]["query_position"] is None
    text = run("inspect", TRAINED).stdout
    assert "position" not in text
    assert "embedding" not in text


def test_inspect_a_gemma_with_its_assistant(tmp_path):
    exit_code, facts = inspect_json(GEMMA)
    assert exit_code == 0
    assert (facts["verdict"], facts["engages"], facts["family"]) == ("usable", True, "gemma4")
    assert (facts["tokenizer"], facts["num_draft_tokens"]) == ("same", "auto")
    tensors = load(ASSISTANT.name).tensors
    uncounted = ("layer_scalar", "token_ordering")
    assert facts["drafter"] == {
        "path": str(ASSISTANT),
        "kind": "gemma4-assistant",
        "layers": 4,
        "parameters": sum(
            math.prod(stored.shape)
            for name, stored in tensors.items()
            if not name.endswith(uncounted)
        ),
        "quantization": None,
        "source": None,
        "revision": None,
        "fingerprint": None,
        "checked": None,
        "ordered_embedding": True,
        "query_position": "P",
        "layer_ids": None,
        "draft_vocab": None,
    }


def test_inspect_a_gemma_in_words(tmp_path):
    source = load("gemma4-dense-assistant")
    source.config["mlx_spec"] = {"query_position": "P-1"}
    assistant = save(source, tmp_path / "assistant")
    run("convert", "--from", assistant, "--to", tmp_path / "drafter", "-q", "--q-bits", 4)
    model = checkpoint_path("gemma4-dense")
    result = run("inspect", model, "--draft-model", tmp_path / "drafter")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        str(model),
        "  family        gemma4",
        "  quantisation  none",
        "  drafter       gemma4-assistant, 4 layer(s), 0.24 M parameters, 4 bits, full embedding, "
        "query position P-1",
        f"                in {tmp_path / 'drafter'}",
        f"                converted from {assistant}",
        "  tokenizer     same: the same tokenizer",
        "  depth         auto",
        "  ways          gemma4-assistant works: the drafter fits this model",
        "                lookup works: it drafts what followed earlier in the text",
        "                combined works: lookup where its match is long, "
        "gemma4-assistant otherwise",
        "                draft-model works: with a smaller model of the same tokenizer as "
        "--draft-model",
        "  verdict       usable: the drafter fits this model",
    ]


def test_inspect_an_assistant_alone():
    exit_code, facts = inspect_json(ASSISTANT)
    assert (exit_code, facts["verdict"], facts["engages"]) == (3, "unverified", False)
    assert (facts["family"], facts["tokenizer"]) == ("gemma4_assistant", None)
    assert facts["drafter"]["ordered_embedding"] is True
    text = run("inspect", ASSISTANT).stdout
    assert "verdict       unverified: a drafter alone; inspect the model it is for" in text
    assert "ordered embedding, query position P" in text


@pytest.mark.parametrize("fault", MISFITS)
def test_inspect_a_wrong_pair(fault, tmp_path):
    path = save_misfit(fault, tmp_path / "assistant")
    model = checkpoint_path("gemma4-dense")
    result = run("inspect", model, "--draft-model", path, "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["verdict"], facts["engages"]) == (4, "incompatible", False)
    assert MISFITS[fault][1] in facts["why"]
    assert facts["drafter"]["path"] == str(path)
    assert facts["num_draft_tokens"] is None


@pytest.mark.parametrize(
    ("model", "drafter", "exit_code", "words"),
    [
        (GEMMA, TRAINED, 4, "The tokenizers differ: id 0 is"),
        (TRAINED, ASSISTANT, 4, "it is for models of type gemma4"),
        (GEMMA, GEMMA, 2, "its assistant is a repository of its own"),
    ],
)
def test_inspect_with_something_else_than_its_drafter(model, drafter, exit_code, words):
    result = run("inspect", model, "--draft-model", drafter, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == exit_code
    assert words in facts["why"]
    assert facts["drafter"] is None


def test_inspect_with_a_damaged_or_missing_drafter(tmp_path):
    source = load(ASSISTANT.name)
    del source.tensors["model.norm.weight"]
    path = save(source, tmp_path / "assistant")
    result = run("inspect", GEMMA, "--draft-model", path)
    assert_one_sentence(result, 1, "lacks 1 tensors of its assistant: model.norm.weight")
    assert_one_sentence(run("inspect", GEMMA, "--draft-model", "no/where"), 1, "does not exist")


def test_inspect_a_gemma_without_an_assistant(tmp_path):
    shutil.copytree(GEMMA, tmp_path / "gemma")
    save_misfit("vocabulary", tmp_path / "other-assistant")
    exit_code, facts = inspect_json(tmp_path / "gemma")
    assert (exit_code, facts["verdict"], facts["drafter"]) == (2, "no-drafter", None)
    assert facts["why"] == (
        "no *-assistant* drafter beside it (--draft-model names one elsewhere); "
        "other-assistant beside it does not fit: "
        "its vocab_size is 256 and the model's vocabulary is 512"
    )


def test_inspect_compares_tokenizers(tmp_path):
    model = tmp_path / "gemma"
    shutil.copytree(GEMMA, model)
    rename_token(model, "a", "aa")
    result = run("inspect", model, "--draft-model", ASSISTANT, "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["verdict"]) == (4, "incompatible")
    assert facts["tokenizer"] == "differs"
    assert "is 'a' in the drafter's tokenizer and 'aa' in the model's" in facts["why"]
    (model / "tokenizer.json").unlink()
    result = run("inspect", model, "--draft-model", ASSISTANT)
    assert result.exit_code == 0
    assert f"tokenizer     unknown: {model} has no tokenizer.json to compare" in result.stdout


def test_inspect_a_model_without_a_drafter(model_dir):
    strip_head(model_dir)
    exit_code, facts = inspect_json(model_dir)
    assert (exit_code, facts["verdict"], facts["drafter"]) == (2, "no-drafter", None)


def test_inspect_a_drafter_alone_and_beside_its_model(model_dir, tmp_path):
    run("convert", "--from", model_dir, "--to", tmp_path / "Tiny-Model-MTP", "-q")
    strip_head(model_dir)
    exit_code, facts = inspect_json(tmp_path / "Tiny-Model-MTP")
    assert (exit_code, facts["verdict"]) == (3, "unverified")
    assert facts["drafter"]["quantization"]["bits"] == 8
    assert facts["drafter"]["source"] == str(model_dir)
    exit_code, facts = inspect_json(model_dir)
    assert (exit_code, facts["drafter"]["path"]) == (0, str(tmp_path / "Tiny-Model-MTP"))


def test_inspect_a_family_without_drafters_of_its_own(tmp_path):
    shutil.copytree(checkpoint_path("llama-target-trained"), tmp_path / "model")
    exit_code, facts = inspect_json(tmp_path / "model")
    assert (exit_code, facts["verdict"]) == (2, "no-drafter")
    assert facts["why"].startswith("no *EAGLE3* drafter beside it")
    assert ways(facts) == {"eagle3": False, "lookup": True, "draft-model": True}


def ways(facts):
    return {way["kind"]: way["works"] for way in facts["ways"]}


def test_inspect_lists_all_that_would_draft(model_dir, tmp_path):
    _, facts = inspect_json(model_dir)
    assert ways(facts) == {"nextn": True, "lookup": True, "combined": True, "draft-model": True}
    strip_head(model_dir)
    _, facts = inspect_json(model_dir)
    assert ways(facts) == {"nextn": False, "lookup": True, "draft-model": True}
    assert facts["ways"][0]["why"] == facts["why"]
    text = run("inspect", model_dir).stdout
    assert "  ways          nextn does not work: no mtp.* weights among" in text
    assert "                lookup works: it drafts what followed earlier in the text" in text


def test_inspect_a_smaller_model_as_the_drafter(tmp_path):
    config = json.loads((GEMMA / "config.json").read_text())
    model = tmp_path / "model"
    shutil.copytree(checkpoint_path("llama-target-trained"), model)
    shutil.copy(GEMMA / "tokenizer.json", model)
    result = run("inspect", model, "--draft-model", GEMMA, "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["verdict"], facts["tokenizer"]) == (0, "usable", "same")
    assert facts["drafter"]["kind"] == "draft-model"
    assert facts["drafter"]["layers"] == config["text_config"]["num_hidden_layers"]
    assert ways(facts) == {"draft-model": True, "lookup": True, "combined": True}


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [("qwen3-5", "draft-model"), ("gemma4-e2b-assistant", "gemma4-assistant")],
)
def test_inspect_names_what_does_not_fit_by_its_own_kind(drafter, kind):
    model = checkpoint_path("llama-target-trained")
    result = run("inspect", model, "--draft-model", checkpoint_path(drafter), "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["verdict"]) == (4, "incompatible")
    assert facts["ways"][0] == {"kind": kind, "works": False, "why": facts["why"]}


# demo


def test_demo_prints_both_runs():
    result = run("demo", "--max-tokens", 30)
    assert result.exit_code == 0
    assert "the same text" in result.stdout
    assert "plain" in result.stdout
    assert "tokens a round" in result.stdout
