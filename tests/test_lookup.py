"""Prompt lookup: the same text, what is proposed and when, what is left behind, what it costs."""

import copy
import importlib
import itertools
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from test_batch import compare, insert
from tiny_models import DECODED, LLAMA, WINDOWED, prompt_of, tiny

import mlx_spec
from mlx_spec.accept import Greedy, Ratio, make_law
from mlx_spec.candidates import Certain
from mlx_spec.costs import Knowledge
from mlx_spec.depth import Adaptive, Fixed
from mlx_spec.drafters.combined import Combined
from mlx_spec.drafters.lookup import LONG, Lookup
from mlx_spec.drafters.text import Text
from mlx_spec.errors import NotEngaged
from mlx_spec.generate import choose_drafter
from mlx_spec.knowledge import depths_for
from mlx_spec.load import lookup_of
from mlx_spec.options import SpecOptions
from mlx_spec.rollback import tokens_in
from mlx_spec.round import Request, Round, speculate
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from models import assert_same_caches, make_request, pair

QWEN = "qwen3-5-trained"
GEMMA = "gemma4-e2b-trained"
ALL = [*DECODED, QWEN, GEMMA]
RING = 1e-3  # past the window, one token of stock sums its rows in another order
LENGTH = 40  # of texts


def model_of(name):
    return pair(name).model if name in (QWEN, GEMMA) else tiny(name)


@cache
def plain_text(name):
    """A prompt that ends as it began, and what stock makes of it. The prompt has a beginning of
    that text in it, and then others tokens, so that lookup is right and wrong in turns."""
    prompt = prompt_of(name)
    continued = plain(name, prompt)
    first = prompt + continued[:11] + prompt_of(name, 3) + continued[8:17] + prompt
    return first, plain(name, first)


def plain(name, prompt, tokens=LENGTH, **options):
    steps = generate_step(mx.array(prompt), model_of(name), max_tokens=tokens, **options)
    return [token for token, _ in steps]


def stream(name, prompt, depth=4, drafter=None, **options):
    return mlx_spec.speculative_generate_step(
        mx.array(prompt),
        model_of(name),
        drafter or Lookup(),
        num_draft_tokens=depth,
        **{"max_tokens": LENGTH} | options,
    )


# The same text


@pytest.mark.parametrize("depth", [3, 16])
@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_stocks(name, depth):
    prompt, expected = plain_text(name)
    stats = SpecStats()
    got = list(stream(name, prompt, depth, stats=stats))
    assert [token for token, *_ in got] == expected
    assert stats.drafted > 0
    assert stats.accepted == sum(right for *_, right in got)
    assert stats.rounds + stats.accepted == LENGTH
    assert stats.by_kind == {"lookup": (stats.drafted, stats.accepted)}


def test_some_drafts_are_wrong_and_many_right():
    """Or the tests above would show little."""
    total = SpecStats()
    for name in ALL:
        stats = SpecStats()
        list(stream(name, plain_text(name)[0], 16, stats=stats))
        total.drafted += stats.drafted
        total.accepted += stats.accepted
    assert total.drafted * 0.9 > total.accepted > 40


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": lambda: make_sampler(0.3, top_p=0.9)},
        {"sampler": lambda: lambda logprobs: mx.random.categorical(logprobs * 3)},
        {"logits_processors": lambda: make_logits_processors(repetition_penalty=1.1)},
    ],
    ids=["top-p", "opaque", "repetition"],
)
@pytest.mark.parametrize("name", [LLAMA, QWEN])
def test_sampled_text_is_stocks_at_the_same_seed(name, options):
    prompt, _ = plain_text(name)
    made = {key: make() for key, make in options.items()}
    mx.random.seed(7)
    expected = plain(name, prompt, **made)
    state = mx.random.state[0].tolist()
    mx.random.seed(7)
    stats = SpecStats()
    got = [t for t, *_ in stream(name, prompt, 5, sampling="stock", stats=stats, **made)]
    assert got == expected
    assert mx.random.state[0].tolist() == state
    assert stats.drafted > 0


def test_text_under_the_law_seed_does_not_depend_on_the_depth():
    prompt, _ = plain_text(LLAMA)
    texts, drafted = [], []
    for depth in (0, 2, 16):
        mx.random.seed(3)
        stats = SpecStats()
        steps = stream(LLAMA, prompt, depth, sampler=make_sampler(0.3), stats=stats)
        texts.append([token for token, *_ in steps])
        drafted.append(stats.drafted)
    assert texts[0] == texts[1] == texts[2]
    assert drafted[0] == 0 < drafted[1] < drafted[2]


def test_under_the_law_ratio_a_draft_is_accepted_as_often_as_it_is_likely():
    """800 rounds of two certain drafts; the tokens have the target's distribution, and the second
    row the one after the first draft."""
    p = mx.array([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.1, 0.25, 0.3, 0.3], [0.2] * 5])
    logits, draft = mx.log(p)[None], (0, 3)
    mx.random.seed(2)
    law = make_law(make_sampler(1.0), None, mx.array([1]), "ratio")
    assert isinstance(law, Ratio)
    rows = []
    for _ in range(800):
        law.begin(2)
        drafts = []
        for token in draft:
            drafts.append(law.pick(Certain(mx.array([token], mx.uint32)), drafts))
        tokens = law.draw(logits, drafts).tokens
        law.committed(tokens[:1], None)
        rows.append(tokens)
    drawn = np.array(mx.stack(rows))
    for row in range(3):
        frequencies = np.bincount(drawn[:, row], minlength=5) / len(drawn)
        np.testing.assert_allclose(frequencies, p[row], atol=0.05)


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_a_certain_draft_is_taken_as_it_is(temp):
    """Whatever processors say of it, and no randomness is used up."""
    ban = lambda tokens, logits: mx.full(logits.shape, -mx.inf)  # noqa: E731
    laws = {"auto", "seed", "stock", "ratio"} if temp else {"auto"}
    for sampling in sorted(laws):
        law = make_law(make_sampler(temp), [ban], mx.array([1]), sampling)
        law.begin(1)
        state = mx.random.state[0].tolist()
        assert law.pick(Certain(mx.array([6], mx.uint32)), []).tolist() == [6]
        assert mx.random.state[0].tolist() == state


# What is proposed, and when


def proposals(lookup, tokens, n):
    caches = lookup.make_cache()
    caches[0].extend(tokens)
    drafts = lookup.draft(mx.array([]), None, n, Greedy().pick, caches, [])
    return [draft.item() for draft in drafts]


def test_the_depth_grows_with_the_match():
    lookup = Lookup()
    caches = lookup.make_cache()
    caches[0].extend([*range(30), 99])
    limits = []
    for token in range(20):
        caches[0].extend([token])
        limits.append(lookup.limit(caches))
    assert limits == [0, 0, *range(3, 16), 16, 16, 16, 16, 16]
    assert proposals(lookup, [*range(30), 99, 0, 1, 2], 4) == [3, 4, 5, 6]
    caches[0].extend([77])
    assert lookup.limit(caches) == 0


def test_a_match_that_reaches_the_end_goes_on_with_itself():
    assert proposals(Lookup(), [9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("depth", [2, "auto"])
def test_without_a_match_nothing_is_drafted_and_nothing_waited_for(depth, monkeypatch):
    """The next round is launched before the one at hand is read, as without a drafter."""
    order = []
    for owner, name in ((Request, "launch"), (Round, "read")):
        function = getattr(owner, name)

        def noted(*args, name=name, function=function):
            order.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, noted)
    monkeypatch.setattr(Text, "match", 0)
    stats = SpecStats()
    list(stream(LLAMA, prompt_of(LLAMA), depth, stats=stats, max_tokens=12))
    stats.conclude()
    assert order == ["launch", "launch", *["read", "launch"] * 11, "read"]
    assert (stats.drafted, stats.rounds, stats.reason) == (0, 12, "no-match")


def test_one_token_is_too_short():
    stats = SpecStats()
    list(stream(LLAMA, prompt_of(LLAMA), stats=stats, max_tokens=1))
    stats.conclude()
    assert stats.reason == "too-short"


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


@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_one_target_forward_and_one_host_read_a_round(name, monkeypatch):
    """And one more read, of the prompt's last token."""
    prompt, _ = plain_text(name)
    model, lookup = model_of(name), Lookup()
    request = make_request(pair_of(name), prompt, 16, lookup)
    counts = Counts(
        monkeypatch,
        target=(type(target_for(model)), "__call__"),
        tolist=(mx.array, "tolist"),
        item=(mx.array, "item"),
        eval=(mx, "eval"),
        boolean=(mx.array, "__bool__"),
        integer=(mx.array, "__int__"),
        index=(mx.array, "__index__"),
        numpy=(mx.array, "__array__"),
        synchronize=(mx, "synchronize"),
    )
    stats = SpecStats()
    generation = speculate(request, mx.default_stream(mx.default_device()), 400, stats)
    for _ in range(LENGTH):
        next(generation)
    assert stats.drafted > 10
    expected = {"target": stats.rounds + 1, "tolist": stats.rounds + 1}
    assert {key: count for key, count in counts.counts.items() if count} == expected


class Tiny:
    """As models.Pair, for `make_request`."""

    def __init__(self, name):
        self.model, self.target = tiny(name), target_for(tiny(name))


def pair_of(name):
    return pair(name) if name in (QWEN, GEMMA) else Tiny(name)


@pytest.mark.parametrize(("shift", "drafted"), [(0, range(60, 150)), (1, range(1, 40))])
def test_wrong_proposals_are_parked_and_right_ones_are_not(shift, drafted, monkeypatch):
    """By the clock of the model: a round takes 1 s and 0.2 s for each draft."""
    clock = Clock(monkeypatch)
    name, tokens = "qwen3", 150
    prompt = prompt_of(name)
    lookup = Knowing(prompt + plain(name, prompt, tokens + 20), shift)
    stats = SpecStats()
    for _ in stream(name, prompt, "auto", lookup, stats=stats, max_tokens=tokens):
        clock.tick()
    assert stats.drafted in drafted
    assert (stats.state == "parked") == (shift == 1)


class Knowing(Lookup):
    """Always has a match, and proposes what comes, or other tokens by `shift`."""

    def __init__(self, whole, shift):
        super().__init__()
        self.whole, self.shift = whole, shift

    def limit(self, caches):
        return 16

    def expects(self, caches):
        return True

    def draft(self, tokens, hidden, n, pick, caches, target_caches):
        at = len(caches[0])
        drafts = [(token + self.shift) % 64 for token in self.whole[at : at + n]]
        return [mx.array([token], mx.uint32) for token in drafts]


class Clock:
    """Time passes in the reads of rounds, and a little with each token."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        read = Round.read

        def timed(round):
            self.now += 1 + 0.2 * len(round.drafts)
            read(round)

        monkeypatch.setattr(Round, "read", timed)
        monkeypatch.setattr(
            importlib.import_module("mlx_spec.pace").time, "perf_counter", lambda: self.now
        )

    def tick(self):
        self.now += 1e-6


class Hopeful(Lookup):
    """Never has a match, and always expects one."""

    def limit(self, caches):
        return 0

    def expects(self, caches):
        return True


def test_waiting_in_vain_comes_to_an_end(monkeypatch):
    """A step takes 1 s; where it was waited for before the next one is launched, 0.2 s pass in
    between. Stock takes `tokens` seconds."""
    now, under_way, waits = 0.0, 0, 0
    launch, read = Request.launch, Round.read

    def timed_launch(request, remaining):
        nonlocal now, under_way, waits
        if under_way == 0:
            now, waits = now + 0.2, waits + 1
        under_way += 1
        return launch(request, remaining)

    def timed_read(round):
        nonlocal now, under_way
        now, under_way = now + 1, under_way - 1
        read(round)

    monkeypatch.setattr(Request, "launch", timed_launch)
    monkeypatch.setattr(Round, "read", timed_read)
    pace = importlib.import_module("mlx_spec.pace")
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    name, tokens = "qwen3", 1000
    knowledge = Knowledge()
    for _ in range(4):
        knowledge.costs.add(0, 0, 1.0)
    request = make_request(pair_of(name), prompt_of(name), 1, Hopeful())
    request.depths = [Adaptive(knowledge, 16)]
    for _ in speculate(request, mx.default_stream(mx.default_device()), tokens, SpecStats()):
        pass
    assert 20 < waits < 0.03 * tokens / 0.2


def test_only_rounds_of_an_even_pace_are_timed(monkeypatch):
    """As on a device with a short queue: a launch takes most of a step's second, and the read that
    follows the rest. Between waiting and not waiting, times from read to read are no step's."""
    now = 0.0
    launch, read = Request.launch, Round.read

    def passes(seconds, function):
        def timed(*args):
            nonlocal now
            now += seconds
            return function(*args)

        return timed

    monkeypatch.setattr(Request, "launch", passes(0.9, launch))
    monkeypatch.setattr(Round, "read", passes(0.1, read))
    pace = importlib.import_module("mlx_spec.pace")
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    hopes = itertools.cycle([False, False, False, True, True, True])
    monkeypatch.setattr(Hopeful, "expects", lambda self, caches: next(hopes))
    seconds = []

    class Watching(Fixed):
        def observe(self, drafted, accepted, context, seconds_of_round, waited=False):
            seconds.append((seconds_of_round, waited))

    request = make_request(pair_of("qwen3"), prompt_of("qwen3"), 1, Hopeful())
    request.depths = [Watching(1)]
    for _ in speculate(request, mx.default_stream(mx.default_device()), 40, SpecStats()):
        pass
    timed = [value for value, _ in seconds if value is not None]
    assert timed == pytest.approx([1.0] * len(timed))
    assert len(timed) > 20
    assert sum(waited for value, waited in seconds if value is not None) > 8


# What is left behind


def holds(name, cache, fed, text):
    """The caches after the first `fed` tokens of the text, fed one at a time."""
    model = model_of(name)
    expected = make_prompt_cache(model)
    for token in text[:fed]:
        model(mx.array([[token]]), cache=expected)
        mx.eval([c.state for c in expected])
    windowed = name in WINDOWED or name == GEMMA
    assert_same_caches(cache, expected, RING if windowed else 0)


@pytest.mark.parametrize("yields", [1, 5, 23])
@pytest.mark.parametrize("name", ALL)
def test_closed_after_any_token_caches_and_text_hold_what_was_yielded(name, yields):
    prompt, expected = plain_text(name)
    cache = make_prompt_cache(model_of(name))
    lookup = Lookup()
    steps = stream(name, prompt, 16, lookup, prompt_cache=cache)
    got = [next(steps)[0] for _ in range(yields)]
    steps.close()
    assert got == expected[:yields]
    holds(name, cache, len(prompt) + yields, prompt + got)
    assert vars(cache[0])["mlx_spec"].caches[0].tokens == prompt + got


class Interrupt(Exception):
    pass


@cache
def whole_run(name):
    """The caches of a model without windows after all of its text, fed one token at a time."""
    model, cache = model_of(name), make_prompt_cache(model_of(name))
    for token in itertools.chain(*plain_text(name)):
        model(mx.array([[token]]), cache=cache)
        mx.eval([c.state for c in cache])
    return cache


@pytest.mark.parametrize("error", [Interrupt(), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("mlx_spec.targets.generic.GenericTarget.__call__", 3),
        ("mlx_spec.drafters.lookup.Lookup.draft", 1),
        ("mlx_spec.drafters.text.Text.extend", 3),
        ("mlx_spec.round.Round.read", 3),
        ("mlx_spec.round.Request.launch", 3),
        ("mlx_spec.rollback.AppendedRows.commit", 13),
    ],
)
def test_after_an_error_anywhere_the_caches_hold_what_was_yielded(place, step, error, monkeypatch):
    name = "qwen3"
    prompt, expected = plain_text(name)
    parent, method = place.rsplit(".", 1)
    module, owner_name = parent.rsplit(".", 1)
    owner = getattr(importlib.import_module(module), owner_name)
    function = getattr(owner, method)
    for at in itertools.count(step=step):
        calls = itertools.count()

        def failing(*args, calls=calls, at=at):
            if next(calls) == at:
                raise error
            return function(*args)

        cache, got, raised = make_prompt_cache(tiny(name)), [], False
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing)
            try:
                for token, *_ in stream(name, prompt, 8, prompt_cache=cache, max_tokens=15):
                    got.append(token)
            except type(error):
                raised = True
        assert got == expected[: len(got)]
        fed = tokens_in(cache)
        assert fed in (len(prompt + got) - 1, len(prompt + got)) or not got
        for layer, whole in zip(cache, whole_run(name), strict=True):
            assert layer.offset == fed
            if fed:
                np.testing.assert_array_equal(
                    layer.keys_and_values()[1], whole.values[..., :fed, :]
                )
        if not raised:
            break
    assert at >= 2, "the place was hardly reached"


def test_a_further_turn_looks_in_the_turns_before():
    """Also after the caches were copied, and not after they were cut."""
    prompt, _ = plain_text(LLAMA)
    lookup = Lookup()
    cache = make_prompt_cache(tiny(LLAMA))
    first = [t for t, *_ in stream(LLAMA, prompt, 4, lookup, prompt_cache=cache, max_tokens=9)]
    again = prompt[:8]
    whole = prompt + first + again
    expected = plain(LLAMA, whole)
    runs = []
    for caches, sees in ((copy.deepcopy(cache), True), (copy.deepcopy(cache), False)):
        if not sees:
            for c in caches:
                c.trim(1)
            whole = prompt + first[:-1] + again
            expected = plain(LLAMA, whole)
        stats = SpecStats()
        got = [t for t, *_ in stream(LLAMA, again, 4, lookup, prompt_cache=caches, stats=stats)]
        assert got == expected
        assert stats.unprimed == (0 if sees else len(whole) - len(again))
        text = vars(caches[0])["mlx_spec"].caches[0].tokens
        assert text == (whole if sees else again) + got
        runs.append(stats.drafted)
    assert runs[0] > 0


@pytest.mark.parametrize("name", [QWEN, GEMMA])
def test_alone_before_and_after_a_batch(name):
    """It knows what was decoded in the batch."""
    prompt, _ = plain_text(name)
    events = {0: insert(prompt, LENGTH), 6: insert(prompt[:9], 6)}
    lookup = Lookup()
    answers = compare(pair(name), events, lookup)
    first = answers.stats[0]
    assert (first.kind, first.unprimed) == ("lookup", 0)
    assert first.batched > 0
    caches = vars(answers.ended[0].prompt_cache[0])["mlx_spec"].caches
    assert caches[0].tokens == answers.ended[0].all_tokens


# Beside another drafter


def test_lookup_drafts_where_its_match_is_long_and_the_head_otherwise():
    p = pair(QWEN)
    prompt, expected = plain_text(QWEN)
    drafter = Combined(Lookup(LONG), p.drafter)
    assert drafter.kind == "lookup+nextn"
    cache = make_prompt_cache(p.model)
    stats = SpecStats()
    steps = stream(QWEN, prompt, 4, drafter, prompt_cache=cache, stats=stats)
    got = [token for token, *_ in steps]
    assert got == expected
    assert min(drafted for drafted, _ in stats.by_kind.values()) > 3
    assert set(stats.by_kind) == {"lookup", "nextn"}
    assert stats.drafted == sum(drafted for drafted, _ in stats.by_kind.values())
    assert stats.accepted == sum(accepted for _, accepted in stats.by_kind.values())
    # what the head has learnt is what it learns alone
    alone = make_prompt_cache(p.model)
    list(stream(QWEN, prompt, 0, p.drafter, prompt_cache=alone))
    text, *learnt = vars(cache[0])["mlx_spec"].caches
    assert text.tokens == prompt + got
    fresh = make_prompt_cache(p.model)
    list(stream(QWEN, prompt + got, 3, p.drafter, prompt_cache=fresh, max_tokens=1))
    (head,) = vars(fresh[0])["mlx_spec"].caches
    rows = learnt[0].offset
    assert rows in (len(prompt + got) - 1, len(prompt + got))
    np.testing.assert_allclose(
        learnt[0].keys_and_values()[0], head.keys[..., :rows, :], rtol=0, atol=1e-5
    )


def test_each_source_has_its_own_depth(monkeypatch):
    """The head is always wrong here, so it is parked, and lookup goes on."""
    clock = Clock(monkeypatch)
    p = pair(QWEN)

    class Wrong(type(p.drafter)):
        def draft(self, *args):
            return [(token + 1) % 512 for token in super().draft(*args)]

    prompt, _ = plain_text(QWEN)
    drafter = Combined(Lookup(LONG), Wrong(p.drafter.head, p.target))
    stats = SpecStats()
    for _ in stream(QWEN, prompt, "auto", drafter, stats=stats, max_tokens=300):
        clock.tick()
    assert stats.by_kind["nextn"][0] < 40
    assert stats.by_kind["lookup"][1] > 100


def test_both_lose_out_of_one_account():
    p = pair(QWEN)
    drafter = Combined(Lookup(LONG), type(p.drafter)(p.drafter.head, p.target))
    lookup, head = depths_for(SpecOptions(), p.model, drafter)
    assert (lookup.max, head.max) == (16, 8)
    for _ in range(6):  # a round without drafts is one round
        lookup.observe(0, 0, 100, 1.0)
        head.observe(0, 0, 100, 1.0)
    account = head.knowledge.account
    assert (account.tokens, lookup.asleep, head.asleep) == (6, False, False)
    for _ in range(8):
        lookup.observe(1, 0, 100, 3.0)
    assert account.tokens == 14
    assert lookup.asleep
    assert head.asleep


# How it is chosen


def test_which_drafter_the_kind_chooses():
    p = pair(QWEN)
    chosen = {
        kind: choose_drafter(p.model, p.drafter, SpecOptions(draft_kind=kind), {}, SpecStats())
        for kind in ("auto", "lookup", "combined")
    }
    assert chosen["auto"] is p.drafter
    assert chosen["lookup"] is lookup_of(p.model)
    assert chosen["combined"].parts == (lookup_of(p.model, LONG), p.drafter)
    stats = SpecStats()
    options = SpecOptions(draft_kind="combined")
    assert choose_drafter(tiny(LLAMA), None, options, {}, stats) is lookup_of(tiny(LLAMA))
    assert stats.reason is None


def test_asked_for_by_name_it_drafts_for_a_model_that_was_not_loaded_here():
    prompt, expected = plain_text(LLAMA)
    tokenizer = pair(QWEN).tokenizer
    options = {"max_tokens": LENGTH, "num_draft_tokens": 4, "require_spec": True}
    with pytest.raises(NotEngaged, match="no-drafter"):
        list(mlx_spec.stream_generate(tiny(LLAMA), tokenizer, prompt, **options))
    got = list(
        mlx_spec.stream_generate(tiny(LLAMA), tokenizer, prompt, draft_kind="lookup", **options)
    )
    assert [r.token for r in got] == expected
    assert got[-1].spec.kind == "lookup"
