"""A small Gemma-4: sliding and full attention, shared keys and values, per-layer inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gemma4_config import FULL, ROPE_PARAMETERS, Gemma4TextConfig
from .pair import KeysValues, Reading

Cache = dict[str, Tensor]


class RMSNorm(nn.Module):
    """Gemma-4's RMS norm: the stored weight is the scale."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


def inverse_frequencies(kind: str, head_dim: int) -> Tensor:
    """Of a head's channel pairs. "Proportional" leaves the last ones unrotated."""
    rope = ROPE_PARAMETERS[kind]
    rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim / 2)
    frequencies = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.where(torch.arange(head_dim // 2) < rotated, frequencies, 0.0)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotary embedding of x (..., T, head_dim); pairs are half a head apart."""
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend_sliding(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Row t of q (B, H, T, D) attends to rows t - window + 1 .. t of k and v (B, 1, T, D).

    A block of `window` rows needs no keys but those of its own and of the block before it.
    """
    batch, length = len(q), q.shape[2]
    padding = -length % window
    q = F.pad(q, (0, 0, 0, padding)).unflatten(2, (-1, window)).transpose(1, 2)
    blocks = q.shape[1]

    def with_block_before(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, window, padding)).unflatten(2, (-1, window))
        return torch.cat([x[:, :, :-1], x[:, :, 1:]], 3).transpose(1, 2).flatten(0, 1)

    row, key = torch.arange(window)[:, None], torch.arange(2 * window)
    seen = (key > row) & (key <= row + window)
    seen = torch.stack([seen & (key >= window), *[seen] * (blocks - 1)]).repeat(batch, 1, 1)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1),
        with_block_before(k).expand(-1, q.shape[2], -1, -1),
        with_block_before(v).expand(-1, q.shape[2], -1, -1),
        attn_mask=seen[:, None],
        scale=1.0,
    )
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def attend_full(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=1.0)


class Attention(nn.Module):
    """All heads share one key and value head. Scores are not scaled: the norms do it."""

    def __init__(self, config: Gemma4TextConfig, index: int):
        super().__init__()
        self.kind = config.layer_types[index]
        self.owns_keys = config.owns_keys(index)
        self.window = None if self.kind == FULL else config.sliding_window
        self.head_dim = config.global_head_dim if self.kind == FULL else config.head_dim
        size, inner = config.hidden_size, config.num_attention_heads * self.head_dim
        self.frequencies = inverse_frequencies(self.kind, self.head_dim)
        self.eps = config.rms_norm_eps
        self.q_proj = nn.Linear(size, inner, bias=False)
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        self.o_proj = nn.Linear(inner, size, bias=False)
        if self.owns_keys:
            self.k_proj = nn.Linear(size, self.head_dim, bias=False)
            self.v_proj = nn.Linear(size, self.head_dim, bias=False)
            self.k_norm = RMSNorm(self.head_dim, self.eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, T, D) -> (B, heads, T, head_dim)."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(q, positions, self.frequencies)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """x (B, T, D) -> two of (B, 1, T, head_dim)."""
        k = rotate(self.k_norm(self.k_proj(x)), positions, self.frequencies)
        v = F.rms_norm(self.v_proj(x), (self.head_dim,), eps=self.eps)
        return k[:, None], v[:, None]

    def forward(self, x: Tensor, positions: Tensor, shared: dict[str, KeysValues]) -> Tensor:
        """Every row sees the rows up to its own index. An owner puts its keys into `shared`."""
        if self.owns_keys:
            shared[self.kind] = self.keys_values(x, positions)
        q, (k, v) = self.queries(x, positions), shared[self.kind]
        if self.window:
            attended = attend_sliding(q, k, v, self.window)
        else:
            attended = attend_full(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def step(
        self, x: Tensor, positions: Tensor, shared: dict[str, KeysValues], cache: Cache
    ) -> Tensor:
        """One token per sequence: x (B, 1, D). An owner's cache holds the keys it still sees."""
        if self.owns_keys:
            k, v = self.keys_values(x, positions)
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            if self.window:
                k, v = k[:, :, -self.window :], v[:, :, -self.window :]
            cache.update(k=k, v=v)
            shared[self.kind] = k, v
        attended = attend_full(self.queries(x, positions), *shared[self.kind], is_causal=False)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Gemma4TextConfig, index: int):
        super().__init__()
        size, eps, extra = (
            config.hidden_size,
            config.rms_norm_eps,
            config.hidden_size_per_layer_input,
        )
        wide = config.use_double_wide_mlp and not config.owns_keys(index)
        self.self_attn = Attention(config, index)
        self.mlp = MLP(size, config.intermediate_size * (2 if wide else 1))
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        if extra:
            self.per_layer_input_gate = nn.Linear(size, extra, bias=False)
            self.per_layer_projection = nn.Linear(extra, size, bias=False)
            self.post_per_layer_input_norm = RMSNorm(size, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        shared: dict[str, KeysValues],
        per_layer_input: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """All positions at once, or with a cache one token per sequence; x (B, T, D)."""
        normed = self.input_layernorm(x)
        if cache is None:
            attended = self.self_attn(normed, positions, shared)
        else:
            attended = self.self_attn.step(normed, positions, shared, cache)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if per_layer_input is not None:
            gate = F.gelu(self.per_layer_input_gate(x), approximate="tanh")
            extra = self.per_layer_projection(gate * per_layer_input)
            x = x + self.post_per_layer_input_norm(extra)
        return x * self.layer_scalar


class Trunk(nn.Module):
    """The language model."""

    def __init__(self, config: Gemma4TextConfig):
        super().__init__()
        size, extra, count = (
            config.hidden_size,
            config.hidden_size_per_layer_input,
            len(config.layer_types),
        )
        self.softcap = config.final_logit_softcapping
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens_per_layer = nn.Embedding(config.vocab_size, count * extra)
        self.per_layer_model_projection = nn.Linear(size, count * extra, bias=False)
        self.per_layer_projection_norm = RMSNorm(extra, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(count))
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids) * self.embed_tokens.embedding_dim**0.5

    def per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        """Half from the tokens' own table, half from their embeddings: (layers, B, T, size)."""
        shape = (len(self.layers), -1)
        table = self.embed_tokens_per_layer(ids).unflatten(-1, shape)
        projected = (self.per_layer_model_projection(x) * x.shape[-1] ** -0.5).unflatten(-1, shape)
        projected = self.per_layer_projection_norm(projected)
        return ((projected + table * table.shape[-1] ** 0.5) * 2**-0.5).movedim(-2, 0)

    def forward(self, ids: Tensor) -> Reading:
        x, positions = self.embed(ids), torch.arange(ids.shape[1])
        shared: dict[str, KeysValues] = {}
        for layer, extra in zip(self.layers, self.per_layer_inputs(ids, x), strict=True):
            x = layer(x, positions, shared, extra)
        return Reading(self.norm(x), shared)

    def step(self, ids: Tensor, caches: list[Cache]) -> Tensor:
        x = self.embed(ids[:, None])
        seen = max((cache["k"].shape[2] for cache in caches if cache), default=0)
        positions, inputs = torch.tensor([seen]), self.per_layer_inputs(ids[:, None], x)
        shared: dict[str, KeysValues] = {}
        for layer, extra, cache in zip(self.layers, inputs, caches, strict=True):
            x = layer(x, positions, shared, extra, cache)
        return self.norm(x)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.embed_tokens.weight)
        return self.softcap * torch.tanh(logits / self.softcap)


def initialise(module: nn.Module) -> None:
    """Residual branches start small, attention scores at unit variance."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.6 * part.in_features**-0.5)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        elif isinstance(part, Attention):
            for name, norm in part.named_children():
                if name in ("q_norm", "k_norm"):
                    nn.init.constant_(norm.weight, part.head_dim**-0.25)
    for name, parameter in module.named_parameters():
        if "post_" in name and "norm" in name:
            nn.init.constant_(parameter, 0.1)
