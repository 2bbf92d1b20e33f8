"""What happened to each request, and to all of them together."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from mlx_spec.errors import SpecError, one_line
from mlx_spec.options import SpecOptions
from mlx_spec.stats import SpecStats

RECENT_S = 2.0  # what "now" means
RECENT_TOKENS = 2048  # of them at most


@dataclass(eq=False)
class Record:
    """One request, from its arrival to its end. Times are of time.monotonic, in seconds.

    Attributes:
        options: depth and acceptance law.
        connected: says whether the client is still there.
        stats: filled in by the thread that decodes.
        context: mlx_lm.server's GenerationContext, once its prompt is being processed.
        queue: where the request waits for responses, once the decoding thread has taken it.
        prompt_done: tokens of the prompt that are processed, those from the cache included.
        tokens: generated so far.
        outcome: "stop", "length", "cancelled" or "error"; None while it is under way.
        error: what it failed with.
    """

    options: SpecOptions = field(default_factory=SpecOptions)
    connected: Callable[[], bool] = lambda: True
    stats: SpecStats = field(default_factory=SpecStats)
    context: Any = None
    queue: Queue | None = None
    prompt_done: int = 0
    tokens: int = 0
    outcome: str | None = None
    error: BaseException | None = None
    begin: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.context.prompt) if self.context else 0

    @property
    def cached_tokens(self) -> int:
        return max(0, self.context.prompt_cache_count) if self.context else 0

    @property
    def processed_tokens(self) -> int:
        """Of the prompt, without those that came from the cache."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_s(self) -> float:
        """From the beginning to the first token."""
        if self.begin is None:
            return 0.0
        return (self.first_token or time.monotonic()) - self.begin

    @property
    def predicted_s(self) -> float:
        """From the first token to the newest."""
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token

    def started(self, context: Any) -> None:
        self.context, self.begin = context, time.monotonic()

    def add_token(self, finish_reason: str | None) -> None:
        now = time.monotonic()
        self.first_token = self.first_token or now
        self.last_token = now
        self.tokens += 1
        self.prompt_done = self.prompt_tokens
        self.outcome = finish_reason

    def timings(self) -> dict[str, Any]:
        """llama.cpp's `timings` (its pull request 12603). The first token counts as part of the
        prompt's time, so rates of decoding are of the tokens after it; null where there is no
        time to divide by."""
        prompt_ms, predicted_ms = 1e3 * self.prompt_s, 1e3 * self.predicted_s
        stats = self.stats
        return {
            "prompt_n": self.processed_tokens,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": ratio(prompt_ms, self.processed_tokens),
            "prompt_per_second": ratio(1e3 * self.processed_tokens, prompt_ms),
            "predicted_n": self.tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": ratio(predicted_ms, self.tokens - 1),
            "predicted_per_second": ratio(1e3 * (self.tokens - 1), predicted_ms),
            "draft_n": stats.drafted,
            "draft_n_accepted": stats.accepted,
            "draft_rounds": stats.rounds,
            "draft_kind": stats.kind,
        }

    def usage_details(self) -> dict[str, int]:
        """OpenAI's usage.completion_tokens_details: drafts among the returned tokens, and the
        others that were made."""
        accepted = self.stats.accepted_yielded
        return {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": self.stats.drafted - accepted,
        }

    def spec(self) -> dict[str, Any]:
        """Whether drafts were made, and if not, why."""
        stats = self.stats
        return {
            "engaged": stats.engaged,
            "reason": None if stats.engaged else stats.reason or "too-short",
            "detail": stats.detail,
            "num_draft_tokens": stats.num_draft_tokens,
            "depth": stats.depth,
            "sampling": stats.sampling,
            "state": stats.state,
            "state_reason": stats.state_reason,
            "batched": stats.batched,
            "unprimed": stats.unprimed,
        }


def ratio(count: float, over: float) -> float | None:
    return count / over if over > 0 else None


@dataclass
class Totals:
    """Sums over requests. `outcomes` counts those that have ended."""

    requests: int = 0
    outcomes: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    tokens_after_first: int = 0
    prompt_s: float = 0.0
    predicted_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: Counter = field(default_factory=Counter)
    accepted_by_position: Counter = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        stats = record.stats
        self.requests += 1
        self.prompt_tokens += max(0, record.prompt_done - record.cached_tokens)
        self.cached_tokens += record.cached_tokens
        self.tokens += record.tokens
        self.tokens_after_first += max(0, record.tokens - 1)
        self.prompt_s += record.prompt_s
        self.predicted_s += record.predicted_s
        self.rounds += stats.rounds
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.drafted_by_position.update(dict(enumerate(stats.drafted_by_position)))
        self.accepted_by_position.update(dict(enumerate(stats.accepted_by_position)))


class Ledger:
    """All requests of a server. Any thread may call it."""

    def __init__(self) -> None:
        self.last_error: str | None = None
        self._active: list[Record] = []
        self._ended = Totals()
        self._recent: deque[float] = deque(maxlen=RECENT_TOKENS)
        self._lock = threading.Lock()

    def begin(self, record: Record) -> None:
        with self._lock:
            self._active.append(record)

    def add_token(self, record: Record, finish_reason: str | None) -> None:
        record.add_token(finish_reason)
        self._recent.append(time.monotonic())

    def end(self, record: Record) -> None:
        """A second call does nothing."""
        with self._lock:
            if record not in self._active:
                return
            self._active.remove(record)
            if record.error is not None and not isinstance(record.error, ConnectionError):
                record.outcome = "error"
                if record.context is not None or not is_own(record.error):
                    self.last_error = one_line(record.error)
            record.outcome = record.outcome or "cancelled"
            record.queue = None
            self._ended.outcomes[record.outcome] += 1
            self._ended.add(record)

    def active(self) -> list[Record]:
        with self._lock:
            return list(self._active)

    def totals(self) -> Totals:
        """Of all requests, those under way included."""
        with self._lock:
            totals = deepcopy(self._ended)
            for record in self._active:
                totals.add(record)
        return totals

    def tokens_per_second(self) -> float | None:
        """Over the last RECENT_S seconds, of all requests; None without tokens."""
        since = time.monotonic() - RECENT_S
        times = [at for at in list(self._recent) if at > since]
        return ratio(len(times) - 1, times[-1] - times[0]) if len(times) > 1 else None


def is_own(error: BaseException) -> bool:
    """Whether it is a request's own fault, if it comes before anything is decoded for it."""
    others = (SpecError, RuntimeError, OSError, MemoryError)
    return not isinstance(error, others) or isinstance(error, RecursionError)


@contextmanager
def in_ledger(ledger: Ledger, record: Record) -> Iterator[None]:
    """An error within ends the record."""
    try:
        yield
    except Exception as error:
        record.error = error
        ledger.end(record)
        raise


def counted(record: Record, callback: Callable[[int, int], None] | None) -> Callable:
    """`callback` for the progress of a prompt, which is recorded too.

    Raises: ConnectionAbortedError where the client has gone.
    """

    def progress(done: int, total: int) -> None:
        record.prompt_done = record.cached_tokens + done
        check_connected(record)
        if callback is not None:
            callback(done, total)

    return progress


def stoppable(record: Record, callback: Callable[[int, int], None]) -> Callable:
    """`callback` for the progress of a prompt that is processed by itself.

    Raises: ConnectionAbortedError where nobody waits for its end.
    """

    def progress(done: int, total: int) -> None:
        callback(done, total)
        if record.outcome is not None:
            raise ConnectionAbortedError("The request was cancelled.")

    return progress


def check_connected(record: Record) -> None:
    if not record.connected():
        raise ConnectionAbortedError("The client has closed the connection.")
