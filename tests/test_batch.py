"""A sequence that is alone in a batch generator drafts; every answer is that of mlx_lm's."""

import copy
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences, generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_spec
from mlx_spec.batch import WORTHWHILE, Plan, SpecBatchGenerator
from mlx_spec.load import Pairing
from mlx_spec.options import SpecOptions
from mlx_spec.stats import SpecStats
from models import (
    DEMO,
    GEMMA_DEMO,
    GEMMA_TRAINED,
    TRAINED,
    ScriptedDrafter,
    assert_same_caches,
    often_right,
    pair,
    right,
)

NAME = "qwen3-5-trained"
GEMMA = "gemma4-dense-trained"
BOTH = pytest.mark.parametrize("name", [NAME, GEMMA])
TRAINED_NAMES = [*TRAINED, *GEMMA_TRAINED]
ATOL = 1e-4  # past the window, mlx_lm's ring sums its rows in another order
PENALTY = make_logits_processors(repetition_penalty=1.3)

Event = Callable[[BatchGenerator], Any]


@dataclass
class Answers:
    """Of a batch generator, until nothing is left.

    Attributes:
        steps: what each call of `next` gave, of prompts and of tokens.
        logprobs: one row for each token.
        ended: the last response of each sequence.
        returned: by the events.
        state: of mlx's generator of random numbers, at the end.
        counts: tokens of prompts, and generated ones.
        stats: of each sequence, in the order of insertion.
    """

    steps: list[tuple[list, list]] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)
    ended: dict[int, Any] = field(default_factory=dict)
    returned: list[Any] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    stats: list[SpecStats] = field(default_factory=list)

    def tokens(self, uid: int) -> list[int]:
        return [token for _, tokens in self.steps for of, token, _ in tokens if of == uid]


def answers_of(generator: BatchGenerator, events: dict[int, Event]) -> Answers:
    """events[i] is called before the i-th call of `next`."""
    answers = Answers()
    with generator.stats() as counters:
        for step in range(1000):
            if step in events:
                answers.returned.append(events[step](generator))
            prompts, tokens = generator.next()
            if not prompts and not tokens and step >= max(events):
                break
            answers.steps.append(
                (
                    [(r.uid, r.progress, r.end_of_segment, r.end_of_prompt) for r in prompts],
                    [(r.uid, r.token, r.finish_reason) for r in tokens],
                )
            )
            answers.logprobs += [r.logprobs for r in tokens]
            answers.ended |= {r.uid: r for r in tokens if r.finish_reason}
    answers.state = mx.random.state[0].tolist()
    answers.counts = counters.prompt_tokens, counters.generation_tokens
    return answers


@contextmanager
def paired(p, drafter=None):
    """The model has a drafter, as if it had been loaded with it."""
    p.model.mlx_spec = Pairing(drafter or p.drafter)
    try:
        yield
    finally:
        del p.model.mlx_spec


def spec_answers(p, events, drafter=None, depth=3, sampling="stock", **options) -> Answers:
    """With drafts. The end of each sequence is told once."""
    stats: list[SpecStats] = []
    ended: list[SpecStats] = []

    def plan():
        stats.append(SpecStats())
        return Plan(SpecOptions(depth, sampling=sampling), stats[-1])

    with paired(p, drafter):
        generator = SpecBatchGenerator(p.model, plan=plan, ended=ended.append, **options)
        answers = answers_of(generator, events)
    assert sorted(map(id, ended)) == sorted(map(id, stats))
    answers.stats = stats
    return answers


def compare(p, events, drafter=None, drafts: bool | None = True, seed=5, **options) -> Answers:
    """Assert that all answers are those of mlx_lm, step by step; and that there were drafts,
    some of them right, or none (None: do not ask)."""
    mx.random.seed(seed)
    stock = answers_of(BatchGenerator(p.model, **options), events)
    mx.random.seed(seed)
    ours = spec_answers(p, events, drafter, **options)
    assert ours.steps == stock.steps
    assert ours.state == stock.state
    assert ours.counts == stock.counts
    assert ours.ended.keys() == stock.ended.keys()
    for uid, response in stock.ended.items():
        assert ours.ended[uid].finish_reason == response.finish_reason
        assert ours.ended[uid].all_tokens == response.all_tokens
        assert_same_caches(ours.ended[uid].prompt_cache, response.prompt_cache, ATOL)
    for own, theirs in zip(ours.returned, stock.returned, strict=True):
        assert_same_returned(own, theirs)
    if stock.logprobs:
        np.testing.assert_allclose(
            mx.stack(ours.logprobs), mx.stack(stock.logprobs), rtol=0, atol=10 * ATOL
        )
    if drafts is not None:
        assert any(stats.engaged for stats in ours.stats) == drafts
        assert any(stats.accepted > 0 for stats in ours.stats) == drafts
    return ours


def insert(prompt: list[int], max_tokens: int = 30, **options: Any) -> Event:
    """One sequence, with one value of each option."""
    lists = {name: [value] for name, value in options.items()}
    return lambda generator: generator.insert([prompt], [max_tokens], **lists)


def insert_segments(*segments: list[int]) -> Event:
    return lambda generator: generator.insert_segments([list(segments)], [30])


def extract(*uids: int) -> Event:
    return lambda generator: frozen(generator.extract_cache(list(uids)))


def remove(*uids: int, caches: bool = False) -> Event:
    return lambda generator: frozen(generator.remove(list(uids), return_prompt_caches=caches))


def frozen(extracted: dict[int, Any]) -> dict[int, Any]:
    """The tokens as they are now; the caches should stay as they are by themselves."""
    return {uid: (caches, list(tokens)) for uid, (caches, tokens) in extracted.items()}


@cache
def text_of(name: str) -> list[int]:
    """The prompt and 60 tokens of plain decoding."""
    p = pair(name)
    return p.prompt + [t for t, _ in generate_step(mx.array(p.prompt), p.model, max_tokens=60)]


def always_right(name: str) -> ScriptedDrafter:
    """For the sequence that begins with the model's prompt."""
    return ScriptedDrafter(pair(name).drafter, right(text_of(name)))


def prefilled(p, tokens: list[int]) -> list[Any]:
    """Caches of mlx_lm, after its own prefill."""
    caches = make_prompt_cache(p.model)
    for _ in generate_step(mx.array(tokens), p.model, prompt_cache=caches, max_tokens=0):
        pass
    return caches


def assert_same_returned(ours: Any, theirs: Any) -> None:
    """By an event: copies of caches with their tokens, or something simple."""
    if not isinstance(theirs, dict):
        assert ours == theirs
        return
    assert ours.keys() == theirs.keys()
    for uid, (caches, tokens) in theirs.items():
        assert ours[uid][1] == tokens
        assert_same_caches(ours[uid][0], caches, ATOL)


# Alone


@pytest.mark.parametrize("name", [*TRAINED_NAMES, DEMO, GEMMA_DEMO])
def test_alone_it_drafts_as_stream_generate_does(name):
    p = pair(name)
    chunks = {"prefill_step_size": 10}
    (stats,) = compare(p, {0: insert(p.prompt, 30)}, **chunks).stats
    responses = mlx_spec.stream_generate(
        p.model,
        p.tokenizer,
        p.prompt,
        max_tokens=30,
        draft_model=p.drafter,
        num_draft_tokens=3,
        **chunks,
    )
    assert stats == list(responses)[-1].spec
    assert (stats.batched, stats.unprimed, stats.reason) == (0, 0, None)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@BOTH
def test_few_tokens(name, max_tokens):
    p = pair(name)
    drafter = always_right(name)
    compare(p, {0: insert(p.prompt, max_tokens)}, drafter, drafts=max_tokens > 1)
    for length in (1, 2):
        events = {0: insert(p.prompt[:length], max_tokens), 2: insert(p.prompt, 12)}
        compare(p, events, drafter, drafts=None)


@BOTH
def test_an_end_token_at_any_index_of_an_accepted_block(name):
    p = pair(name)
    for token in text_of(name)[len(p.prompt) :][:9]:
        ours = compare(
            p,
            {0: insert(p.prompt)},
            always_right(name),
            stop_tokens=[[token]],
        )
        assert ours.ended[0].finish_reason == "stop"


@BOTH
def test_a_stop_sequence_that_spans_rounds(name):
    p = pair(name)
    generated = text_of(name)[len(p.prompt) :]
    for begin in (0, 3, 6):
        stop = StopSequences([[1, 2, 3], generated[begin : begin + 3]])
        ours = compare(p, {0: insert(p.prompt, stop_sequences=stop)}, always_right(name))
        assert ours.ended[0].finish_reason == "stop"


# Others arrive


# Before which call of `next`, and how many tokens of each sequence are then decoded in a batch.
ARRIVALS = {
    "in the prompt": (1, 7, 8),
    "before the end of the prompt is told": (3, 9, 8),
    "before the first token": (4, 10, 8),
    "before the second token": (5, 10, 8),
    "in the middle": (15, 10, 8),
    "shortly before the end": (27, 7, 8),
    "before the last token": (33, 1, 0),
    "after the end": (34, 0, 0),
}


@pytest.mark.parametrize(
    ("name", "arrival"),
    [*((NAME, arrival) for arrival in ARRIVALS), *((GEMMA, a) for a in list(ARRIVALS)[::2])],
)
def test_another_arrives(name, arrival):
    p = pair(name)
    at, *batched = ARRIVALS[arrival]
    events = {0: insert(p.prompt, 30), at: insert(p.prompt[3:12], 8)}
    ours = compare(p, events, prefill_step_size=10)
    assert [stats.batched for stats in ours.stats] == batched
    assert [stats.engaged for stats in ours.stats] == [True, batched[1] == 0]


@pytest.mark.parametrize("name", [TRAINED[1], GEMMA_DEMO])
def test_another_arrives_and_outlives_it(name):
    p = pair(name)
    events = {0: insert(p.prompt, 15), 9: insert(p.prompt[3:12], 24)}
    first, second = compare(p, events).stats
    assert first.engaged
    assert second.engaged
    assert first.batched == 8


@BOTH
def test_a_hand_over_at_any_index_of_an_accepted_block(name):
    p = pair(name)
    for at in (3, 4, 6, 9):
        events = {0: insert(p.prompt, 10), at: insert(p.prompt[:2], 1)}
        compare(p, events, always_right(name))


@BOTH
def test_hand_overs_again_and_again(name):
    """Blocks are accepted in part, in full and not at all."""
    p = pair(name)
    drafter = ScriptedDrafter(p.drafter, often_right(text_of(name), p.target.vocab_size))
    others = {at: insert(p.prompt[at : at + 3], 2) for at in (4, 11, 18)}
    first, *rest = compare(p, {0: insert(p.prompt, 40), **others}, drafter).stats
    assert first.drafted > first.accepted > 5
    assert first.batched >= 10
    assert {stats.reason for stats in rest} == {"batch"}
    assert {stats.batched for stats in rest} == {2}


@BOTH
def test_a_stop_sequence_that_spans_a_hand_over(name):
    """Into the batch, with one or two of its tokens before; then out of it."""
    p = pair(name)
    generated = text_of(name)[len(p.prompt) :]
    for before in (1, 2):
        stop = StopSequences([generated[8 - before : 11 - before]])
        first = insert(p.prompt, stop_sequences=stop)
        into = {0: first, 10: insert(p.prompt[:5], 12)}
        out = {0: lambda g, first=first: (first(g), insert(p.prompt[:5], 8)(g))}
        for events, batched in ((into, 1 - before + 2), (out, 8)):
            ours = compare(p, events, always_right(name), drafts=None)
            assert ours.ended[0].finish_reason == "stop"
            assert len(ours.tokens(0)) == 11 - before
            assert ours.stats[0].batched == batched


# Others end


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, (30, 3, 9)) for name in TRAINED_NAMES), (NAME, (3, 9, 30))],
)
def test_the_last_of_several_drafts(name, order):
    p = pair(name)
    prompts = [p.prompt, p.prompt[2:7], p.prompt[5:20]]
    ours = compare(p, {0: lambda generator: generator.insert(prompts, list(order))})
    last = order.index(30)
    for uid, stats in enumerate(ours.stats):
        assert stats.batched == min(order[uid], 9)
        assert stats.engaged == (uid == last)
        assert stats.reason == (None if uid == last else "batch")
    seen_by_none = len(prompts[last]) + 9
    assert ours.stats[last].unprimed == (seen_by_none if name in TRAINED else 0)


@BOTH
def test_one_is_left_because_the_other_is_removed(name):
    p = pair(name)
    events = {0: lambda g: g.insert([p.prompt, p.prompt[:9]], [28, 30]), 7: remove(1)}
    first, second = compare(p, events, always_right(name)).stats
    assert (first.batched, second.batched) == (5, 5)
    assert first.accepted == first.accepted_yielded > 0  # no draft past the end


@pytest.mark.parametrize("left", [WORTHWHILE - 1, WORTHWHILE])
def test_few_remaining_tokens_are_not_worth_leaving_the_batch(left):
    p = pair(NAME)
    both = [p.prompt, p.prompt[:9]]
    worthwhile = left == WORTHWHILE
    events = {0: lambda generator: generator.insert(both, [5 + left, 5])}
    first, _ = compare(p, events, drafts=worthwhile).stats
    assert first.batched == (5 if worthwhile else 5 + left)


def test_what_the_drafter_has_not_seen_is_counted():
    """The tokens of a batch, and what came before it was asked the first time. All others it has
    learnt, but for one at each time that it takes over."""
    p = pair(NAME)
    first = insert(p.prompt, 40)
    other = insert(p.prompt[:5], 4)
    at_once = {0: lambda g: (first(g), other(g))}
    for events, takes_over in ((at_once, 1), ({0: first, 10: other}, 2), ({0: first, 1: other}, 2)):
        ours = compare(p, events, prefill_step_size=10)
        unprimed, batched = ours.stats[0].unprimed, ours.stats[0].batched
        assert ours.stats[1].unprimed == 0
        assert unprimed == batched + (0 if 10 in events else len(p.prompt) - 10 * (1 in events))
        ended = ours.ended[0]
        (learnt,) = vars(ended.prompt_cache[0])["mlx_spec"].caches
        assert learnt.offset == len(ended.all_tokens) - unprimed - takes_over


# Prompts in segments, and caches in their course


SEGMENTS = ((0, 7), (7, 16), (16, 24))


def segments_of(p):
    return [p.prompt[begin:end] for begin, end in SEGMENTS]


@BOTH
def test_copies_at_the_ends_of_segments(name):
    """As mlx_lm.server takes them: they hold the segments, and do not change later."""
    p = pair(name)
    chunks = {"prefill_step_size": 4}
    segments = segments_of(p)
    events = {0: insert_segments(*segments), 2: extract(0), 5: extract(0), 7: extract(0)}
    ours = compare(p, events, **chunks)
    ends = [i for i, (prompts, _) in enumerate(ours.steps) if prompts and prompts[0][2]]
    assert ends == [1, 4, 6, 7]
    fresh = spec_answers(p, {0: insert(p.prompt)}, **chunks)
    assert ours.stats == fresh.stats
    for copies, length in zip(ours.returned[1:], (7, 16, 23), strict=True):
        caches, tokens = copies[0]
        assert tokens == p.prompt[:length]
        assert_same_caches(caches, prefilled(p, tokens), ATOL)
        pairs = [c.offset for c in vars(caches[0])["mlx_spec"].caches]
        assert pairs == [length - 1 for _ in p.drafter.make_cache()]
        rest = insert(p.prompt[length:], caches=caches, all_tokens=tokens)
        continued = spec_answers(p, {0: rest}, **chunks)
        assert continued.tokens(0) == fresh.tokens(0)
        assert continued.ended[0].all_tokens == fresh.ended[0].all_tokens
        assert_same_caches(continued.ended[0].prompt_cache, fresh.ended[0].prompt_cache, ATOL)
        assert continued.stats == fresh.stats


@BOTH
def test_a_copy_at_any_time_and_of_all_sequences(name):
    """In the prompt, before the first token, in a block; another one waits meanwhile."""
    p = pair(name)
    for at in (1, 3, 4, 6):
        events = {
            0: insert(p.prompt, 12),
            at: lambda g: (insert(p.prompt[:2], 1)(g), extract(0, 1)(g))[1],
        }
        ours = compare(p, events, always_right(name), prefill_step_size=12)
        assert ours.returned[1].keys() == {0, 1}


@pytest.mark.parametrize(("name", "caches"), [(NAME, False), (GEMMA, True)])
def test_removed_at_any_time(name, caches):
    """In the prompt, before the first token, in a block; then another one comes."""
    p = pair(name)
    for at in (1, 3, 4, 6):
        events = {
            0: insert(p.prompt, 20),
            at: remove(0, caches=caches),
            at + 1: insert(p.prompt[:2], 1),
        }
        ours = compare(p, events, always_right(name), drafts=None, prefill_step_size=12)
        assert ours.ended.keys() == {1}
        assert (ours.stats[0].accepted > 0) == (at > 3)
        assert ours.returned[1].keys() == ({0} if caches else set())


def test_removing_leaves_the_generator_of_random_numbers_as_mlx_lm_leaves_it():
    p = pair(NAME)
    sampler = make_sampler(0.8, top_p=0.9)
    for at in (1, 3, 5):
        events = {
            0: insert(p.prompt, 20, samplers=sampler),
            at: lambda g: (remove(0)(g), mx.random.state[0].tolist())[1],
        }
        compare(p, events, always_right(NAME), drafts=at > 2)


@BOTH
def test_the_callers_prompt_cache_stays_as_it_was(name):
    """As with mlx_lm; so it can be used again, with what the drafter knows of it."""
    p = pair(name)
    begin, rest = p.prompt[:15], p.prompt[15:]
    given = spec_answers(p, {0: insert(begin, 1)}).ended[0]
    before = copy.deepcopy(given.prompt_cache)
    runs = [
        spec_answers(
            p, {0: insert(rest, caches=given.prompt_cache, all_tokens=[*given.all_tokens])}
        )
        for _ in range(2)
    ]
    assert runs[0].tokens(0) == runs[1].tokens(0)
    assert runs[0].stats == runs[1].stats
    assert runs[0].stats[0].unprimed == 0
    assert_same_caches(given.prompt_cache, before)


@BOTH
def test_turns_of_a_chat(name):
    """On the cache of the turn before, the drafter knows as much as after one prefill of all."""
    p = pair(name)
    prompts = [p.prompt, p.prompt[3:4], p.prompt[5:14]]

    def chat(generator):
        caches, tokens, texts = make_prompt_cache(p.model), [], []
        for prompt in prompts:
            history = tokens + prompt
            answers = answers_of(
                generator, {0: insert(prompt, 12, caches=caches, all_tokens=tokens)}
            )
            (ended,) = answers.ended.values()
            caches, tokens = ended.prompt_cache, ended.all_tokens
            assert tokens[: len(history)] == history
            texts.append(tokens[len(history) :])
        return texts, history, caches

    stock_texts, _, stock_caches = chat(BatchGenerator(p.model))
    stats: list[SpecStats] = []
    fixed = partial(Plan, SpecOptions(3))
    with paired(p):
        texts, history, caches = chat(SpecBatchGenerator(p.model, plan=fixed, ended=stats.append))
    assert texts == stock_texts
    assert_same_caches(caches, stock_caches, ATOL)
    fresh = spec_answers(p, {0: insert(history, 12)})
    assert fresh.tokens(0) == texts[-1]
    assert stats[-1] == fresh.stats[0]
    assert stats[-1].accepted > 0


# Samplers and processors


@cache
def penalised_text(name: str) -> list[int]:
    """The prompt and 30 tokens of mlx_lm."""
    p = pair(name)
    events = {0: insert(p.prompt, 30, logits_processors=PENALTY)}
    return p.prompt + answers_of(BatchGenerator(p.model), events).tokens(0)


@pytest.mark.parametrize(
    ("name", "at"), [*((NAME, at) for at in (None, 1, 3, 10, 11)), (GEMMA, None), (GEMMA, 10)]
)
def test_processors_see_the_history_that_mlx_lm_shows_them(name, at):
    p = pair(name)
    (penalty,) = PENALTY
    seen: list[list[list[int]]] = []  # of mlx_lm, then of ours

    def processor(tokens, logits):
        seen[-1].append(tokens.tolist())
        return penalty(tokens, logits)

    def first(generator):
        seen.append([])
        insert(p.prompt, 24, logits_processors=[processor])(generator)

    text = penalised_text(name)
    drafter = ScriptedDrafter(p.drafter, often_right(text, p.target.vocab_size))
    later = {} if at is None else {at: insert(p.prompt[:9], 3)}
    stats = compare(p, {0: first, **later}, drafter).stats[0]
    assert stats.drafted > stats.accepted > 2
    theirs, ours = seen
    assert all(tokens in ours for tokens in theirs)


@pytest.mark.parametrize(
    ("name", "at"), [*((NAME, at) for at in (None, 1, 2, 9, 10, 22)), (GEMMA, None), (GEMMA, 10)]
)
def test_sampled_tokens_at_the_same_seed(name, at):
    """Of both sequences, however they were decoded: at each hand-over the generator of random
    numbers is where mlx_lm has it."""
    p = pair(name)
    sampler, other = make_sampler(0.6, top_p=0.9), make_sampler(1.0, min_p=0.05)
    first = insert(p.prompt, 24, samplers=sampler)
    later = {} if at is None else {at: insert(p.prompt[:9], 4, samplers=other)}
    compare(p, {0: first, **later})


@pytest.mark.parametrize(
    ("name", "at", "depth"),
    [*((NAME, at, 3) for at in (None, 2, 9, 22)), (NAME, 10, 0), (GEMMA, 10, 3)],
)
def test_with_the_law_seed_there_is_one_text_however_it_is_decoded(name, at, depth):
    """Alone with drafts, alone without, or in mlx_lm's batch in between: what plain decoding under
    this law gives at the same seed."""
    p = pair(name)
    sampler = make_sampler(0.9, top_p=0.9)
    mx.random.seed(5)
    plain = mlx_spec.stream_generate(
        p.model, p.tokenizer, p.prompt, max_tokens=24, sampler=sampler, num_draft_tokens=0
    )
    expected = [response.token for response in plain]
    later = {} if at is None else {at: insert(p.prompt[:9], 4, samplers=sampler)}
    mx.random.seed(5)
    events = {0: insert(p.prompt, 24, samplers=sampler), **later}
    ours = spec_answers(p, events, depth=depth, sampling="seed")
    assert ours.tokens(0) == expected
    assert {stats.sampling for stats in ours.stats} == {"seed"}
    assert (ours.stats[0].drafted > 0) == (depth > 0)


@pytest.mark.parametrize("name", [NAME, GEMMA_TRAINED[1]])
def test_a_shared_sampler_and_processors_of_the_generator(name):
    p = pair(name)
    events = {0: insert(p.prompt, 24), 8: insert(p.prompt[:9], 4)}
    compare(p, events, sampler=make_sampler(0.6), logits_processors=PENALTY)


# Without drafts


def test_without_drafts_mlx_lm_decodes_and_the_reason_is_told():
    p = pair(GEMMA)
    events = {0: insert(p.prompt, 12)}
    expected = answers_of(BatchGenerator(p.model), events)
    ring = [
        RotatingKVCache(16) if isinstance(c, RotatingKVCache) else c for c in p.model.make_cache()
    ]
    for reason, drafter, depth, more in [
        ("num-draft-tokens-0", p.drafter, 0, {}),
        ("unsupported-cache", p.drafter, 3, {"caches": ring}),
    ]:
        ours = spec_answers(p, {0: insert(p.prompt, 12, **more)}, drafter, depth)
        (stats,) = ours.stats
        assert (stats.reason, stats.drafted, stats.batched) == (reason, 0, 12)
        if not more:
            assert ours.steps == expected.steps
    ended: list[SpecStats] = []
    answers_of(SpecBatchGenerator(p.model, ended=ended.append), events)
    assert [stats.reason for stats in ended] == ["no-drafter"]


def test_one_token_is_too_short():
    p = pair(NAME)
    (stats,) = compare(p, {0: insert(p.prompt, 1)}, drafts=False).stats
    assert (stats.reason, stats.batched) == ("too-short", 0)


def test_a_sequence_that_is_removed_before_its_turn():
    p = pair(NAME)
    events = {0: lambda g: (insert(p.prompt)(g), insert(p.prompt)(g), remove(1)(g))}
    first, second = compare(p, events).stats
    assert first.batched == 0
    assert second.reason == "too-short"


# Bookkeeping


def test_bytes_of_caches():
    """Those that mlx_lm has, and the drafter's."""
    p = pair(NAME)
    sizes = []
    for spec in (True, False):
        of_steps = []
        events = {
            step: lambda g, of_steps=of_steps: of_steps.append(g.prompt_cache_nbytes)
            for step in range(1, 12)
        }
        events[0] = insert(p.prompt)
        if spec:
            spec_answers(p, events, prefill_step_size=10)
        else:
            answers_of(BatchGenerator(p.model, prefill_step_size=10), events)
        sizes.append(of_steps)
    (head,) = p.drafter.make_cache()
    p.drafter.extend(mx.array([1]), mx.zeros((1, 1, p.target.hidden_size)), [head])
    for ours, theirs in zip(*sizes, strict=True):
        assert ours == theirs + head.nbytes


def test_inserting_nothing_changes_nothing():
    p = pair(NAME)
    events = {
        0: insert(p.prompt),
        2: lambda g: (insert(p.prompt[:9], 9)(g), g.insert([])),
        4: lambda g: g.insert([]),
    }
    ours = compare(p, events)
    assert len(ours.stats) == 2


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (32, 2)])
def test_small_batches(sizes):
    """Of sequences that are decoded at once, and of prompts."""
    p = pair(NAME)
    events = {
        0: insert(p.prompt, 12),
        1: insert(p.prompt[:9], 6),
        2: insert(p.prompt[4:], 30),
        9: insert(p.prompt[2:], 12),
    }
    completion, prefill = sizes
    compare(
        p,
        events,
        prefill_step_size=10,
        completion_batch_size=completion,
        prefill_batch_size=prefill,
    )


# At random


PIECES = [(0, 24), (2, 9), (5, 6), (7, 20)]


@cache
def pieces(name: str) -> list[tuple[list[int], list[int]]]:
    """Some prompts, each with 40 tokens of mlx_lm alone."""
    p = pair(name)
    prompts = [p.prompt[begin:end] for begin, end in PIECES]
    return [
        (prompt, [t for t, _ in generate_step(mx.array(prompt), p.model, max_tokens=40)])
        for prompt in prompts
    ]


@BOTH
def test_arrivals_and_removals_at_random(name):
    """The tokens of each sequence are those of mlx_lm alone."""
    p = pair(name)
    rng = random.Random(3)
    expected: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    ended: list[SpecStats] = []
    with paired(p):
        generator = SpecBatchGenerator(
            p.model, plan=partial(Plan, SpecOptions(3)), ended=ended.append, prefill_step_size=7
        )
        for step in range(300):
            if step < 200 and rng.random() < 0.06:
                prompt, text = rng.choice(pieces(name))
                (uid,) = generator.insert([prompt], [rng.choice([1, 5, 20, 40])])
                expected[uid], got[uid] = text, []
            if step < 200 and got and rng.random() < 0.02:
                generator.remove([rng.choice(list(got))], rng.random() < 0.5)
            _, tokens = generator.next()
            for response in tokens:
                got[response.uid].append(response.token)
        assert generator.next() == ([], [])
    assert len(got) == len(ended) > 10
    for uid, tokens in got.items():
        assert tokens == expected[uid][: len(tokens)]
    assert sum(stats.batched for stats in ended) > 50
    assert sum(stats.drafted for stats in ended) > sum(stats.accepted for stats in ended) > 50
