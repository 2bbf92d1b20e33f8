"""Special tokens of a family, and a byte-level BPE tokenizer trained with them."""

from dataclasses import dataclass

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens and the chat format."""

    special: tuple[str, ...]
    special_first: bool  # lowest ids, else highest
    bos: str | None  # put before every document
    separator: str  # put after every document
    pad: str
    eos: str  # tokenizer's own
    begin_turn: str
    end_turn: str
    assistant: str  # role of the model
    template: str

    @property
    def answer(self) -> str:
        """The beginning of the model's turn."""
        return f"{self.begin_turn}{self.assistant}\n"

    def question(self, user: str) -> str:
        """A prompt: the user's turn and the beginning of the model's."""
        return f"{self.begin_turn}user\n{user}{self.end_turn}\n{self.answer}"

    def chat(self, user: str, assistant: str) -> str:
        return f"{self.question(user)}{assistant.rstrip()}{self.end_turn}\n"


def train_tokenizer(documents: list[str], size: int, vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE with Qwen's splitting rule and no text normalisation."""
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in vocabulary.special]
    trainer = trainers.BpeTrainer(
        vocab_size=size if vocabulary.special_first else size - len(special),
        special_tokens=special if vocabulary.special_first else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(special)
    if bos := vocabulary.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(documents)]


def windows(documents: list[list[int]], separator: int, length: int, seed: int) -> Tensor:
    """Shuffle the documents, join them and cut the stream into rows of `length` ids."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    ids: list[int] = []
    for i in order.tolist():
        ids += documents[i] + [separator]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
