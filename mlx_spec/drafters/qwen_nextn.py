"""The NextN ("MTP") head of Qwen3-Next, Qwen3.5 and Qwen3.6.

For a committed token x[t+1] and the target's hidden state h[t] (after its final norm):

    u = fc([norm_e(E[x[t+1]]) ; norm_h(h[t])])      embedding first
    m = norm(decoder_layer(u))                      gated full attention, own KV cache
    logits of x[t+2] = lm_head(m)

E and lm_head are the target's unless the checkpoint brings its own. Of lm_head, a draft vocabulary
leaves some rows only. A further draft feeds back m in place of h. Formula: vLLM's
qwen3_next_mtp.py and qwen3_5_mtp.py; several layers follow DeepSeek-V3 (arXiv 2412.19437, section
2.2): layer k pairs layer k-1's m[t] with x[t+1+k].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from mlx_spec.candidates import Candidates
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.draft_vocab import DraftVocab, size_of
from mlx_spec.errors import Incompatible
from mlx_spec.targets.target import HiddenTarget


@dataclass
class ModelArgs(TextModelArgs):
    """The target's text configuration; see `from_config` for what is added to it."""

    mtp_num_hidden_layers: int = 1
    dedicated_embedding: bool = False
    dedicated_lm_head: bool = False
    draft_vocab: int | None = None  # tokens

    @classmethod
    def from_config(cls, config: dict[str, Any], weights: dict[str, Any]) -> "ModelArgs":
        """`config` is the drafter's config.json. What the weights hold decides over what
        the configuration says: number of layers, dense or MoE, dedicated matrices."""
        text = dict(config.get("text_config", config))
        if "rope_parameters" not in text:  # Qwen3-Next writes them flat
            text["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": text.get("rope_theta", 10000.0),
                "partial_rotary_factor": text.get("partial_rotary_factor", 0.25),
            } | (text.get("rope_scaling") or {})
        text["rope_parameters"] = dict(text["rope_parameters"])
        layers = {key.split(".")[1] for key in weights if key.startswith("layers.")}
        text["mtp_num_hidden_layers"] = len(layers)
        text["dedicated_embedding"] = "embed_tokens.weight" in weights
        text["dedicated_lm_head"] = "lm_head.weight" in weights
        text["draft_vocab"] = size_of(config)
        if "layers.0.mlp.gate.weight" not in weights:
            text["num_experts"] = 0
        return cls.from_dict(text)


class QwenNextN(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        full_attention = args.full_attention_interval - 1
        self.layers = [
            DecoderLayer(args, layer_idx=full_attention) for _ in range(args.mtp_num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.dedicated_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        if args.dedicated_lm_head:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if args.draft_vocab is not None:
            self.draft_vocab = DraftVocab(args.draft_vocab)

    def __call__(
        self, embeddings: mx.array, hidden: mx.array, layer: int, cache: KVCache
    ) -> mx.array:
        """Rows of (embedding of the next token, hidden state) through one layer.

        Args: embeddings, hidden: (1, T, H). Returns m: (1, T, H), after the final norm.
        """
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        u = self.fc(mx.concatenate(pair, axis=-1))  # (1, T, H)
        u = self.layers[layer](u, mask=create_attention_mask(u, cache), cache=cache)
        return self.norm(u)

    @property
    def quant_predicate(self):
        """As in mlx-lm, the routers of a mixture of experts keep 8 bits. So does `fc`, through
        which passes all that the head knows of the target; fp8 packs leave it in bfloat16."""

        def predicate(path: str, _: nn.Module) -> bool | dict[str, int]:
            if path == "fc" or path.endswith(("mlp.gate", "shared_expert_gate")):
                return {"group_size": 64, "bits": 8}
            return True

        return predicate


class NextNDrafter(Drafter):
    """A `QwenNextN` head beside its target; see `mlx_spec.drafters.Drafter`.

    The caches are one KVCache per layer. Layer k > 0 reads outputs of layer k-1, of which the
    newest waits for a token that is not known yet; these wait in one more ArraysCache.
    """

    kind = "nextn"
    learns = True

    def __init__(self, head: QwenNextN, target: HiddenTarget):
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
