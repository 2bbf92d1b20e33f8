"""With a small real model, if there is one: pytest tests/test_smollm2.py --smollm2 DIRECTORY."""

import sys
from pathlib import Path

import mlx_lm
import pytest

import mlx_spec

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from bench_lookup import PROMPTS

TOKENS = 90


@pytest.fixture(scope="module")
def smollm2(request):
    directory = request.config.getoption("--smollm2")
    if directory is None:
        pytest.skip("no --smollm2 was given")
    return mlx_spec.load(directory)


def prompt_of(name, tokenizer):
    instruction, begin = PROMPTS[name]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": instruction}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer.encode(text + begin, add_special_tokens=False)


def test_it_was_unpacked_well(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=9)
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize("name", PROMPTS)
def test_lookup_where_the_answer_repeats_its_source_and_where_it_does_not(smollm2, name):
    model, tokenizer = smollm2
    options = {"max_tokens": TOKENS if "prose" not in name else 24}
    prompt = prompt_of(name, tokenizer)
    expected = list(mlx_lm.stream_generate(model, tokenizer, prompt, **options))
    got = list(mlx_spec.stream_generate(model, tokenizer, prompt, num_draft_tokens=16, **options))
    assert [r.token for r in got] == [r.token for r in expected]
    stats = got[-1].spec
    assert stats.kind == "lookup"
    if "prose" in name:
        assert stats.drafted < 0.5 * stats.rounds
    else:
        assert stats.tokens_per_round >= 2.5
