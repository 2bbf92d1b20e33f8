"""NextN ("MTP") heads beside their targets, whatever their layers are: how they learn and draft.

For a committed token x[t+1] and the target's hidden state h[t] (after its final norm), a head gives
m[t], and lm_head of it the logits of x[t+2]. Of lm_head, a draft vocabulary leaves some rows only.
A further draft feeds back m in place of h. Several layers follow DeepSeek-V3 (arXiv 2412.19437,
section 2.2): layer k pairs layer k-1's m[t] with x[t+1+k].
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache

from mlx_spec.candidates import Candidates
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.draft_vocab import DraftVocab
from mlx_spec.errors import Incompatible
from mlx_spec.targets.target import HiddenTarget


class NextNHead(nn.Module):
    """One or more layers, each with its own keys and values.

    Attributes:
        args: its configuration: `hidden_size`, `vocab_size`, and what else there is of the
            following (`dedicated_embedding`, `dedicated_lm_head`, `draft_vocab` in tokens).
    """

    args: Any
    layers: list[Any]
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    draft_vocab: DraftVocab

    def __call__(
        self, embeddings: mx.array, hidden: mx.array, layer: int, cache: KVCache
    ) -> mx.array:
        """Rows of (embedding of the next token, hidden state) through one layer.

        Args: embeddings, hidden: (1, T, H). Returns m: (1, T, H), after the final norm.
        """
        raise NotImplementedError


class NextNDrafter(Drafter):
    """See `mlx_spec.drafters.Drafter`.

    The caches are one KVCache per layer. Layer k > 0 reads outputs of layer k-1, of which the
    newest waits for a token that is not known yet; these wait in one more ArraysCache.
    """

    kind = "nextn"
    learns = True

    def __init__(self, head: NextNHead, target: HiddenTarget):
        for name, own, theirs in [
            ("hidden size", head.args.hidden_size, target.hidden_size),
            ("vocabulary", head.args.vocab_size, target.vocab_size),
        ]:
            if own != theirs:
                raise Incompatible(
                    f"The drafter's {name} is {own} but the model's is {theirs}; "
                    "convert the drafter from the repository that this model was made from."
                )
        self.head = head
        self.embed = head.embed_tokens if head.args.dedicated_embedding else target.embed
        self.lm_head = head.lm_head if head.args.dedicated_lm_head else target.lm_head
        self.output_matrix = head.lm_head if head.args.dedicated_lm_head else target.output_matrix
        self.logits: Callable[[mx.array], mx.array | Candidates] = self.lm_head
        if head.args.draft_vocab is not None:
            self.logits = head.draft_vocab.restrict(self.output_matrix, target.vocab_size)

    def make_cache(self) -> list[Any]:
        layers = len(self.head.layers)
        waiting = [ArraysCache(layers - 1)] if layers > 1 else []
        return [KVCache() for _ in range(layers)] + waiting

    def position(self, caches: list[Any]) -> Any:
        layers = len(self.head.layers)
        offsets = [cache.offset for cache in caches[:layers]]
        return offsets, [list(waiting.cache) for waiting in caches[layers:]]

    def rewind(self, caches: list[Any], position: Any) -> None:
        offsets, waiting = position
        for cache, offset in zip(caches, offsets, strict=False):
            cache.offset = offset
        for cache, arrays in zip(caches[len(offsets) :], waiting, strict=True):
            cache.cache = list(arrays)

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        self._learn(tokens, hidden, caches)

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        layers = len(self.head.layers)
        m = self._learn(tokens, hidden, caches)  # (1, 1, H)
        learnt = self.position(caches)
        drafts: list[mx.array] = []
        while True:
            logits = self.logits(m[:, -1])  # (1, V)
            drafts.append(pick(logits, drafts))
            k = len(drafts)
            if k == n:
                break
            if 1 < k < layers and (waiting := caches[layers][k - 1]) is not None:
                m = mx.concatenate([waiting, m], axis=1)
            elif k >= layers:
                m = m[:, -1:]
            rows = drafts[-m.shape[1] :]
            m = self._forward(k % layers, mx.concatenate(rows), m, caches)
        self.rewind(caches, learnt)
        return drafts

    def _learn(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> mx.array:
        """Returns the newest m of layer 0, (1, 1, H): it predicts the next token."""
        assert hidden is not None
        layers = len(self.head.layers)
        m = self._forward(0, tokens, hidden, caches)
        newest = m[:, -1:]
        for k in range(1, layers):
            waiting = caches[layers]
            if waiting[k - 1] is not None:
                m = mx.concatenate([waiting[k - 1], m], axis=1)
            waiting[k - 1], m = m[:, -1:], m[:, :-1]
            rows = m.shape[1]
            if rows == 0:
                break
            m = self._forward(k, tokens[-rows:], m, caches)
        return newest

    def _forward(
        self, layer: int, tokens: mx.array, hidden: mx.array, caches: list[Any]
    ) -> mx.array:
        return self.head(self.embed(tokens[None]), hidden, layer, caches[layer])
