"""What the stages train on: rows of the corpus, and rows that the trunk wrote."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .loop import Recipe
from .pair import Pair, Trunk
from .tokenizer import encode, windows


@dataclass(frozen=True)
class Encoded:
    """Token ids of the corpus."""

    text: list[list[int]]
    chat: list[list[int]]
    separator: int

    def rows(self, length: int, seed: int) -> Tensor:
        """One epoch of shuffled rows (N, length); text and chat rows keep their shares."""
        text = windows(self.text, self.separator, length, seed)
        chats = windows(self.chat, self.separator, length, seed + 1)
        rows = torch.cat([text, chats])
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + 2))]

    def batches(self, rows: int, length: int, seed: int) -> Iterator[Tensor]:
        while True:
            yield from self.rows(length, seed).split(rows)
            seed += 1000


@torch.no_grad()
def generate(
    trunk: Trunk, prompts: list[list[int]], length: int, temperature: float, seed: int = 0
) -> Tensor:
    """Continue the prompts to `length` ids each, (B, length). Temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    caches: list[dict[str, Tensor]] = [{} for _ in trunk.layers]
    for t in range(length - 1):
        logits = trunk.logits(trunk.step(ids[:, t], caches))
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            weights = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(weights, 1, generator=generator)[:, 0]
        ids[:, t + 1] = torch.where(t + 1 < given, ids[:, t + 1], chosen)
    return ids


def chat_prompts(
    tokenizer: Tokenizer, examples: list[str], marker: str, longest: int
) -> list[list[int]]:
    """The examples up to the marker, where the answer begins, if they are not too long."""
    prompts = encode(tokenizer, [e[: e.index(marker) + len(marker)] for e in examples])
    return [prompt for prompt in prompts if len(prompt) <= longest]


def self_text(model: Pair, data: Encoded, chats: list[list[int]], recipe: Recipe) -> Tensor:
    """Rows written by the trunk: half greedy, half at temperature 0.8; a third are chats."""
    batch, longest = 128, 48
    rows = math.ceil(recipe.self_steps * recipe.self_rows / 2)  # each row is used twice
    starts = data.rows(longest, 71)[:, : longest - 8].tolist()
    written = []
    for i in range(math.ceil(rows / batch)):
        texts = starts[i * batch : i * batch + batch - batch // 3]
        # From 8 to `longest - 8` ids of text, so that drafts are learned right after a start.
        prompts = [text[: 8 + j % (longest - 15)] for j, text in enumerate(texts)]
        prompts += chats[i * (batch // 3) : (i + 1) * (batch // 3)]
        length = recipe.self_length + recipe.depth
        written.append(generate(model.trunk, prompts, length, 0.8 * (i % 2), seed=i))
    return torch.cat(written)


def shuffled(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        yield from rows[order].split(size)
        seed += 1000
