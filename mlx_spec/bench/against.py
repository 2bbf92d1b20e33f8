"""Another server's speed, on the same prompts: any with OpenAI's API, such as Ollama, LM Studio,
llama-server, mlx_lm.server or mlx_vlm.server.

Their runs cannot take turns with ours, and much may differ that is not seen from outside. So the
user says how that server's model is quantised and whether it speculates, and the report says what
is not alike.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

from mlx_spec.bench.prompts import Prompt
from mlx_spec.bench.report import number, spread
from mlx_spec.bench.result import Setting
from mlx_spec.errors import BadArguments, SpecError, reported_as

APIS = ("chat/completions", "completions")
GENERATED = ("content", "reasoning_content", "reasoning", "text", "tool_calls")
NO_SPECULATION = "none"

RateFrom = Literal["timings", "usage", "chunks"]


class EndpointError(SpecError):
    """Another server that cannot be measured."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and what its user says about it. Raises: BadArguments for what cannot be one.

    Attributes:
        url: of the server, of its /v1, or of one API of it, which then takes all prompts.
        quantization: of its model, such as "4bit" or "Q4_K_M".
        speculation: "none", or its kind and depth, such as "draft-mtp n=3".
        model: its name there; None: the only one there.
        key: sent as a bearer token.
        timeout_s: the longest wait for the next piece of an answer, a prefill for example.
    """

    url: str
    quantization: str | None
    speculation: str | None
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    timeout_s: float = 600

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadArguments(
                f"{self.url!r} is not the address of a server; give one such as "
                "http://127.0.0.1:11434/v1."
            )
        if parts.username is not None:
            raise BadArguments("A key does not belong into --against; give --against-key-file.")
        if not self.quantization or not self.speculation:
            raise BadArguments(
                "To compare like with like, say what that server runs: --against-quantization, for "
                "example 4bit, and --against-speculation, for example none or 'draft-mtp n=3'."
            )

    @property
    def base(self) -> str:
        """Ends in /v1, or in what precedes an API that was given."""
        url = self.url.rstrip("/")
        for api in APIS:
            if url.endswith(f"/{api}"):
                return url.removesuffix(f"/{api}")
        return url if url.endswith("/v1") else f"{url}/v1"

    def api_for(self, prompt: Prompt) -> str:
        """An instruction is a chat message; a text to be continued goes without a template."""
        url = self.url.rstrip("/")
        for api in APIS:
            if url.endswith(f"/{api}"):
                return api
        return APIS[0] if prompt.instruction else APIS[1]


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `chunks` counts those with text; usage and timings as they were sent.

    Attributes:
        first_s, last_s: when the first and the last text came, in seconds from the request on.
    """

    first_s: float
    last_s: float
    chunks: int
    usage: dict[str, Any]
    timings: dict[str, Any]

    @property
    def tokens(self) -> int | None:
        return first_number(self.timings.get("predicted_n"), *self._counts("completion", "output"))

    @property
    def prompt_tokens(self) -> int | None:
        return first_number(*self._counts("prompt", "input"))

    @property
    def cached_tokens(self) -> int | None:
        return first_number(dict_in(self.usage, "prompt_tokens_details").get("cached_tokens"))

    @property
    def stated_tps(self) -> float | None:
        return first_number(self.timings.get("predicted_per_second"))

    @property
    def rate_from(self) -> RateFrom:
        if self.stated_tps:
            return "timings"
        return "chunks" if self.tokens is None else "usage"

    @property
    def generation_tps(self) -> float | None:
        """None where the whole answer came at once."""
        if self.stated_tps:
            return self.stated_tps
        count = self.chunks if self.tokens is None else self.tokens
        if count < 2 or self.last_s <= self.first_s:
            return None
        return (count - 1) / (self.last_s - self.first_s)

    def _counts(self, *kinds: str) -> list[Any]:
        return [self.usage.get(f"{kind}_tokens") for kind in kinds]


def first_number(*values: Any) -> Any:
    """The first that is a number; other servers send what they like."""
    return next((v for v in values if isinstance(v, int | float) and v == v), None)


def dict_in(event: dict[str, Any], name: str) -> dict[str, Any]:
    """What an event has under a name, if it is an object."""
    value = event.get(name)
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class AgainstRow:
    """One prompt there; medians over the repeats. None: not sent, not known.

    Attributes:
        api: that it was sent to.
        prompt_tokens, cached_tokens, time_to_first_token_s: of the first request: the server may
            keep the prompt for the others.
        generated_tokens: of the shortest answer.
        generation_tps: tokens per second, with the lowest and the highest of the repeats.
        rate_from: "timings": the server's own; "usage": its count of tokens, over the time from
            the first text to the last; "chunks": pieces of text, which may be several tokens each.
        draft_n, draft_n_accepted: of its timings, over all repeats.
    """

    prompt_class: str
    api: str
    prompt_tokens: int | None
    cached_tokens: int | None
    time_to_first_token_s: float
    generated_tokens: int | None
    generation_tps: float | None
    generation_tps_low: float | None
    generation_tps_high: float | None
    rate_from: RateFrom
    draft_n: int | None
    draft_n_accepted: int | None


@dataclass(frozen=True)
class Against:
    """What was measured of another server."""

    url: str
    model: str
    quantization: str
    speculation: str
    max_tokens: int
    temp: float
    repeats: int
    rows: list[AgainstRow]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def unlike(self, setting: Setting) -> list[str]:
        """How it differs from what was measured here, a phrase each."""
        found = []
        here = setting.target_quantization or "unknown"
        if normalised(self.quantization) != normalised(here):
            found.append(f"its model is quantised as {self.quantization}, this one as {here}")
        if self.speculation == NO_SPECULATION:
            found.append("it does not speculate, so only the rows of stock are its like")
        elif setting.drafter_kind is None or setting.drafter_kind not in self.speculation:
            found.append(f"it speculates by {self.speculation}, here {setting.drafter_kind} drafts")
        if (self.max_tokens, self.temp) != (setting.max_tokens, setting.temp):
            found.append(
                f"{self.max_tokens} tokens at temperature {self.temp:g} there, "
                f"{setting.max_tokens} at {setting.temp:g} here"
            )
        return found

    def contradictions(self) -> list[str]:
        """Where its answers speak against what was said about it."""
        known = [row.draft_n for row in self.rows if row.draft_n is not None]
        if self.speculation == NO_SPECULATION and any(known):
            return [f"said not to speculate, it reports {sum(known)} drafts"]
        if self.speculation != NO_SPECULATION and known and not any(known):
            return [f"said to speculate by {self.speculation}, it reports no drafts"]
        return []

    def as_text(self, setting: Setting | None = None) -> str:
        """A line for each prompt, then how to read it; `setting` is that of the runs here."""
        lines = [f"{self.url}: {self.model} ({self.quantization}), speculation: {self.speculation}"]
        for row in self.rows:
            speeds = spread(row.generation_tps_low, row.generation_tps_high, ".1f")
            cached = f", {row.cached_tokens} of them cached" if row.cached_tokens else ""
            drafts = ""
            if row.draft_n:
                drafts = f", {row.draft_n_accepted} of {row.draft_n} drafts accepted"
            lines.append(
                f"  {row.prompt_class} ({row.api}): {number(row.generation_tps, '.1f')} tokens/s"
                f"{speeds}, from {row.rate_from}; first token after "
                f"{row.time_to_first_token_s:.2f} s; {number(row.prompt_tokens, 'd')} prompt tokens"
                f"{cached}, {number(row.generated_tokens, 'd')} generated{drafts}"
            )
        lines.append(
            "Measured on its own: its runs could not take turns with those here, so the machine "
            "may have been warmer or busier for one of them."
        )
        if any(row.rate_from == "chunks" for row in self.rows):
            lines.append(
                "It sends no count of tokens: pieces of text were counted, and with speculation "
                "one may hold several tokens."
            )
        lengths = [row.generated_tokens for row in self.rows if row.generated_tokens is not None]
        if any(length < self.max_tokens for length in lengths):
            lines.append(f"Some of its texts ended before {self.max_tokens} tokens.")
        unlike = [] if setting is None else self.unlike(setting)
        if unlike:
            lines.append(f"Not like with like: {'; '.join(unlike)}.")
        lines += [f"Contradiction: {found}." for found in self.contradictions()]
        return "\n".join(lines)


def normalised(quantization: str) -> str:
    """Bits alone, where a quantisation is told in bits; dtypes by one name."""
    bits = sorted(set(re.findall(r"(\d+)[ -]?bit", quantization.lower())))
    if bits:
        return " ".join(bits)
    names = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32"}
    return names.get(quantization.lower(), quantization.lower())


def read_key_file(path: Path) -> str:
    """Raises: BadArguments for a file that cannot be read, or is empty."""
    with reported_as(BadArguments):
        key = path.read_text().strip()
    if not key:
        raise BadArguments(f"The key file {path} is empty.")
    return key


def measure_against(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    max_tokens: int = 256,
    repeats: int = 3,
    temp: float = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Against:
    """Stream each prompt `repeats` times, after a short request that lets the server load.

    Args:
        max_tokens: of each text, which may end before.
        progress: is called with what comes next.

    Raises: EndpointError in one sentence for a server that cannot be measured.
    """
    model = endpoint.model or only_model(endpoint)

    def answer(prompt: Prompt, most: int) -> Answer:
        api = endpoint.api_for(prompt)
        content: dict[str, Any] = {"prompt": prompt.text}
        if api == "chat/completions":
            content = {"messages": [{"role": "user", "content": prompt.text}]}
        body = {
            "model": model,
            **content,
            "max_tokens": most,
            "temperature": temp,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return stream(endpoint, api, body)

    progress(f"{endpoint.url}: warm-up")
    answer(Prompt("warm-up", "Count from one to ten.", prompts[0].instruction), 8)
    rows = []
    for prompt in prompts:
        answers = []
        for repeat in range(repeats):
            progress(f"{endpoint.url}: {prompt.prompt_class}, run {repeat + 1} of {repeats}")
            answers.append(answer(prompt, max_tokens))
        rows.append(make_row(prompt.prompt_class, endpoint.api_for(prompt), answers))
    return Against(
        endpoint.url,
        model,
        endpoint.quantization or "",
        endpoint.speculation or "",
        max_tokens,
        temp,
        repeats,
        rows,
    )


def make_row(prompt_class: str, api: str, answers: Sequence[Answer]) -> AgainstRow:
    first = answers[0]
    speeds = [a.generation_tps for a in answers if a.generation_tps is not None]
    lengths = [a.tokens for a in answers if a.tokens is not None]

    def total(name: str) -> int | None:
        counts = [first_number(a.timings.get(name)) for a in answers]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    return AgainstRow(
        prompt_class,
        api,
        first.prompt_tokens,
        first.cached_tokens,
        first.first_s,
        min(lengths) if lengths else None,
        median(speeds) if speeds else None,
        min(speeds) if speeds else None,
        max(speeds) if speeds else None,
        first.rate_from,
        total("draft_n"),
        total("draft_n_accepted"),
    )


def only_model(endpoint: Endpoint) -> str:
    with answered(endpoint, "models", None) as response:
        listed = decoded(endpoint, response.read()).get("data")
    listed = listed if isinstance(listed, list) else []
    names = [str(model.get("id")) for model in listed if isinstance(model, dict)]
    if len(names) == 1:
        return names[0]
    some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise EndpointError(
        f"{endpoint.url} offers {len(names)} models; say with --against-model which one to measure"
        + (f": {some}." if names else ".")
    )


def stream(endpoint: Endpoint, api: str, body: dict[str, Any]) -> Answer:
    """Raises: EndpointError where the answer is not a stream of text."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    began = time.perf_counter()
    with answered(endpoint, api, body) as response:
        for event in events(endpoint, response):
            if has_text(event):
                times.append(time.perf_counter() - began)
            usage = dict_in(event, "usage") or usage
            timings = dict_in(event, "timings") or timings
    if not times:
        raise EndpointError(
            f"{endpoint.base}/{api} sent no text as a stream of events, so its speed is not known; "
            "is it a server with OpenAI's API?"
        )
    return Answer(times[0], times[-1], len(times), usage, timings)


def has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    part = dict_in(choices[0], "delta") or choices[0]
    return any(part.get(name) for name in GENERATED)


def events(endpoint: Endpoint, response: Any) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events, up to its end."""
    begun = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = decoded(endpoint, data)
        if event.get("error"):
            raise EndpointError(f"{endpoint.url} stopped its answer: {message_of(event)}.")
        begun = True
        yield event
    if begun:
        raise EndpointError(f"{endpoint.url} broke off its answer, which lacks the end, [DONE].")


def decoded(endpoint: Endpoint, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EndpointError(
            f"{endpoint.url} sent something else than JSON objects; is it a server with OpenAI's "
            "API?"
        )
    return value


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key goes to the server that the user named, and to no other."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        raise EndpointError(f"{req.full_url} has moved to {newurl}; give that one to --against.")


# No proxy: it would be measured as well.
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())


@contextmanager
def answered(endpoint: Endpoint, path: str, body: dict[str, Any] | None) -> Iterator[Any]:
    """The response to a GET, or with a body to a POST. Raises: EndpointError in one sentence."""
    url = f"{endpoint.base}/{path}"
    headers = {"Content-Type": "application/json"}
    if endpoint.key is not None:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with opener.open(
            urllib.request.Request(url, data, headers), timeout=endpoint.timeout_s
        ) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise EndpointError(refusal(endpoint, url, error)) from error
    except TimeoutError as error:
        raise EndpointError(
            f"{url} sent nothing for {endpoint.timeout_s:g} s; it may be stuck or too busy."
        ) from error
    except urllib.error.URLError as error:
        raise EndpointError(
            f"Nothing answers at {url} ({error.reason}); start that server, or mend --against."
        ) from error
    except (OSError, HTTPException) as error:
        raise EndpointError(f"{url} broke off its answer.") from error


def refusal(endpoint: Endpoint, url: str, error: urllib.error.HTTPError) -> str:
    """One sentence for an HTTP status that is an error."""
    try:
        said = message_of(json.loads(error.read(65536)))
    except (ValueError, OSError, HTTPException):
        said = ""
    because = f": {said}" if said else ""
    if error.code in (401, 403):
        if endpoint.key is None:
            return f"{url} needs a key; put it into a file and give --against-key-file."
        return f"{url} refuses the key{because}."
    if error.code == 404:
        return f"{url} is not there (HTTP 404){because}; check --against and --against-model."
    return f"{url} answered HTTP {error.code}{because}."


def message_of(answer: Any) -> str:
    """What an error answer says, without its full stop."""
    error = answer.get("error") if isinstance(answer, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(said or "").split())[:300].rstrip(".")
