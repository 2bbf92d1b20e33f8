"""Chooses a drafter's reduced vocabulary: the tokens that are likeliest in a text."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.bench.prompts import CLASSES, read_class, read_file
from mlx_spec.convert.checkpoint import Checkpoint
from mlx_spec.convert.head import Head
from mlx_spec.convert.tokenizer import load_tokenizer
from mlx_spec.convert.weights import Parameter, Weights
from mlx_spec.errors import BadArguments, CheckpointError, Incompatible

IDS, COUNTS = "draft_vocab.ids", "draft_vocab.counts"
NAMES = (IDS, COUNTS)
INTEGERS = ("I32",)
BUILTIN = "builtin"
BLOCK = 64  # tokens
HELD_OUT = 10  # one block of so many is not counted, but measured
MATRIX = r"^((?!.*mtp\.).*\.)?{}\.(weight|scales|biases)$"


@dataclass(frozen=True)
class Calibration:
    """What was counted.

    Attributes:
        source: "builtin", or the name of a file.
        counts: (V,) how often each token was seen.
        held_out: (T,) the tokens that were not counted.
        always: tokens that are proposed however seldom they were seen: those that end a text, and
            those that a chat template writes or a tokenizer calls special.
    """

    source: str
    counts: np.ndarray
    held_out: np.ndarray
    always: frozenset[int]


@dataclass(frozen=True)
class Savings:
    """A reduced vocabulary, and what it saves and costs.

    Attributes:
        rows, all_rows: of the output matrix.
        row_bytes: that one of them takes; None where the files do not tell.
        head_bytes: that a draft reads beside the output matrix.
        ceiling: the share of the held-out tokens that can be proposed at all.
    """

    source: str
    rows: int
    all_rows: int
    row_bytes: float | None
    head_bytes: float
    ceiling: float

    def as_text(self) -> str:
        """Lines for people."""
        cost = f"{self.all_rows} -> {self.rows} rows of the output matrix"
        if self.row_bytes is not None:
            before, after = (
                (self.head_bytes + rows * self.row_bytes) / 1e6
                for rows in (self.all_rows, self.rows)
            )
            cost += f", {before:.2f} -> {after:.2f} MB read a draft"
        return (
            f"Draft vocabulary: the {self.rows} likeliest of {self.all_rows} tokens, by "
            f"{self.source}\nAcceptance ceiling: {self.ceiling:.3f}, their share of text that was "
            f"not counted\nDrafting cost: {cost}"
        )


def read_text(path: Path, vocab_size: int, source: str | None) -> Calibration:
    """Count the tokens of a text.

    Args:
        path: directory of the tokenizer.
        source: a text file; None or "builtin": the prompts of the benchmark.

    Raises: BadArguments for a file that cannot be read, or a text that is too short.
    """
    if source in (None, BUILTIN):
        name, text = BUILTIN, "\n\n".join(read_class(name).text for name in CLASSES)
    else:
        prompt = read_file(source)
        name, text = prompt.prompt_class, prompt.text
    tokenizer = load_tokenizer(path)
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    if tokens.size < BLOCK * HELD_OUT:
        raise BadArguments(
            f"{source} has {tokens.size} tokens, which is too few to count; "
            f"give a text of {BLOCK * HELD_OUT} at least."
        )
    blocks = np.split(tokens, range(BLOCK, tokens.size, BLOCK))
    counted = [block for i, block in enumerate(blocks, start=1) if i % HELD_OUT]
    return Calibration(
        name,
        np.bincount(np.concatenate(counted), minlength=vocab_size),
        np.concatenate(blocks[HELD_OUT - 1 :: HELD_OUT]),
        _always(tokenizer, vocab_size),
    )


def _always(tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Not all added tokens, as some tokenizers hold thousands in reserve."""
    template = str(tokenizer.chat_template or "")
    added = tokenizer.get_added_vocab().items()
    written = {number for token, number in added if token in template}
    found = written | {*tokenizer.eos_token_ids, *tokenizer.all_special_ids}
    return frozenset(number for number in found if number < vocab_size)


def likeliest(calibration: Calibration, size: int) -> np.ndarray:
    """The ids of so many tokens, ascending: those that always are among them, then those that were
    seen most often; of equally frequent ones the lower ids, which tokenizers gave to what they
    merged earlier.

    Raises: BadArguments for a size that leaves nothing out, or no choice.
    """
    vocab_size, always = calibration.counts.size, sorted(calibration.always)
    if not len(always) < size < vocab_size:
        raise BadArguments(
            f"A draft vocabulary of {size} tokens is not possible; it must have more than "
            f"{len(always)} and fewer than the model's {vocab_size}."
        )
    order = np.argsort(-calibration.counts, kind="stable")
    others = order[~np.isin(order, always)]
    return np.sort(np.concatenate([always, others[: size - len(always)]])).astype(np.int32)


def check_all_tokens(head: Head) -> None:
    """Raises Incompatible for a drafter whose output is restricted already."""
    if head.config.get("use_ordered_embeddings"):
        raise Incompatible(
            "This assistant looks at the tokens of its likeliest clusters only, so a draft "
            "vocabulary saves nothing; leave --draft-vocab out"
        )
    if "draft_vocab_size" in head.config:
        raise Incompatible(
            "An EAGLE-3 head was trained with a vocabulary of its own; leave --draft-vocab out"
        )


def restrict(head: Head, size: int, calibration: Calibration) -> Head:
    """The same drafter, which proposes so many tokens only. It is one that `check_all_tokens` lets
    pass.

    Raises: BadArguments for the size.
    """
    ids = likeliest(calibration, size)
    counts = calibration.counts[ids].astype(np.int32)
    record = {
        "size": size,
        "calibration": calibration.source,
        "counted_tokens": int(calibration.counts.sum()),
        "held_out_tokens": int(calibration.held_out.size),
        "coverage": float(np.isin(calibration.held_out, ids).mean()),
    }
    return replace(
        head,
        config=head.config | {"mlx_spec": head.config["mlx_spec"] | {"draft_vocab": record}},
        weights=Weights(
            {
                **head.weights.parameters,
                IDS: Parameter.of(mx.array(ids)),
                COUNTS: Parameter.of(mx.array(counts)),
            }
        ),
    )


def savings(head: Head, model: Checkpoint) -> Savings:
    """Of a head that was restricted; `model` has the output matrix, unless the head has."""
    record, vocab_size = head.config["mlx_spec"]["draft_vocab"], vocab_size_of(head)
    own = {key: p.nbytes for key, p in head.weights.parameters.items() if key not in NAMES}
    matrix = [key for key in own if key.startswith(("lm_head.", "model.embed_tokens."))]
    matrix_bytes = sum(own[key] for key in matrix) if matrix else _bytes_in(model)
    text = head.config["text_config"]
    experts = text.get("num_experts") or text.get("n_routed_experts")
    head_bytes = 0.0
    for key, size in own.items():
        if ".switch_mlp." in key:
            head_bytes += size * text["num_experts_per_tok"] / experts
        elif key not in matrix and not key.startswith("embed_tokens."):
            head_bytes += size
    return Savings(
        record["calibration"],
        record["size"],
        vocab_size,
        None if matrix_bytes is None else matrix_bytes / vocab_size,
        head_bytes,
        record["coverage"],
    )


def _bytes_in(model: Checkpoint) -> int | None:
    """Of a model's output matrix; None where the shard that holds it is not here."""
    text = model.section("text_config")
    tied = model.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    pattern = re.compile(MATRIX.format("embed_tokens" if tied else "lm_head"))
    try:
        tensors = [model.tensor(name) for name in model.names if pattern.match(name)]
    except CheckpointError:
        return None
    return sum(tensor.nbytes for tensor in tensors) or None


def vocab_size_of(head: Head) -> int:
    return head.config["text_config"]["vocab_size"]


# ---- reading -------------------------------------------------------------------------------------


def recorded(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a drafter directory's `mlx_spec` block says of a draft vocabulary, as an addition to
    that of another; empty for all tokens."""
    record = checkpoint.section("mlx_spec").get("draft_vocab")
    return {} if record is None else {"draft_vocab": record}


def checked(weights: Weights, checkpoint: Checkpoint, vocab_size: int) -> Weights:
    """The same parameters, of which the ids of a draft vocabulary are checked when they are made:
    CheckpointError if they are no part of the vocabulary in ascending order."""
    if IDS not in weights:
        return weights
    stored = weights.parameters[IDS]

    def make() -> mx.array:
        ids = np.array(stored.value())
        if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
            raise CheckpointError(
                f"{IDS} in {checkpoint.path / checkpoint.tensor(IDS).file} are not ascending ids "
                f"of a vocabulary of {vocab_size} tokens: convert the drafter again"
            )
        return mx.array(ids)

    return Weights({**weights.parameters, IDS: replace(stored, make=make)})
