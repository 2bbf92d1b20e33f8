"""What a sampler of mlx-lm does: the parameters that are inside of it.

mlx-lm passes samplers on as closures over their filters. A sampler whose code is make_sampler's
own is read here; any other one is opaque.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.sample_utils import Sampler, apply_xtc, greedy_sampler, make_sampler

from mlx_spec.randomness import untouched_generator

Sampling = Literal["auto", "seed", "stock", "ratio"]
Law = Literal["greedy", "seed", "stock", "ratio"]
Filter = Callable[[mx.array], mx.array]
DETERMINISTIC = ("apply_top_p", "apply_min_p", "apply_top_k")


@dataclass(frozen=True)
class Xtc:
    """mlx_lm.sample_utils.apply_xtc, whose coin is tossed by the caller."""

    probability: float
    threshold: float
    special_tokens: list[int]

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """logprobs (m, V), coins (m, 1) in [0, 1)."""
        with untouched_generator():  # apply_xtc tosses one, too; with probability 1 it is idle
            excluded = apply_xtc(logprobs, 1.0, self.threshold, self.special_tokens)
        return mx.where(coins > self.probability, logprobs, excluded)


@dataclass(frozen=True)
class Parameters:
    """A sampler of mlx-lm: its filters, in their order, and its temperature.

    top_k: 0 where there is no such filter.
    """

    filters: tuple[Filter | Xtc, ...]
    temp: float
    top_k: int = 0

    @property
    def tosses_coins(self) -> bool:
        return any(isinstance(method, Xtc) for method in self.filters)

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the most likely token."""
        return self.temp == 0 or (self.top_k == 1 and not self.tosses_coins)

    def log_weights(self, logprobs: mx.array, coins: mx.array | None) -> mx.array:
        """Of log-probabilities (m, V), filtered and divided by the temperature: the sampler draws
        from their softmax. Not normalised, float32; minus infinity for what is filtered out.

        coins: (m, 1), uniform in [0, 1), if `tosses_coins`.
        """
        for method in self.filters:
            if isinstance(method, Xtc):
                assert coins is not None
                logprobs = method(logprobs, coins)
            else:
                logprobs = method(logprobs)
        return logprobs.astype(mx.float32) * (1.0 / self.temp)


def read_sampler(sampler: Sampler) -> Parameters | None:
    """The parameters of a sampler of mlx-lm; None for an opaque one."""
    if sampler is greedy_sampler:
        return Parameters((), 0.0)
    code = getattr(sampler, "__code__", None)
    if code is None or code not in cast(Any, make_sampler).__code__.co_consts:
        return None
    enclosed = _closure(sampler)
    filters: list[Filter | Xtc] = []
    top_k = 0
    for method in enclosed["sampling_methods"]:
        names, values = method.__code__.co_names, _closure(method)
        if names == ("apply_xtc",):
            filters.append(
                Xtc(
                    values["xtc_probability"],
                    values["xtc_threshold"],
                    values["xtc_special_tokens"],
                )
            )
        elif len(names) == 1 and names[0] in DETERMINISTIC:
            filters.append(method)
            top_k = values.get("top_k", top_k)
        else:
            return None
    return Parameters(tuple(filters), enclosed["temp"], top_k)


def _closure(function: Any) -> dict[str, Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(function.__code__.co_freevars, cells, strict=True))
