"""The NextN ("MTP") head of Qwen3-Next, Qwen3.5 and Qwen3.6.

For a committed token x[t+1] and the target's hidden state h[t] (after its final norm):

    u = fc([norm_e(E[x[t+1]]) ; norm_h(h[t])])      embedding first
    m = norm(decoder_layer(u))                      gated full attention, own KV cache
    logits of x[t+2] = lm_head(m)

E and lm_head are the target's unless the checkpoint brings its own. Formula: vLLM's
qwen3_next_mtp.py and qwen3_5_mtp.py.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from mlx_spec.drafters.draft_vocab import DraftVocab, size_of
from mlx_spec.drafters.nextn import NextNHead


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


class QwenNextN(NextNHead):
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
