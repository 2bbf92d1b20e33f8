"""The laws `seed` and `ratio`: exact distributions, on a vocabulary of 12 tokens, and one text
whatever drafts it, on models."""

import subprocess
import sys
from copy import deepcopy
from itertools import combinations

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

import mlx_spec
from mlx_spec.accept import Greedy, History, Ratio, Seed, Stock, make_law, plain_sampler
from mlx_spec.demo import demo_model
from mlx_spec.drafters import Drafter
from mlx_spec.errors import BadArguments
from mlx_spec.randomness import generator_state
from mlx_spec.sampling import Xtc, read_sampler
from models import (
    DEMO,
    GEMMA_DEMO,
    ScriptedDrafter,
    make_request,
    pair,
)

V = 12
DRAWS = 200_000
NOTHING = mx.array([], mx.uint32)
LOGITS = np.array([2.2, 1.9, 1.5, 1.1, 0.9, 0.6, 0.2, -0.1, -0.6, -1.1, -1.9, -3.0])


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# The filters of a sampler, from their definitions: (probabilities, parameter) -> kept tokens


def top_p(p, threshold):
    """The most likely tokens until their sum reaches the threshold."""
    order = np.argsort(-p)
    kept = np.zeros(V, bool)
    kept[order[: np.searchsorted(np.cumsum(p[order]), threshold) + 1]] = True
    return kept


def min_p(p, share):
    return p >= share * p.max()


def top_k(p, k):
    return np.isin(np.arange(V), np.argsort(-p)[:k])


def xtc(p, threshold):
    """All of those above the threshold, but the least likely of them, are excluded."""
    above = np.flatnonzero(p > threshold)
    return ~np.isin(np.arange(V), [t for t in above if p[t] > p[above].min()])


FILTERS = {
    "temp": ({}, None, None),
    "top-p": ({"top_p": 0.8}, top_p, 0.8),
    "min-p": ({"min_p": 0.2}, min_p, 0.2),
    "xtc": ({"xtc_probability": 0.4, "xtc_threshold": 0.12}, xtc, 0.12),
    "top-k": ({"top_k": 4}, top_k, 4),
}  # in the order in which mlx-lm applies them
PAIRS = [*((name,) for name in FILTERS), *combinations([*FILTERS][1:], 2)]
TEMPS = (0.7, 1.3)


def exact(logits, names, temp):
    """The distribution that a sampler draws from: filters on probabilities at temperature 1, in
    order, renormalised by each but for min-p's and top-k's comparisons, which do not mind; then
    the temperature."""

    def filtered(coin):
        log_p = np.log(softmax(logits))
        for name in FILTERS:
            if name in names and FILTERS[name][1] is not None and (name != "xtc" or coin):
                kept = FILTERS[name][1](softmax(log_p), FILTERS[name][2])
                log_p = np.where(kept, log_p, -np.inf)
        return softmax(log_p / temp)

    return 0.4 * filtered(True) + 0.6 * filtered(False) if "xtc" in names else filtered(False)


def sampler_of(names, temp):
    return make_sampler(temp, **{k: v for name in names for k, v in FILTERS[name][0].items()})


def assert_chi_square(counts, wanted):
    """Less likely than one in 150,000: the cube root is nearly normal (Wilson, Hilferty 1931)."""
    statistic, freedom = ((counts - wanted) ** 2 / wanted).sum(), len(counts) - 1
    if freedom > 0:
        spread = 2 / (9 * freedom)
        assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread) < 4.35
    else:
        assert counts == pytest.approx(wanted)


def assert_drawn_from(tokens, expected):
    """By chi-square, and total variation within 1 %."""
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=expected.size)
    total = counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert 0.5 * np.abs(counts / total - expected).sum() < 0.01 * np.sqrt(expected.size / V)
    assert_chi_square(counts[possible], total * expected[possible])


def law_for(kind, sampler, seed=4):
    mx.random.seed(seed)
    return kind(read_sampler(sampler), History(None, NOTHING))


def rows_of(logits, count):
    """(1, count, V)"""
    return mx.broadcast_to(mx.array(logits, mx.float32), (1, count, V))


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_seed_draws_from_the_exact_distribution(names):
    temp = TEMPS[PAIRS.index(names) % 2]
    law = law_for(Seed, sampler_of(names, temp))
    law.begin(DRAWS - 1)
    draws = law.draw(rows_of(LOGITS, DRAWS), [])
    assert_drawn_from(draws.tokens, exact(LOGITS, names, temp))


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_the_exact_distribution_is_that_of_mlx_lms_own_sampler(names):
    sampler = sampler_of(names, 0.7)
    mx.random.seed(3)
    # one coin of XTC for all rows of a call
    calls = 400 if "xtc" in names else 4
    logprobs = mx.log(mx.array(softmax(LOGITS), mx.float32))
    rows = mx.broadcast_to(logprobs, (DRAWS // calls, V))
    tokens = np.concatenate([np.array(sampler(rows)) for _ in range(calls)])
    expected = exact(LOGITS, names, 0.7)
    counts = np.bincount(tokens, minlength=V) / len(tokens)
    tolerance = 0.06 if "xtc" in names else 0.01
    assert 0.5 * np.abs(counts - expected).sum() < tolerance
    assert counts[expected == 0].sum() == 0


def test_seed_draws_successive_tokens_independently():
    law = law_for(Seed, make_sampler(1.0))
    law.begin(DRAWS - 3)
    tokens = np.array(law.draw(rows_of(LOGITS, DRAWS - 2), []).tokens)
    p = softmax(LOGITS)
    joint = (p[:, None, None] * p[:, None] * p).ravel()
    triples = tokens.reshape(-1, 3) @ [V * V, V, 1]
    counts = np.bincount(triples, minlength=V**3)
    wanted = len(triples) * joint
    common = wanted > 5
    assert_chi_square(counts[common], wanted[common])


@pytest.mark.parametrize("names", [("temp",), ("top-p",), ("xtc",), ("xtc", "top-k")], ids="+".join)
def test_draft_and_target_agree_at_least_as_the_papers_bound_says(names):
    """(1 - TV) / (1 + TV), and more often than with noise of their own."""
    rng = np.random.default_rng(1)
    sampler, count = sampler_of(names, 0.9), 40_000
    other = LOGITS + rng.normal(size=V)
    law = law_for(Seed, sampler)
    law.begin(count - 1)
    target = np.array(law.draw(rows_of(LOGITS, count), []).tokens)
    draft = np.array(law.draw(rows_of(other, count), []).tokens)
    if "xtc" in names:  # a coin is tossed first, the same for both
        p, q = ([exact(x, n, 0.9) for n in (names[1:], names)] for x in (LOGITS, other))
        p[1], q[1] = ((x[1] - 0.6 * x[0]) / 0.4 for x in (p, q))
        weights = (0.6, 0.4)
    else:
        p, q, weights = [exact(LOGITS, names, 0.9)], [exact(other, names, 0.9)], (1.0,)
    tvs = [0.5 * np.abs(a - b).sum() for a, b in zip(p, q, strict=True)]
    bound = sum(w * (1 - tv) / (1 + tv) for w, tv in zip(weights, tvs, strict=True))
    independent = sum(w * (a * b).sum() for w, a, b in zip(weights, p, q, strict=True))
    assert min(tvs) > 0.1
    agreement = (target == draft).mean()
    assert agreement > bound - 0.01
    assert agreement > independent + 0.1
    assert agreement <= 1 - sum(w * tv for w, tv in zip(weights, tvs, strict=True)) + 0.01


def test_the_draft_at_each_position_has_the_noise_and_the_coin_of_its_row():
    law = law_for(Seed, make_sampler(1.5, xtc_probability=0.5, xtc_threshold=0.1))
    logits = mx.random.normal((1, 9, V), key=mx.random.key(0))
    law.committed(mx.array([1, 2, 3]), None)
    law.begin(8)
    drafts = []
    for k in range(8):
        drafts.append(law.pick(logits[:, k], drafts))
    draws = law.draw(logits, drafts)
    assert draws.tokens.tolist()[:8] == [d.item() for d in drafts]
    # as a sampler in mlx-lm's loops, one position after the other
    plain = law_for(Seed, make_sampler(1.5, xtc_probability=0.5, xtc_threshold=0.1))
    plain.position = 3
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert [plain(logprobs[:, k]).item() for k in range(9)] == draws.tokens.tolist()
    assert len(set(draws.tokens.tolist())) > 2


def test_keys_of_other_seeds_positions_and_purposes_are_others():
    laws = [law_for(Seed, make_sampler(1.0), seed) for seed in range(40)]
    keys = [law.keys(purpose, 0, 50) for law in laws for purpose in range(3)]
    assert len({tuple(key) for key in mx.concatenate(keys).tolist()}) == 40 * 3 * 50


def bulk_rounds(law, p, q, depth, count, sequences):
    """Rounds of many sequences at once, each from token 0 on: their first `count` tokens
    (sequences, count), and how many drafts of the first round were accepted (sequences,).

    p, q: (V, V), logits after each token. A law takes rows as they come, so the rows of all
    sequences go through it in one call."""
    pending = np.zeros(sequences, np.int64)
    texts = [[] for _ in range(sequences)]
    first = None
    p, q = mx.array(p, mx.float32), mx.array(q, mx.float32)
    for _ in range(count):
        law.begin(depth)
        drafts, rows = [], [mx.array(pending)]
        for _ in range(depth):
            drafts.append(law.pick(q[rows[-1]], drafts))
            rows.append(drafts[-1])
        tokens = law.draw(p[mx.concatenate(rows)][None], drafts).tokens
        tokens = np.array(tokens).reshape(depth + 1, sequences)
        same = tokens[:-1] == np.array(mx.stack(drafts))
        accepted = np.cumprod(same, axis=0).sum(0)
        first = accepted if first is None else first
        for i in range(sequences):
            texts[i].extend(tokens[: accepted[i] + 1, i])
        pending = tokens[accepted, np.arange(sequences)]
    return np.array([text[:count] for text in texts]), first


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_ratio_is_exact_and_accepts_what_the_distributions_share(depth):
    """Joint distribution of three tokens; acceptance of the first draft sum(min(p, q)), of the
    next one the same given it."""
    rng = np.random.default_rng(depth)
    temp, sequences = 0.9, 30_000
    logits = rng.normal(size=(V, V)) * 1.5
    wrong = logits + rng.normal(size=(V, V))
    law = law_for(Ratio, make_sampler(temp))
    texts, accepted = bulk_rounds(law, logits, wrong, depth, 3, sequences)
    p, q = softmax(logits / temp), softmax(wrong / temp)
    joint = p[0][:, None, None] * p[:, :, None] * p[None]  # p(a) p(b|a) p(c|b)
    counts = np.bincount(texts @ [V * V, V, 1], minlength=V**3)
    wanted = sequences * joint.ravel()
    common = wanted > 5
    assert_chi_square(counts[common], wanted[common])
    shared = np.minimum(p, q)
    chance = shared[0]  # of accepted drafts that end in each token
    for k in range(depth):
        assert (accepted > k).mean() == pytest.approx(chance.sum(), abs=0.015)
        chance = chance @ shared
    assert (accepted > 0).mean() < 0.9


@pytest.mark.parametrize("names", [("top-p",), ("min-p", "top-k"), ("xtc",)], ids="+".join)
def test_ratio_filters_target_and_drafter_alike(names):
    """Also where they keep different tokens."""
    rng = np.random.default_rng(5)
    logits, sequences = np.tile(LOGITS, (V, 1)), 20_000
    wrong = logits + rng.normal(size=(V, V)) * 2
    accepted_tokens = []
    if "xtc" in names:  # one coin for all rows of a position, so sequence by sequence
        law = law_for(Ratio, sampler_of(names, 0.8))
        for _ in range(1500):
            text, _ = bulk_rounds(law, logits, wrong, 1, 1, 1)
            accepted_tokens.append(text)
            law.position += 2
        counts = np.bincount(np.ravel(accepted_tokens), minlength=V) / 1500
        expected = exact(LOGITS, names, 0.8)
        assert 0.5 * np.abs(counts - expected).sum() < 0.06
        assert counts[expected == 0].sum() == 0
        return
    law = law_for(Ratio, sampler_of(names, 0.8))
    texts, accepted = bulk_rounds(law, logits, wrong, 2, 2, sequences)
    p, q = exact(LOGITS, names, 0.8), exact(wrong[0], names, 0.8)
    assert_drawn_from(texts[:, 1], p)
    assert (p > 0).sum() != (q > 0).sum()
    assert (accepted > 0).mean() == pytest.approx(np.minimum(p, q).sum(), abs=0.015)


# Which law it is


def test_a_sampler_of_mlx_lm_is_read():
    parameters = read_sampler(make_sampler(0.7, 0.9, 0.1, 1, 8, 0.3, 0.2, xtc_special_tokens=[3]))
    assert parameters.temp == 0.7
    assert parameters.top_k == 8
    assert parameters.tosses_coins
    assert len(parameters.filters) == 4
    assert parameters.filters[2] == Xtc(0.3, 0.2, [3])
    assert read_sampler(lambda logprobs: mx.argmax(logprobs, axis=-1)) is None
    assert read_sampler(mx.random.categorical) is None


def test_greedy_is_known_by_what_it_does():
    for sampler in (None, greedy_sampler, make_sampler(0.0), make_sampler(0.8, top_k=1)):
        assert isinstance(make_law(sampler, None, NOTHING), Greedy), sampler
    coin = make_sampler(0.8, top_k=1, xtc_probability=0.5)
    assert isinstance(make_law(coin, None, NOTHING), Seed)
    processed = make_law(make_sampler(0.8, top_k=1), make_logits_processors({3: 50.0}), NOTHING)
    processed.begin(0)
    assert processed.draw(rows_of(LOGITS, 1), []).tokens.tolist() == [3]


def test_the_law_that_was_asked_for():
    def own(logprobs):
        return mx.argmax(logprobs, axis=-1)

    sampler = make_sampler(0.8)
    kinds = {"auto": Seed, "seed": Seed, "stock": Stock, "ratio": Ratio}
    for sampling, kind in kinds.items():
        assert type(make_law(sampler, None, NOTHING, sampling)) is kind
    for sampling in ("auto", "stock"):
        assert type(make_law(own, None, NOTHING, sampling)) is Stock
    for sampling in ("seed", "ratio"):
        with pytest.raises(BadArguments, match=f"Sampling '{sampling}' needs a sampler of mlx_lm"):
            make_law(own, None, NOTHING, sampling)
    assert plain_sampler(own, "auto") == (own, "stock")
    assert plain_sampler(sampler, "ratio") == (sampler, "stock")
    assert plain_sampler(None, "auto") == (None, "greedy")
    law, name = plain_sampler(sampler, "auto")
    assert (type(law), name) == (Seed, "seed")
    assert make_law(law, None, NOTHING) is law


@pytest.mark.parametrize("kind", [Seed, Ratio])
def test_a_request_takes_one_draw_of_the_global_generator(kind):
    """So mx.random.seed governs it, two requests differ, and what follows is the same whatever
    the depth."""
    sampler = make_sampler(0.9, xtc_probability=0.5)
    states, keys = [], []
    for picks in (0, 3):
        mx.random.seed(9)
        law = kind(read_sampler(sampler), History(None, NOTHING))
        for _ in range(2):
            law.begin(picks)
            drafts = []
            for _ in range(picks):
                drafts.append(law.pick(rows_of(LOGITS, 1)[0], drafts))
            mx.eval(law.draw(rows_of(LOGITS, picks + 1), drafts).tokens)
        states.append(generator_state().tolist())
        keys.append(law.key.tolist())
        keys.append(kind(read_sampler(sampler), History(None, NOTHING)).key.tolist())
    mx.random.seed(9)
    mx.random.uniform()
    assert states == [generator_state().tolist()] * 2
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]


# One text


class Oracle(Drafter):
    """Drafts with the target itself: it knows the exact distribution."""

    kind = "oracle"
    head = None
    learns = False

    def __init__(self, p):
        self.model, self.pair = p.model, p

    def make_cache(self):
        return []

    def position(self, caches):
        return None

    def rewind(self, caches, position):
        pass

    def extend(self, tokens, hidden, caches):
        pass

    def draft(self, tokens, hidden, n, pick, caches, target_caches):
        copies, drafts = deepcopy(target_caches), []
        newest = tokens[-1:]
        for _ in range(n):
            _, logits = self.pair.target(newest[None], copies)
            newest = pick(logits[:, -1], drafts)
            drafts.append(newest)
        return drafts


SAMPLERS = {
    "top-p": {"temp": 0.9, "top_p": 0.9},
    "top-k, min-p": {"temp": 1.2, "top_k": 40, "min_p": 0.02},
    "xtc": {"temp": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
}
TOKENS = 40


def text_of(p, sampler, seed=7, **options):
    mx.random.seed(seed)
    responses = list(
        mlx_spec.stream_generate(
            p.model,
            p.tokenizer,
            p.prompt,
            max_tokens=TOKENS,
            sampler=make_sampler(**SAMPLERS[sampler]),
            **options,
        )
    )
    return [r.token for r in responses], responses[-1].spec


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("qwen3-5-trained", "xtc"),
        ("gemma4-dense-trained", "xtc"),
        ("qwen3-6-moe-trained", "top-p"),
        (DEMO, "top-k, min-p"),
    ],
)
def test_one_text_whatever_drafts_it(name, sampler):
    p = pair(name)
    plain, spec = text_of(p, sampler, draft_model=p.drafter, num_draft_tokens=0)
    assert (spec.sampling, spec.reason, spec.drafted) == ("seed", "num-draft-tokens-0", 0)
    assert len(set(plain)) > TOKENS / 6
    rng = np.random.default_rng(2)
    random = ScriptedDrafter(
        p.drafter, lambda position, n: rng.integers(0, p.target.vocab_size, n).tolist()
    )
    accepted = {}
    oracle, real = Oracle(p), p.drafter
    runs = [(real, depth) for depth in (1, 3, 5)]
    for drafter, depth in [*runs, (real, "auto"), (random, 3), (oracle, 4)]:
        tokens, spec = text_of(p, sampler, draft_model=drafter, num_draft_tokens=depth)
        assert tokens == plain, (depth, drafter.kind)
        assert spec.sampling == "seed"
        assert spec.drafted > 0 or depth == "auto"
        accepted[drafter, depth] = spec.acceptance
    assert accepted[oracle, 4] == 1
    assert all(accepted[real, depth] > 0.08 for depth in (1, 3, 5))
    assert accepted[random, 3] < 0.05
    other, _ = text_of(p, sampler, 8, draft_model=p.drafter, num_draft_tokens=3)
    assert other != plain


@pytest.mark.parametrize("name", [DEMO, GEMMA_DEMO])
def test_with_penalties(name):
    p = pair(name)
    processors = make_logits_processors(repetition_penalty=1.2, frequency_penalty=0.3)
    texts = []
    for depth in (0, 1, 4):
        tokens, spec = text_of(
            p, "top-p", draft_model=p.drafter, num_draft_tokens=depth, logits_processors=processors
        )
        texts.append(tokens)
        assert (spec.accepted > 0) == (depth > 0)
    assert texts[0] == texts[1] == texts[2]


def test_mlx_lms_own_step_with_the_law_as_its_sampler():
    """Plain decoding is mlx_lm's loop."""
    p = pair(DEMO)
    expected, _ = text_of(p, "xtc", draft_model=p.drafter, num_draft_tokens=4)
    mx.random.seed(7)
    law = make_law(make_sampler(**SAMPLERS["xtc"]), None, NOTHING)
    steps = generate_step(mx.array(p.prompt), p.model, sampler=law, max_tokens=TOKENS)
    assert [token for token, _ in steps] == expected


def test_greedy_text_is_the_same_under_all_laws():
    p = pair(DEMO)
    expected = [
        r.token for r in mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=40)
    ]
    for sampler in (None, make_sampler(0.7, top_k=1)):
        for sampling in ("auto", "seed", "ratio"):
            got = list(
                mlx_spec.stream_generate(
                    p.model,
                    p.tokenizer,
                    p.prompt,
                    max_tokens=40,
                    sampler=sampler,
                    sampling=sampling,
                    draft_model=p.drafter,
                    num_draft_tokens=3,
                )
            )
            assert [r.token for r in got] == expected
            assert got[-1].spec.sampling == "greedy"
            assert got[-1].spec.accepted > 0


def test_across_processes():
    """With a drafter and without one."""
    command = [sys.executable, "-m", "mlx_spec", "generate", "--model", str(demo_model())]
    command += ["--prompt", "import os\n", "--ignore-chat-template", "--max-tokens", "50"]
    command += ["--temp", "0.9", "--top-p", "0.9", "--seed", "3", "--verbose", "False"]
    texts = []
    for more in (["--draft-model", "none"], ["--num-draft-tokens", "5"], []):
        run = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        texts.append(run.stdout)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 50


# Acceptance on the demos


def recorded(name, law_kind, tokens, temp=1.0):
    """Run at depth 1; the log-weights of the target and of the drafter at each draft, (m, V), and
    which drafts were accepted."""
    p = pair(name)
    weights = {"p": [], "q": []}

    class Recording(law_kind):
        def log_weights(self, logprobs, offset=0):
            result = super().log_weights(logprobs, offset)
            weights["p" if logprobs.shape[0] > 1 else "q"].append(result[:1])
            return result

    mx.random.seed(12)
    law = Recording(read_sampler(make_sampler(temp)), History(None, NOTHING))
    request = make_request(p, p.prompt, 1, law=law)
    stats = mlx_spec.SpecStats()
    stream = mx.default_stream(mx.default_device())
    for _ in mlx_spec.round.speculate(request, stream, tokens, stats):
        pass
    count = min(len(weights["p"]), len(weights["q"]))
    p_rows, q_rows = (mx.concatenate(weights[x][:count]) for x in "pq")
    return p_rows, q_rows, stats


@pytest.mark.parametrize("name", [DEMO, GEMMA_DEMO])
def test_acceptance_on_the_demos(name):
    """At least the bound of the paper, and its share of the ratio test's within 2 points of a
    simulation of Gumbel noise by numpy. Noise: each pair of distributions is drawn from 30 times.
    """
    p_rows, q_rows, stats = recorded(name, Seed, 160)
    p, q = (softmax(np.array(x, np.float64)) for x in (p_rows, q_rows))
    tv = 0.5 * np.abs(p - q).sum(-1)
    bound = ((1 - tv) / (1 + tv)).mean()
    deviation = np.sqrt(bound * (1 - bound) / len(tv))
    assert stats.drafted > 80
    assert stats.acceptance > bound - 3 * deviation
    assert stats.acceptance < (1 - tv).mean() + 3 * deviation

    log_p, log_q = (np.log(np.maximum(x, 1e-300)) for x in (p, q))
    repeats, rng = 30, np.random.default_rng(0)
    simulated, agreed = [], []
    law = law_for(Seed, make_sampler(1.0))
    for _ in range(repeats):
        noise = rng.gumbel(size=p.shape)
        simulated.append(((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).mean())
        law.begin(len(p) - 1)
        target, draft = law.draw(p_rows[None], []), law.draw(q_rows[None], [])
        agreed.append(np.mean(np.array(target.tokens) == np.array(draft.tokens)))
        law.position += len(p)
    ratio = (1 - tv).mean()
    assert np.mean(agreed) / ratio == pytest.approx(np.mean(simulated) / ratio, abs=0.02)
    assert np.mean(agreed) > bound

    _, _, stats = recorded(name, Ratio, 160)
    assert stats.acceptance == pytest.approx(ratio, abs=4 * deviation)
