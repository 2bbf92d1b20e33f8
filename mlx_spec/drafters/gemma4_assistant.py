"""The assistant of Gemma-4: a drafter that attends to the target's own keys and values.

For the newest token x[P] and the target's hidden state h[P-1] (after its final norm):

    u = pre_projection([E_target[x[P]] * sqrt(H) ; h[P-1]])     embedding first
    y = norm(layers(u))                                         queries only, at position P
    logits of x[P+1] = embed_tokens(y)^T,   h' = post_projection(y)

A further draft feeds back h' in place of h. The position and the keys and values, those of the
tokens before x[P], stay the same in all drafts of a round. Formula: transformers'
modeling_gemma4_assistant.py; the layers are mlx-lm's own, as those of Gemma-4 that share their
keys and values with an earlier layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text

from mlx_spec.candidates import Candidates
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.draft_vocab import DraftVocab, size_of
from mlx_spec.errors import CheckpointError, Incompatible
from mlx_spec.targets.gemma4 import Gemma4Target, SharedKV

# "P": of the newest token, as in transformers, LiteRT-LM and llama.cpp.
# "P-1": of the token before it, as in vLLM and SGLang.
QueryPosition = Literal["P", "P-1"]


@dataclass
class ModelArgs:
    backbone_hidden_size: int
    text: gemma4_text.ModelArgs
    use_ordered_embeddings: bool
    num_centroids: int
    centroid_intermediate_top_k: int
    query_position: QueryPosition
    draft_vocab: int | None = None  # tokens

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelArgs":
        """`config` is the drafter's config.json. Raises CheckpointError for an unknown
        `query_position`."""
        position = (config.get("mlx_spec") or {}).get("query_position", "P")
        if position not in get_args(QueryPosition):
            raise CheckpointError(
                f"query_position in the drafter's config.json is {position!r}; "
                f"it must be one of {', '.join(get_args(QueryPosition))}."
            )
        return cls(
            config["backbone_hidden_size"],
            gemma4_text.ModelArgs.from_dict(config["text_config"]),
            config.get("use_ordered_embeddings", False),
            config.get("num_centroids", 2048),
            config.get("centroid_intermediate_top_k", 32),
            position,
            size_of(config),
        )


class AssistantModel(nn.Module):
    def __init__(self, text: gemma4_text.ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [
            gemma4_text.DecoderLayer(text, layer_idx=i) for i in range(text.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)

    def __call__(self, x: mx.array, kv: SharedKV, position: int) -> mx.array:
        for layer in self.layers:
            x, _, _ = layer(x, shared_kv=kv.rows[layer.layer_type], offset=position)
        return self.norm(x)


class MaskedEmbedding(nn.Module):
    """The ordered-embedding head: logits for the tokens of the most likely clusters only."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.top_k = args.centroid_intermediate_top_k
        self.centroids = nn.Linear(args.text.hidden_size, args.num_centroids, bias=False)
        # Tokens by cluster: C clusters of V / C ids each.
        self.token_ordering = mx.zeros((args.text.vocab_size,), mx.int64)

    def __call__(self, y: mx.array, embedding: nn.Module) -> Candidates:
        """y (1, H), embedding of (V, H)."""
        clusters = mx.argpartition(-self.centroids(y), kth=self.top_k - 1, axis=-1)
        ids = self.token_ordering.reshape(self.centroids.weight.shape[0], -1)
        ids = ids[clusters[0, : self.top_k]].flatten()  # (top_k * V / C,)
        return Candidates(y @ embedding(ids).T, ids, self.token_ordering.size)


class Gemma4Assistant(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        hidden_size, backbone = args.text.hidden_size, args.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * backbone, hidden_size, bias=False)
        self.model = AssistantModel(args.text)
        self.post_projection = nn.Linear(hidden_size, backbone, bias=False)
        if args.use_ordered_embeddings:
            self.masked_embedding = MaskedEmbedding(args)
        if args.draft_vocab is not None:
            self.draft_vocab = DraftVocab(args.draft_vocab)

    def __call__(
        self,
        embedding: mx.array,
        hidden: mx.array,
        kv: SharedKV,
        position: int,
        logits: Callable[[mx.array], mx.array | Candidates] | None = None,
    ) -> tuple[mx.array | Candidates, mx.array]:
        """One draft.

        Args:
            embedding: (1, 1, H) the target's, scaled, of the newest token.
            hidden: (1, 1, H) the target's, or the second result of the draft before.
            kv: the target's keys and values.
            position: of the query.
            logits: what makes them of y (1, H_a). Default: the method, for all of them.

        Returns: logits (1, V) or of the candidates, and the hidden state for the next draft.
        """
        u = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))
        y = self.model(u, kv, position)  # (1, 1, H_a)
        return (logits or self.logits)(y[0]), self.post_projection(y)

    def logits(self, y: mx.array) -> mx.array | Candidates:
        """y (1, H_a)."""
        if self.args.use_ordered_embeddings:
            return self.masked_embedding(y, self.model.embed_tokens)
        return self.model.embed_tokens.as_linear(y)

    @property
    def quant_predicate(self):
        """The choice of clusters keeps 8 bits, as routers do in mlx-lm; so does the projection
        through which passes all that the drafter knows of the newest token."""

        def predicate(path: str, _: nn.Module) -> bool | dict[str, int]:
            if path in ("masked_embedding.centroids", "pre_projection"):
                return {"group_size": 64, "bits": 8}
            return True

        return predicate


class AssistantDrafter(Drafter):
    """A `Gemma4Assistant` beside its target; see `mlx_spec.drafters.Drafter`.

    It has no cache and learns nothing: all it knows of the text are the target's keys and values
    and the newest pair.
    """

    kind = "gemma4-assistant"
    learns = False

    def __init__(self, head: Gemma4Assistant, target: Gemma4Target):
        if faults := misfits(head.args, target):
            raise Incompatible(
                f"The drafter does not fit the model: {'; '.join(faults)}. "
                "Convert the assistant that was released with this model."
            )
        self.head = head
        self.embed = target.embed
        self.shared_kv = target.shared_kv
        self.logits: Callable[[mx.array], mx.array | Candidates] = head.logits
        if head.args.draft_vocab is not None:
            embedding, vocab_size = head.model.embed_tokens, target.vocab_size
            self.logits = head.draft_vocab.restrict(embedding, vocab_size)
        self.shift = -1 if head.args.query_position == "P-1" else 0

    def make_cache(self) -> list[Any]:
        return []

    def position(self, caches: list[Any]) -> None:
        return None

    def rewind(self, caches: list[Any], position: None) -> None:
        pass

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        pass

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        assert hidden is not None
        kv = self.shared_kv(target_caches)
        position = kv.length + self.shift  # P is the number of tokens before the newest
        newest, h = tokens[-1:], hidden[:, -1:]
        drafts: list[mx.array] = []
        while len(drafts) < n:
            logits, h = self.head(self.embed(newest[None]), h, kv, position, self.logits)
            newest = pick(logits, drafts)
            drafts.append(newest)
        return drafts


def misfits(args: ModelArgs, target: Gemma4Target) -> list[str]:
    """What keeps an assistant from working with a target, one clause for each fault."""
    pairs = [
        ("backbone_hidden_size", args.backbone_hidden_size, "hidden size", target.hidden_size),
        ("vocab_size", args.text.vocab_size, "vocabulary", target.vocab_size),
    ]
    faults = []
    for kind in sorted(set(args.text.layer_types)):
        if kind not in target.kv_shapes:
            faults.append(f"it has {kind} layers and the model has no keys and values of that kind")
            continue
        heads, dims = target.kv_shapes[kind]
        full = kind == "full_attention"
        name, own = "head_dim", args.text.head_dim
        if full and args.text.global_head_dim:
            name, own = "global_head_dim", args.text.global_head_dim
        pairs.append((name, own, f"head size in {kind}", dims))
        if args.text.num_attention_heads % heads:
            faults.append(
                f"its {args.text.num_attention_heads} heads cannot share the model's {heads} "
                f"heads of keys and values in {kind}"
            )
    return [
        f"its {name} is {own} and the model's {theirs_name} is {theirs}"
        for name, own, theirs_name, theirs in pairs
        if own != theirs
    ] + faults
