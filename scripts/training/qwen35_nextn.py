"""Qwen3.5's NextN (MTP) head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .qwen35 import Layer, RMSNorm
from .qwen35_config import Qwen35Config


class Head(nn.Module):
    """The NextN head: from h_t and the embedding of x_{t+1} to a hidden state for x_{t+2}."""

    def __init__(self, config: Qwen35Config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = RMSNorm(size, eps)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)

    def combine(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        parts = self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(parts, -1))


class DraftChains:
    """Chained drafts from every position t of a batch at once.

    The first step makes the history rows, from the trunk's hidden states. A later step of the
    chain that starts at t sees, as when drafting, the history up to t and its own earlier rows.
    """

    def __init__(self, head: Head):
        self.head = head
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """One row for every chain, (B, T, D) -> (B, T, D)."""
        u = self.head.combine(embedding, hidden)
        layer = self.head.layers[0]
        positions = torch.arange(u.shape[1]) + len(self.keys)
        gate, q, k, v = layer.mixer.project(layer.input_layernorm(u), positions)
        self.keys.append(k)
        self.values.append(v)
        u = u + layer.mixer.output(self.attend(q), gate)
        return self.head.norm(u + layer.mlp(layer.post_attention_layernorm(u)))

    def attend(self, q: Tensor) -> Tensor:
        history_k, history_v = self.keys[0], self.values[0]
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, history_k, history_v, is_causal=True)
        q = q * q.shape[-1] ** -0.5
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(q @ history_k.mT).masked_fill(future, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k in self.keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)  # (B, heads, T, T + own rows)
        attended = weights[..., :length] @ history_v
        for i, v in enumerate(self.values[1:]):
            attended = attended + weights[..., length + i, None] * v
        return attended
