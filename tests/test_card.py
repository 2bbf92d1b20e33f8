"""The model card, uploading, and checking what was written."""

import hashlib
import json
import shutil

import huggingface_hub
import pytest
from checkpoints import config_of, load, reference, save, weights_of
from click.testing import CliRunner
from fake_hub import fake_hub
from huggingface_hub import ModelCard

from mlx_spec.cli import cli
from mlx_spec.conversion import convert
from mlx_spec.convert.card import make_card
from mlx_spec.errors import CheckpointError
from mlx_spec.inspection import inspect_path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "Qwen-MTP"
    convert(reference("qwen3-5"), path, quantize=True)
    return path


def test_the_card_describes_the_drafter(drafter):
    card = ModelCard.load(drafter / "README.md")
    assert card.data.to_dict() == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "draft-model", "speculative-decoding"],
    }
    assert "# NextN (MTP) head" in card.text
    tensors = len(weights_of(drafter))
    assert f"| drafter | qwen3_5_mtp, {tensors} tensors, 8 bits |" in card.text
    assert "converted from" not in card.text
    assert config_of(drafter)["mlx_spec"]["fingerprint"]["sha256"][:16] in card.text
    assert str(reference("qwen3-5").parent) not in card.text  # nothing of this machine


@pytest.mark.parametrize(
    ("source", "revision", "base"),
    [
        ("Qwen/Qwen3.5-9B", "1" * 40, "Qwen/Qwen3.5-9B"),
        (f"/x/hub/models--Qwen--Qwen3.5-9B/snapshots/{'a' * 40}", None, "Qwen/Qwen3.5-9B"),
        ("Qwen/Qwen3.5-9B", None, None),  # a directory of that name
    ],
)
def test_the_base_model_is_the_repository_that_the_head_is_from(source, revision, base, drafter):
    config = config_of(drafter)
    config["mlx_spec"] |= {"source": source, "revision": revision}
    card = ModelCard(make_card(config, {}))
    assert card.data.base_model == base
    assert (f"# NextN (MTP) head of {base}" in card.text) == (base is not None)
    assert (f"revision {revision}" in card.text) == (revision is not None)


def test_the_licence_of_the_source_holds_and_a_drafters_base_model_is_kept(tmp_path):
    source = save(load("qwen3-5"), tmp_path / "model")
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: tiny\nbase_model: a/b\ntags: [x]\n---\n# Model\n"
    )
    convert(source, tmp_path / "out")
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.license, data.license_name, data.base_model) == ("other", "tiny", None)
    assert "x" not in data.tags

    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nbase_model: a/model\n", 1))
    convert(tmp_path / "out", tmp_path / "again")
    assert ModelCard.load(tmp_path / "again" / "README.md").data.base_model == "a/model"
    (source / "README.md").write_text("---\n: [\n---\n")
    convert(source, tmp_path / "out")
    assert ModelCard.load(card).data.license is None


def test_the_same_head_has_the_same_card_and_is_replaced_with_it(drafter, tmp_path):
    convert(reference("qwen3-5"), tmp_path / "out", quantize=True)
    convert(reference("qwen3-5"), tmp_path / "out", quantize=True)
    assert (tmp_path / "out" / "README.md").read_bytes() == (drafter / "README.md").read_bytes()


def test_an_assistant_is_for_its_model_and_a_drafter_stays_of_its_origin(tmp_path):
    """Not for the assistant's own repository, which is only where it comes from."""
    name, source = "gemma4-dense-assistant", {"source": "a/assistant", "revision": "1" * 40}
    with fake_hub({"org/gemma4-dense": reference("gemma4-dense")}) as endpoint:
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
            patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
            convert(reference(name), tmp_path / "first", "org/gemma4-dense")
    card = ModelCard.load(tmp_path / "first" / "README.md")
    assert card.data.base_model == "org/gemma4-dense"
    assert "# Assistant of org/gemma4-dense\n" in card.text
    assert "without org/gemma4-dense, which" in card.text

    config = config_of(tmp_path / "first")
    config["mlx_spec"] |= source
    (tmp_path / "first" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "first", tmp_path / "second", quantize=True)
    record = config_of(tmp_path / "second")["mlx_spec"]
    assert {key: record[key] for key in source} == source
    card = ModelCard.load(tmp_path / "second" / "README.md")
    assert card.data.base_model == "a/assistant"
    assert "# Assistant of org/gemma4-dense\n" in card.text
    assert f"| converted from | a/assistant, revision {'1' * 40} |" in card.text


# Uploading


def test_uploading_is_mlx_lms_with_our_own_card(tmp_path, monkeypatch):
    calls = []

    class FakeApi:
        def create_repo(self, **options):
            calls.append(("create", options))

        def upload_large_folder(self, folder_path, **options):
            files = {f.name: f.read_bytes() for f in sorted((tmp_path / "out").iterdir())}
            assert folder_path == str(tmp_path / "out")
            calls.append(("upload", options, files))

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    convert(reference("qwen3-5"), tmp_path / "out", upload="me/Qwen-MTP")
    convert(reference("qwen3-5"), tmp_path / "kept")
    assert calls[0] == ("create", {"repo_id": "me/Qwen-MTP", "exist_ok": True})
    assert calls[1][1] == {"repo_id": "me/Qwen-MTP", "repo_type": "model"}
    assert calls[1][2] == {f.name: f.read_bytes() for f in sorted((tmp_path / "kept").iterdir())}
    assert b"mlx-spec generate --model MODEL" in calls[1][2]["README.md"]


def test_an_upload_that_fails_leaves_the_drafter(tmp_path, monkeypatch):
    class FakeApi:
        def create_repo(self, **options):
            raise huggingface_hub.errors.LocalTokenNotFoundError("no token")

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    options = ("--from", reference("qwen3-5"), "--to", tmp_path / "out")
    result = run("convert", *options, "--upload", "me/Qwen-MTP")
    assert result.exit_code == 1
    assert "was written, but could not be uploaded to me/Qwen-MTP (no token)" in result.stderr
    assert run("inspect", tmp_path / "out", "--check").exit_code == 3
    result = run("convert", *options[:3], tmp_path / "no", "--upload", "me")
    assert "'me' cannot be a repository" in result.stderr
    assert not (tmp_path / "no").exists()


# Checking


def run(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


def test_files_as_they_were_written(drafter):
    result = run("inspect", drafter, "--check")
    assert result.exit_code == 3  # a drafter alone
    tensors = len(weights_of(drafter))
    assert f"{tensors} tensors are as they were written" in result.stdout
    assert f"converted from {reference('qwen3-5')}" in result.stdout
    facts = json.loads(
        run("inspect", reference("qwen3-5"), "--draft-model", drafter, "--check", "--json").stdout
    )
    assert facts["drafter"]["checked"] == tensors
    assert facts["fingerprint"] == "same"
    assert inspect_path(str(drafter)).drafter.checked is None


def test_a_changed_tensor_is_named(drafter, tmp_path):
    path = tmp_path / "drafter"
    shutil.copytree(drafter, path)
    name, stored = "layers.0.mlp.up_proj.weight", weights_of(path)["layers.0.mlp.up_proj.weight"]
    recorded = config_of(path)["mlx_spec"]["sha256"][name]
    assert recorded == hashlib.sha256(stored.data).hexdigest()
    data = (path / "model.safetensors").read_bytes()
    at = data.index(stored.data) + len(stored.data) // 2
    (path / "model.safetensors").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    result = run("inspect", path, "--check")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {name} in {path} is not what was written there")
    assert run("inspect", path).exit_code == 3  # nothing else would notice


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hashes: hashes.clear(), "records no hashes to check"),
        (lambda hashes: hashes.pop("norm.weight"), "holds norm.weight, of which .* no hash"),
        (lambda hashes: hashes.update({"x": "0"}), "lacks x"),
    ],
)
def test_what_cannot_be_checked(change, words, drafter, tmp_path):
    shutil.copytree(drafter, tmp_path / "drafter")
    config = config_of(tmp_path / "drafter")
    change(config["mlx_spec"]["sha256"])
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        inspect_path(str(tmp_path / "drafter"), check=True)
