"""What is refused before a request is decoded."""

import json

import pytest

from mlx_spec.options import SpecOptions
from mlx_spec.server.validation import BOUNDS, BadRequest, check, encode, parse, take_options

TEXT = {"prompt": "import os"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def refusal(body, chat=False):
    with pytest.raises(BadRequest) as error:
        check(dict(body), chat)
    return str(error.value)


def test_what_mlx_lm_takes_is_taken():
    options = {
        "stream": True,
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0.5,
        "xtc_probability": 1,
        "xtc_threshold": 0,
        "seed": 2**64 - 1,
        "num_draft_tokens": 0,
        "logit_bias": {"5": -100, "7": 1.5},
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 11,
        "chat_template_kwargs": {},
        "repetition_penalty": 1.1,
    }
    check(TEXT | options, chat=False)
    check(CHAT | options | {"stop": "a", "tools": []}, chat=True)
    parts = [{"type": "text", "text": "a"}]
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"custom": {}}]
    messages = [
        {"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": None},
    ]
    check({"messages": messages}, chat=True)


def test_a_number_that_mlx_lm_wants_as_a_float_becomes_one():
    """mlx cannot read integers of more than 64 bits."""
    body = TEXT | {"xtc_probability": 1, "xtc_threshold": 0, "presence_penalty": 2**64}
    check(body, chat=False)
    assert body["presence_penalty"] == 2**64
    for name in ("xtc_probability", "xtc_threshold", "presence_penalty"):
        assert isinstance(body[name], float)


def test_stream_options_may_be_incomplete():
    body = TEXT | {"stream_options": {}}
    check(body, chat=False)
    assert body["stream_options"] == {"include_usage": False}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_wrong_type_is_named(name):
    wrong = 5 if BOUNDS[name][0] in (str, dict, list, bool, (str, list)) else "5"
    assert refusal(TEXT | {name: wrong}).startswith(f"{name} must be of type ")


@pytest.mark.parametrize("name", [n for n, (types, *_) in BOUNDS.items() if types is not bool])
def test_true_is_not_a_number(name):
    assert refusal(TEXT | {name: True}).startswith(f"{name} must be of type ")


@pytest.mark.parametrize("name", [n for n, (_, least, _) in BOUNDS.items() if least is not None])
def test_too_little_is_refused(name):
    least = BOUNDS[name][1]
    assert refusal(TEXT | {name: least - 1}) == f"{name} must be at least {least}."


@pytest.mark.parametrize("name", [n for n, (*_, most) in BOUNDS.items() if most is not None])
def test_too_much_is_refused(name):
    most = BOUNDS[name][2]
    assert refusal(TEXT | {name: most + 1}) == f"{name} must be at most {most}."


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_numbers_are_finite(value):
    assert refusal(TEXT | {"temperature": value}) == "temperature must be finite."
    assert refusal(TEXT | {"logit_bias": {"5": value}}).startswith("logit_bias is not an object")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt is not a text, or is empty."),
        ({"prompt": ""}, "prompt is not a text, or is empty."),
        ({"prompt": ["a", "b"]}, "prompt is not a text, or is empty."),
        (TEXT | {"stop": ["a", 5]}, "stop is not a text or a list of texts."),
        (TEXT | {"logit_bias": {"x": 1}}, "logit_bias is not an object of token id to number."),
        (TEXT | {"logit_bias": {"5": "x"}}, "logit_bias is not an object of token id to number."),
        (TEXT | {"logit_bias": {"5": True}}, "logit_bias is not an object of token id to number."),
    ],
)
def test_what_is_wrong_with_a_text_request(body, words):
    assert refusal(body) == words


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is not a list of messages, or is empty."),
        ("hello", "messages is not a list of messages, or is empty."),
        ([], "messages is not a list of messages, or is empty."),
        (["hello"], "Each message must be an object with a role."),
        ([{"content": "hello"}], "Each message must be an object with a role."),
        ([{"role": 5, "content": "hello"}], "Each message must be an object with a role."),
        ([{"role": "user", "content": 5}], "A message's content must be a text or a list"),
        ([{"role": "user", "content": ["a"]}], "A message's content must be a text or a list"),
        ([{"role": "user", "content": [{}]}], "A message's content must be a text or a list"),
        ([{"role": "user", "content": [{"type": "text"}]}], "A part of type text must have a"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "A part of type text must have a text.",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}],
            "The URL of an image must be a text.",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": []}}]}],
            "The URL of an image must be a text.",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "A message's tool_calls must be a list."),
        ([{"role": "assistant", "tool_calls": ["f"]}], "Each of a message's tool_calls, and"),
        (
            [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "Each of a message's tool_calls, and its function, must be an object.",
        ),
    ],
)
def test_what_is_wrong_with_messages(messages, words):
    assert refusal({"messages": messages}, chat=True).startswith(words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "The body is not JSON: "),
        (b"{", "The body is not JSON: "),
        (b"\xff\xfe", "The body is not JSON: "),
        (b"[1]", "The body is not a JSON object."),
        (b'"text"', "The body is not a JSON object."),
        (b'{"temperature": NaN}', "NaN is not a number of JSON."),
        (b'{"temperature": -Infinity}', "-Infinity is not a number of JSON."),
        (b'{"a":' * 100_000, "The body is not JSON: "),
        (b'{"seed": ' + b"9" * 5000 + b"}", "The body is not JSON: "),
    ],
    ids=range(9),
)
def test_what_is_not_a_json_object(raw, words):
    with pytest.raises(BadRequest) as error:
        parse(raw)
    assert str(error.value).startswith(words)


def test_null_is_as_good_as_absent():
    """Clients send it for options that they leave out; mlx_lm.server refuses some of them."""
    body = {"prompt": "a", "max_tokens": None, "seed": None, "stop": None}
    assert parse(json.dumps(body).encode()) == {"prompt": "a"}


def test_what_was_checked_is_what_mlx_lm_reads():
    body = {"prompt": "Ünïcode \U0001f600\0", "stop": ["\n"]}
    assert parse(encode(body)) == body


@pytest.mark.parametrize(
    "body", [r'{"prompt": "\ud800"}', r'{"stop": ["a\udc00"]}', r'{"\ud800": 1}']
)
def test_half_a_surrogate_pair_is_no_text(body):
    """JSON can write it; a tokenizer fails."""
    with pytest.raises(BadRequest, match="surrogates not allowed"):
        encode(parse(body.encode()))


def test_depth_and_law_are_taken_out_of_the_body():
    """mlx_lm.server knows num_draft_tokens as a number only, and the others not at all."""
    body = TEXT | {"num_draft_tokens": "auto", "max_draft_tokens": 4, "sampling": "ratio"}
    body["draft_kind"] = "lookup"
    assert take_options(body, SpecOptions(3)) == SpecOptions("auto", 4, "ratio", "lookup")
    assert body == TEXT
    assert take_options({}, SpecOptions(3, 5, "stock")) == SpecOptions(3, 5, "stock")
    assert take_options({"num_draft_tokens": 0}, SpecOptions()) == SpecOptions(0)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"num_draft_tokens": "many"}, "num_draft_tokens must be of type int."),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0."),
        ({"num_draft_tokens": 33}, "num_draft_tokens must be at most 32."),
        ({"max_draft_tokens": 0}, "max_draft_tokens is 0; give 1 or more."),
        ({"max_draft_tokens": "auto"}, "max_draft_tokens is 'auto'; give 1 or more."),
        ({"sampling": "greedy"}, "sampling is 'greedy'; give one of auto, seed, stock, ratio."),
        ({"draft_kind": "nextn"}, "draft_kind is 'nextn'; give one of auto, lookup, combined."),
        ({"sampling": ["seed"]}, "sampling is ['seed']; give one of auto, seed, stock, ratio."),
    ],
)
def test_depth_and_law_that_are_none(option, sentence):
    with pytest.raises(BadRequest) as error:
        take_options(dict(option), SpecOptions())
    assert str(error.value) == sentence
