"""Whether rejection sampling draws from the model's own distribution: a chi-square test.

Sampling "ratio" promises a distribution, not a text. The first two tokens after a prompt are drawn
many times and counted against the probabilities that stock mlx_lm gives them.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import Sampler

from mlx_spec.generate import stream_generate
from mlx_spec.options import DraftKind
from mlx_spec.sampling import Parameters, read_sampler

LIKELY = 20  # the most likely tokens have a bin each, all others one together
LEAST_EXPECTED = 5  # draws in a bin; the usual condition for the chi-square approximation


@dataclass(frozen=True)
class DistributionTest:
    """Draws of one token, against the model's distribution.

    Attributes:
        position: 0 for the first token after the prompt; 1 for the second, where the first one
            was the most likely one.
        draws: how many were counted.
        bins: of the test; 1 where a single token takes nearly all, and nothing can be tested.
        p_value: the probability of counts that are at least as far off; None with 1 bin.
        drafted, accepted: drafts, over all draws at this depth.
        why: where nothing was drafted.
    """

    prompt: str
    depth: int
    position: int
    draws: int
    bins: int
    p_value: float | None
    drafted: int
    accepted: int
    why: str | None = None


def distribution_tests(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    prompt: list[int],
    depth: int,
    sampler: Sampler,
    draws: int,
    seed: int,
    draft_kind: DraftKind = "auto",
) -> list[DistributionTest]:
    """The first two tokens after a prompt, with drafts, under sampling "ratio".

    Args:
        name: what the tests call the prompt.
        sampler: of mlx_lm.sample_utils.make_sampler.
    """
    parameters = read_sampler(sampler)
    assert parameters is not None
    first = exact_probabilities(model, prompt, parameters)
    ends = [token for token in tokenizer.eos_token_ids if token < first.size]
    going_on = first.copy()
    going_on[ends] = 0
    most_likely = int(going_on.argmax())

    mx.random.seed(seed)
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    drafted = accepted = 0
    why = None
    for _ in range(draws):
        responses = list(
            stream_generate(
                model,
                tokenizer,
                prompt,
                depth + 1,  # so that the first round has all its drafts
                num_draft_tokens=depth,
                sampling="ratio",
                draft_kind=draft_kind,
                sampler=sampler,
            )
        )
        firsts[responses[0].token] += 1
        if responses[0].token == most_likely and len(responses) > 1:
            seconds[responses[1].token] += 1
        stats = responses[-1].spec
        assert stats is not None
        drafted += stats.drafted
        accepted += stats.accepted
        why = why if stats.engaged else stats.why
    why = None if drafted else why
    tests = []
    for position, counts in enumerate([firsts, seconds]):
        if position == 1 and counts:
            first = exact_probabilities(model, [*prompt, most_likely], parameters)
        bins, p_value = compare(counts, first)
        total = counts.total()
        tests.append(
            DistributionTest(name, depth, position, total, bins, p_value, drafted, accepted, why)
        )
    return tests


def next_logits(model: nn.Module, tokens: list[int]) -> mx.array:
    """Stock's logits for the token after `tokens`: (V,), in the model's dtype."""
    rows: list[mx.array] = []

    def note(history: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits[0])
        return logits

    next(generate_step(mx.array(tokens), model, max_tokens=1, logits_processors=[note]))
    return rows[0]


def exact_probabilities(model: nn.Module, tokens: list[int], parameters: Parameters) -> np.ndarray:
    """Of the token after `tokens`, filtered, at the temperature: (V,) float64."""
    logits = next_logits(model, tokens)[None]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    weights = np.exp(np.array(parameters.log_weights(logprobs, None)[0], dtype=np.float64))
    return weights / weights.sum()


def compare(counts: Mapping[int, int], probabilities: np.ndarray) -> tuple[int, float | None]:
    """Pearson's chi-square test of counted draws: the number of bins, and the p-value."""
    total = sum(counts.values())
    order = np.argsort(-probabilities)[:LIKELY]
    alone = [int(token) for token in order if total * probabilities[token] >= LEAST_EXPECTED]
    expected = [total * float(probabilities[token]) for token in alone]
    observed = [counts.get(token, 0) for token in alone]
    rest_expected, rest_observed = total - sum(expected), total - sum(observed)
    if rest_expected >= LEAST_EXPECTED or not alone:
        expected.append(rest_expected)
        observed.append(rest_observed)
    else:
        expected[-1] += rest_expected
        observed[-1] += rest_observed
    if len(expected) < 2:
        return len(expected), None
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return len(expected), chi_square_tail(statistic, len(expected) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability that chi-square with so many degrees of freedom is above `statistic`: the
    regularised incomplete gamma function Q(degrees / 2, statistic / 2)."""
    a, x = degrees / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # the series of P = 1 - Q (Abramowitz and Stegun, 6.5.29)
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return 1 - scale * total
    # The continued fraction (6.5.31), from its tail on.
    fraction = 0.0
    for k in range(200, 0, -1):
        fraction = k * (a - k) / (x + 2 * k + 1 - a + fraction)
    return scale / (x + 1 - a + fraction)
