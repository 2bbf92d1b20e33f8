"""The OpenAI client gets from `mlx-spec serve` the answers of mlx_lm.server.

The demo models answer in float32: past Gemma-4's sliding window mlx_lm itself rounds a row
differently when several are computed at once, which in bfloat16 turns near-ties.
"""

import inspect
import itertools
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import _byte_decoder
from mlx_lm.utils import load_tokenizer
from openai import OpenAI
from serving import serving

from models import DEMO, GEMMA_DEMO, checkpoint_path

CODE = (  # longer than the window of the Gemma demo
    "import os\nimport sys\n\n\nclass Stack:\n    def __init__(self, maxsize=0):\n"
    "        self.items = []\n        self.maxsize = maxsize\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n"
    "    def peek(self):\n"
)
ASK = [{"role": "user", "content": f"Write the function read_file after this.\n{CODE}"}]
ASK_TO = "Write the function read_file: Return the contents of a file."
AGAIN = "\nimport os\nimport sys\nimport re\nimport"
ENDING = [{"role": "user", "content": ASK_TO}]


@contextmanager
def stock_serving(model: Path, *options: Any) -> Iterator[str]:
    """The address of an unmodified mlx_lm.server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--port", port, "--model", model]
    process = subprocess.Popen(
        [str(word) for word in (*command, *options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@dataclass
class Answer:
    """Of a chat or text completion, streamed or not.

    Attributes:
        parts: what came in one piece each: text, reasoning and tool calls.
        body: the whole answer, or the last chunk that has choices.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: Any = None
    usage: dict = field(default_factory=dict)
    parts: list[tuple] = field(default_factory=list)
    body: dict = field(default_factory=dict)

    def add(self, body: dict) -> None:
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            message = choice.get("message") or choice.get("delta") or {}
            calls = message.get("tool_calls", [])
            for call in calls:
                assert call.pop("id")
            text = choice.get("text") or message.get("content") or ""
            reasoning = message.get("reasoning", "")
            self.parts.append((text, reasoning, calls))
            self.text += text
            self.reasoning += reasoning
            self.tool_calls += calls
            self.finish_reason = choice["finish_reason"]
            self.logprobs = choice.get("logprobs")
            self.body = body

    @property
    def content(self) -> tuple:
        return self.text, self.reasoning, self.tool_calls, self.finish_reason

    @property
    def tokens(self) -> tuple[int, int]:
        return self.usage["prompt_tokens"], self.usage["completion_tokens"]

    @property
    def cached_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]


def answer(openai: OpenAI, **options: Any) -> Answer:
    """Options that the client does not know go into the body as they are."""
    completions = openai.chat.completions if "messages" in options else openai.completions
    known = inspect.signature(completions.create).parameters
    extra = {name: options.pop(name) for name in set(options) - set(known)}
    if options.get("stream"):
        options["stream_options"] = {"include_usage": True}
    response = completions.create(model="default_model", **options, extra_body=extra)
    collected = Answer()
    for chunk in response if options.get("stream") else [response]:
        collected.add(chunk.to_dict())
    return collected


@dataclass
class Servers:
    """mlx-spec's and mlx_lm's, on one model."""

    spec: OpenAI
    stock: OpenAI
    model: Path
    tokenizer: Any
    known: dict[str, Answer] = field(default_factory=dict)

    def stock_answer(self, **options: Any) -> Answer:
        """Of mlx_lm.server, which is asked once."""
        key = json.dumps(options, sort_keys=True)
        if key not in self.known:
            self.known[key] = answer(self.stock, **options)
        return self.known[key]

    def both(self, *depths: int, **options: Any) -> tuple[list[Answer], Answer]:
        """mlx-spec's answers at these depths, and mlx_lm's."""
        with ThreadPoolExecutor(1) as other:
            expected = other.submit(self.stock_answer, **options)
            ours = [answer(self.spec, num_draft_tokens=n, **options) for n in depths]
            return ours, expected.result()


@contextmanager
def both_serving(model: Path, *options: Any) -> Iterator[Servers]:
    with (
        ThreadPoolExecutor(1) as other,
        serving_in(other, model, *options) as url,
        serving(*options, model=model) as spec,
    ):
        yield Servers(client(spec.url), client(url.result()), model, load_tokenizer(model))


@contextmanager
def serving_in(pool: ThreadPoolExecutor, model: Path, *options: Any) -> Iterator[Any]:
    """`stock_serving`, begun in another thread."""
    context = stock_serving(model, *options)
    url = pool.submit(context.__enter__)
    try:
        yield url
    finally:
        url.result()
        context.__exit__(None, None, None)


def in_float32(source: Path, to: Path) -> Path:
    """A copy of a model and of the drafter beside it, both in float32."""
    for path in {source, source.with_name(f"{source.name}-assistant")}:
        if path.exists():
            shutil.copytree(path, to / path.name)
            file = str(to / path.name / "model.safetensors")
            weights = mx.load(str(path / "model.safetensors"))
            for name, array in weights.items():
                if array.dtype == mx.bfloat16:
                    weights[name] = array.astype(mx.float32)
            mx.save_safetensors(file, weights, metadata={"format": "pt"})
    return to / source.name


@pytest.fixture(scope="module", params=[DEMO, GEMMA_DEMO])
def servers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with both_serving(in_float32(checkpoint_path(request.param), folder)) as servers:
        yield servers


def check(got: Answer, depth: int, drafts: bool = True) -> None:
    """The counters of an answer agree with each other, and say that drafts were right."""
    timings, spec = got.body["timings"], got.body["spec"]
    details = got.usage["completion_tokens_details"]
    accepted, rejected = (details[f"{k}_prediction_tokens"] for k in ("accepted", "rejected"))
    prompt_tokens, completion_tokens = got.tokens
    assert timings["predicted_n"] == completion_tokens
    assert timings["prompt_n"] == prompt_tokens - got.cached_tokens
    assert got.usage["total_tokens"] == prompt_tokens + completion_tokens
    assert accepted + rejected == timings["draft_n"]
    assert accepted <= timings["draft_n_accepted"] <= timings["draft_n"]
    assert accepted <= completion_tokens
    assert timings["draft_rounds"] + accepted >= completion_tokens - 1 or not spec["engaged"]
    assert spec["engaged"] == (timings["draft_n"] > 0)
    if depth == 0:
        assert (spec["engaged"], spec["reason"]) == (False, "num-draft-tokens-0")
    elif drafts:
        assert (spec["engaged"], spec["reason"], spec["depth"]) == (True, None, depth)
        assert spec["batched"] == 0
        assert accepted > 0


# One request at a time

CHAT = {"messages": ASK}
TEXT = {"prompt": CODE}
DRAWN = {"temperature": 0.8, "seed": 7}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.4}
OPTIONS = {
    "greedy": TEXT,
    "greedy chat": CHAT,
    "temperature": TEXT | DRAWN,
    "temperature chat": CHAT | DRAWN,
    "top-p": TEXT | {"temperature": 1, "top_p": 0.8, "seed": 2**40},
    "top-k": TEXT | {"temperature": 1.2, "top_k": 20, "seed": 1},
    "min-p": TEXT | {"temperature": 1.1, "min_p": 0.05, "seed": 2},
    "XTC": TEXT | DRAWN | {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "penalties": TEXT | PENALTIES,
    "logit_bias": TEXT | {"logit_bias": {"198": -3.0, "220": 1.5, "300": 2}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_text_is_stocks(servers, options):
    ours, expected = servers.both(0, 3, **options, max_tokens=16)
    assert len(expected.text) > 16
    assert {"timings", "spec"}.isdisjoint(expected.body)
    streamed = options | {"max_tokens": 16, "stream": True}
    streams = [answer(servers.spec, num_draft_tokens=n, **streamed) for n in (1, 4)]
    for depth, got in zip((0, 3, 1, 4), ours + streams, strict=True):
        assert got.content == expected.content
        assert got.tokens == expected.tokens
        check(got, depth)


@pytest.mark.parametrize("name", ["greedy", "temperature chat"])
def test_a_stream_comes_in_stocks_pieces(servers, name):
    options = OPTIONS[name] | {"max_tokens": 16, "stream": True}
    (got,), expected = servers.both(3, **options)
    assert got.parts == expected.parts
    assert len(got.parts) > 8
    assert {"timings", "spec"}.isdisjoint(expected.body)


def test_penalties_and_a_seed(servers):
    """mlx_lm.server then does not penalise what the prompt cache holds, so each prompt is new."""
    for depth in (0, 1, 3):
        options = {"prompt": f"# depth {depth}\n{CODE}", "max_tokens": 16} | PENALTIES | DRAWN
        (got,), expected = servers.both(depth, **options)
        assert got.content == expected.content
        check(got, depth, drafts=False)
        assert got.body["timings"]["draft_n"] >= depth


def test_an_end_token(servers):
    options = {"messages": ENDING, "max_tokens": 80, "stream": True}
    ours, expected = servers.both(1, 3, 4, **options)
    assert expected.finish_reason == "stop"
    for depth, got in zip((1, 3, 4), ours, strict=True):
        assert (got.parts, got.content) == (expected.parts, expected.content)
        assert got.tokens == expected.tokens
        check(got, depth)


def stop_words(servers, options, most):
    """Stop words of two and three tokens, from anywhere in an answer, and where they end."""
    whole = servers.stock_answer(**options, max_tokens=28, logprobs=True)
    tokens = [token["id"] for token in whole.logprobs["content"]]
    words = []
    for end in range(5, len(tokens) + 1):
        size = 2 + end % 2
        at = end - size
        word = servers.tokenizer.decode(tokens[at:end])
        before = [tokens[i : i + size] for i in range(at)]
        encoded = servers.tokenizer.encode(word, add_special_tokens=False)
        if encoded == tokens[at:end] and encoded not in before:
            words.append((word, end))
    return words[:: -(-len(words) // most)]


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": f"# stop words\n{CODE}"} | PENALTIES,
        {"prompt": f"# stop at\n{CODE}", "temperature": 0.3, "seed": 4},
    ],
    ids=["greedy", "drawn"],
)
def test_stop_words_of_several_tokens(servers, options):
    """Wherever they lie in the rounds."""
    words = stop_words(servers, options, most=4)
    assert len(words) > 2
    beyond = 0
    for at, (word, end) in enumerate(words):
        stop = {"stop": word, "max_tokens": 28}
        depths = [(3, 1), (4, 3)][at % 2]
        ours, expected = servers.both(*depths, **options, **stop)
        assert (expected.finish_reason, expected.tokens[1]) == ("stop", end)
        for depth, got in zip(depths, ours, strict=True):
            assert got.content == expected.content
            assert got.tokens == expected.tokens
            check(got, depth, drafts=end > 8)
            details = got.usage["completion_tokens_details"]
            beyond += (
                got.body["timings"]["draft_n_accepted"] - details["accepted_prediction_tokens"]
            )
    assert beyond > 0  # an answer ended where further drafts had been right


def test_a_stop_word_that_is_no_sequence_of_tokens_is_cut_out(servers):
    """As mlx_lm does, which goes on."""
    text = servers.stock_answer(**TEXT, max_tokens=16).text
    options = TEXT | {"max_tokens": 16, "stop": text.strip()[1:4], "stream": True}
    (got,), expected = servers.both(3, **options)
    assert (got.parts, got.content) == (expected.parts, expected.content)
    assert len(expected.text) < len(text)


@pytest.mark.parametrize("name", ["greedy", "temperature"])
def test_every_cap(servers, name):
    for most in (1, 2, 3, 4, 5, 7):
        (got,), expected = servers.both(3, **OPTIONS[name], max_tokens=most)
        assert got.content == expected.content
        assert got.tokens[1] == most
        check(got, 3, drafts=False)
        if most == 1:
            assert got.body["spec"]["reason"] == "too-short"


@pytest.mark.parametrize("name", ["greedy chat", "temperature"])
def test_logprobs(servers, name):
    options = OPTIONS[name] | {"max_tokens": 12, "logprobs": True, "top_logprobs": 5}
    ours, expected = servers.both(0, 1, 3, 4, **options)
    tokens = expected.logprobs["content"]
    assert len(tokens) == expected.tokens[1] == 12
    for got in ours:
        assert len(got.logprobs["content"]) == got.tokens[1] == 12
        for theirs, own in zip(tokens, got.logprobs["content"], strict=True):
            best = [{t["token"]: t["logprob"] for t in x["top_logprobs"]} for x in (theirs, own)]
            assert best[0].keys() == best[1].keys()
            assert best[0] == pytest.approx(best[1], abs=1e-3)
            assert len(best[0]) == 5
    plain = options | {"top_logprobs": -1}
    (got,), expected = servers.both(3, **plain)
    theirs, own = expected.logprobs["content"], got.logprobs["content"]
    assert [t["id"] for t in own] == [t["id"] for t in theirs]
    assert [t["logprob"] for t in own] == pytest.approx([t["logprob"] for t in theirs], abs=1e-3)
    check(got, 3)


@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=["greedy", "temperature"])
def test_bytes_that_are_no_characters(servers, drawn):
    """Bytes above 127 only: characters, and parts of some, as they come."""
    of_byte = {byte: mark for mark, byte in _byte_decoder().items()}
    bytes_ = servers.tokenizer.convert_tokens_to_ids([of_byte[byte] for byte in range(128, 256)])
    options = TEXT | drawn | {"logit_bias": {str(i): 30 for i in bytes_}, "max_tokens": 16}
    ours, expected = servers.both(1, 3, 4, **options, stream=True)
    assert all(ord(character) > 127 for character in expected.text)
    for depth, got in zip((1, 3, 4), ours, strict=True):
        assert (got.parts, got.content) == (expected.parts, expected.content)
        check(got, depth, drafts=drafter_of(servers.model) == servers.model)


# Several turns: mlx_lm.server's prompt cache


@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=["greedy", "temperature"])
def test_a_conversation(servers, drawn):
    """The cache is used as in mlx_lm.server, and what the drafter knows is kept with it."""
    messages = []
    for turn, line in enumerate(["the list", "a file", "all of it"]):
        asked = f"Write the function close_{len(drawn)}: Close {line}."
        messages = [*messages, {"role": "user", "content": asked}]
        options = {"messages": messages, "max_tokens": 16} | drawn
        (got,), expected = servers.both(3, **options)
        assert got.content == expected.content
        assert got.cached_tokens == expected.cached_tokens
        check(got, 3)
        if turn:
            assert got.cached_tokens > 16
            assert got.body["spec"]["unprimed"] == 0
        messages = [*messages, {"role": "assistant", "content": got.text}]
    drafter = drafter_of(servers.model)
    fresh = answer(servers.spec, **options, draft_model=str(drafter))  # has caches of its own
    assert fresh.cached_tokens == 0
    assert fresh.content == expected.content
    check(fresh, 3)


def drafter_of(model: Path) -> Path:
    beside = model.with_name(f"{model.name}-assistant")
    return beside if beside.exists() else model


@pytest.mark.parametrize("how", ["stop word", "end token", "cap"])
@pytest.mark.parametrize("drawn", [{}, DRAWN], ids=["greedy", "temperature"])
def test_a_prefix_goes_on_after_any_end(servers, how, drawn):
    """What an answer has left in the cache is right, wherever in a round it ended."""
    accepted, beyond = 0, 0
    for at in (3, 6) if how in ("cap", "stop word") else (5,):
        prompt = f"# {how}\nn = {at}\n{CODE}"
        options = {"prompt": prompt, "max_tokens": 16} | drawn
        if how == "end token":
            prompt = servers.tokenizer.apply_chat_template(
                ENDING, tokenize=False, add_generation_prompt=True
            ).removeprefix("<bos>")
            options |= {"prompt": prompt, "max_tokens": 60}
        whole = servers.stock_answer(**options, logprobs=True)
        tokens = [token["id"] for token in whole.logprobs["content"]]
        if how == "disconnect":
            disconnect_after(at, servers.spec, **options)
        else:
            ends = {"stop": servers.tokenizer.decode([tokens[at]])} if how == "stop word" else {}
            ends |= {"max_tokens": at} if how == "cap" else {}
            (got,), expected = servers.both(3, **options | ends)
            assert got.content == expected.content
        further = {"prompt": f"{prompt}{servers.tokenizer.decode(tokens)}{AGAIN}", "max_tokens": 12}
        (got,), expected = servers.both(3, **further | drawn)
        assert got.content == expected.content
        check(got, 3, drafts=False)
        accepted += got.usage["completion_tokens_details"]["accepted_prediction_tokens"]
        beyond += max(0, got.cached_tokens - whole.tokens[0])
    assert accepted > 0
    assert beyond > 0 or (how == "disconnect" and not drawn)  # then nothing is kept of an answer


def disconnect_after(chunks: int, openai: OpenAI, **options: Any) -> None:
    stream = openai.completions.create(
        model="default_model", stream=True, extra_body={"num_draft_tokens": 3}, **options
    )
    for _ in zip(stream, range(chunks), strict=False):
        pass
    stream.close()


# Thinking, tool calls and characters of several bytes, from a model that says what is written here


DISTURBANCE = 3.5  # of the drafter, which is wrong about every fourth time


def pieces(text: str) -> list[str | bytes]:
    """Between bars, one token each; what is not ASCII, one token for each byte."""
    found: list[str | bytes] = []
    for piece in text.split("|"):
        if piece.isascii():
            found.append(piece)
        else:
            found += [bytes([byte]) for byte in piece.encode()]
    return found


SCRIPTS = {  # no piece twice
    "<say-calls>": 'Two| sums|.|</think>|I| will| add|:|<tool_call>|{"name":"add",|"arguments":'
    '|{"a":1,|"b":"|я|"}}|</tool_call>| and|<tool|_call>|{"name":|"mul",| "arg|uments":{"x":[2|,3'
    "|]|}|}</tool_|call>",
    "<say-think>": "Is| that|?</th|ink>|Yes|,| it| is|.\n|No|<|<thin|k>| or|</thi|nk>| so",
    "<say-bytes>": "x|ä|y|€|z|😀|漢|!",
    "<say-broken>": 'b<tool_|call>{"name"|: oops|</tool_call|>rest',
    "<say-open>": '<to|ol_call>|{"name":"o",|"arguments"|:{"o":0}}',
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for tool_call in m.tool_calls %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ script }}{% endif %}"
)


def scripted_model(path: Path, scripts: dict[str, str]) -> None:
    """A Qwen3.5 that says a script after its name. Its layers add nothing, so that the next token
    depends on the newest alone, through the rows of `lm_head`. Its head is right most of the
    time: it reads a disturbed embedding."""
    shutil.copytree(checkpoint_path(DEMO), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    mark = {byte: mark for mark, byte in _byte_decoder().items()}

    def id_of(piece: str | bytes) -> int:
        name = piece if piece in ids else "".join(mark[byte] for byte in as_bytes(piece))
        if name not in ids:
            ids[name] = len(ids)
            new = dict.fromkeys(["lstrip", "rstrip", "normalized", "single_word", "special"], False)
            tokenizer["added_tokens"].append({"id": ids[name], "content": piece} | new)
        return ids[name]

    id_of("<think>")
    follows: dict[int, int] = {}
    for name, script in scripts.items():
        tokens = [id_of(piece) for piece in [name, *pieces(script), "<|im_end|>"]]
        for one, next_one in itertools.pairwise(tokens):
            assert one not in follows, f"a piece of {name} is there twice"
            follows[one] = next_one
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["added_tokens_decoder"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    config["text_config"]["vocab_size"] = len(ids)
    (path / "config.json").write_text(json.dumps(config))

    weights = mx.load(str(path / "model.safetensors"))
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight")
    silent += ("norm_embedding.weight", "norm_hidden.weight")  # stored minus one, as all norms
    for name, array in weights.items():
        is_silent = name.endswith(silent) and "linear_attn.norm" not in name
        weights[name] = mx.zeros(array.shape) if is_silent else array.astype(mx.float32)
    size = config["text_config"]["hidden_size"]
    random = np.random.default_rng(0)
    embeddings = random.standard_normal((len(ids), size)).astype(np.float32)
    embeddings /= np.sqrt((embeddings**2).mean(-1, keepdims=True))
    lm_head = np.zeros_like(embeddings)
    for one, next_one in follows.items():
        lm_head[next_one] += 20 / size * embeddings[one]
    fc = np.eye(size, 2 * size, dtype=np.float32)
    fc[:, :size] += random.standard_normal((size, size)) * DISTURBANCE / np.sqrt(size)
    weights["model.language_model.embed_tokens.weight"] = mx.array(embeddings)
    weights["lm_head.weight"] = mx.array(lm_head)
    weights["mtp.fc.weight"] = mx.array(fc)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})


def as_bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "scripted"
    scripted_model(path, SCRIPTS)
    with both_serving(path) as servers:
        yield servers


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SAID = {  # text, reasoning, tool calls, finish reason
    "<say-calls>": (
        "I will add: and",
        "Two sums.",
        [("add", {"a": 1, "b": "я"}), ("mul", {"x": [2, 3]})],
        "tool_calls",
    ),
    "<say-think>": ("Yes, it is.\nNo< so", "Is that? or", [], "stop"),
    "<say-bytes>": ("xäy€z😀漢!", "", [], "stop"),
    "<say-broken>": ("brest", "", [], "tool_calls"),
    "<say-open>": ("", "", [("o", {"o": 0})], "tool_calls"),
}


def script(name: str, **options: Any) -> dict[str, Any]:
    think = "<think>" if SAID[name][1] else ""
    kwargs = {"script": f"{think}{name}"}
    asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 60}
    return asked | {"tools": TOOLS, "chat_template_kwargs": kwargs} | options


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_thinking_tool_calls_and_characters(scripted, name, stream):
    """Tags and characters lie across tokens and across rounds."""
    ours, expected = scripted.both(0, 1, 2, 3, 5, **script(name, stream=stream))
    text, reasoning, calls, finish_reason = expected.content
    functions = [call["function"] for call in calls]
    said = [(function["name"], json.loads(function["arguments"])) for function in functions]
    assert (text, reasoning, said, finish_reason) == SAID[name]
    for depth, got in zip((0, 1, 2, 3, 5), ours, strict=True):
        assert (got.parts, got.content) == (expected.parts, expected.content)
        assert got.tokens == expected.tokens
        check(got, depth)
    timings = [got.body["timings"] for got in ours]
    assert any(t["draft_n"] > t["draft_n_accepted"] for t in timings)


@pytest.mark.parametrize("name", ["<say-calls>", "<say-bytes>"])
def test_a_script_that_is_cut(scripted, name):
    """At any token: inside a character, a tag, a call. Half a character is replaced at the end,
    as in mlx_lm."""
    lengths = set()
    for most in range(2, 31 if name == "<say-calls>" else 17, 3):
        (got,), expected = scripted.both(3, **script(name, stream=most % 2 == 0, max_tokens=most))
        assert (got.parts, got.content) == (expected.parts, expected.content)
        assert got.finish_reason in ("length", "stop", "tool_calls")
        lengths.add(len(got.text + got.reasoning))
    assert len(lengths) > 3


@pytest.mark.parametrize("stop", ["it is", "n|k", "</think> so"], ids=["text", "part", "tag"])
def test_a_stop_word_in_a_script(scripted, stop):
    ours, expected = scripted.both(1, 3, 4, **script("<say-think>", stop=stop))
    for got in ours:
        assert got.content == expected.content
        assert got.tokens == expected.tokens
