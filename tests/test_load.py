"""Finding a drafter, loading it, and the bad input that users bring."""

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import MISFITS, save, save_misfit
from checkpoints import load as load_checkpoint
from fake_hub import fake_hub
from mlx.utils import tree_flatten

import mlx_spec
from mlx_spec.conversion import convert
from mlx_spec.errors import CheckpointError, Incompatible, NoDrafter, SpecError
from mlx_spec.load import find_drafter, load, load_drafter, pairing_of
from models import checkpoint_path, pair, strip_head

NAME = "qwen3-5-trained"
GEMMA = "gemma4-e2b-trained"


def test_a_head_inside_the_model_is_found(model_dir):
    assert find_drafter(model_dir).path == model_dir
    model, _ = load(str(model_dir))
    assert pairing_of(model).path == model_dir
    assert pairing_of(model).drafter.kind == "nextn"


def test_a_sibling_is_found_by_name_and_by_fit(model_dir):
    convert(model_dir, model_dir.parent / "Tiny-Model-MTP")
    convert(model_dir, model_dir.parent / "Another-MTP-bf16")
    convert(checkpoint_path("qwen3-5-moe"), model_dir.parent / "Tiny-Model-4bit-MTP-of-other-size")
    other = model_dir.parent / "Tiny-Model-4bit-MTP-of-other-size" / "config.json"
    config = json.loads(other.read_text())
    config["text_config"]["hidden_size"] = 64
    other.write_text(json.dumps(config))
    (model_dir.parent / "Tiny-MTP-notes").mkdir()
    strip_head(model_dir)
    assert find_drafter(model_dir).path == model_dir.parent / "Tiny-Model-MTP"


def test_a_damaged_or_alien_sibling_is_passed_over_and_named(model_dir):
    strip_head(model_dir)
    damaged = model_dir.parent / "Tiny-MTP-damaged"
    convert(checkpoint_path(NAME), damaged)
    (damaged / "config.json").write_text("{")
    shutil.copytree(model_dir, model_dir.parent / "Tiny-mtp-model")
    model, _ = load(str(model_dir))
    detail = pairing_of(model).detail
    assert "Tiny-MTP-damaged beside it does not fit" in detail
    assert "Tiny-mtp-model beside it does not fit: it is not a drafter" in detail


def test_siblings_of_a_link_are_found(model_dir, tmp_path):
    strip_head(model_dir)
    links = tmp_path / "links"
    links.mkdir()
    (links / "Qwen-4bit").symlink_to(model_dir)
    convert(checkpoint_path(NAME), links / "Qwen-MTP")
    assert find_drafter(links / "Qwen-4bit").path == links / "Qwen-MTP"
    convert(checkpoint_path(NAME), model_dir.parent / "Qwen-MTP-of-the-original")
    (links / "Qwen-MTP").rename(links / "elsewhere")
    found = find_drafter(links / "Qwen-4bit").path
    assert found == model_dir.parent / "Qwen-MTP-of-the-original"


def test_a_sibling_of_a_deeper_model_does_not_fit(model_dir):
    convert(model_dir, model_dir.parent / "Tiny-MTP")
    config = model_dir.parent / "Tiny-MTP" / "config.json"
    rewrite(config, num_hidden_layers=64)
    strip_head(model_dir)
    found = find_drafter(model_dir)
    assert found.path is None
    assert "its num_hidden_layers is 64 and the model's 4" in found.why_not


# Gemma-4 and its assistants


@pytest.fixture
def gemma_dir(tmp_path):
    """A trained model as people name it, alone."""
    path = tmp_path / "gemma-4-E2B-it-4bit"
    shutil.copytree(checkpoint_path(GEMMA), path)
    return path


def put_assistant(path: Path, name: str = GEMMA) -> Path:
    shutil.copytree(checkpoint_path(f"{name}-assistant"), path)
    return path


@pytest.mark.parametrize(
    "name", ["gemma-4-E2B-it-assistant", "gemma-4-E2B-it-assistant-bf16", "gemma-4-E2B-Assistant"]
)
def test_an_assistant_beside_its_model_is_found_as_it_was_downloaded(name, gemma_dir):
    assistant = put_assistant(gemma_dir.parent / name)
    model, tokenizer = load(str(gemma_dir))
    assert pairing_of(model).path == assistant
    tokenizer.eos_token_ids = []
    expected = list(mlx_lm.stream_generate(model, tokenizer, "hello there", max_tokens=40))
    got = list(
        mlx_spec.stream_generate(model, tokenizer, "hello there", max_tokens=40, num_draft_tokens=3)
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.kind == "gemma4-assistant"
    assert got[-1].spec.drafted > got[-1].spec.accepted > 0


def test_the_assistant_with_the_most_alike_name_is_taken(gemma_dir):
    beside = gemma_dir.parent
    for name in ("another-assistant", "gemma-4-E4B-it-assistant"):
        put_assistant(beside / name)
    convert(
        checkpoint_path(f"{GEMMA}-assistant"), beside / "gemma-4-E2B-it-assistant", dtype="float16"
    )
    assert find_drafter(gemma_dir).path == beside / "gemma-4-E2B-it-assistant"


def test_assistants_that_do_not_fit_are_passed_over_and_named(tmp_path):
    model = tmp_path / "gemma-4-31B-it-4bit"
    shutil.copytree(checkpoint_path("gemma4-dense"), model)
    for i, fault in enumerate(MISFITS):
        save_misfit(fault, tmp_path / f"gemma-4-31B-it-{i}-assistant")
    convert(checkpoint_path(NAME), tmp_path / "gemma-4-31B-it-4bit-qwen-assistant")
    shutil.copytree(model, tmp_path / "my-assistant")
    damaged = put_assistant(tmp_path / "gemma-4-31B-it-4bit-assistant-damaged")
    (damaged / "config.json").write_text("{")
    found = find_drafter(model)
    assert found.path is None
    assert found.why_not.startswith(
        "no *-assistant* drafter beside it (--draft-model names one elsewhere); "
    )
    for i, (_, words) in enumerate(MISFITS.values()):
        assert f"gemma-4-31B-it-{i}-assistant beside it does not fit: {words}" in found.why_not
    assert "qwen-assistant beside it does not fit: it is for models of type qwen3" in found.why_not
    assert "my-assistant beside it does not fit: it is not a drafter" in found.why_not
    assert f"beside it does not fit: {damaged / 'config.json'} is not JSON" in found.why_not
    put_assistant(tmp_path / "other-assistant", "gemma4-dense")
    assert find_drafter(model).path == tmp_path / "other-assistant"


def test_families_do_not_look_for_each_others_drafters(model_dir, gemma_dir):
    """Both are in the same directory, and of the same sizes."""
    strip_head(model_dir)
    put_assistant(model_dir.parent / "Tiny-Model-assistant")
    convert(checkpoint_path(NAME), gemma_dir.parent / "gemma-4-E2B-it-MTP")
    assert find_drafter(gemma_dir).path == model_dir.parent / "Tiny-Model-assistant"
    assert find_drafter(model_dir).path == gemma_dir.parent / "gemma-4-E2B-it-MTP"


def test_an_assistant_whose_config_transformers_wrote(gemma_dir, tmp_path):
    assistant = put_assistant(tmp_path / "it-assistant")
    config = json.loads((assistant / "config.json").read_text())
    text = config["text_config"]
    text["per_layer_config"] = {"3": {"head_dim": text.pop("global_head_dim")}}
    del text["num_global_key_value_heads"]
    (assistant / "config.json").write_text(json.dumps(config))
    for draft_model in ("auto", str(assistant)):
        model, _ = load(str(gemma_dir), draft_model=draft_model)
        assert pairing_of(model).path == assistant
        assert pairing_of(model).drafter.head.args.text.global_head_dim == 64


def test_the_unified_model_and_its_assistant(gemma_dir, tmp_path):
    assistant = put_assistant(tmp_path / "x-assistant")
    for path, model_type in (
        (gemma_dir, "gemma4_unified"),
        (assistant, "gemma4_unified_assistant"),
    ):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    model, _ = load(str(gemma_dir))
    assert pairing_of(model).path == assistant


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_an_assistant_has_the_targets_dtype_but_for_its_ordering(dtype, gemma_dir):
    model, _ = mlx_lm.load(str(gemma_dir))
    model.set_dtype(dtype)
    target = mlx_spec.targets.target_for(model)
    drafter = load_drafter(checkpoint_path(f"{GEMMA}-assistant"), target)
    parameters = dict(tree_flatten(drafter.head.parameters()))
    assert parameters.pop("masked_embedding.token_ordering").dtype == mx.int64
    assert {value.dtype for value in parameters.values()} == {dtype}


def test_a_quantised_gemma_with_a_quantised_assistant(gemma_dir, tmp_path):
    mlx_lm.convert(str(gemma_dir), mlx_path=str(tmp_path / "q"), quantize=True, q_group_size=32)
    convert(
        checkpoint_path(f"{GEMMA}-assistant"), tmp_path / "q-assistant", quantize=True, q_bits=4
    )
    model, tokenizer = load(str(tmp_path / "q"))
    head = pairing_of(model).drafter.head
    assert (head.model.embed_tokens.bits, head.pre_projection.bits) == (4, 8)
    assert head.model.embed_tokens.scales.dtype == mx.bfloat16
    tokenizer.eos_token_ids = []
    expected = list(mlx_lm.stream_generate(model, tokenizer, "hello there", max_tokens=40))
    got = list(
        mlx_spec.stream_generate(model, tokenizer, "hello there", max_tokens=40, num_draft_tokens=3)
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.drafted > got[-1].spec.accepted > 0


@pytest.mark.parametrize("fault", MISFITS)
def test_an_assistant_of_another_model_given_by_name(fault, tmp_path):
    path = save_misfit(fault, tmp_path / "assistant")
    with pytest.raises(Incompatible) as error:
        load(str(checkpoint_path("gemma4-dense")), draft_model=str(path))
    assert MISFITS[fault][1] in str(error.value)


def test_a_drafter_of_another_family():
    """The sizes are the same."""
    with pytest.raises(Incompatible, match="it is for models of type gemma4, gemma4_text"):
        load(str(checkpoint_path(NAME)), draft_model=str(checkpoint_path(f"{GEMMA}-assistant")))


def test_a_gemma_given_as_the_drafter():
    path = str(checkpoint_path(GEMMA))
    with pytest.raises(NoDrafter, match="its assistant is a repository of its own"):
        load(path, draft_model=path)


def test_an_assistant_given_as_the_model():
    with pytest.raises(Incompatible, match="is a drafter, not a model"):
        load(str(checkpoint_path(f"{GEMMA}-assistant")))


def test_a_damaged_assistant_that_was_found(gemma_dir):
    source = load_checkpoint(f"{GEMMA}-assistant")
    del source.tensors["post_projection.weight"]
    save(source, gemma_dir.parent / "gemma-4-E2B-it-assistant")
    with pytest.raises(CheckpointError, match=r"lacks 1 .*post_projection\.weight") as error:
        load(str(gemma_dir))
    assert "--draft-model none" in str(error.value)


def test_the_config_is_returned_as_mlx_lm_does(model_dir):
    ours = load(str(model_dir), None, None, None, False, True)
    theirs = mlx_lm.load(str(model_dir), None, None, None, False, True)
    assert len(ours) == 3
    assert ours[2] == theirs[2]


def test_without_a_drafter_the_model_is_loaded_all_the_same(model_dir):
    strip_head(model_dir)
    model, tokenizer = load(str(model_dir))
    last = list(
        mlx_spec.stream_generate(model, tokenizer, "hello", max_tokens=5, num_draft_tokens=3)
    )[-1]
    assert last.spec.reason == "no-match"
    assert last.spec.detail.startswith("no mtp.* weights among the model's own")
    assert not last.spec.engaged
    assert last.spec.acceptance is None


@pytest.mark.parametrize("draft_model", ["none", None])
def test_no_drafter_on_request(model_dir, draft_model):
    model, _ = load(str(model_dir), draft_model=draft_model)
    assert pairing_of(model).drafter is None
    assert pairing_of(model).reason == "no-drafter"


def test_the_drafter_has_the_targets_dtype(model_dir):
    model, _ = load(str(model_dir))
    head = pairing_of(model).drafter.head
    assert {v.dtype for _, v in tree_flatten(head.parameters())} == {mx.bfloat16}
    model, _ = mlx_lm.load(str(model_dir))
    model.set_dtype(mx.float32)
    drafter = load_drafter(model_dir, mlx_spec.targets.target_for(model))
    assert {v.dtype for _, v in tree_flatten(drafter.head.parameters())} == {mx.float32}


def test_the_pairing_is_no_part_of_the_models_weights(model_dir):
    model, _ = load(str(model_dir))
    plain, _ = mlx_lm.load(str(model_dir))
    assert [k for k, _ in tree_flatten(model.parameters())] == [
        k for k, _ in tree_flatten(plain.parameters())
    ]


@pytest.mark.parametrize(("name", "kind"), [(NAME, "nextn"), (GEMMA, "gemma4-assistant")])
def test_a_model_with_its_drafter_is_freed_at_once(name, kind):
    """There is no cycle that only the garbage collector would find."""
    model, tokenizer = load(str(checkpoint_path(name)))
    assert pairing_of(model).drafter.kind == kind
    list(mlx_spec.stream_generate(model, tokenizer, "hello", max_tokens=3, num_draft_tokens=3))
    embedding = weakref.ref(model.layers[0].input_layernorm)
    gc.collect()
    gc.disable()
    try:
        del model
        assert embedding() is None
    finally:
        gc.enable()


def test_a_seed_set_before_loading_means_the_same_with_and_without_a_drafter(model_dir):
    states = []
    for draft_model in ("auto", "none"):
        mx.random.seed(5)
        load(str(model_dir), draft_model=draft_model)
        states.append(mx.random.state[0].tolist())
    mx.random.seed(5)
    mlx_lm.load(str(model_dir))
    states.append(mx.random.state[0].tolist())
    assert states[0] == states[1] == states[2]


def test_a_quantised_target_and_a_quantised_drafter(model_dir, tmp_path):
    """The target's 4 bits say nothing about the drafter's 8, or none."""
    mlx_lm.convert(
        str(model_dir), mlx_path=str(tmp_path / "quantised"), quantize=True, q_group_size=64
    )
    for name, options in {"8bit": {"quantize": True, "q_bits": 8}, "plain": {}}.items():
        convert(model_dir, tmp_path / name, **options)
        model, tokenizer = load(str(tmp_path / "quantised"), draft_model=str(tmp_path / name))
        head = pairing_of(model).drafter.head
        assert hasattr(head.fc, "bits") == (name == "8bit")
        assert getattr(model.layers[3].self_attn.q_proj, "bits", None) == 4
        expected = list(mlx_lm.stream_generate(model, tokenizer, "hello", max_tokens=30))
        got = list(
            mlx_spec.stream_generate(model, tokenizer, "hello", max_tokens=30, num_draft_tokens=3)
        )
        assert [r.token for r in got] == [r.token for r in expected]
        assert got[-1].spec.drafted > 0


def test_what_a_user_has(tmp_path):
    """A mixture of experts in 4 bits without its head, a 4-bit drafter beside it."""
    source = checkpoint_path("qwen3-6-moe-trained")
    path = tmp_path / "Model-4bit"
    mlx_lm.convert(str(source), mlx_path=str(path), quantize=True, q_group_size=32)
    convert(source, tmp_path / "Model-MTP", quantize=True, q_bits=4, q_group_size=32)
    model, tokenizer = load(str(path))
    assert pairing_of(model).path == tmp_path / "Model-MTP"
    tokenizer.eos_token_ids = []
    expected = list(mlx_lm.stream_generate(model, tokenizer, "hello there", max_tokens=60))
    got = list(
        mlx_spec.stream_generate(model, tokenizer, "hello there", max_tokens=60, num_draft_tokens=3)
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.drafted > got[-1].spec.accepted > 0


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision(dtype, model_dir):
    model, tokenizer = mlx_lm.load(str(model_dir))
    model.set_dtype(dtype)
    tokenizer.eos_token_ids = []
    drafter = load_drafter(model_dir, mlx_spec.targets.target_for(model))
    expected = list(mlx_lm.stream_generate(model, tokenizer, "hello there", max_tokens=60))
    got = list(
        mlx_spec.stream_generate(
            model, tokenizer, "hello there", max_tokens=60, draft_model=drafter, num_draft_tokens=3
        )
    )
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.drafted > got[-1].spec.accepted > 0


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def rewrite(path, **changes):
    config = json.loads(path.read_text())
    config["text_config"] |= changes
    path.write_text(json.dumps(config))


BAD_MODELS = {
    "missing path": (shutil.rmtree, "does not exist"),
    "no safetensors": (lambda d: (d / "model.safetensors").unlink(), "no .*safetensors"),
    "corrupt header": (
        lambda d: (d / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header at all"),
        "model.safetensors",
    ),
    "truncated shard": (lambda d: truncate(d / "model.safetensors"), "model.safetensors"),
    "tensors without config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "config that is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "wrong shapes": (lambda d: rewrite(d / "config.json", intermediate_size=64), "shape"),
    "unknown model type": (
        lambda d: (d / "config.json").write_text('{"model_type": "no_such"}'),
        "no_such",
    ),
}


@pytest.mark.parametrize("fault", BAD_MODELS)
def test_a_bad_model_is_one_clear_error(fault, model_dir):
    break_it, words = BAD_MODELS[fault]
    break_it(model_dir)
    with pytest.raises((SpecError, ValueError), match=words) as error:
        load(str(model_dir))
    assert len(str(error.value)) < 400


def test_a_drafter_given_as_the_model(model_dir, tmp_path):
    convert(model_dir, tmp_path / "drafter")
    with pytest.raises(Incompatible, match="is a drafter, not a model"):
        load(str(tmp_path / "drafter"))


def test_a_model_without_a_head_given_as_the_drafter(model_dir, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    strip_head(other)
    with pytest.raises(NoDrafter, match="original repository"):
        load(str(model_dir), draft_model=str(other))


def test_a_missing_drafter(model_dir):
    with pytest.raises(CheckpointError, match="'nowhere' does not exist; give a dir"):
        load(str(model_dir), draft_model="nowhere")


def test_a_head_that_lacks_a_tensor_is_named(model_dir):
    weights = mx.load(str(model_dir / "model.safetensors"))
    mx.eval(weights)
    del weights["mtp.layers.0.self_attn.k_norm.weight"]
    mx.save_safetensors(str(model_dir / "model.safetensors"), weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_norm\.weight") as error:
        load(str(model_dir))
    assert "--draft-model none" in str(error.value)
    load(str(model_dir), draft_model="none")


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 64), ("vocab_size", 1000)])
def test_a_drafter_of_another_model(key, value, model_dir, tmp_path):
    p = pair(NAME)
    convert(model_dir, tmp_path / "drafter")
    target = mlx_spec.targets.target_for(p.model)
    setattr(target, key, value)
    with pytest.raises(Incompatible, match="convert the drafter from the repository"):
        load_drafter(tmp_path / "drafter", target)


def test_a_repository_in_the_hubs_cache(tmp_path):
    """As mlx-lm finds it, without a network."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(checkpoint_path(NAME), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    options = ["--model", "org/tiny", "-m", "8", "--require-spec", "--stats", "text"]
    result = subprocess.run(
        [sys.executable, "-m", "mlx_spec", "generate", *options],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "Speculation: nextn" in result.stderr


def test_a_repository_that_is_not_here(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "mlx_spec", "generate", "--model", "org/none"],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("Error: The model is not here")
    assert len(result.stderr.splitlines()) == 1


def generate_with_a_drafter_from(endpoint, home, draft_model):
    model = checkpoint_path("gemma4-e2b-trained")
    options = ["--model", str(model), "--draft-model", draft_model, "--ignore-chat-template"]
    options += ["--num-draft-tokens", "2"]
    return subprocess.run(
        [sys.executable, "-m", "mlx_spec", "generate", *options, "-m", "8", "--stats", "text"],
        env=os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
    )


def test_a_drafter_from_the_hub(tmp_path):
    """Downloaded once, then found in the cache."""
    assistant = checkpoint_path("gemma4-e2b-trained-assistant")
    with fake_hub({"org/tiny-assistant": assistant}) as endpoint:
        result = generate_with_a_drafter_from(endpoint, tmp_path, "org/tiny-assistant")
        missing = generate_with_a_drafter_from(endpoint, tmp_path, "org/none")
    assert result.returncode == 0, result.stderr
    assert "Speculation: gemma4-assistant" in result.stderr
    assert missing.returncode == 1
    assert missing.stderr.splitlines()[-1].startswith("Error: The drafter org/none does not exist")
    again = generate_with_a_drafter_from(endpoint, tmp_path, "org/tiny-assistant")
    assert "Speculation: gemma4-assistant" in again.stderr
    unreachable = generate_with_a_drafter_from(endpoint, tmp_path, "org/none")
    assert unreachable.returncode == 1
    assert "the Hugging Face hub could not be reached" in unreachable.stderr


def test_of_equally_alike_drafters_the_smaller_is_taken(tmp_path):
    """Whoever quantised it wants it used."""
    model = tmp_path / "gemma-4-E2B-it-4bit"
    assistant = tmp_path / "gemma-4-E2B-it-assistant"
    shutil.copytree(checkpoint_path("gemma4-e2b-trained"), model)
    shutil.copytree(checkpoint_path("gemma4-e2b-trained-assistant"), assistant)
    assert find_drafter(model).path == assistant
    convert(assistant, tmp_path / "gemma-4-E2B-it-assistant-8bit", model, quantize=True)
    assert find_drafter(model).path.name == "gemma-4-E2B-it-assistant-8bit"


def test_both_names_of_a_link_are_compared(tmp_path):
    model = tmp_path / "Gem-it-4bit"
    shutil.copytree(checkpoint_path("gemma4-e2b"), model)
    for name in ("Gem-assistant", "Gem-it-assistant"):
        shutil.copytree(checkpoint_path("gemma4-e2b-assistant"), tmp_path / name)
    (tmp_path / "link").symlink_to(model)
    assert find_drafter(tmp_path / "link").path.name == "Gem-it-assistant"


def test_a_sibling_that_cannot_be_listed_is_passed_over(tmp_path, monkeypatch):
    model = tmp_path / "Gem-it-4bit"
    shutil.copytree(checkpoint_path("gemma4-e2b"), model)
    (tmp_path / "Gem-it-assistant").mkdir()
    listed = Path.iterdir

    def iterdir(self):
        if self.name == "Gem-it-assistant":
            raise PermissionError(13, "Permission denied")
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    found = find_drafter(model)
    assert found.path is None
    assert "Gem-it-assistant cannot be read: Permission denied" in found.why_not
