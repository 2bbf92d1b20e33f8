"""A reduced draft vocabulary: only the likeliest tokens are proposed.

The drafter's output matrix is then read in part, which is most of what a draft reads. What is
verified is another matter: the target sees all tokens, so that the text is the same.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.candidates import Candidates
from mlx_spec.errors import Incompatible


def size_of(config: dict[str, Any]) -> int | None:
    """How many tokens a drafter's config.json allows; None for all of them."""
    record = (config.get("mlx_spec") or {}).get("draft_vocab")
    return None if record is None else record["size"]


Linear = Callable[[mx.array], mx.array]


class DraftVocab(nn.Module):
    """Attributes, as tensors of the drafter:
    ids: (N,) int32, ascending: the tokens that are proposed.
    counts: (N,) int32: how often each of them was seen in the text that decided.
    """

    def __init__(self, size: int):
        super().__init__()
        self.ids = mx.zeros((size,), mx.int32)
        self.counts = mx.zeros((size,), mx.int32)

    def restrict(self, matrix: nn.Module, vocab_size: int) -> Callable[[mx.array], Candidates]:
        """The product with the rows of these tokens, (1, H) -> Candidates."""
        ids = self.ids.astype(mx.uint32)
        part = rows_of(matrix, ids)
        return lambda x: Candidates(part(x), ids, vocab_size)


def rows_of(matrix: nn.Module, ids: mx.array) -> Linear:
    """A product with some rows of an output matrix or an embedding, quantised or not: packed
    rows stay packed.

    Raises: Incompatible for another kind of matrix.
    """
    kinds = (nn.Linear, nn.Embedding, nn.QuantizedLinear, nn.QuantizedEmbedding)
    parts: dict[str, Any] = dict(matrix)
    if type(matrix) not in kinds or "bias" in parts:
        raise Incompatible(
            f"The output matrix is a {type(matrix).__name__}, of which a draft vocabulary cannot "
            "take rows; convert the drafter without --draft-vocab."
        )
    weight = parts["weight"][ids]
    if not isinstance(matrix, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return lambda x: x @ weight.T
    scales, biases = parts["scales"][ids], parts.get("biases")
    biases = None if biases is None else biases[ids]
    packing = {"group_size": matrix.group_size, "bits": matrix.bits, "mode": matrix.mode}
    return lambda x: mx.quantized_matmul(x, weight, scales, biases, transpose=True, **packing)
