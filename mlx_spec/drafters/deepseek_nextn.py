"""The NextN ("MTP") head of DeepSeek-V3, and of those that follow it: GLM-4.5 to 4.7 and MiMo.

For a committed token x[t+1] and the target's hidden state h[t] (after its final norm):

    u = eh_proj([enorm(E[x[t+1]]) ; hnorm(h[t])])   MiMo: the hidden state first
    m = norm(mtp_block(u))                          a layer of the target's kind, own KV cache
    logits of x[t+2] = lm_head(m)

All of it is there once for each layer. E and lm_head are the target's unless the checkpoint brings
others. The layer is mlx-lm's own, with a mixture of experts wherever the target has one. Formula:
DeepSeek-V3 (arXiv 2412.19437, section 2.2); vLLM's deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, mimo
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_spec.drafters.draft_vocab import DraftVocab, size_of
from mlx_spec.drafters.nextn import NextNDrafter, NextNHead
from mlx_spec.errors import Incompatible
from mlx_spec.targets.target import HiddenTarget


@dataclass(frozen=True)
class Kind:
    """What differs between models.

    Attributes:
        args: the configuration of mlx-lm's layer.
        block: the layer.
        hidden_first: whether `eh_proj` takes [hidden state ; embedding].
        latent: whether keys and values are latent (MLA), for which mlx-lm wants masks as arrays.
    """

    args: Any
    block: Callable[[Any], nn.Module]
    hidden_first: bool = False
    latent: bool = False


KINDS = {
    "deepseek_v3": Kind(
        deepseek_v3.ModelArgs,
        lambda args: deepseek_v3.DeepseekV3DecoderLayer(args, layer_idx=0),
        latent=True,
    ),
    "glm4_moe": Kind(
        glm4_moe.ModelArgs,
        lambda args: glm4_moe.DecoderLayer(args, layer_idx=0),
    ),
    "glm4_moe_lite": Kind(
        glm4_moe_lite.ModelArgs,
        lambda args: glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, layer_idx=0),
        latent=True,
    ),
    "mimo": Kind(mimo.ModelArgs, mimo.TransformerBlock, hidden_first=True),
}


@dataclass
class ModelArgs:
    """Attributes: block: the target's configuration, as mlx-lm's layer takes it."""

    model_type: str  # of the target
    block: Any
    num_layers: int
    dedicated_embedding: bool
    dedicated_lm_head: bool
    draft_vocab: int | None  # tokens

    @property
    def hidden_size(self) -> int:
        return self.block.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.block.vocab_size

    @classmethod
    def from_config(cls, config: dict[str, Any], weights: Iterable[str]) -> "ModelArgs":
        """`config` is the drafter's config.json. What the weights hold decides how many layers
        there are, and whether there are dedicated matrices."""
        text = config["text_config"]
        block = KINDS[text["model_type"]].args.from_dict((text.get("rope_parameters") or {}) | text)
        if hasattr(block, "first_k_dense_replace"):  # a head's layer is none of the first
            block = replace(block, first_k_dense_replace=0)
        names = set(weights)
        return cls(
            text["model_type"],
            block,
            len({key.split(".")[1] for key in names if key.startswith("layers.")}),
            "embed_tokens.weight" in names,
            "lm_head.weight" in names,
            size_of(config),
        )


class NextNLayer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        size, eps = args.hidden_size, args.block.rms_norm_eps
        self.enorm = nn.RMSNorm(size, eps=eps)
        self.hnorm = nn.RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.mtp_block = KINDS[args.model_type].block(args.block)
        self.norm = nn.RMSNorm(size, eps=eps)


class DeepSeekNextN(NextNHead):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        kind = KINDS[args.model_type]
        self.hidden_first, self.latent = kind.hidden_first, kind.latent
        self.layers = [NextNLayer(args) for _ in range(args.num_layers)]
        if args.dedicated_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        if args.dedicated_lm_head:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if args.draft_vocab is not None:
            self.draft_vocab = DraftVocab(args.draft_vocab)

    def __call__(
        self, embeddings: mx.array, hidden: mx.array, layer: int, cache: KVCache
    ) -> mx.array:
        own = self.layers[layer]
        pair = [own.enorm(embeddings), own.hnorm(hidden)]
        if self.hidden_first:
            pair.reverse()
        u = own.eh_proj(mx.concatenate(pair, axis=-1))  # (1, T, H)
        mask = create_attention_mask(u, cache, return_array=self.latent)
        return own.norm(own.mtp_block(u, mask, cache))

    @property
    def quant_predicate(self):
        """`eh_proj`, through which passes all that the head knows of the target, keeps 8 bits;
        fp8 packs leave it in bfloat16. Routers are no matrices to mlx-lm here."""

        def predicate(path: str, _: nn.Module) -> bool | dict[str, int]:
            return {"group_size": 64, "bits": 8} if path.endswith("eh_proj") else True

        return predicate


class DeepSeekNextNDrafter(NextNDrafter):
    """A `DeepSeekNextN` head beside its target."""

    def __init__(self, head: DeepSeekNextN, target: HiddenTarget):
        if (theirs := target.model.model_type) != head.args.model_type:
            raise Incompatible(
                f"The drafter does not fit the model: it is for models of type "
                f"{head.args.model_type}, and the model is a {theirs}; "
                "give the drafter of this model."
            )
        super().__init__(head, target)
