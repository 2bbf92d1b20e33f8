"""Do a drafter and its model give the same ids to the same tokens?"""

import filecmp
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_lm import utils
from tokenizers import Tokenizer

from mlx_spec.errors import CheckpointError

FILE = "tokenizer.json"
Verdict = Literal["same", "differs", "unknown"]


@dataclass(frozen=True)
class Tokenizers:
    """What was found, and a clause that says it."""

    verdict: Verdict
    detail: str


def compare_tokenizers(drafter: Path, model: Path) -> Tokenizers:
    """Compares the tokenizer.json of two directories: their vocabularies, unless the files are
    the same.

    Raises:
        CheckpointError: one of them is damaged.
    """
    for path in (drafter, model):
        if not (path / FILE).is_file():
            return Tokenizers("unknown", f"{path} has no {FILE} to compare")
    if filecmp.cmp(drafter / FILE, model / FILE, shallow=False):
        return Tokenizers("same", "the same tokenizer")
    return compare_vocabularies(_vocabulary(drafter / FILE), _vocabulary(model / FILE))


def compare_vocabularies(drafter: dict[str, int], model: dict[str, int]) -> Tokenizers:
    """Compares ids by token."""
    own, theirs = ({(number, token) for token, number in ids.items()} for ids in (drafter, model))
    if own == theirs:
        return Tokenizers("same", "the same tokens in both tokenizers")
    first = min(number for number, _ in own ^ theirs)
    tokens = [sorted(token for number, token in ids if number == first) for ids in (own, theirs)]
    mine, others = (", ".join(map(repr, found)) or "no token" for found in tokens)
    return Tokenizers(
        "differs", f"id {first} is {mine} in the drafter's tokenizer and {others} in the model's"
    )


def load_tokenizer(path: Path) -> Any:
    """That of a model in a directory, as mlx_lm.load gives it: with the ends of a text that its
    configuration names."""
    ends = utils.load_config(path).get("eos_token_id")
    return utils.load_tokenizer(path, eos_token_ids=ends)


def _vocabulary(path: Path) -> dict[str, int]:
    """Ids of all tokens."""
    try:
        return Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # tokenizers raises nothing more special
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error
