"""Each family of models with each kind of drafter under each law: the table in the README."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler
from test_eagle3 import head_for

import mlx_spec
from mlx_spec.drafters.combined import Combined
from mlx_spec.drafters.draft_model import DraftModel
from mlx_spec.drafters.eagle3 import Eagle3Drafter
from mlx_spec.drafters.lookup import Lookup
from models import DEEPSEEK, EAGLE, pair

FAMILIES = {
    "qwen": "qwen3-5-trained",
    "deepseek": DEEPSEEK,
    "gemma4": "gemma4-dense-trained",
    "other": EAGLE,
}
KINDS = ("own", "eagle3", "draft-model", "lookup", "combined")
SAMPLERS = {  # by law; under `ratio` so cold that the distribution is one token
    "greedy": {},
    "stock": {"temp": 0.8, "top_p": 0.9},
    "seed": {"temp": 0.8, "top_p": 0.9},
    "ratio": {"temp": 0.001},
}
TOKENS = 24
CELLS = [
    (family, kind, law)
    for family in FAMILIES
    for kind in KINDS
    for law in SAMPLERS
    if (family, kind) != ("other", "own")
]


def drafter_for(family: str, kind: str):
    p = pair(FAMILIES[family])
    match kind:
        case "own":
            return p.drafter
        case "eagle3" if family == "other":
            return p.drafter
        case "eagle3":  # nobody has trained one, so it has random weights
            return Eagle3Drafter(head_for(p.model), p.target)
        case "draft-model":  # the model itself
            return DraftModel(p.model, p.target)
        case "lookup":
            return Lookup()
    return Combined(Lookup(4), p.drafter)


def generation(generate, family: str, law: str, **options):
    """From a prompt in which the text is found again."""
    p = pair(FAMILIES[family])
    mx.random.seed(7)
    sampler = make_sampler(**SAMPLERS[law]) if SAMPLERS[law] else None
    prompt = p.prompt + start(family) + p.prompt
    return list(
        generate(p.model, p.tokenizer, prompt, max_tokens=TOKENS, sampler=sampler, **options)
    )


@cache
def start(family: str) -> list[int]:
    """How the greedy text goes on after the prompt of the checkpoint."""
    p = pair(FAMILIES[family])
    responses = mlx_lm.stream_generate(p.model, p.tokenizer, p.prompt, max_tokens=12)
    return [r.token for r in responses]


@cache
def plain(family: str, law: str) -> tuple[int, ...]:
    """What must come out: mlx_lm's own text, but for `seed` that without drafts."""
    p = pair(FAMILIES[family])
    if law == "seed":
        off = {"draft_model": p.drafter, "num_draft_tokens": 0, "sampling": "seed"}
        responses = generation(mlx_spec.stream_generate, family, law, **off)
    else:
        responses = generation(mlx_lm.stream_generate, family, law)
    return tuple(r.token for r in responses)


@pytest.mark.parametrize(("family", "kind", "law"), CELLS)
def test_the_text(family, kind, law):
    responses = generation(
        mlx_spec.stream_generate,
        family,
        law,
        draft_model=drafter_for(family, kind),
        num_draft_tokens=3,
        sampling="auto" if law == "greedy" else law,
    )
    assert tuple(r.token for r in responses) == plain(family, law)
    stats = responses[-1].spec
    assert stats.sampling == law
    assert stats.drafted > 0
    random_head = kind == "eagle3" and family != "other"
    if not random_head and law != "stock":  # under which drafts are right less often
        assert stats.accepted > 0


def test_the_table_in_the_readme():
    """Names a kind for each family exactly where there are cells."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    table = {}
    for row in rows:
        family, _, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        if family.strip("`") in FAMILIES:
            table |= {(family.strip("`"), kind): c for kind, c in zip(KINDS, cells, strict=True)}
    laws = ", ".join(SAMPLERS)
    there = {(family, kind) for family, kind, _ in CELLS}
    assert table == {
        (family, kind): laws if (family, kind) in there else "-"
        for family in FAMILIES
        for kind in KINDS
    }
