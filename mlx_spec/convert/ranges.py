"""Which bytes of a file to ask for, so that few requests bring little that is not wanted."""

from collections.abc import Iterable
from itertools import pairwise

Range = tuple[int, int]  # first byte, and the one after the last

MAX_GAP_BYTES = 1 << 20  # a request costs about as much time as this many bytes
SPARE = 0.03  # of the wanted bytes, for gaps


def coalesce(wanted: Iterable[Range]) -> list[Range]:
    """The wanted bytes as few ranges, in order.

    Small gaps are fetched along, the smallest first, as long as all of them together are at
    most a few percent of what is wanted.
    """
    merged: list[Range] = []
    for begin, end in sorted(r for r in wanted if r[0] < r[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    spare = SPARE * total_bytes(merged)
    gaps = sorted((after[0] - before[1], after) for before, after in pairwise(merged))
    bridged = set()
    for gap, after in gaps:
        if gap > min(spare, MAX_GAP_BYTES):
            break
        spare -= gap
        bridged.add(after)
    result: list[Range] = []
    for part in merged:
        if part in bridged:
            result[-1] = (result[-1][0], part[1])
        else:
            result.append(part)
    return result


def split(ranges: Iterable[Range], piece_bytes: int) -> list[Range]:
    """The same bytes in pieces of at most so many."""
    return [
        (start, min(start + piece_bytes, end))
        for begin, end in ranges
        for start in range(begin, end, piece_bytes)
    ]


def total_bytes(ranges: Iterable[Range]) -> int:
    return sum(end - begin for begin, end in ranges)
