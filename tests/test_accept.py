"""The acceptance laws by themselves."""

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from mlx_spec.accept import Greedy, History, Stock, make_law
from mlx_spec.randomness import generator_state, set_generator_state, untouched_generator

LOGITS = mx.random.normal((1, 4, 50), key=mx.random.key(2)) * 3
DRAFTS = [mx.array([t], mx.uint32) for t in (7, 3, 9)]


def stock_draws(sampler, processors, history):
    """Row by row, as mlx_lm.generate_step does it."""
    tokens = []
    for row in range(4):
        logits = LOGITS[:, row]
        for processor in processors:
            logits = processor(mx.concatenate([history, *DRAFTS[:row]]), logits)
        tokens.append(sampler(logits - mx.logsumexp(logits, keepdims=True)).item())
    return tokens


def test_make_law():
    history = mx.array([1])
    assert isinstance(make_law(None, None, history), Greedy)
    assert isinstance(make_law(greedy_sampler, [], history), Greedy)
    assert isinstance(make_law(make_sampler(0.0), [], history), Greedy)
    assert isinstance(make_law(make_sampler(0.5), None, history, "stock"), Stock)
    assert isinstance(make_law(None, make_logits_processors({3: 1.0}), history), Greedy)


def test_greedy_takes_the_argmax_of_each_row():
    draws = Greedy().draw(LOGITS, DRAFTS)
    assert draws.tokens.tolist() == np.array(LOGITS[0]).argmax(-1).tolist()
    expected = np.array(LOGITS[0], np.float64)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    np.testing.assert_allclose(mx.stack(draws.logprobs), expected, atol=1e-5)
    assert draws.keys == []


def test_stock_draws_as_stock_whatever_was_picked_before():
    history = mx.array([4, 5, 6])
    sampler = make_sampler(0.9, top_p=0.95, xtc_probability=0.5)
    processors = make_logits_processors(repetition_penalty=1.4)
    mx.random.seed(11)
    expected = stock_draws(sampler, processors, history)
    after = generator_state().tolist()
    for picks in (0, 3):
        mx.random.seed(11)
        law = Stock(sampler, History(processors, history))
        law.begin(3)
        for k in range(picks):
            law.pick(LOGITS[:, k], DRAFTS[:k])
        draws = law.draw(LOGITS, DRAFTS)
        assert draws.tokens.tolist() == expected
        assert draws.keys[-1].tolist() == after
        law.leave(None)


def test_a_draft_from_the_targets_own_logits_is_the_targets_draw():
    """Draft and target share the randomness of their position."""
    mx.random.seed(5)
    law = Stock(make_sampler(1.0), History([], mx.array([1])))
    law.begin(3)
    picks = [law.pick(LOGITS[:, k], DRAFTS[:k]).item() for k in range(4)]
    assert law.draw(LOGITS, DRAFTS).tokens.tolist() == picks
    law.leave(None)


def test_stock_goes_on_from_the_key_of_the_last_token():
    sampler = make_sampler(1.0)
    mx.random.seed(5)
    first = [sampler(LOGITS[:, 0]).item(), sampler(LOGITS[:, 1]).item()]
    second = sampler(LOGITS[:, 2]).item()
    mx.random.seed(5)
    law = Stock(sampler, History([], mx.array([1])))
    law.begin(3)
    draws = law.draw(LOGITS, DRAFTS)
    assert draws.tokens.tolist()[:2] == first
    law.committed(mx.array(first), draws.keys[1].tolist())
    law.begin(3)
    assert law.draw(LOGITS[:, 2:], []).tokens.tolist()[0] == second
    law.leave(None)


def test_two_generations_at_once_do_not_draw_the_same_numbers():
    sampler = make_sampler(1.0)
    laws = []
    states = []
    for _ in range(2):
        mx.random.seed(5)
        laws.append(Stock(sampler, History([], mx.array([1]))))
        laws[-1].begin(3)
        states.append({tuple(key.tolist()) for key in laws[-1].draw(LOGITS, DRAFTS).keys})
    assert not states[0] & states[1]
    for law in laws:
        law.leave(None)
    mx.random.seed(5)
    assert Stock(sampler, History([], mx.array([1]))).key == [0, 5]


def test_a_greedy_sampler_with_processors_leaves_the_generator_to_the_caller():
    mx.random.seed(5)
    law = make_law(None, make_logits_processors({3: 50.0}), mx.array([1]))
    mx.random.uniform()
    state = generator_state().tolist()
    law.begin(3)
    assert law.draw(LOGITS, DRAFTS).tokens.tolist() == [3] * 4
    assert law.draw(LOGITS, DRAFTS).keys == []
    law.leave(None)
    assert generator_state().tolist() == state


def test_generator_state_round_trip():
    mx.random.seed(2**40 + 17)
    mx.random.uniform()
    state = generator_state().tolist()
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(0)
    set_generator_state(state)
    with untouched_generator():
        mx.random.normal((5,))
    assert mx.random.uniform(shape=(3,)).tolist() == expected
