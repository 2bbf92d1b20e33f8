"""Would a reduced draft vocabulary pay? An estimate from what the output matrix costs here."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec.bench.result import Row
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.draft_vocab import rows_of
from mlx_spec.drafters.gemma4_assistant import AssistantDrafter
from mlx_spec.drafters.nextn import NextNDrafter

SIZE = 32768  # tokens
WORTH = 0.03  # what is less of the speed is not mentioned
REPEATS = 12


def advise(drafter: Drafter, rows: Sequence[Row], size: int = SIZE) -> str | None:
    """A line that recommends `convert --draft-vocab`; None where that would not pay.

    Args:
        rows: of a benchmark with this drafter.
        size: tokens of the reduced vocabulary.
    """
    fixed = [row for row in rows if isinstance(row.depth, int) and row.ratio is not None]
    matrix = output_matrix(drafter)
    if not fixed or matrix is None or dict(matrix)["weight"].shape[0] < 2 * size:
        return None
    best = max(fixed, key=lambda row: row.ratio or 0)
    return recommendation(best, *time_output(matrix, size), size)


def output_matrix(drafter: Drafter) -> nn.Module | None:
    """That of which a draft reads all rows; None where it reads some of them already."""
    if isinstance(drafter, NextNDrafter) and drafter.head.args.draft_vocab is None:
        return drafter.output_matrix
    if isinstance(drafter, AssistantDrafter) and not (
        drafter.head.args.use_ordered_embeddings or drafter.head.args.draft_vocab
    ):
        return drafter.head.model.embed_tokens
    return None


def time_output(matrix: nn.Module, size: int) -> tuple[float, float]:
    """Median seconds of the product of one hidden state with all rows, and with `size` of them."""
    weights = dict(matrix)
    rows, width = weights["weight"].shape
    dtype = weights["weight"].dtype
    if "scales" in weights:
        width, dtype = weights["scales"].shape[1] * matrix.group_size, mx.bfloat16
    ids = mx.array(np.linspace(0, rows - 1, size).astype(np.uint32))
    part = rows_of(matrix, ids)
    whole = matrix.as_linear if "Embedding" in type(matrix).__name__ else matrix
    x = mx.ones((1, width), dtype)
    times: dict[Callable[[mx.array], mx.array], list[float]] = {whole: [], part: []}
    for repeat in range(REPEATS + 2):  # the first ones are slow
        for product, seconds in times.items():
            began = time.perf_counter()
            mx.eval(product(x + repeat))
            seconds.append(time.perf_counter() - began)
    return median(times[whole][2:]), median(times[part][2:])


def recommendation(best: Row, whole_s: float, part_s: float, size: int) -> str | None:
    """For the depth with the best ratio, where the estimated gain is worth a line."""
    assert isinstance(best.depth, int)
    if not best.tokens_per_round or not best.generation_tps:
        return None
    round_s = best.tokens_per_round / best.generation_tps
    saved_s = min(best.depth * (whole_s - part_s), 0.9 * round_s)
    gain = saved_s / (round_s - saved_s)
    if gain <= WORTH:
        return None
    return (
        f"Estimate: a drafter converted with --draft-vocab {size} would be {gain:.0%} faster at "
        f"depth {best.depth} on {best.prompt_class}, less what it loses in acceptance: one row "
        f"times the output matrix takes {whole_s * 1e3:.2f} ms here, and {part_s * 1e3:.2f} ms "
        f"with {size} rows."
    )
