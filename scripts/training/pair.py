"""What the stages and the evaluation ask of a model: a trunk and a head that drafts for it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from .loop import Recipe
from .tokenizer import Vocabulary

KeysValues = tuple[Tensor, Tensor]  # two of (B, heads, T, head_dim)
Chooser = Callable[[Tensor], Tensor]  # head states (..., D) -> token ids (...)


@dataclass(frozen=True)
class Reading:
    """What the trunk made of ids (B, T), as far as a head may read it."""

    hidden: Tensor  # (B, T, D), after the final norm
    shared: dict[str, KeysValues] = field(default_factory=dict)  # by kind of layer

    def __getitem__(self, index: tuple[slice, slice]) -> "Reading":
        """Some rows and positions."""
        rows, positions = index
        shared = {
            kind: (k[rows, :, positions], v[rows, :, positions])
            for kind, (k, v) in self.shared.items()
        }
        return Reading(self.hidden[rows, positions], shared)


class Trunk(Protocol):
    layers: nn.ModuleList

    def __call__(self, ids: Tensor) -> Reading: ...

    def step(self, ids: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        """One token for every sequence: ids (B) -> hidden states (B, D)."""

    def embed(self, ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Chains(Protocol):
    """Chained drafts that start at every position of a batch at once."""

    def step(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """One row for every chain, (B, T, D) -> head states (B, T, D)."""


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a model directory but for the tokenizer."""

    tensors: dict[str, Tensor]
    config: dict[str, object]
    generation_config: dict[str, object]
    readme: str  # what the README says before the training


@dataclass(frozen=True)
class Notes:
    """What the README says of things that only this family has."""

    stage: str = ""
    losses: str = ""
    results: str = ""


class Pair(nn.Module, ABC):
    vocabulary: ClassVar[Vocabulary]
    decoded_tokens: ClassVar[int] = 128  # of a continuation, in the evaluation
    notes: ClassVar[Notes] = Notes()
    trunk: nn.Module
    head: nn.Module

    @classmethod
    @abstractmethod
    def create(cls) -> Self:
        """Initialised for training."""

    @classmethod
    @abstractmethod
    def load(cls, directory: Path) -> Self: ...

    @abstractmethod
    def checkpoints(self, tokenizer: Tokenizer) -> dict[str, Checkpoint]:
        """The directories to write, by what is appended to the trunk's name."""

    @abstractmethod
    def round_to_bfloat16(self, part: nn.Module) -> None:
        """Round to what the file will hold: later stages see the model as it is loaded."""

    @abstractmethod
    def chains(self, reading: Reading) -> Chains: ...

    @abstractmethod
    def draft_logits(self, state: Tensor) -> Tensor: ...

    def recycled(self, state: Tensor) -> Tensor:
        """What the next step of a chain takes for the trunk's hidden state."""
        return state

    def choosers(self) -> dict[str, Chooser]:
        """The ways to choose a draft that the evaluation compares, by a remark on each."""
        return {"": lambda state: self.draft_logits(state).argmax(-1)}

    def finish(self, batches: Iterator[Tensor], recipe: Recipe) -> dict[str, list[float]]:
        """Stages that only this family has. Returns their last losses."""
        return {}

    def follow(self, reading: Reading, ids: Tensor, depth: int) -> Iterator[Tensor]:
        """Head states at depths 1..depth with the chains fed from the text.

        The reading is of T positions, ids (B, T + depth); row t of depth k is fed x_{t+k}.
        """
        chains, hidden, length = self.chains(reading), reading.hidden, reading.hidden.shape[1]
        for k in range(1, depth + 1):
            state = chains.step(self.trunk.embed(ids[:, k : k + length]), hidden)
            yield state
            hidden = self.recycled(state)

    def draft(self, reading: Reading, ids: Tensor, depth: int, choose: Chooser) -> Tensor:
        """Drafts (B, T, depth) of every position; ids (B, T + 1) starts the chains."""
        chains, hidden, fed, drafts = self.chains(reading), reading.hidden, ids[:, 1:], []
        for _ in range(depth):
            state = chains.step(self.trunk.embed(fed), hidden)
            hidden, fed = self.recycled(state), choose(state)
            drafts.append(fed)
        return torch.stack(drafts, -1)
