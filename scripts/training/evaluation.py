"""How good the trunk is, and how often a draft is right."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .batches import chat_prompts, generate
from .corpus import Corpus
from .pair import Chooser, Pair
from .tokenizer import encode, windows


@dataclass(frozen=True)
class Acceptance:
    """Drafts by depth: how often a draft was right when all drafts before it were right."""

    offered: list[int]
    accepted: list[int]

    @classmethod
    def count(cls, right: Tensor) -> "Acceptance":
        """right (rounds, depth): whether each draft is the trunk's choice."""
        accepted = right.long().cumprod(-1).sum(0).tolist()
        return cls([len(right), *accepted[:-1]], accepted)

    @property
    def rates(self) -> list[float]:
        return [a / max(1, o) for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        return 1 + sum(self.accepted) / self.offered[0]


@torch.no_grad()
def text_metrics(pair: Pair, rows: Tensor, depth: int) -> tuple[float, dict[str, Acceptance]]:
    """Trunk loss in nats per token, and acceptance with the chains fed from the text."""
    length, losses = rows.shape[1] - depth, []
    right: dict[str, list[Tensor]] = {remark: [] for remark in pair.choosers()}
    for ids in rows.split(8):
        reading = pair.trunk(ids)
        logits = pair.trunk.logits(reading.hidden)
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
        choices = logits.argmax(-1)
        states = list(pair.follow(reading[:, :length], ids, depth))
        for remark, choose in pair.choosers().items():
            found = [choose(s) == choices[:, k : k + length] for k, s in enumerate(states, 1)]
            right[remark].append(torch.stack(found, -1).flatten(0, 1))
    counts = {remark: Acceptance.count(torch.cat(found)) for remark, found in right.items()}
    return sum(losses) / len(losses), counts


@torch.no_grad()
def continuations(pair: Pair, prompts: list[list[int]]) -> Tensor:
    """The trunk's own, greedily, (B, T), with the prompts."""
    return generate(pair.trunk, prompts, max(map(len, prompts)) + pair.decoded_tokens, 0)


@torch.no_grad()
def decoding_metrics(
    pair: Pair, prompts: list[list[int]], rows: Tensor, depth: int, eos: int, choose: Chooser
) -> Acceptance:
    """Greedy speculative decoding of every prompt, replayed on the trunk's own continuation."""
    length = rows.shape[1] - depth
    rounds = []
    for ids, prompt in zip(rows.split(1), prompts, strict=True):
        reading = pair.trunk(ids[:, : length - 1])
        drafts = pair.draft(reading, ids[:, :length], depth, choose)[0]
        ended = (ids[0, len(prompt) :] == eos).nonzero()
        stop = len(prompt) + (int(ended[0]) if len(ended) else pair.decoded_tokens)
        t = len(prompt) - 1  # h_t and x_{t+1} are known; the chain drafts x_{t+2}, ...
        while t + 1 + depth < min(stop, length):
            right = drafts[t] == ids[0, t + 2 : t + 2 + depth]
            rounds.append(right)
            t += 1 + int(right.long().cumprod(0).sum())
    return Acceptance.count(torch.stack(rounds))


@dataclass(frozen=True)
class Metrics:
    losses: dict[str, float]
    acceptance: dict[str, Acceptance]
    samples: list[tuple[str, str]]


SAMPLE_PROMPTS = (
    "def main(argv):\n",
    "import os\n\ndef read_file(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
)
SAMPLE_QUESTION = "Write the function read_file: Return the contents of a file."


def evaluate(pair: Pair, tokenizer: Tokenizer, corpus: Corpus, depth: int = 4) -> Metrics:
    vocabulary = pair.vocabulary
    separator = tokenizer.token_to_id(vocabulary.separator)
    eos = tokenizer.token_to_id(vocabulary.end_turn)
    text, chats = encode(tokenizer, corpus.held_out), encode(tokenizer, corpus.held_out_chat)
    losses, acceptance = {}, {}
    for name, documents in {"text": text, "chat": chats}.items():
        rows = windows(documents, separator, 512 + depth, 5)[:48]
        losses[name], counts = text_metrics(pair, rows, depth)
        for remark, count in counts.items():
            acceptance[f"held-out {name}, fed from it{remark}"] = count
    code = [ids[:32] for ids in windows(text, separator, 512, 7)[:48].tolist()]
    questions = chat_prompts(tokenizer, corpus.held_out_chat, vocabulary.answer, 48)[:48]
    for name, prompts in {"text": code, "chat": questions}.items():
        rows = continuations(pair, prompts)
        for remark, choose in pair.choosers().items():
            acceptance[f"greedy decoding, {name} prompts{remark}"] = decoding_metrics(
                pair, prompts, rows, depth, eos, choose
            )
    samples = []
    for prompt in (*SAMPLE_PROMPTS, vocabulary.question(SAMPLE_QUESTION)):
        ids = tokenizer.encode(prompt).ids
        new = generate(pair.trunk, [ids], len(ids) + 96, 0)[0, len(ids) :].tolist()
        new = new[: new.index(eos)] if eos in new else new
        samples.append((prompt, tokenizer.decode(new)))
    return Metrics(losses, acceptance, samples)


def report(metrics: Metrics) -> str:
    """The metrics as Markdown."""
    lines = [
        f"- held-out {name}: {loss:.3f} nats per token" for name, loss in metrics.losses.items()
    ]
    lines += [
        "",
        "| drafts | depth 1 | 2 | 3 | 4 | tokens per round |",
        "|---|---|---|---|---|---|",
    ]
    for name, counts in metrics.acceptance.items():
        cells = [
            f"{rate:.3f} ({a}/{o})"
            for rate, a, o in zip(counts.rates, counts.accepted, counts.offered, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {counts.tokens_per_round:.2f} |")
    for prompt, continuation in metrics.samples:
        lines += ["", "```", f"{prompt}>>> {continuation}", "```"]
    return "\n".join(lines)
