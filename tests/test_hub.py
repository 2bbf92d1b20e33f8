"""Converting from the Hugging Face hub: the same drafter, and only its bytes travel."""

import json
import random
import struct
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path

import huggingface_hub
import mlx_lm
import pytest
from checkpoints import (
    ASSISTANTS,
    NAMES,
    config_of,
    load,
    read_file,
    reference,
    save_grouped,
    save_sharded,
    split_trunk_and_head,
    weights_of,
)
from click.testing import CliRunner
from fake_hub import COMMIT, FakeHub, Fault, serving

from mlx_spec.cli import cli
from mlx_spec.conversion import convert
from mlx_spec.convert import download, hub, ranges
from mlx_spec.convert.staging import Piece, Staging
from mlx_spec.errors import CheckpointError, Incompatible, SpecError, one_line
from mlx_spec.load import find_drafter
from mlx_spec.probe import probe

DEMO = Path(__file__).parent.parent / "models" / "tiny-qwen3.5-nextn"
HEAD = "qwen3-5-trained"  # a trunk and a head in one file
ASSISTANT = "gemma4-e2b-assistant"  # nothing but the drafter
FILE = "model.safetensors"
SIZE = (reference(HEAD) / FILE).stat().st_size


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, own_cache):
    """An empty cache of huggingface_hub, waits that take no time, and pieces of a few KB."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(download, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(hub, "PIECE_BYTES", 20_000)
    return tmp_path / "hf"


@pytest.fixture
def serve(monkeypatch):
    """Serves directories as org/NAME."""
    with pytest.MonkeyPatch.context() as patch:
        running = []

        def start(*paths, **options):
            state = FakeHub({f"org/{path.name}": path for path in paths}, **options)
            context = serving(state)
            running.append(context)
            context.__enter__()
            constants = huggingface_hub.constants
            patch.setattr(constants, "ENDPOINT", state.endpoint)
            template = state.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return state

        yield start
        for context in running:
            context.__exit__(None, None, None)


@pytest.fixture
def waits(monkeypatch):
    """Seconds that were waited before trying again; they pass at once."""
    seconds = []
    monkeypatch.setattr(download.Downloads, "wait", lambda self, s: seconds.append(s))
    return seconds


def header_bytes(path):
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def drafter_bytes(path):
    """Size of the tensors of the drafter in all files of a directory."""
    tensors = {n: t for file in path.glob("*.safetensors") for n, t in read_file(file).items()}
    head = {n: t for n, t in tensors.items() if n.startswith("mtp.")} or tensors
    return sum(len(tensor.data) for tensor in head.values())


def files_of(path):
    """Those that do not say where they are from."""
    telling = ("config.json", "README.md")
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in telling}


def assert_same_drafter(here, there):
    """But for where they are from."""
    assert files_of(there) == files_of(here)
    assert "tokenizer.json" in files_of(there)
    configs = [config_of(path) for path in (here, there)]
    for config in configs:
        config["mlx_spec"] |= {"source": None, "revision": None, "target": None}
    assert configs[0] == configs[1]


def staged(own_cache):
    return [path for path in own_cache.rglob("*") if path.is_file() and path.name != ".lock"]


# What travels, and what comes of it


@pytest.mark.parametrize(
    "path", [DEMO, *map(reference, NAMES + ASSISTANTS)], ids=lambda path: path.name
)
def test_the_same_drafter_as_from_a_directory_and_hardly_more_bytes(
    path, tmp_path, serve, own_cache
):
    state = serve(path)
    report = convert(f"org/{path.name}", tmp_path / "there")
    convert(path, tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    record = config_of(tmp_path / "there")["mlx_spec"]
    assert (record["source"], record["revision"]) == (f"org/{path.name}", COMMIT)
    wanted = drafter_bytes(path)
    assert wanted <= state.weights_sent <= 1.05 * wanted + header_bytes(path / FILE)
    assert report.fetched_bytes == state.weights_sent
    assert not staged(own_cache)


def test_of_shards_only_those_with_the_head_are_read(tmp_path, serve):
    path = save_sharded(load("qwen3-5-moe"), tmp_path / "sharded", shards=6)
    state = serve(path)
    convert("org/sharded", tmp_path / "there")
    convert(path, tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    with_head = {file for name, file in index.items() if name.startswith("mtp.")}
    opened = {file for _, _, file, _, _ in state.asked if file.endswith(".safetensors")}
    assert with_head < opened
    # Headers that say how norms are stored, and where those of the fingerprint are.
    layers = [f"layers.{i}.input_layernorm.weight" for i in (0, 2, 3)]
    norms = tuple(f"language_model.{name}" for name in ("norm.weight", *layers))
    with_norms = {file for name, file in index.items() if name.endswith(norms)}
    assert len(opened - with_head - with_norms) <= 1 < len(with_norms)
    headers = sum(header_bytes(path / file) for file in opened)
    assert state.weights_sent <= 1.05 * drafter_bytes(path) + headers


def test_a_target_on_the_hub_is_compared_by_a_few_norms(tmp_path, serve, own_cache):
    state = serve(reference(HEAD), reference("qwen3-5-tied"))
    report = convert(reference(HEAD), tmp_path / "out", f"org/{HEAD}")
    assert report.pairing == f"Fits org/{HEAD}; the same tokenizer; the head belongs to this model"
    assert state.weights_sent <= header_bytes(reference(HEAD) / FILE) + 4 * 128 * 2 + 64
    assert not staged(own_cache)
    with pytest.raises(Incompatible, match="belongs to another model"):
        convert(f"org/{HEAD}", tmp_path / "other", "org/qwen3-5-tied")
    convert(f"org/{HEAD}", tmp_path / "other", "org/qwen3-5-tied", allow_mismatch=True)
    assert not staged(own_cache)


def test_the_command_says_how_much_was_fetched(tmp_path, serve):
    state = serve(DEMO)
    result = CliRunner().invoke(
        cli, ["convert", "--from", f"org/{DEMO.name}@{COMMIT}", "--to", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    whole = (DEMO / FILE).stat().st_size
    said = f"Fetched {state.weights_sent / 1e6:.2f} of {whole / 1e6:.2f} MB"
    assert said in result.output


def test_what_the_cache_has_is_not_fetched_again(tmp_path, serve):
    state = serve(reference(HEAD))
    huggingface_hub.snapshot_download(f"org/{HEAD}")
    state.sent.clear()
    assert convert(f"org/{HEAD}", tmp_path / "out").fetched_bytes == 0
    assert state.weights_sent == 0


@pytest.fixture
def offline(monkeypatch):
    """Call it to be offline from now on."""

    def go():
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        huggingface_hub.utils.close_session()

    yield go
    huggingface_hub.utils.close_session()


def test_offline_the_cache_is_used(tmp_path, serve, offline):
    state = serve(reference(HEAD))
    huggingface_hub.snapshot_download(f"org/{HEAD}")
    state.asked.clear()
    offline()
    convert(f"org/{HEAD}", tmp_path / "there")
    with pytest.raises(CheckpointError, match="org/other is not here, and the Hugging Face"):
        convert("org/other", tmp_path / "other")
    assert not state.asked
    convert(reference(HEAD), tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    assert config_of(tmp_path / "there")["mlx_spec"]["revision"] == COMMIT


def test_offline_after_only_the_drafter_was_fetched(tmp_path, serve, offline):
    serve(reference(HEAD))
    convert(f"org/{HEAD}", tmp_path / "out")
    offline()
    with pytest.raises(CheckpointError, match=f"The weights of org/{HEAD} are not here"):
        convert(f"org/{HEAD}", tmp_path / "again")


def test_an_existing_directory_comes_first(tmp_path, serve, monkeypatch):
    state = serve(reference(HEAD))
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / HEAD).symlink_to(reference(HEAD))
    monkeypatch.chdir(tmp_path)
    assert convert(f"org/{HEAD}", "out").fetched_bytes is None
    assert not state.asked


def test_the_token_is_for_the_hub_alone(tmp_path, serve, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    state = serve(reference(HEAD))
    convert(f"org/{HEAD}", tmp_path / "out")
    tokens = {server: set() for server in ("hub", "storage")}
    for server, _, _, _, authorization in state.asked:
        tokens[server].add(authorization)
    assert tokens == {"hub": {"Bearer hf_secret"}, "storage": {None}}


# Trouble on the way


def test_answers_that_break_off_go_on_where_they_stopped(tmp_path, serve, waits):
    state = serve(reference(HEAD))
    state.faults = [Fault(FILE, cut=5_000, times=6)]
    convert(f"org/{HEAD}", tmp_path / "there")
    convert(reference(HEAD), tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    size = header_bytes(reference(HEAD) / FILE)
    assert state.weights_sent <= 1.05 * drafter_bytes(reference(HEAD)) + size
    assert waits


@pytest.mark.parametrize(
    ("status", "headers", "waited"),
    [
        (503, {}, [0.001, 0.002, 0.004]),
        (429, {"Retry-After": "7"}, [7, 7, 7]),
        (429, {"RateLimit": '"resolvers";r=0;t=12'}, [12, 12, 12]),
    ],
)
def test_a_busy_hub_is_asked_again(status, headers, waited, tmp_path, serve, waits):
    state = serve(reference(ASSISTANT))
    state.faults = [Fault(FILE, status, times=3, headers=headers)]
    convert(f"org/{ASSISTANT}", tmp_path / "out")
    assert waits == waited


def test_small_files_of_a_busy_hub_are_asked_for_again(tmp_path, serve, waits):
    state = serve(reference(ASSISTANT))
    state.faults = [Fault("config.json", 503), Fault("tokenizer.json", 500)]
    convert(f"org/{ASSISTANT}", tmp_path / "out")
    assert waits


def test_a_wait_of_an_hour_is_refused(tmp_path, serve, waits):
    state = serve(reference(ASSISTANT))
    state.faults = [Fault(FILE, 429, headers={"Retry-After": "3600"})]
    with pytest.raises(CheckpointError, match="hub did not give"):
        convert(f"org/{ASSISTANT}", tmp_path / "out")
    assert not waits


def test_an_interrupted_run_goes_on(tmp_path, serve, waits, own_cache):
    """What was fetched is not fetched again, and what is there before the end is no model."""
    path = reference("qwen3-5-moe")
    state = serve(path)
    failing = threading.Event()

    def fault(self, file):
        fetched = sum(path.stat().st_size for path in staged(own_cache))
        if file == FILE and fetched > 100_000:
            failing.set()
        return Fault(file, 500) if failing.is_set() and file == FILE else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeHub, "fault", fault)
        with pytest.raises(CheckpointError, match="try again later; what was fetched is kept"):
            convert("org/qwen3-5-moe", tmp_path / "there")
    assert not (tmp_path / "there").exists()
    kept = staged(own_cache)
    assert not [file for file in kept if file.name.startswith(".")]  # halves of pieces
    assert sum(file.stat().st_size for file in kept) > 100_000
    assert not {file.suffix for file in staged(own_cache)} & {".json", ".safetensors"}
    kept[0].write_bytes(b"x" * kept[0].stat().st_size)  # a crash may leave anything
    sound = sum(file.stat().st_size for file in kept[1:])
    state.sent.clear()
    convert("org/qwen3-5-moe", tmp_path / "there")
    convert(path, tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    rest = drafter_bytes(path) - sound
    assert (
        rest <= state.weights_sent <= rest + 0.05 * drafter_bytes(path) + header_bytes(path / FILE)
    )
    assert not staged(own_cache)


def test_a_server_without_ranges_that_has_to_send_all(tmp_path, serve):
    state = serve(reference(ASSISTANT), ranges=False)
    convert(f"org/{ASSISTANT}", tmp_path / "there")
    convert(reference(ASSISTANT), tmp_path / "here")
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    assert [r for _, method, f, r, _ in state.asked if f == FILE and method == "GET"][-1] is None


def test_a_server_without_ranges_that_would_have_to_send_too_much(tmp_path, serve):
    serve(reference(HEAD), ranges=False)
    with pytest.raises(CheckpointError, match="The server gives no parts of files, and only"):
        convert(f"org/{HEAD}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_server_without_ranges_and_a_head_in_a_file_of_its_own(tmp_path, serve):
    """The model's norms are not worth all of their file, so that there is no fingerprint."""
    source = load(HEAD)
    path = save_grouped(source, tmp_path / "split", split_trunk_and_head(source))
    state = serve(path, ranges=False)
    text = convert("org/split", tmp_path / "there").as_text().splitlines()
    assert "No fingerprint of its model is recorded; --target gives one" in text
    convert(path, tmp_path / "here")
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")
    assert "fingerprint" not in config_of(tmp_path / "there")["mlx_spec"]
    report = convert("org/split", tmp_path / "there", target="org/split")
    assert report.pairing.endswith(
        "; no fingerprint tells whether the drafter belongs to this very model"
    )
    assert ", as its norms could not be read" in report.as_text()
    whole = {f for _, method, f, r, _ in state.asked if method == "GET" and r is None}
    assert "model-00001-of-00002.safetensors" not in whole  # that of the trunk


def test_messages_hold_no_secrets_of_addresses(tmp_path, serve, waits):
    """Storage is asked at signed addresses, a mirror perhaps with a password."""
    serve(reference(HEAD), faults=[Fault(FILE, status=500, times=99)], signature="?X-Signature=1")
    with pytest.raises(CheckpointError, match=r"did not give org/qwen3-5.* '500 ") as caught:
        convert(f"org/{HEAD}", tmp_path / "out")
    assert "127.0.0.1" in str(caught.value)
    assert "Signature" not in str(caught.value)
    error = OSError("no https://me:word@mirror.org:80/a/b?c=d&e=f nor http://me@x")
    assert one_line(error) == "no https://mirror.org:80/a/b nor http://x"
    assert one_line(ValueError("a tensor, " * 1000)).endswith(" tensor, a ...")
    assert len(one_line(ValueError("a tensor, " * 1000))) <= 600


def test_ranges_that_are_ignored_later(tmp_path, serve, monkeypatch):
    """Bytes are never taken from the wrong place."""
    monkeypatch.setattr(download, "MAX_SKIP_BYTES", 1000)
    state = serve(reference(HEAD))
    begin = header_bytes(reference(HEAD) / FILE)

    def fault(self, file):
        state.ranges = len([f for _, _, f, _, _ in self.asked if f == FILE]) < 7
        return None

    monkeypatch.setattr(FakeHub, "fault", fault)
    assert begin > 1000
    with pytest.raises(CheckpointError, match="ignores that only a part of model"):
        convert(f"org/{HEAD}", tmp_path / "out")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Range": "bytes 0-7/8"}, "is not the file that was asked for"),
        ({"Content-Range": f"bytes 1-8/{SIZE}"}, "is not the file that was asked for"),
        ({"Content-Encoding": "gzip"}, r"sends model.safetensors compressed"),
    ],
)
def test_answers_about_something_else_are_refused(headers, message, tmp_path, serve):
    state = serve(reference(HEAD))
    state.faults = [Fault(FILE, headers=headers)]
    with pytest.raises(CheckpointError, match=message):
        convert(f"org/{HEAD}", tmp_path / "out")


def test_weights_of_another_commit_are_refused(tmp_path, serve):
    serve(reference(HEAD), weights_commit="2" * 40)
    with pytest.raises(CheckpointError, match="its commit is 2222"):
        convert(f"org/{HEAD}", tmp_path / "out")


def test_content_that_changes_under_way_is_refused(tmp_path, serve):
    """The same size, so that only the hashes tell."""
    path = tmp_path / ASSISTANT
    path.mkdir()
    for file in reference(ASSISTANT).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    state = serve(path)
    data = (path / FILE).read_bytes()
    (tmp_path / "changed").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def fault(self, file):
        asked = [f for _, _, f, _, _ in self.asked if f == FILE]
        with self.lock:
            if file == FILE and len(asked) >= 8 and (tmp_path / "changed").exists():
                (tmp_path / "changed").replace(path / FILE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeHub, "fault", fault)
        with pytest.raises(CheckpointError, match="its sha256 is"):
            convert(f"org/{ASSISTANT}", tmp_path / "out")
    assert state.weights_sent


def test_a_whole_file_is_checked_against_its_sha256(tmp_path, serve, own_cache):
    """Bytes that the storage sends wrongly."""
    state = serve(reference(ASSISTANT))
    sent = []

    def read_bytes(path):
        data = original(path)
        if path.name == FILE and path.parent == reference(ASSISTANT) and sent:
            data = data[:-1] + bytes([data[-1] ^ 1])
        sent.append(path)
        return data

    original = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        state.sent.clear()
        patch.setattr(Path, "read_bytes", read_bytes)
        hub_sha256(reference(ASSISTANT))
        with pytest.raises(CheckpointError, match="does not have the sha256 that the hub promises"):
            convert(f"org/{ASSISTANT}", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert(f"org/{ASSISTANT}", tmp_path / "out")  # nothing of that was kept


def hub_sha256(path):
    """Of the sound file, from now on."""
    from fake_hub import sha256

    file = path / FILE
    return sha256(file, file.stat().st_mtime_ns)


# What the hub does not give


def test_what_is_not_there_or_not_for_everyone(tmp_path, serve):
    path = reference(HEAD)
    serve(path, gated=frozenset({f"org/{HEAD}"}))
    for source, message in [
        (f"org/{HEAD}", "does not let you read .*: accept its licence there and log in"),
        (f"org/{HEAD}@v9", "has no such revision: give a branch, a tag or a commit"),
        ("org/none", "org/none does not exist, neither here nor on the Hugging Face hub"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not exist: give the directory"):
        convert("not/a/repository", tmp_path / "out")


def test_no_hub_and_no_copy(tmp_path, serve, waits):
    state = serve(reference(HEAD))
    huggingface_hub.constants.ENDPOINT = "http://127.0.0.1:9"
    with pytest.raises(CheckpointError, match="is not here, and the Hugging Face hub could not be"):
        convert(f"org/{HEAD}", tmp_path / "out")
    assert not state.asked


def test_files_that_are_too_large_to_be_what_they_are_called(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(hub, "MAX_JSON_BYTES", 100)
    serve(reference(HEAD))
    with pytest.raises(CheckpointError, match="large, which it cannot be"):
        convert(f"org/{HEAD}", tmp_path / "out")


def test_two_processes_share_their_pieces(tmp_path, own_cache):
    path, piece = tmp_path / "pieces", Piece("file", 3, 9)
    first, second = Staging(path), Staging(path)
    first.put(piece, [b"abc", b"def"])
    assert second.find(piece)
    first.remove()
    assert second.read("file", 4, 8) == b"bcde"
    second.remove()
    assert not path.exists()


def test_pieces_that_overlap_or_leave_gaps(tmp_path):
    staging, data = Staging(tmp_path), bytes(range(100))
    for begin, end in [(10, 30), (20, 50), (40, 45), (60, 70)]:
        staging.put(Piece("file", begin, end), [data[begin:end]])
    for begin in range(100):
        for end in range(begin, 100):
            here = any(a <= begin and end <= b for a, b in [(10, 50), (60, 70)]) or begin == end
            assert staging.covers("file", begin, end) == here
            if here:
                assert staging.read("file", begin, end) == data[begin:end]


def test_source_and_target_may_be_the_same_repository(tmp_path, serve, own_cache):
    """Of the target only the norms are read, by which the drafter knows it."""
    path = save_sharded(load("qwen3-5-trained"), tmp_path / "sharded")
    state = serve(path)
    convert("org/sharded", tmp_path / "there", "org/sharded@main")
    convert(path, tmp_path / "here", path)
    assert_same_drafter(tmp_path / "here", tmp_path / "there")
    assert state.weights_sent < 1.3 * drafter_bytes(path)
    assert not staged(own_cache)


# With the model


def test_model_and_drafter_in_one_run(tmp_path, serve, monkeypatch):
    """Every byte travels once; the model is what mlx_lm.convert writes."""
    state = serve(reference(HEAD))
    target = tmp_path / "Tiny-4bit"
    report = convert(f"org/{HEAD}", tmp_path / "Tiny-MTP", with_target=target, target_q_bits=4)
    whole = (reference(HEAD) / FILE).stat().st_size
    assert report.fetched_bytes == state.weights_sent
    assert whole <= state.weights_sent <= whole + header_bytes(reference(HEAD) / FILE)
    convert(reference(HEAD), tmp_path / "drafter")
    assert_same_drafter(tmp_path / "drafter", tmp_path / "Tiny-MTP")
    mlx_lm.convert(str(reference(HEAD)), str(tmp_path / "stock"), quantize=True, q_bits=4)
    assert config_of(target) == config_of(tmp_path / "stock")
    assert weights_of(target) == weights_of(tmp_path / "stock")
    assert find_drafter(target).path == tmp_path / "Tiny-MTP"
    assert {path.name for path in tmp_path.iterdir()} >= {"Tiny-4bit", "Tiny-MTP"}
    with pytest.raises(SpecError, match="exists: choose another place for the model"):
        convert(reference(HEAD), tmp_path / "again", with_target=target)


def test_nothing_is_downloaded_for_a_target_that_does_not_fit(tmp_path, serve):
    """The model would be, after the target was found to be another one."""
    state = serve(reference(HEAD))
    with pytest.raises(Incompatible, match="the head belongs to another model"):
        convert(
            f"org/{HEAD}",
            tmp_path / "out",
            reference("qwen3-5-tied"),
            with_target=tmp_path / "model",
        )
    assert state.weights_sent < 10_000
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "model").exists()


def test_a_model_to_probe_with_that_cannot_be_had(tmp_path, serve, waits, monkeypatch):
    """One sentence, whatever mlx_lm makes of it; a target that the hub has is downloaded."""
    serve(DEMO)
    monkeypatch.setattr("mlx_spec.probe.CLASSES", ("code",))
    monkeypatch.setattr("mlx_spec.probe.probe", partial(probe, max_tokens=8))
    options = ["--from", DEMO, "--target", f"org/{DEMO.name}", "--probe", "--to"]
    arguments = [str(argument) for argument in [*options, tmp_path / "out"]]

    def broken(*_, **options):
        raise huggingface_hub.errors.HTTPError("The read operation timed out")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_spec.probe.load", broken)
        result = CliRunner().invoke(cli, ["convert", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: org/tiny-qwen3.5-nextn is not here, and the Hugging")
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(cli, ["convert", *arguments])
    assert result.exit_code == 0, result.output
    assert "Probe: works; " in result.output


def test_a_drafter_that_the_network_does_not_bring(monkeypatch):
    def broken(*_, **options):
        raise huggingface_hub.errors.HTTPError("The read operation timed out")

    monkeypatch.setattr("mlx_spec.inspection.drafter_path", broken)
    result = CliRunner().invoke(cli, ["inspect", str(DEMO), "--draft-model", "org/drafter"])
    assert (result.exit_code, result.stderr) == (1, "Error: The read operation timed out\n")


def test_an_assistant_comes_without_a_model(tmp_path, serve):
    state = serve(reference(ASSISTANT))
    with pytest.raises(Incompatible, match="is a drafter and holds no model"):
        convert(f"org/{ASSISTANT}", tmp_path / "out", with_target=tmp_path / "model")
    assert state.weights_sent <= header_bytes(reference(ASSISTANT) / FILE)


# Ranges


def test_neighbours_are_fetched_together_and_gaps_stay_small():
    chance = random.Random(0)
    for _ in range(60):
        edges = sorted(chance.sample(range(3000), 2 * chance.randint(1, 30)))
        wanted = list(zip(edges[::2], edges[1::2], strict=True))
        chance.shuffle(wanted)
        found = ranges.coalesce(wanted)
        covered = {byte for begin, end in found for byte in range(begin, end)}
        needed = {byte for begin, end in wanted for byte in range(begin, end)}
        assert needed <= covered
        assert len(covered) <= 1.03 * len(needed)
        assert sum(end - begin for begin, end in found) == len(covered)
        assert all(before[1] < after[0] for before, after in pairwise(found))
        pieces = ranges.split(found, 100)
        assert {byte for begin, end in pieces for byte in range(begin, end)} == covered
        assert max(end - begin for begin, end in pieces) <= 100


def test_small_gaps_are_bridged_and_large_ones_are_not():
    assert ranges.coalesce([(0, 1000), (1010, 2000), (3000, 3000)]) == [(0, 2000)]
    assert ranges.coalesce([(0, 1000), (1100, 2000)]) == [(0, 1000), (1100, 2000)]
    far = 2 << 20
    assert ranges.coalesce([(0, 100 * far), (101 * far, 200 * far)])[0] == (0, 100 * far)
