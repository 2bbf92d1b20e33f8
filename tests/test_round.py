"""The loop: what is committed after each round, what it costs, and how it can be left."""

import gc
import importlib
import itertools
import weakref
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import mlx_spec
from mlx_spec.accept import Greedy, History, Stock
from mlx_spec.rollback import Transaction
from mlx_spec.round import Drawn, Request, speculate
from mlx_spec.sliding_window import in_time_order
from mlx_spec.stats import SpecStats
from models import (
    DEEPSEEK,
    DEMOS,
    EAGLE,
    GEMMA_RANDOM,
    GEMMA_TRAINED,
    RANDOM,
    TRAINED,
    ScriptedDrafter,
    assert_same_caches,
    make_request,
    often_right,
    pair,
    right,
)

NAME = "qwen3-5-trained"
GEMMA = "gemma4-e2b-trained"
BOTH = pytest.mark.parametrize("name", [NAME, GEMMA])
RING = 2e-4  # stock's ring sums its rows in another order
ROWS = {DEEPSEEK: 1e-4}  # latent attention computes one row in another way than several


@cache
def greedy_text(name):
    """The prompt and 60 tokens of plain decoding."""
    p = pair(name)
    prompt = mx.array(p.prompt)
    return p.prompt + [t for t, _ in generate_step(prompt, p.model, max_tokens=60)]


class PlainRun:
    """The same tokens one at a time through mlx-lm's model, the pairs through the drafter."""

    def __init__(self, p, text):
        self.p = p
        self.target = p.drafter.view(p.target)
        self.text = text
        self.caches = in_time_order(make_prompt_cache(p.model))
        self.draft_caches = p.drafter.make_cache()
        self.fed = 0

    def upto(self, tokens):
        """Caches after `tokens` tokens, and the drafter's after the pairs with tokens known."""
        while self.fed < tokens:
            hidden, _ = self.target(mx.array([[self.text[self.fed]]]), self.caches)
            self.fed += 1
            if self.fed < len(self.text):
                following = mx.array([self.text[self.fed]])
                self.p.drafter.extend(following, hidden, self.draft_caches)
            mx.eval([c.state for c in self.caches + self.draft_caches])
        return self.caches, self.draft_caches


@cache
def plain_caches(name, fed):
    """The target's caches after `fed` tokens of the greedy text; to be compared, not changed."""
    return PlainRun(pair(name), greedy_text(name)).upto(fed)[0]


ALL = [*RANDOM, *TRAINED, *DEMOS, *GEMMA_RANDOM, *GEMMA_TRAINED]


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        *((name, (1, 2, 5)[i % 3]) for i, name in enumerate(ALL) if name not in (NAME, GEMMA)),
        *((name, depth) for name in (NAME, GEMMA) for depth in (1, 2, 5)),
        (DEEPSEEK, 3),
        (EAGLE, 2),
        (EAGLE, 5),
        ("glm4-moe", 2),
        ("mimo", 3),
    ],
)
def test_after_every_round_caches_are_those_of_a_plain_run(name, depth):
    """For every accepted count from 0 to n, chosen by making the proposals wrong from there on."""
    p = pair(name)
    text = greedy_text(name)
    wanted = iter(range(1000))

    def script(position, n):
        accepted = next(wanted) % (n + 1)
        proposals = right(text)(position, n)
        return [t if i < accepted else (t + 1) % 256 for i, t in enumerate(proposals)]

    drafter = ScriptedDrafter(p.drafter, script)
    request = make_request(p, p.prompt, depth, drafter, prefill_step=5)
    plain = PlainRun(p, text)
    seen = set()
    emitted = 0
    for _ in range(2 * (depth + 1)):
        launched = request.launch(None)
        launched.read()
        request.commit(launched)
        seen.add(launched.accepted)
        emitted += len(launched.tokens)
        fed = len(p.prompt) + emitted - 1
        caches, draft_caches = plain.upto(fed)
        assert_same_caches(request.caches, caches, ROWS.get(name, 0))
        learnt = fed - len(request.unlearnt)
        assert learnt == fed - len(launched.tokens)
        for draft_cache in draft_caches:
            draft_cache.offset = learnt
        assert_same_caches(request.draft_caches, draft_caches, ROWS.get(name, 0))
        for draft_cache in draft_caches:
            draft_cache.offset = fed
    request.learn()
    assert_same_caches(request.draft_caches, plain.draft_caches, ROWS.get(name, 0))
    assert seen == set(range(depth + 1))


# How a generation can be left


def stream(p, drafter, depth=3, cache=None, **options):
    return mlx_spec.speculative_generate_step(
        mx.array(p.prompt),
        p.model,
        drafter,
        num_draft_tokens=depth,
        prompt_cache=cache,
        **{"sampling": "stock"} | options,
    )


def both_caches(p):
    return make_prompt_cache(p.model) + p.drafter.make_cache()


def assert_holds(p, cache, text, fed):
    """`cache` holds the first `fed` tokens of the text, and the drafter what it can know."""
    plain, plain_draft = PlainRun(p, text[: fed + 1]).upto(fed)
    if len(text) == fed:
        plain_draft = PlainRun(p, text).upto(fed)[1]
    assert_same_caches(cache[: p.layers], plain)
    assert_same_caches(cache[p.layers :], plain_draft)


def assert_goes_on(p, cache, text, fed):
    """Continued from the cache, plain decoding gives the rest of the text."""
    rest = mx.array(text[fed : fed + 1])
    more = generate_step(rest, p.model, prompt_cache=cache[: p.layers], max_tokens=8)
    assert [t for t, _ in more] == text[fed + 1 : fed + 9]


TOP_P = make_sampler(0.8, top_p=0.9)


@pytest.mark.parametrize(
    ("name", "yields", "sampler"),
    [
        *itertools.product([NAME, GEMMA], [1, 2, 4, 5, 13], [None, TOP_P]),
        *zip(itertools.repeat(EAGLE), [1, 4, 5, 8], [None, None, TOP_P, TOP_P]),
    ],
)
def test_closed_after_any_token_it_leaves_what_stock_leaves(name, yields, sampler):
    p = pair(name)
    mx.random.seed(3)
    stock_cache = make_prompt_cache(p.model)
    stock = generate_step(
        mx.array(p.prompt), p.model, sampler=sampler, prompt_cache=stock_cache, max_tokens=40
    )
    expected = [next(stock)[0] for _ in range(yields)]
    stock.close()
    state = mx.random.state[0].tolist()

    mx.random.seed(3)
    cache = both_caches(p)
    entries = list(cache)
    ours = stream(p, p.drafter, 4, cache, sampler=sampler, max_tokens=40)
    got = [next(ours)[0] for _ in range(yields)]
    ours.close()
    assert got == expected
    assert [id(c) for c in cache] == [id(c) for c in entries]
    assert_same_caches(cache[: p.layers], stock_cache, RING if name == GEMMA else 0)
    assert mx.random.state[0].tolist() == state
    fed = len(p.prompt) + yields
    assert cache[p.full].offset == fed
    assert_holds(p, cache, p.prompt + got, fed)


@pytest.mark.parametrize("max_tokens", range(1, 8))
@BOTH
def test_run_to_the_cap_it_leaves_what_stock_leaves(name, max_tokens):
    p = pair(name)
    stock_cache, cache = make_prompt_cache(p.model), both_caches(p)
    prompt = mx.array(p.prompt)
    expected = [
        t
        for t, _ in generate_step(prompt, p.model, prompt_cache=stock_cache, max_tokens=max_tokens)
    ]
    got = [t for t, _, _ in stream(p, p.drafter, 4, cache, max_tokens=max_tokens)]
    assert got == expected
    assert_same_caches(cache[: p.layers], stock_cache, RING if name == GEMMA else 0)
    assert_holds(p, cache, p.prompt + got, len(p.prompt) + max_tokens)


@BOTH
def test_a_second_turn_on_the_kept_cache_equals_stock(name):
    p = pair(name)
    turns = {}
    for run, step in {
        "stock": lambda prompt, cache: generate_step(
            prompt, p.model, prompt_cache=cache, max_tokens=25
        ),
        "ours": lambda prompt, cache: mlx_spec.speculative_generate_step(
            prompt, p.model, p.drafter, prompt_cache=cache, max_tokens=25, num_draft_tokens=3
        ),
    }.items():
        cache = make_prompt_cache(p.model) + (p.drafter.make_cache() if run == "ours" else [])
        turns[run] = [
            token
            for prompt in (p.prompt, p.prompt[:9], p.prompt[5:6])
            for token, *_ in step(mx.array(prompt), cache)
        ]
    assert turns["ours"] == turns["stock"]


class Interrupt(Exception):
    pass


def failing(function, at, error):
    """`function`, raising `error` at its `at`-th call (from 0 on)."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls - 1 == at:
            raise error
        return function(*args, **kwargs)

    return wrapped


PLACES = {
    NAME: {
        "target forward": "mlx_spec.targets.qwen.QwenTarget.__call__",
        "layer of the target": "mlx_lm.models.qwen3_5.MLP.__call__",
        "drafter forward": "mlx_spec.drafters.qwen_nextn.QwenNextN.__call__",
        "draw": "mlx_spec.accept.Greedy.draw",
        "pick": "mlx_spec.accept.Greedy.pick",
        "host read": "mlx_spec.round.Round.read",
        "commit of a state": "mlx_spec.rollback.RecurrentState.commit",
        "commit of rows": "mlx_spec.rollback.AppendedRows.commit",
        "launch": "mlx_spec.round.Request.launch",
        "statistics": "mlx_spec.stats.SpecStats.add_round",
    },
    DEEPSEEK: {
        "layer of the target": "mlx_lm.models.deepseek_v3.DeepseekV3MLP.__call__",
        "drafter forward": "mlx_spec.drafters.deepseek_nextn.DeepSeekNextN.__call__",
        "commit of rows": "mlx_spec.rollback.AppendedRows.commit",
    },
    GEMMA: {
        "layer of the target": "mlx_lm.models.gemma4_text.MLP.__call__",
        "drafter forward": "mlx_spec.drafters.gemma4_assistant.Gemma4Assistant.__call__",
        "update of a window": "mlx_spec.sliding_window.SlidingWindow.update_and_fetch",
        "commit of rows": "mlx_spec.rollback.AppendedRows.commit",
        "launch": "mlx_spec.round.Request.launch",
    },
    EAGLE: {
        "layer of the target": "mlx_lm.models.llama.TransformerBlock.__call__",
        "drafter forward": "mlx_spec.drafters.eagle3.Eagle3.__call__",
        "commit of rows": "mlx_spec.rollback.AppendedRows.commit",
    },
}


@pytest.mark.parametrize(
    ("name", "place", "error"),
    [
        *((name, place, Interrupt("stop")) for name in PLACES for place in PLACES[name]),
        *((NAME, place, KeyboardInterrupt()) for place in ("layer of the target", "host read")),
        (GEMMA, "update of a window", KeyboardInterrupt()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_after_an_error_anywhere_the_caches_hold_what_was_yielded(name, place, error, monkeypatch):
    p = pair(name)
    text = greedy_text(name)
    parent, method = PLACES[name][place].rsplit(".", 1)
    module, owner_name = parent.rsplit(".", 1)
    owner = getattr(importlib.import_module(module), owner_name)
    for at in itertools.count(step=2 if name == NAME else 9):
        cache = both_caches(p)
        tokens = []
        raised = False
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing(getattr(owner, method), at, error))
            try:
                for token, _, _ in stream(p, p.drafter, 3, cache, max_tokens=12):
                    tokens.append(token)
            except type(error):
                raised = True
        full = p.prompt + tokens
        assert tokens == text[len(p.prompt) : len(full)]
        fed = cache[p.full].offset
        # or a part of the prompt; Gemma-4's last row goes alone
        parts = () if tokens else (0, len(p.prompt) - 2)
        assert fed in (len(full) - 1, len(full), *parts)
        assert_same_caches(cache[: p.layers], plain_caches(name, fed), ROWS.get(name, 0))
        assert all(c.offset <= fed for c in cache[p.layers :])
        if fed:
            assert_goes_on(p, cache, text, fed)
        if not raised:
            break
    assert at >= 4, "the place was hardly reached"


@pytest.mark.parametrize("at", range(12))
def test_an_error_of_a_processor_comes_after_the_tokens_before_it(at):
    p = pair(NAME)
    text = greedy_text(NAME)
    drafter = ScriptedDrafter(p.drafter, often_right(text, 512))

    def processor(tokens, logits):
        if len(tokens) == len(p.prompt) + at:
            raise Interrupt("as the caller wanted")
        return logits

    cache = both_caches(p)
    got = []
    generation = stream(p, drafter, 3, cache, max_tokens=30, logits_processors=[processor])
    with pytest.raises(Interrupt, match="as the caller wanted"):
        got.extend(token for token, _, _ in generation)
    assert got == text[len(p.prompt) :][: len(got)]
    assert at - 3 <= len(got) <= at
    fed = cache[3].offset
    assert fed in (len(p.prompt) + len(got) - 1, len(p.prompt) + len(got))
    assert_same_caches(cache[:4], plain_caches(NAME, fed))


def test_processors_see_the_history_that_stock_shows_them():
    p = pair(NAME)

    def seen_by(step):
        seen = {}

        def processor(tokens, logits):
            seen[tokens.size] = tokens.tolist()
            return logits

        text = [t for t, *_ in step([processor])]
        return text, seen

    prompt = mx.array(p.prompt)
    text, expected = seen_by(
        lambda processors: generate_step(
            prompt, p.model, max_tokens=30, logits_processors=processors
        )
    )
    drafter = ScriptedDrafter(p.drafter, right(p.prompt + text + [0] * 9))
    got_text, got = seen_by(
        lambda processors: stream(p, drafter, 3, max_tokens=30, logits_processors=processors)
    )
    assert got_text == text
    assert {size: got[size] for size in expected if size in got} == {
        size: tokens for size, tokens in expected.items() if size in got
    }
    assert set(expected) - set(got) <= {max(expected)}


# What a round costs


class Counts:
    def __init__(self, monkeypatch, **methods):
        self.counts = dict.fromkeys(methods, 0)
        for key, (owner, name) in methods.items():
            monkeypatch.setattr(owner, name, self._counted(key, getattr(owner, name)))

    def _counted(self, key, function):
        def wrapped(*args, **kwargs):
            self.counts[key] += 1
            return function(*args, **kwargs)

        return wrapped


@pytest.mark.parametrize(
    ("name", "depth", "law"),
    [
        *itertools.product([*TRAINED, *GEMMA_TRAINED], (1, 3, 5), ("greedy", "stock")),
        (DEEPSEEK, 3, "greedy"),
        (EAGLE, 3, "greedy"),
        (EAGLE, 5, "stock"),
    ],
)
def test_one_target_forward_and_one_host_read_a_round(name, depth, law, monkeypatch):
    """And as many drafter forwards as drafts. mlx hands values to Python in these ways only."""
    p = pair(name)
    laws = {
        "greedy": Greedy(),
        "stock": Stock(make_sampler(0.8, top_p=0.9), History([], mx.array(p.prompt))),
    }
    request = make_request(p, p.prompt, depth, law=laws[law])
    mx.eval(request.unlearnt.hidden)
    counts = Counts(
        monkeypatch,
        target=(type(p.target), "__call__"),
        drafter=(type(p.drafter.head), "__call__"),
        tolist=(mx.array, "tolist"),
        item=(mx.array, "item"),
        eval=(mx, "eval"),
        boolean=(mx.array, "__bool__"),
        integer=(mx.array, "__int__"),
        real=(mx.array, "__float__"),
        index=(mx.array, "__index__"),
        numpy=(mx.array, "__array__"),
        synchronize=(mx, "synchronize"),
    )
    stats = SpecStats()
    generation = speculate(request, mx.default_stream(mx.default_device()), 400, stats)
    for _ in range(30):
        next(generation)
    rounds, drafted = stats.rounds, stats.drafted
    assert rounds > 3
    assert drafted == rounds * depth
    # one round is always under way
    expected = {"target": rounds + 1, "drafter": drafted + depth, "tolist": rounds}
    assert {key: count for key, count in counts.counts.items() if count} == expected


def test_the_loop_reads_through_the_counted_doors():
    """The counters above can count: each way of reading is seen."""
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch, tolist=(mx.array, "tolist"), item=(mx.array, "item"))
        mx.array([1]).tolist()
        mx.array(1).item()
        assert counts.counts == {"tolist": 1, "item": 1}


def buffers(arrays):
    """Address and size in bytes of each buffer behind the arrays."""
    mx.eval(arrays)
    return {np.asarray(memoryview(a)).ctypes.data: a.nbytes for a in arrays}


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-tied", "qwen3-next"])
def test_the_head_shares_the_targets_matrices(name):
    """No second copy: beyond the head's own layer there are only the target's own buffers."""
    p = pair(name)
    own = buffers([a for _, a in tree_flatten(p.drafter.head.parameters())])
    theirs = buffers([a for _, a in tree_flatten(p.model.parameters())])
    h = p.target.hidden_size
    assert not own.keys() & theirs.keys()
    assert p.drafter.embed == p.target.embed
    assert p.drafter.lm_head == p.target.lm_head

    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    drafter = type(p.drafter)(p.drafter.head, p.target)
    caches = drafter.make_cache()
    mx.eval(drafter.draft(mx.array([1]), mx.zeros((1, 1, h)), 2, Greedy().pick, caches, []))
    gc.collect()
    used = mx.get_active_memory() - before
    assert 0 < used < 2 * caches[0].nbytes + p.target.vocab_size * 4 * 4


@BOTH
def test_memory_stays_flat_and_close_to_the_weights(name):
    """Between tokens nothing piles up from round to round."""
    p = pair(name)
    generation = stream(p, p.drafter, 3, max_tokens=181)
    used = []
    for at, _ in enumerate(generation):
        if at in (60, 120, 180):
            gc.collect()
            mx.clear_cache()
            used.append(mx.get_active_memory())
    assert max(used) - min(used) < 0.05 * min(used)
    assert np.all(np.array(used) < 1.3 * used[0])


@pytest.mark.parametrize("length", [24, 300])
@BOTH
def test_peak_memory_is_that_of_plain_decoding_with_the_drafter_loaded(name, length):
    p = pair(name)
    mx.eval(p.model.parameters(), p.drafter.head.parameters())
    prompt = (p.prompt * 20)[:length]

    def plain():
        return generate_step(mx.array(prompt), p.model, max_tokens=60)

    def speculative():
        return mlx_spec.speculative_generate_step(
            mx.array(prompt), p.model, p.drafter, num_draft_tokens=3, max_tokens=60
        )

    peaks = []
    for run in (plain, speculative):
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in run():
            pass
        peaks.append(mx.get_peak_memory())
    assert peaks[1] <= 1.05 * peaks[0]


def test_a_growing_cache_is_not_kept_twice():
    """mlx-lm frees the old rows as soon as they are copied into a larger buffer."""
    p = pair(NAME)
    cache = make_prompt_cache(p.model)
    p.model(mx.array([p.prompt * 11])[:, :250], cache=cache)
    mx.eval([c.state for c in cache])
    old = weakref.ref(cache[3].keys)
    transaction = Transaction(p.target, cache)
    transaction.verify(mx.array(p.prompt[:8]))
    assert cache[3].keys.shape[2] > 256
    assert old() is None
    transaction.commit(2)
    transaction.abort()
    assert cache[3].offset == 250


@BOTH
def test_without_drafts_nothing_piles_up_for_the_drafter(name):
    p = pair(name)
    request = make_request(p, p.prompt, 0)
    stats = SpecStats()
    list(speculate(request, mx.default_stream(mx.default_device()), 20, stats))
    assert stats.rounds == 20
    assert request.unlearnt is None


# A next token that was drawn elsewhere


def left_by_stock(name, yields, sampler):
    """Tokens with log-probabilities, caches, and the state of the generator of random numbers."""
    p = pair(name)
    mx.random.seed(3)
    caches = make_prompt_cache(p.model)
    plain = generate_step(mx.array(p.prompt), p.model, sampler=sampler, prompt_cache=caches)
    got = [next(plain) for _ in range(yields)]
    plain.close()
    return got, caches, mx.random.state[0].tolist()


@pytest.mark.parametrize("sampler", [None, make_sampler(0.8, top_p=0.9)])
@BOTH
def test_a_token_that_was_drawn_elsewhere_comes_first(name, sampler, monkeypatch):
    """Left before it, all is as it was; left after it, as stock leaves it."""
    p = pair(name)
    expected, _, _ = left_by_stock(name, 12, sampler)
    tokens = [token for token, _ in expected]

    def after_two_of_stock():
        _, caches, state = left_by_stock(name, 2, sampler)
        request = make_request(p, [1], 3)
        request.caches, request.pending = in_time_order(caches), mx.array(tokens[2:3], mx.uint32)
        request.drawn = Drawn(request.pending, expected[2][1])
        if sampler:
            request.law = Stock(sampler, History([], mx.array(p.prompt + tokens[:3])))
        stats = SpecStats()
        stream = mx.default_stream(mx.default_device())
        return request, speculate(request, stream, 10, stats), stats, state

    def assert_left(request, yields, state):
        assert request.drawn.token.tolist() == tokens[yields : yields + 1]
        assert mx.random.state[0].tolist() == state
        assert_same_caches(request.caches, left_by_stock(name, yields, sampler)[1], RING)

    request, generation, _, state = after_two_of_stock()
    generation.close()
    assert_left(request, 2, state)

    request, generation, _, state = after_two_of_stock()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", failing(mx.async_eval, 0, Interrupt("at the first launch")))
        with pytest.raises(Interrupt):
            next(generation)
    assert_left(request, 2, state)

    request, generation, _, _ = after_two_of_stock()
    with monkeypatch.context() as patch:
        patch.setattr(Request, "launch", failing(Request.launch, 1, Interrupt("later")))
        with pytest.raises(Interrupt):
            list(generation)
    assert request.drawn is None  # the last token is pending

    request, generation, stats, _ = after_two_of_stock()
    token, logprobs, right = next(generation)
    assert (token, right, stats.rounds) == (tokens[2], False, 0)
    assert logprobs is expected[2][1]
    generation.close()
    assert_left(request, 3, left_by_stock(name, 3, sampler)[2])

    _, generation, stats, _ = after_two_of_stock()
    assert [token for token, _, _ in generation] == tokens[2:]
    assert stats.drafted > 0
