"""A small Qwen3.5 language model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .delta_net import GatedDeltaNet
from .pair import Reading
from .qwen35_config import ROPE_THETA, Qwen35Config


class RMSNorm(nn.Module):
    """Qwen's RMS norm: the stored weight is the scale minus one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, config: Qwen35Config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, rotary_dim: int) -> Tensor:
    """Rotary embedding of the first `rotary_dim` channels of x (..., T, head_dim)."""
    frequencies = ROPE_THETA ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b, rest = x.split([rotary_dim // 2, rotary_dim // 2, x.shape[-1] - rotary_dim], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Gated full attention. Queries and keys are normalised per head, then rotated."""

    def __init__(self, config: Qwen35Config):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        size, inner = config.hidden_size, self.heads * self.head_dim
        self.q_proj = nn.Linear(size, 2 * inner, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, T, D) -> gate (B, T, heads * head_dim) and q, k, v (B, heads, T, head_dim)."""
        shape = x.shape[:-1]
        q, gate = self.q_proj(x).view(*shape, self.heads, -1).chunk(2, -1)
        k = self.k_norm(self.k_proj(x).view(*shape, self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(*shape, self.kv_heads, -1).transpose(1, 2)
        q = self.q_norm(q).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k = rotate(k, positions, self.rotary_dim).repeat_interleave(groups, 1)
        q = rotate(q, positions, self.rotary_dim)
        return gate.reshape(*shape, -1), q, k, v.repeat_interleave(groups, 1)

    def output(self, attended: Tensor, gate: Tensor) -> Tensor:
        """attended (B, heads, T, head_dim) -> (B, T, D)."""
        return self.o_proj(attended.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

    def forward(self, x: Tensor) -> Tensor:
        gate, q, k, v = self.project(x, torch.arange(x.shape[1]))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One token per sequence: x (B, D). The cache holds k and v (B, heads, T, head_dim)."""
        seen = cache["k"].shape[2] if cache else 0
        gate, q, k, v = self.project(x[:, None], torch.tensor([seen]))
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        return self.output(F.scaled_dot_product_attention(q, k, v), gate)[:, 0]


class Layer(nn.Module):
    def __init__(self, config: Qwen35Config, kind: str):
        super().__init__()
        if kind == "full_attention":
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        x = x + self.mixer.step(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """The language model."""

    def __init__(self, config: Qwen35Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Reading:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return Reading(self.norm(x))

    def step(self, ids: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.step(x, cache)
        return self.norm(x)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


def initialise(model: nn.Module) -> None:
    """Residual branches start at zero; memories of the delta rule last 5 to 300 tokens."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.6 * module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, GatedDeltaNet):
            rate = torch.logspace(-2.5, -0.7, module.v_heads)
            module.A_log.data = torch.linspace(0.5, 2, module.v_heads).log()
            module.dt_bias.data = torch.expm1(rate / module.A_log.exp()).log()
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
