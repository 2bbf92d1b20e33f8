"""`mlx-spec verify`: equal texts and equal distributions are told from others, ties from faults."""

import json
import math
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.accept import Greedy, Ratio, Seed
from mlx_spec.bench.distribution import (
    DistributionTest,
    chi_square_tail,
    compare,
    distribution_tests,
    exact_probabilities,
    next_logits,
)
from mlx_spec.bench.prompts import Prompt
from mlx_spec.bench.verify import (
    Plan,
    Run,
    Verdict,
    draw_at,
    margin,
    rounding,
    verify,
    verify_loaded,
)
from mlx_spec.errors import BadArguments, NotEngaged
from mlx_spec.load import Pairing
from mlx_spec.round import Request
from mlx_spec.sampling import read_sampler
from models import checkpoint_path, pair

P = "qwen3-5-trained"
PROMPT = Prompt("prose", "Once upon a time", False)


@pytest.fixture
def model(monkeypatch):
    """A model in float32 that `load` would have paired with its head."""
    p = pair(P)
    p.model.mlx_spec = Pairing(p.drafter, checkpoint_path(P))
    yield p.model
    del p.model.mlx_spec


def check(model, **options):
    plan = Plan(**{"max_tokens": 12, "depths": (1, 3)} | options)
    return verify_loaded(model, pair(P).tokenizer, "tiny", [PROMPT], plan)


def prompt_ids():
    return pair(P).tokenizer.encode(PROMPT.text)


# Texts


@pytest.mark.parametrize("law", ["greedy", "stock", "seed"])
def test_texts_that_are_equal(model, law):
    sampled = {} if law == "greedy" else {"temp": 0.8, "sampling": law, "seed": 7}
    verdict = check(model, **sampled)
    assert (verdict.law, verdict.outcome, verdict.exit_code) == (law, "identical", 0)
    assert [(run.depth, run.tokens, run.difference) for run in verdict.runs] == [
        (1, 12, None),
        (3, 12, None),
    ]
    assert all(run.drafted > 0 and run.why is None for run in verdict.runs)
    assert verdict.as_text().splitlines()[-1] == "identical"


def test_lookup_needs_no_drafter(model):
    model.mlx_spec = Pairing(None, reason="no-drafter", detail="none was asked for")
    tokenizer = pair(P).tokenizer
    repeated = Prompt("prose", "Once upon a time. " * 3, False)
    plan = Plan(max_tokens=12, depths=(1,), draft_kind="lookup", temp=1.5)
    verdict = verify_loaded(model, tokenizer, "tiny", [repeated], plan)
    assert verdict.exit_code == 0
    assert verdict.runs[0].drafted > 0
    ids = tokenizer.encode(repeated.text)
    tests = distribution_tests(model, tokenizer, "prose", ids, 1, plan.sampler, 2, 0, "lookup")
    assert tests[0].drafted > 0


def second_best_once(monkeypatch, call):
    """Greedy decoding emits the second most likely token in row 0 of one call of `draw`."""
    draw, calls = Greedy.draw, Counter()

    def faulty(law, logits, drafts):
        draws = draw(law, logits, drafts)
        calls["draw"] += 1
        if calls["draw"] == call:
            second = mx.argsort(logits[0, :1], axis=-1)[:, -2].astype(draws.tokens.dtype)
            return replace(draws, tokens=mx.concatenate([second, draws.tokens[1:]]))
        return draws

    monkeypatch.setattr(Greedy, "draw", faulty)


def test_a_token_that_the_model_did_not_choose(model, monkeypatch):
    """The margin is that of a forward over prompt and common tokens, by numpy."""
    second_best_once(monkeypatch, call=3)
    verdict = check(model, depths=(1,))
    [run] = verdict.runs
    found = run.difference
    assert (verdict.outcome, verdict.exit_code) == ("DIFFERENT", 1)
    assert 2 <= found.token <= 4

    tokens = prompt_ids()
    for _ in range(found.token):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    logits = np.array(model(mx.array([tokens]))[0, -1], np.float64)
    order = np.argsort(logits)
    assert (found.expected, found.got) == (order[-1], order[-2])
    assert found.margin == pytest.approx(logits[order[-1]] - logits[order[-2]], abs=1e-4)
    assert found.eps == 1e-4
    last = verdict.as_text().splitlines()[-1]
    assert last == "DIFFERENT: 1 of 1 texts, and not by a tie"


def test_a_difference_below_eps_is_a_tie(model, monkeypatch):
    second_best_once(monkeypatch, call=3)
    verdict = check(model, depths=(1,), eps=50.0)
    assert (verdict.outcome, verdict.exit_code) == ("identical up to ties", 0)
    assert verdict.runs[0].difference.is_tie
    last = verdict.as_text().splitlines()[-1]
    assert last == "identical up to ties (margin < 5.0e+01): 1 of 1 texts turn off at one"


def test_equal_texts_prove_nothing_where_nothing_was_drafted(model, monkeypatch):
    monkeypatch.setattr(Request, "_rows_left", lambda self, *limits: 1)
    verdict = check(model, depths=(2,))
    assert verdict.runs[0].difference is None
    assert verdict.runs[0].drafted == 0
    assert (verdict.outcome, verdict.exit_code) == ("not verified", 3)
    assert "at depth 2 nothing was drafted: too-short" in verdict.as_text()


@pytest.mark.parametrize(
    ("depths", "outcome"), [((1, "auto"), "identical"), (("auto",), "not verified")]
)
def test_auto_may_park_next_to_depths_that_draft(depths, outcome):
    parked = Run("prose", "auto", 12, 0, 0, "parked (acceptance 0.2 < break-even 0.4)", None)
    runs = [Run("prose", 1, 12, 9, 2, None, None), parked] if 1 in depths else [parked]
    verdict = Verdict("tiny", "greedy", Plan(depths=depths), runs)
    assert verdict.outcome == outcome
    assert "depth auto: 12 tokens, nothing drafted: parked (acceptance" in verdict.as_text()


def test_auto_is_compared_too(model):
    verdict = check(model, depths=(1, "auto"))
    assert [(run.depth, run.difference) for run in verdict.runs] == [(1, None), ("auto", None)]
    assert verdict.exit_code == 0


def test_a_model_without_a_drafter(model_dir):
    with pytest.raises(NotEngaged, match=r"nothing to verify for .*none was asked for"):
        verify(str(model_dir), "none")


def test_from_files(model_dir):
    seen = []
    plan = Plan(max_tokens=4, depths=(1,))
    verdict = verify(str(model_dir), prompts=[PROMPT], plan=plan, progress=seen.append)
    assert verdict.exit_code == 0
    assert seen == [f"loading {model_dir}", "prose, without drafts", "prose, depth 1"]
    result = json.loads(json.dumps(verdict.as_dict()))
    assert result["schema"] == "mlx-spec/verify/1"
    assert result["verdict"] in ("identical", "identical up to ties")
    assert result["runs"][0]["tokens"] == 4
    assert result["plan"]["depths"] == [1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"depths": ()}, "at least one"),
        ({"depths": (0,)}, "from 1 on"),
        ({"max_tokens": 1}, "at least 2 tokens"),
        ({"temp": -1}, "temperature"),
        ({"eps": -1.0}, "negative"),
        ({"draws": 10}, "at least 100"),
        ({"sampling": "seeds"}, "seeds"),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"top_k": -1}, "top_k is -1"),
        ({"temp": 1, "sampling": "ratio", "depths": ("auto",)}, "at fixed depths"),
    ],
)
def test_plans_that_are_refused(bad, message):
    with pytest.raises(BadArguments, match=message):
        Plan(**bad)


# Margins


def logprobs_of(probabilities):
    return mx.log(mx.array([probabilities]))


def test_the_margin_of_greedy_decoding_is_the_difference_of_log_probabilities():
    draw = draw_at(0, logprobs_of([0.5, 0.3, 0.2]), Plan())
    logprobs = logprobs_of([0.5, 0.3, 0.2])
    assert margin(draw, logprobs, 0, 1) == pytest.approx(math.log(5 / 3), abs=1e-5)
    assert margin(draw, logprobs, 0, 2) == pytest.approx(math.log(5 / 2), abs=1e-5)
    assert margin(draw, logprobs, 1, 0) == pytest.approx(math.log(5 / 3), abs=1e-5)


def test_a_third_token_in_place_of_two_that_tie_is_no_tie():
    logprobs = logprobs_of([0.45, 0.45, 0.1])
    assert margin(draw_at(0, logprobs, Plan()), logprobs, 0, 2) > 1


def test_a_token_that_cannot_be_drawn_has_no_margin():
    logprobs = logprobs_of([0.6, 0.4, 0.0])
    assert margin(draw_at(0, logprobs, Plan()), logprobs, 0, 2) is None


@pytest.mark.parametrize("at", [0, 3])
def test_the_margin_of_shared_noise_counts_the_noise(at):
    plan = Plan(temp=0.5, sampling="seed", seed=11)
    logprobs = logprobs_of([0.3, 0.3, 0.2, 0.2])
    mx.random.seed(11)
    noise = Seed(read_sampler(plan.sampler), None).gumbel(at, 1, 4)
    scores = np.array(logprobs[0]) + 0.5 * np.array(noise[0])
    best, second, *_ = np.argsort(-scores)
    draw = draw_at(at, logprobs, plan)
    assert draw(logprobs) == best
    found = margin(draw, logprobs, int(best), int(second))
    assert found == pytest.approx(scores[best] - scores[second], abs=1e-5)


@pytest.mark.parametrize("at", [0, 4])
def test_the_margin_of_stock_sampling_counts_its_random_number(at):
    """mlx draws by inverting the cumulative distribution, one uniform number for each token."""
    p = np.array([0.1, 0.2, 0.3, 0.4])
    mx.random.seed(5)
    u = [mx.random.uniform(shape=(1,)).item() for _ in range(at + 1)][-1]
    expected = int(np.searchsorted(p.cumsum(), u))
    got = expected + 1 if expected < 3 else 2

    def drawn(shift):
        q = p.copy()
        q[got] *= math.exp(shift / 2)
        q[expected] *= math.exp(-shift / 2)
        return int(np.searchsorted(q.cumsum() / q.sum(), u))

    least = next(shift for shift in np.arange(0, 20, 1e-3) if drawn(shift) == got)
    logprobs = logprobs_of(p.tolist())
    draw = draw_at(at, logprobs, Plan(temp=1.0, sampling="stock", seed=5))
    assert draw(logprobs) == expected
    assert margin(draw, logprobs, expected, got) == pytest.approx(least, abs=2e-3)


@pytest.mark.parametrize(
    ("dtype", "largest", "expected"),
    [
        (mx.float32, 20.0, 1e-4),
        (mx.bfloat16, 20.0, 0.25),  # steps of 1/8 from 16 to 32
        (mx.bfloat16, -40.0, 0.5),
        (mx.bfloat16, 16.0, 0.25),
        (mx.float16, 20.0, 1 / 32),
    ],
)
def test_what_rounding_explains(dtype, largest, expected):
    assert rounding(mx.array([1.0, largest, 0.5]).astype(dtype)) == expected


# Distributions


@pytest.mark.parametrize(
    ("degrees", "statistic", "expected"),
    [
        (1, 3.841459, 0.05),  # tables of quantiles
        (1, 10.827566, 0.001),
        (5, 1.145476, 0.95),
        (10, 18.307038, 0.05),
        (10, 29.588298, 0.001),
        (20, 31.410433, 0.05),
        (2, 4.0, math.exp(-2)),  # closed forms
        (1, 1.5, math.erfc(math.sqrt(0.75))),
        (4, 9.0, math.exp(-4.5) * 5.5),
        (3, 0.0, 1.0),
    ],
)
def test_the_tail_of_chi_square(degrees, statistic, expected):
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-5)


def test_rare_tokens_share_a_bin():
    """20 draws of (0.5, 0.3, 0.1, 0.1): the last two expect 2 each, so they join the second."""
    p = np.array([0.5, 0.3, 0.1, 0.1])
    bins, p_value = compare({0: 6, 1: 8, 2: 4, 3: 2}, p)
    assert bins == 2
    assert p_value == pytest.approx(chi_square_tail(16 / 10 + 16 / 10, 1))
    bins, p_value = compare({0: 60, 1: 20, 2: 12, 3: 8}, p)
    assert bins == 4
    assert p_value == pytest.approx(chi_square_tail(2 + 100 / 30 + 0.4 + 0.4, 3))


def test_the_rest_has_a_bin_where_it_is_likely_enough():
    p = np.array([0.5, *[0.01] * 50])
    bins, _ = compare({0: 500, 1: 500}, p)
    assert bins == 21  # the 20 most likely and the rest
    assert compare({0: 500, 1: 500}, p)[1] < 1e-9
    assert compare({0: 100}, np.array([0.99, 0.01])) == (1, None)


def test_exact_probabilities_are_filtered_and_at_the_temperature(model):
    plan = Plan(temp=0.7, top_k=3)
    found = exact_probabilities(model, prompt_ids(), read_sampler(plan.sampler))
    logits = np.array(model(mx.array([prompt_ids()]))[0, -1], np.float64)
    weights = np.where(logits >= np.sort(logits)[-3], np.exp(logits / 0.7), 0)
    np.testing.assert_allclose(found, weights / weights.sum(), atol=1e-5)


def test_next_logits_are_those_of_one_forward(model):
    expected = model(mx.array([prompt_ids()]))[0, -1]
    np.testing.assert_allclose(next_logits(model, prompt_ids()), expected, atol=1e-3)


RATIO = {"temp": 1.5, "top_k": 20, "sampling": "ratio", "depths": (1,), "draws": 100}


def test_rejection_sampling_keeps_the_distribution(model):
    verdict = check(model, **RATIO)
    assert (verdict.law, verdict.outcome, verdict.exit_code) == ("ratio", "same distribution", 0)
    first, second = verdict.tests
    assert first.draws == 100 > second.draws > 0
    assert first.drafted == 100 > first.accepted > 0
    assert first.bins > 1
    assert "same distribution (chi-square, all p >=" in verdict.as_text()


def test_accepting_every_draft_does_not(model, monkeypatch):
    """The drafts are tokens that the model finds unlikely."""
    drafter = pair(P).drafter
    draft = drafter.draft

    def unlikely(tokens, hidden, n, pick, *caches):
        return draft(tokens, hidden, n, lambda logits, drafts: pick(-logits, drafts), *caches)

    monkeypatch.setattr(drafter, "draft", unlikely)
    monkeypatch.setattr(Ratio, "_checked", lambda self, p, drafts, *keys: mx.concatenate(drafts))
    verdict = check(model, **RATIO)
    assert (verdict.outcome, verdict.exit_code) == ("DIFFERENT", 1)
    assert verdict.unlikely
    assert "below p = " in verdict.as_text().splitlines()[-1]


def verdict_of(*tests):
    plan = Plan(temp=1.0, sampling="ratio", depths=(1,))
    return Verdict("tiny", "ratio", plan, tests=tests)


def test_a_distribution_of_one_token_cannot_be_tested():
    verdict = verdict_of(DistributionTest("code", 1, 0, 1000, 1, None, 1000, 990))
    assert (verdict.outcome, verdict.exit_code) == ("not verified", 3)
    assert "give another prompt" in verdict.as_text()


def test_one_of_many_tests_may_be_unlikely():
    """With 5 tests, p = 3e-4 is not below 1e-3 / 5."""
    test = DistributionTest("code", 1, 0, 1000, 9, 3e-4, 1000, 500)
    others = [replace(test, p_value=p) for p in (0.9, 0.5, 0.3, 0.1)]
    assert verdict_of(test).exit_code == 1
    assert verdict_of(test, *others).outcome == "same distribution"
    assert verdict_of(replace(test, p_value=1.9e-4), *others).outcome == "DIFFERENT"
