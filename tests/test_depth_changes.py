"""The loop while the depth changes: rounds without drafts among rounds with some.

A round without drafts is committed and followed by the next launch before it is read."""

from functools import cache
from importlib import import_module
from itertools import cycle

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_spec
from mlx_spec import knowledge
from mlx_spec.accept import History, Stock, make_law
from mlx_spec.depth import Fixed
from mlx_spec.round import CATCH_UP, Request, Round, speculate
from mlx_spec.sliding_window import settled
from mlx_spec.stats import SpecStats
from models import GEMMA_TRAINED, TRAINED, assert_same_caches, make_request, pair

NAME = "qwen3-5-trained"
GEMMA = "gemma4-e2b-trained"
RING = 1e-3
PATTERN = [2, 0, 0, 3, 0, 1, 0, 0, 0, 4]


class Turns:
    """Depths in turns; keeps what it is told."""

    max = 4
    state = "active"
    why = None
    asleep = False

    def __init__(self, depths=PATTERN):
        self.depths = cycle(depths)
        self.chosen = []
        self.observed = []

    def choose(self, context):
        self.chosen.append((next(self.depths), context))
        return self.chosen[-1][0]

    def observe(self, drafted, accepted, context, seconds, waited=False):
        self.observed.append((drafted, accepted, context, seconds))


@pytest.fixture
def turns(monkeypatch):
    made = []

    def depths_for(options, model, drafter):
        made.append(Turns())
        return made[-1:]

    monkeypatch.setattr(import_module("mlx_spec.generate"), "depths_for", depths_for)
    return made


SAMPLING = {
    "greedy": {},
    "stock": {"sampler": lambda: make_sampler(0.9, top_p=0.9)},
    "penalties": {
        "sampler": lambda: make_sampler(0.9),
        "logits_processors": lambda: make_logits_processors(repetition_penalty=1.2),
    },
}


def both(name, sampling, tokens, stop_after=None):
    """Tokens, caches and random state of stock and of ours; closed after so many tokens."""
    p = pair(name)
    results = []
    for ours in (False, True):
        options = {key: make() for key, make in SAMPLING[sampling].items()}
        caches = make_prompt_cache(p.model)
        mx.random.seed(3)
        if ours:
            steps = mlx_spec.speculative_generate_step(
                mx.array(p.prompt),
                p.model,
                p.drafter,
                prompt_cache=caches,
                sampling="stock",
                max_tokens=tokens,
                **options,
            )
        else:
            steps = generate_step(
                mx.array(p.prompt), p.model, prompt_cache=caches, max_tokens=tokens, **options
            )
        got = [next(steps)[0] for _ in range(stop_after or tokens)]
        if stop_after is None:
            assert next(steps, None) is None
        steps.close()
        results.append((got, caches, mx.random.state[0].tolist()))
    return results


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((NAME, sampling) for sampling in SAMPLING),
        (TRAINED[1], "stock"),
        (GEMMA_TRAINED[0], "penalties"),
        (GEMMA, "greedy"),
    ],
)
def test_the_text_and_what_is_left_are_stocks(name, sampling, turns):
    (expected, caches, state), (got, own, own_state) = both(name, sampling, 60)
    assert got == expected
    assert own_state == state
    assert_same_caches(own, caches, RING if "gemma" in name else 0)
    (depth,) = turns
    drafted = [drafted for drafted, *_ in depth.observed]
    assert drafted[:8] == PATTERN[:8]
    assert sum(accepted + 1 for _, accepted, *_ in depth.observed) == 60
    assert sum(drafted for drafted, *_ in depth.observed) > 20
    if sampling == "greedy":
        assert sum(accepted for _, accepted, *_ in depth.observed) > 0
    prompt = len(pair(name).prompt)
    context = prompt - 1
    for _, accepted, at, _ in depth.observed:
        assert at == context
        context += accepted + 1
    # while rounds have no drafts, the next one is chosen before they are read
    assert [at for _, at in depth.chosen[: len(depth.observed)]] == [
        at for *_, at, _ in depth.observed
    ]


@pytest.mark.parametrize("yields", [*range(1, 8), 10, 13])
@pytest.mark.parametrize(("name", "sampling"), [(NAME, "stock"), (GEMMA, "greedy")])
def test_closed_after_any_token(name, sampling, yields, turns):
    (expected, caches, state), (got, own, own_state) = both(name, sampling, 40, yields)
    assert got == expected
    assert own_state == state
    assert_same_caches(own, caches, RING if name == GEMMA else 0)


@cache
def plain_text(name):
    p = pair(name)
    return [token for token, _ in generate_step(mx.array(p.prompt), p.model, max_tokens=40)]


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, Interrupt])
@pytest.mark.parametrize("method", ["launch", "read", "commit"])
@pytest.mark.parametrize("call", [1, 3, 5])
def test_after_an_error_anywhere_the_caches_go_on_as_plain_decoding(
    method, call, error, monkeypatch
):
    """They hold all tokens that were yielded, or all but the last."""
    p = pair(NAME)
    text = plain_text(NAME)
    request = make_request(p, p.prompt, 3)
    request.depths = [Turns()]
    owner = {"launch": Request, "commit": Request, "read": Round}[method]
    function, calls = getattr(owner, method), iter(range(100))

    def failing(*args, **kwargs):
        if next(calls) == call:
            raise error("here")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, method, failing)
    got = []
    generation = speculate(request, mx.default_stream(mx.default_device()), 30, SpecStats())
    with pytest.raises(error, match="here"):
        got.extend(token for token, *_ in generation)
    monkeypatch.undo()
    assert got == text[: len(got)]
    fed = request.caches[p.full].offset - len(p.prompt)
    assert fed in (len(got), len(got) - 1)
    rest = mx.array([*p.prompt, *text][len(p.prompt) + fed :][:1])
    more = generate_step(rest, p.model, prompt_cache=settled(request.caches), max_tokens=4)
    assert [token for token, _ in more] == text[fed + 1 : fed + 5]


@pytest.mark.parametrize("name", [NAME, GEMMA])
def test_a_round_without_drafts_is_followed_before_it_is_read(name, monkeypatch):
    """So the device never waits for the host: one forward and one read for each token."""
    p = pair(name)
    request = make_request(p, p.prompt, 0)
    mx.eval([cache.state for cache in request.caches])
    events = []
    for owner, method in [(Request, "launch"), (Round, "read")]:
        function = getattr(owner, method)

        def noted(self, *args, function=function, method=method):
            events.append(method)
            return function(self, *args)

        monkeypatch.setattr(owner, method, noted)
    reads = []
    tolist = mx.array.tolist
    monkeypatch.setattr(mx.array, "tolist", lambda self: (reads.append(1), tolist(self))[1])
    stats = SpecStats()
    generation = speculate(request, mx.default_stream(mx.default_device()), 100, stats)
    for _ in range(20):
        next(generation)
    assert events == ["launch", *["launch", "read"] * 20]
    assert len(reads) == stats.rounds == 20
    assert stats.drafted == 0


@pytest.mark.parametrize("name", [NAME, "qwen3-6-moe-trained"])
def test_the_drafter_keeps_up_while_nothing_is_drafted(name):
    """In few forwards of many rows; afterwards it knows what it would have learnt at once, and
    drafts as well."""
    p = pair(name)
    parked, alike = make_request(p, p.prompt, 3), make_request(p, p.prompt, 3)
    parked.depths = [Turns([0] * 70 + [3] * 1000)]
    stream, forwards = mx.default_stream(mx.default_device()), []
    with pytest.MonkeyPatch.context() as patch:
        extend = p.drafter.extend
        patch.setattr(
            p.drafter, "extend", lambda *args: (forwards.append(args[0].size), extend(*args))
        )
        text = [token for token, *_ in speculate(parked, stream, 70, SpecStats())]
    assert forwards[:2] == [CATCH_UP, CATCH_UP]
    expected = [token for token, *_ in speculate(alike, stream, 70, SpecStats())]
    assert text == expected
    for got, wanted in zip(parked.draft_caches, alike.draft_caches, strict=True):
        assert got.offset == wanted.offset
    assert_same_caches(parked.draft_caches, alike.draft_caches, 1e-4)


@pytest.mark.parametrize("others", ["none", "in turns", "one in between", "another law"])
def test_stocks_random_numbers_while_another_generation_is_under_way(others):
    """Rounds without drafts go on from where the generator is, unless another one has set it."""
    p = pair(NAME)
    sampler = make_sampler(4.0)  # the model is very sure of itself
    mx.random.seed(3)
    expected = [
        t for t, _ in generate_step(mx.array(p.prompt), p.model, sampler=sampler, max_tokens=30)
    ]

    def started(depths):
        law = Stock(sampler, History(None, mx.array(p.prompt, mx.uint32)))
        request = make_request(p, p.prompt, 3, law=law)
        request.depths = [Turns(depths)]
        return speculate(request, mx.default_stream(mx.default_device()), 30, SpecStats())

    mx.random.seed(3)
    generation = started(PATTERN)
    got, other = [next(generation)[0]], []
    second = started([0])
    for at, (token, *_) in enumerate(generation):
        got.append(token)
        if others == "in turns" and at < 25:
            other.append(next(second)[0])
        if others == "one in between" and at == 12:
            other.extend(token for token, *_ in second)
        if others == "another law" and at % 3 == 0:
            make_law(sampler, None, mx.array(p.prompt))  # takes one draw
    second.close()
    assert got == expected
    assert others == "none" or sum(a == b for a, b in zip(got, other, strict=False)) < 10


def test_fixed_depth_computes_the_same_rows_each_time():
    """As documented; `auto` does not, as it measures."""
    p = pair(NAME)
    rows = []
    for _ in range(2):
        request = make_request(p, p.prompt, 2)
        request.depths = [Fixed(2)]
        stats = SpecStats()
        for _ in speculate(request, mx.default_stream(mx.default_device()), 40, stats):
            pass
        rows.append((stats.rounds, stats.drafted_by_position, stats.accepted_by_position))
    assert rows[0] == rows[1]


def test_what_is_measured_stays_with_the_drafter_and_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(knowledge, "_known", type(knowledge._known)())
    p = pair(NAME)
    for _ in range(2):
        tokens = list(
            mlx_spec.speculative_generate_step(
                mx.array(p.prompt), p.model, p.drafter, max_tokens=40
            )
        )
        assert len(tokens) == 40
    known = knowledge.knowledge_of(p.model, p.drafter)
    assert known.costs.depths[:1] == [0]
    (file,) = (tmp_path / "mlx-spec" / "depth").iterdir()
    assert file.suffix == ".json"
    monkeypatch.setattr(knowledge, "_known", type(knowledge._known)())
    again = knowledge.knowledge_of(p.model, p.drafter)
    assert again is not known
    assert 0 in again.costs.depths
