"""What is wrong with the body of a request, in one sentence, before mlx_lm.server reads it."""

import json
from dataclasses import asdict, replace
from math import isfinite
from typing import Any, NoReturn

from mlx_spec.errors import BadArguments
from mlx_spec.options import SpecOptions

MAX_DRAFT_TOKENS = 32  # of a request: each is a further row of every forward
MAX_TOKENS = 2**31 - 1  # as many as mlx can count

Number = (int, float)
# name: (types, least, greatest)
BOUNDS: dict[str, tuple[Any, float | None, float | None]] = {
    "stream": (bool, None, None),
    "stream_options": (dict, None, None),
    "model": (str, None, None),
    "draft_model": (str, None, None),
    "adapters": (str, None, None),
    "max_tokens": (int, 1, None),
    "max_completion_tokens": (int, 1, None),
    "temperature": (Number, 0, None),
    "top_p": (Number, 0, 1),
    "top_k": (int, 0, None),
    "min_p": (Number, 0, 1),
    "repetition_penalty": (Number, 0, None),
    "repetition_context_size": (int, 0, MAX_TOKENS),
    "presence_penalty": (Number, None, None),
    "presence_context_size": (int, 0, MAX_TOKENS),
    "frequency_penalty": (Number, None, None),
    "frequency_context_size": (int, 0, MAX_TOKENS),
    "xtc_probability": (Number, 0, 1),
    "xtc_threshold": (Number, 0, 0.5),
    "logprobs": (bool, None, None),
    "top_logprobs": (int, -1, 11),
    "seed": (int, 0, 2**64 - 1),
    "logit_bias": (dict, None, None),
    "stop": ((str, list), None, None),
    "tools": (list, None, None),
    "role_mapping": (dict, None, None),
    "chat_template_kwargs": (dict, None, None),
}
# mlx_lm.server refuses 0 and 1 for some of these, and mlx an integer of more than 64 bits.
FLOATS = [name for name, (types, *_) in BOUNDS.items() if types is Number]


class BadRequest(ValueError):
    """The message goes to the client."""


def parse(raw: bytes) -> dict[str, Any]:
    """The body, as mlx_lm.server is to see it: null is as good as absent.

    Raises: BadRequest.
    """
    try:
        body = json.loads(raw.decode(), parse_constant=refuse_constant)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise BadRequest("The body is not a JSON object.")
    return {name: value for name, value in body.items() if value is not None}


def encode(body: dict[str, Any]) -> bytes:
    """The body again. Raises: BadRequest for half of a surrogate pair, which is no text."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be read: {error}.") from error


def refuse_constant(name: str) -> NoReturn:
    raise BadRequest(f"{name} is not a number of JSON.")


def check(body: dict[str, Any], chat: bool) -> None:
    """Raises: BadRequest for the first thing that is wrong. `body` may be completed."""
    for name, (types, least, greatest) in BOUNDS.items():
        if name in body:
            check_value(name, body[name], types, least, greatest)
    for name in FLOATS:
        if name in body:
            body[name] = float(body[name])
    if isinstance(body.get("stream_options"), dict):
        body["stream_options"].setdefault("include_usage", False)
    if isinstance(body.get("stop"), list) and not all(isinstance(s, str) for s in body["stop"]):
        raise BadRequest("stop is not a text or a list of texts.")
    for token, bias in body.get("logit_bias", {}).items():
        if not token.lstrip("-").isdigit() or not is_number(bias):
            raise BadRequest("logit_bias is not an object of token id to number.")
    if chat:
        check_messages(body.get("messages"))
    elif not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise BadRequest("prompt is not a text, or is empty.")


def check_value(
    name: str, value: Any, types: Any, least: float | None, greatest: float | None
) -> None:
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        names = [t.__name__ for t in (types if isinstance(types, tuple) else (types,))]
        raise BadRequest(f"{name} must be of type {' or '.join(names)}.")
    if types is Number and not is_finite(value):
        raise BadRequest(f"{name} must be finite.")
    if least is not None and value < least:
        raise BadRequest(f"{name} must be at least {least}.")
    if greatest is not None and value > greatest:
        raise BadRequest(f"{name} must be at most {greatest}.")


def take_options(body: dict[str, Any], defaults: SpecOptions) -> SpecOptions:
    """Take depth, acceptance law and kind of drafts out of the body. Raises: BadRequest."""
    given = {name: body.pop(name) for name in asdict(defaults) if name in body}
    for name in ("num_draft_tokens", "max_draft_tokens"):
        if name in given and given[name] != "auto":
            check_value(name, given[name], int, 0, MAX_DRAFT_TOKENS)
    try:
        return replace(defaults, **given)
    except BadArguments as error:
        raise BadRequest(str(error)) from error


def is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool) and is_finite(value)


def is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an integer
        return False


def check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of messages, or is empty.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("Each message must be an object with a role.")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts
        ):
            raise BadRequest("A message's content must be a text or a list of parts with a type.")
        for part in parts:
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise BadRequest("A part of type text must have a text.")
            image = part.get("image_url", part.get("image"))
            if not isinstance(image.get("url") if isinstance(image, dict) else image, str | None):
                raise BadRequest("The URL of an image must be a text.")
        calls = message.get("tool_calls")
        if not isinstance(calls, list | None):
            raise BadRequest("A message's tool_calls must be a list.")
        if not all(
            isinstance(call, dict) and isinstance(call.get("function"), dict | None)
            for call in calls or []
        ):
            raise BadRequest("Each of a message's tool_calls, and its function, must be an object.")
