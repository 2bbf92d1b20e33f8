"""The automaton against plain searching, and what a token costs."""

import copy
from random import Random

import pytest

from mlx_spec.drafters.text import Text


def longest_match(tokens):
    """Length of the longest suffix that also ends earlier, and all such ends."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        ends = [at for at in range(length, len(tokens)) if tokens[at - length : at] == suffix]
        if ends:
            return length, ends
    return 0, []


def text_of(random, alphabet, length):
    """Random tokens, with copies of what came before."""
    tokens = []
    while len(tokens) < length:
        if tokens and random.random() < 0.3:
            begin = random.randrange(len(tokens))
            tokens += tokens[begin : begin + random.randrange(1, 9)]
        tokens.append(random.randrange(alphabet))
    return tokens[:length]


def contents(text):
    """All that it holds, but the count of its work."""
    return {name: value for name, value in vars(text).items() if name != "work"}


@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_the_match_and_its_continuation_are_those_of_a_search(alphabet):
    random = Random(alphabet)
    for _ in range(12):
        tokens = text_of(random, alphabet, 60)
        text = Text()
        for at, token in enumerate(tokens, start=1):
            text.extend([token])
            length, ends = longest_match(tokens[:at])
            assert text.match == length
            if length == 0:
                continue
            followed = []
            for end in ends:
                whole = tokens[:at]
                for k in range(7):
                    whole = [*whole, whole[end + k]]
                followed.append(whole[at:])
            assert text.continuation(7) in followed


def test_of_two_earlier_places_the_later_one_that_was_seen_counts():
    text = Text([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3])
    assert text.match == 3
    assert text.continuation(5) == [8, 1, 2, 3, 8]


@pytest.mark.parametrize("alphabet", [1, 2, 20])
def test_what_is_cut_leaves_nothing(alphabet):
    random = Random(alphabet)
    for _ in range(30):
        tokens = text_of(random, alphabet, 40)
        length = random.randrange(len(tokens))
        text = Text(tokens)
        text.cut(length)
        assert contents(text) == contents(Text(tokens[:length]))
        text.extend(tokens[length:])
        assert contents(text) == contents(Text(tokens))


def test_it_becomes_another_text():
    random = Random(5)
    for _ in range(20):
        before, after = text_of(random, 3, random.randrange(20)), text_of(random, 3, 15)
        after = before[: random.randrange(20)] + after
        text = Text(before)
        text.become(after)
        assert contents(text) == contents(Text(after))


def test_a_copy_is_independent():
    tokens = text_of(Random(1), 3, 50)
    text = Text(tokens)
    copied = copy.deepcopy(text)
    text.extend([0, 1, 2, 0])
    assert contents(copied) == contents(Text(tokens))


@pytest.mark.parametrize("kind", ["few tokens", "many tokens", "one token", "a long repetition"])
def test_200_000_tokens_cost_a_constant_number_of_steps_each(kind):
    """A text of n tokens has at most 3n - 4 transitions (Blumer et al.), and each transition is
    written once, and again at most once for each token when states are split."""
    n, random = 200_000, Random(2)
    tokens = {
        "few tokens": lambda: [random.randrange(4) for _ in range(n)],
        "many tokens": lambda: [int(random.paretovariate(0.7)) % 50_000 for _ in range(n)],
        "one token": lambda: [7] * n,
        "a long repetition": lambda: [random.randrange(500) for _ in range(n // 2)] * 2,
    }[kind]()
    text = Text(tokens[: n // 2])
    first_half = text.work
    text.extend(tokens[n // 2 :])
    assert text.work < 4 * n
    assert text.work - first_half < 4 * n // 2
