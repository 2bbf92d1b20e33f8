"""EAGLE-3 (arXiv 2503.01840): a head for a target of any family, with a layer of Llama's kind.

With a[t], the residual stream before three layers of the target, one after the other:

    g = fc(a[t])                                      only for rows that come from the target
    e = norm_e(E[x[t+1]]), f = norm_f(g)
    y = r + attention([e ; f]),  y = y + mlp(norm(y))     r = g, or f (`norm_before_residual`)
    logits of x[t+2] = lm_head(norm(y))               over the head's own, reduced vocabulary

A further draft feeds back y, before the final norm (after it with `norm_output`), in place of g.
Formula: vLLM's llama_eagle3.py and EAGLE's cnets.py. Rotary embeddings are the head's own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from mlx_spec.candidates import Candidates
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.targets.parts import embedding_of, output_of
from mlx_spec.targets.tapped import TappedTarget
from mlx_spec.targets.target import Target

# What number k in a list of layers means: the input of layer k, counted from 0, as in vLLM and
# llama.cpp, or its output, as in SGLang for most models.
LayerIds = Literal["input", "output"]


@dataclass
class ModelArgs(llama.ModelArgs):
    """A layer of Llama's kind; see `from_config` for what is added to it."""

    draft_vocab_size: int = 0
    features: int = 3  # how many layers of the target they come from
    feature_size: int = 0  # of all of them
    window: int | None = None  # of attention, in tokens
    layer_ids: tuple[int, ...] | None = None
    layer_ids_are: LayerIds = "input"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    reduced: bool = False
    dedicated_embedding: bool = False
    dedicated_lm_head: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any], weights: Iterable[str]) -> "ModelArgs":
        """`config` is the drafter's config.json as `convert.eagle3` writes it. What the weights
        hold decides over what it says of matrices of its own."""
        names, values = set(weights), dict(config)
        rope = dict(values.pop("rope_parameters", None) or {})
        if rope:  # where transformers 5 writes what Llama had flat
            values["rope_theta"] = rope.pop("rope_theta", cls.rope_theta)
            values["rope_scaling"] = rope
        ids = layer_ids(config)
        count = len(ids) if ids else config.get("num_aux_hidden_states") or 3
        nested = config.get("eagle_config") or {}
        sliding = (config.get("layer_types") or [None])[0] == "sliding_attention"
        values |= {
            "layer_types": None,
            "features": count,
            "window": config["sliding_window"] if sliding else None,
            "norm_before_fc": config.get("norm_before_fc", nested.get("norm_before_fc", False)),
            "fc_norm": config.get("fc_norm", config.get("use_aux_norm", False)),
            "feature_size": count * (config.get("target_hidden_size") or config["hidden_size"]),
            "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
            "layer_ids": ids,
            "layer_ids_are": meaning_of_layer_ids(config),
            "reduced": "d2t" in names,
            "dedicated_embedding": "embed_tokens.weight" in names,
            "dedicated_lm_head": "lm_head.weight" in names,
        }
        return cls.from_dict(values)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers of a target with so many, whose inputs are the features."""
        if self.layer_ids is None:
            return (2, count // 2, count - 3)
        return tuple(i + (self.layer_ids_are == "output") for i in self.layer_ids)


def layer_ids(config: dict[str, Any]) -> tuple[int, ...] | None:
    """As they are listed in a head's config.json, if they are."""
    nested = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or nested.get(key)
    return tuple(ids) if ids else None


def meaning_of_layer_ids(config: dict[str, Any]) -> LayerIds:
    """Raises CheckpointError for an unknown one."""
    meaning = (config.get("mlx_spec") or {}).get("layer_ids", "input")
    if meaning not in get_args(LayerIds):
        raise CheckpointError(
            f"layer_ids in the mlx_spec block of the drafter's config.json is {meaning!r}; "
            f"it must be one of {', '.join(get_args(LayerIds))}."
        )
    return meaning


class Attention(llama.Attention):
    """Twice as wide at its entry."""

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self[name].weight.shape[0]
            self[name] = nn.Linear(2 * args.hidden_size, rows, bias=args.attention_bias)


class Layer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.norm_before_residual = args.norm_before_residual
        self.window = args.window
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.self_attn = Attention(args)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.mlp = llama.MLP(args)

    def __call__(self, embeddings: mx.array, features: mx.array, cache: KVCache) -> mx.array:
        f = self.hidden_norm(features)
        x = mx.concatenate([self.input_layernorm(embeddings), f], axis=-1)  # (1, T, 2H)
        y = f if self.norm_before_residual else features
        mask = create_attention_mask(x, cache, window_size=self.window)
        y = y + self.self_attn(x, mask, cache)
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle3(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        if args.norm_before_fc:
            self.input_norm = nn.RMSNorm(args.feature_size, eps=args.rms_norm_eps)
        if args.fc_norm:
            size = args.feature_size // args.features
            self.fc_norm = [nn.RMSNorm(size, eps=args.rms_norm_eps) for _ in range(args.features)]
        self.fc = nn.Linear(args.feature_size, args.hidden_size, bias=False)
        self.layers = [Layer(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.dedicated_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        if args.dedicated_lm_head:
            self.lm_head = nn.Linear(args.hidden_size, args.draft_vocab_size, bias=False)
        if args.reduced:
            # Of each token of the reduced vocabulary, what is to be added to its id.
            self.d2t = mx.zeros((args.draft_vocab_size,), mx.int64)

    def combine(self, features: mx.array) -> mx.array:
        """Of the target: (1, T, K * H) -> (1, T, H)."""
        if self.args.norm_before_fc:
            features = self.input_norm(features)
        if self.args.fc_norm:
            parts = mx.split(features, self.args.features, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = mx.concatenate(normed, axis=-1)
        return self.fc(features)

    def __call__(
        self, embeddings: mx.array, features: mx.array, cache: KVCache
    ) -> tuple[mx.array, mx.array]:
        """Rows of (embedding of the next token, combined features) through the layer.

        Returns: what a further draft feeds back, and what `lm_head` wants; all are (1, T, H).
        """
        y = self.layers[0](embeddings, features, cache)
        normed = self.norm(y)
        return (normed if self.args.norm_output else y), normed

    @property
    def quant_predicate(self):
        """`fc`, through which passes all that the head knows of the target, keeps 8 bits."""

        def predicate(path: str, _: nn.Module) -> bool | dict[str, int]:
            return {"group_size": 64, "bits": 8} if path == "fc" else True

        return predicate


class Eagle3Drafter(Drafter):
    """An `Eagle3` head beside its target; see `mlx_spec.drafters.Drafter`. It has one KVCache."""

    kind = "eagle3"
    learns = True

    def __init__(self, head: Eagle3, target: Target):
        """Raises: Incompatible where they do not fit."""
        args = head.args
        self.head = head
        self.layers = args.layers_of(len(target.model.layers))
        embed: Any = head.embed_tokens if args.dedicated_embedding else embedding_of(target.model)
        self.embed: Callable[[mx.array], mx.array] = embed
        for name, own, theirs in [
            ("vocabulary", args.vocab_size, target.vocab_size),
            ("size of features", args.feature_size, self.view(target).feature_size),
            ("hidden size", args.hidden_size, embed(mx.array([[0]])).shape[-1]),
        ]:
            if own != theirs:
                raise Incompatible(
                    f"The drafter's {name} is {own} but the model's is {theirs}; "
                    "give the drafter that was trained with this model."
                )
        output = head.lm_head if args.dedicated_lm_head else output_of(target.model)
        self.logits: Callable[[mx.array], mx.array | Candidates] = output
        if args.reduced:
            ids = (mx.arange(args.draft_vocab_size) + head.d2t).astype(mx.uint32)
            mx.eval(ids)
            self.logits = lambda hidden: Candidates(output(hidden), ids, args.vocab_size)

    def view(self, target: Target) -> TappedTarget:
        return TappedTarget(target, self.layers)

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def position(self, caches: list[Any]) -> Any:
        return caches[0].offset

    def rewind(self, caches: list[Any], position: Any) -> None:
        caches[0].offset = position

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
        features, output = self._learn(tokens, hidden, caches)
        learnt = self.position(caches)
        drafts = [pick(self.logits(output[:, -1]), [])]
        while len(drafts) < n:
            features, output = self.head(self.embed(drafts[-1][None]), features[:, -1:], caches[0])
            drafts.append(pick(self.logits(output[:, -1]), drafts))
        self.rewind(caches, learnt)
        return drafts

    def _learn(
        self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]
    ) -> tuple[mx.array, mx.array]:
        assert hidden is not None
        return self.head(self.embed(tokens[None]), self.head.combine(hidden), caches[0])
