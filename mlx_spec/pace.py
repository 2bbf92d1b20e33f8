"""How long a round takes: the time from one host read to the next."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

SLOW_CALLER = 0.1  # of the time between two reads
WAITED = 0.05  # of it, for the device


class Pace:
    """Watches a loop that reads a round while the next one may be under way, and hands tokens to
    its caller in between."""

    def __init__(self) -> None:
        self.last_read: float | None = None
        self.caller_s = 0.0

    @contextmanager
    def of_caller(self) -> Iterator[None]:
        """Around what the caller does with a token."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.caller_s += time.perf_counter() - began

    @contextmanager
    def of_read(self) -> Iterator[None]:
        """Around the read of a round; `seconds` is then what the round took, None where that is not
        known: at the first, and where the device had waited for a slow caller."""
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        self.seconds: float | None = None
        if self.last_read is not None:
            elapsed = now - self.last_read
            if now - began >= WAITED * elapsed or self.caller_s <= SLOW_CALLER * elapsed:
                self.seconds = elapsed
        self.last_read, self.caller_s = now, 0.0
