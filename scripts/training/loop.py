"""The loop of one stage, and what the stages' lengths are."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from .optimiser import Optimiser


@dataclass(frozen=True)
class Recipe:
    """Steps of the three stages and their batches."""

    text_steps: int
    distil_steps: int
    self_steps: int
    last_steps: int  # of a stage that only some families have
    length: int = 512  # positions per row that are trained
    rows: int = 4
    depth: int = 4  # unrolled drafts; the first stage unrolls two
    self_length: int = 192
    self_rows: int = 12

    @classmethod
    def of(cls, steps: int) -> "Recipe":
        """`steps` of the first stage and a fixed share for the others."""
        return cls(steps, steps // 5, steps // 5, max(1, steps // 10))


def train(
    name: str,
    batches: Iterator[Tensor],
    optimiser: Optimiser,
    loss_of: Callable[[Tensor], tuple[Tensor, list[float]]],
    checkpoint: Callable[[], None],
) -> list[float]:
    """Run one stage. Logs, and returns at the end, mean losses of the last 50 steps."""
    recent: list[list[float]] = []
    start = saved = time.monotonic()
    for step, ids in zip(range(1, optimiser.steps + 1), batches, strict=False):
        loss, parts = loss_of(ids)
        optimiser.step(loss)
        recent = [*recent[-49:], parts]
        if step % 25 == 0 or step == optimiser.steps:
            means = [sum(column) / len(recent) for column in zip(*recent, strict=True)]
            shown = " ".join(f"{value:.3f}" for value in means)
            seconds = time.monotonic() - start
            print(f"{name} {step}/{optimiser.steps} {seconds:.0f} s: {shown}", flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            checkpoint()
    return [sum(column) / len(recent) for column in zip(*recent, strict=True)]
