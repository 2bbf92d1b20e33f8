"""A smaller model as the drafter: what it proposes, on caches of each kind, and for which model."""

import json
import shutil
from functools import cache

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import rename_token
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from test_batch import compare, insert
from tiny_models import LLAMA, VOCAB, prompt_of, tiny

import mlx_spec
from mlx_spec.accept import Greedy
from mlx_spec.drafters.draft_model import DraftModel
from mlx_spec.drafters.wrapped import Wrapped
from mlx_spec.errors import Incompatible, NotEngaged
from mlx_spec.load import draft_model_of, load, pairing_of
from mlx_spec.sliding_window import in_time_order
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from models import checkpoint_path, pair

QWEN = "qwen3-5-trained"  # recurrent layers
GEMMA = "gemma4-dense-trained"  # windows of 8 tokens
TOKENS = 30


def model_of(name):
    return pair(name).model if name in (QWEN, GEMMA) else tiny(name)


def drafter_of(draft, target):
    return DraftModel(model_of(draft), target_for(model_of(target)))


@cache
def plain(name, start=20, tokens=TOKENS):
    prompt = mx.array(prompt_of(name, start))
    steps = generate_step(prompt, model_of(name), max_tokens=tokens)
    return [token for token, _ in steps]


class Checked(Wrapped):
    """Compares all proposals with what the draft model decodes, as stock, after the whole text."""

    def __init__(self, inner, text):
        super().__init__(inner)
        self.whole = text
        self.rounds = 0

    def draft(self, tokens, hidden, n, pick, caches, target_caches):
        drafts = self.inner.draft(tokens, hidden, n, pick, caches, target_caches)
        known = self.whole[: max(c.offset for c in target_caches if hasattr(c, "offset")) + 1]
        expected = generate_step(mx.array(known), self.head, max_tokens=n)
        proposed = [draft.item() for draft in drafts]
        assert proposed == [token % self.inner.vocab_size for token, _ in expected]
        self.rounds += 1
        return drafts


@pytest.mark.parametrize(
    ("target", "draft", "depth"),
    [
        (LLAMA, QWEN, 4),
        (QWEN, LLAMA, 1),
        (LLAMA, GEMMA, 3),
        (GEMMA, QWEN, 1),
        ("gemma3_text", "qwen3", 4),
        ("qwen3", "gemma3_text", 4),
    ],
)
def test_the_text_is_stocks_and_proposals_are_the_draft_models_own(target, draft, depth):
    """After each roll-back. Random and unrelated models: nearly all drafts are wrong."""
    text = prompt_of(target) + plain(target)
    drafter = Checked(drafter_of(draft, target), text)
    steps = mlx_spec.speculative_generate_step(
        mx.array(prompt_of(target)),
        model_of(target),
        drafter,
        num_draft_tokens=depth,
        max_tokens=TOKENS,
        prefill_step_size=7,
    )
    assert [token for token, *_ in steps] == plain(target)
    assert drafter.rounds > TOKENS // (depth + 1) - 2


@pytest.mark.parametrize("name", [QWEN, GEMMA, "gpt_oss"])
def test_a_model_that_drafts_for_itself_is_always_right(name):
    """All drafts are accepted, in a hybrid and past the windows of the others; one is wrong where
    the ring of the windows adds up in another order."""
    stats = SpecStats()
    steps = mlx_spec.speculative_generate_step(
        mx.array(prompt_of(name)),
        model_of(name),
        drafter_of(name, name),
        num_draft_tokens=5,
        max_tokens=TOKENS,
        stats=stats,
    )
    assert [token for token, *_ in steps] == plain(name)
    assert stats.accepted >= stats.drafted - 1 > 18
    assert stats.unprimed == 0


def test_what_is_rewound_is_forgotten():
    """Each kind of cache, also where it has grown in between."""
    for name in (QWEN, GEMMA, "gpt_oss", LLAMA):
        drafter = drafter_of(name, name)
        caches, expected = (in_time_order(drafter.make_cache()) for _ in range(2))
        prompt = mx.array(prompt_of(name, 30))
        for held in (caches, expected):
            drafter.extend(prompt, None, held)
        before = drafter.position(caches)
        for length in (3, 300):
            drafter.extend(mx.array([5] * length), None, caches)
            drafter.rewind(caches, before)
        next_one = mx.array([7])
        got, wanted = (
            drafter.draft(next_one, None, 6, Greedy().pick, held, []) for held in (caches, expected)
        )
        assert mx.concatenate(got).tolist() == mx.concatenate(wanted).tolist()


@pytest.mark.parametrize(("own", "theirs"), [(VOCAB + 8, VOCAB), (VOCAB - 8, VOCAB)])
@pytest.mark.parametrize("sampling", ["seed", "ratio", "stock"])
def test_a_vocabulary_that_is_padded_otherwise(own, theirs, sampling):
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": own}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "rms_norm_eps": 1e-6}
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    target = target_for(tiny("qwen3"))
    assert target.vocab_size == theirs
    stats = SpecStats()
    steps = mlx_spec.speculative_generate_step(
        mx.array(prompt_of("qwen3")),
        tiny("qwen3"),
        DraftModel(model, target),
        num_draft_tokens=3,
        max_tokens=20,
        sampler=make_sampler(0.8, top_p=0.9),
        sampling=sampling,
        stats=stats,
    )
    assert all(token < theirs for token, *_ in steps)
    assert stats.drafted > 20


def test_caches_that_cannot_be_put_back_are_refused():
    with pytest.raises(Incompatible, match="without attention"):
        drafter_of("mamba", "qwen3")


def test_further_turns_with_caches_that_the_caller_made():
    """As mlx_lm takes them: the model's and the draft model's in one list; or the model's alone."""
    prompt, more = prompt_of(GEMMA), prompt_of(GEMMA, 7)
    model, draft = model_of(GEMMA), model_of(QWEN)
    first = plain(GEMMA)[:12]
    expected = generate_step(mx.array(prompt + first + more), model, max_tokens=20)
    expected = [token for token, _ in expected]
    for both in (True, False):
        cache = make_prompt_cache(model) + (make_prompt_cache(draft) if both else [])
        kinds = [type(c) for c in cache]
        drafter = drafter_of(QWEN, GEMMA)
        got = []
        for tokens, count in ((prompt, 12), (more, 20)):
            stats = SpecStats()
            steps = mlx_spec.speculative_generate_step(
                mx.array(tokens), model, Checked(drafter, prompt + first + more + expected)
                if both else drafter,
                prompt_cache=cache, num_draft_tokens=3, max_tokens=count, stats=stats,
            )  # fmt: skip
            got += [token for token, *_ in steps]
        assert got == first + expected
        assert [type(c) for c in cache] == kinds
        assert both or stats.unprimed == 0


def test_alone_before_and_after_a_batch():
    """It learns what was decoded in the batch: the model drafts for itself, and is always right."""
    p = pair(QWEN)
    events = {0: insert(p.prompt, TOKENS), 6: insert(p.prompt[:9], 6)}
    first = compare(p, events, drafter_of(QWEN, QWEN)).stats[0]
    assert first.batched > 0
    assert first.unprimed == 0
    assert first.accepted == first.drafted > 10


# Which model may draft for which


def make_llama(path, layers):
    """A random model with the reference tokenizer."""
    path.mkdir()
    config = json.loads((checkpoint_path(LLAMA) / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 64}
    (path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint_path(QWEN) / file, path)
    mx.random.seed(1)
    llama.Model(llama.ModelArgs.from_dict(config)).save_weights(str(path / "model.safetensors"))
    return path


def test_loaded_by_its_name(tmp_path):
    target = shutil.copytree(checkpoint_path(QWEN), tmp_path / "target")
    draft = make_llama(tmp_path / "draft", 1)
    model, tokenizer = load(str(target), draft_model=str(draft))
    assert pairing_of(model).path == draft
    options = {"max_tokens": 12, "num_draft_tokens": 3}
    got = list(mlx_spec.stream_generate(model, tokenizer, [5, 6, 7], **options))
    expected = list(mlx_lm.stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12))
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.kind == "draft-model"
    assert got[-1].spec.drafted > 0
    rename_token(draft, "a", "aa")
    with pytest.raises(Incompatible, match="is 'aa' in the drafter's tokenizer and 'a' in the mod"):
        load(str(target), draft_model=str(draft))


def test_a_model_that_was_loaded_by_mlx_lm_is_taken_as_it_is():
    p, draft = pair(QWEN), tiny(LLAMA)
    options = {"max_tokens": 12, "num_draft_tokens": 3, "draft_model": draft}
    got = list(mlx_spec.stream_generate(p.model, p.tokenizer, p.prompt, **options))
    expected = list(mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=12))
    assert [r.token for r in got] == [r.token for r in expected]
    assert got[-1].spec.kind == "draft-model"
    assert draft_model_of(draft, p.target) is draft_model_of(draft, p.target)


def test_one_that_cannot_draft_is_a_reason():
    p = pair(QWEN)
    options = {"max_tokens": 5, "draft_model": tiny("mamba")}
    got = list(mlx_spec.stream_generate(p.model, p.tokenizer, p.prompt, **options))
    assert got[-1].spec.reason == "unsupported-cache"
    with pytest.raises(NotEngaged, match="without attention"):
        list(mlx_spec.stream_generate(p.model, p.tokenizer, p.prompt, require_spec=True, **options))
