"""Gemma-4's assistant: a drafter that reads the target's keys and values."""

import torch
from torch import Tensor, nn

from .gemma4 import Layer, RMSNorm
from .gemma4_config import CLUSTERS, TOP_K, Gemma4TextConfig
from .ordered_head import OrderedHead
from .pair import Reading


class Assistant(nn.Module):
    """From h_t and the embedding of x_{t+1} to a hidden state for x_{t+2}."""

    def __init__(self, config: Gemma4TextConfig, trunk_size: int):
        super().__init__()
        size = config.hidden_size
        self.pre_projection = nn.Linear(2 * trunk_size, size, bias=False)
        self.post_projection = nn.Linear(size, trunk_size, bias=False)
        self.masked_embedding = OrderedHead(size, config.vocab_size, CLUSTERS, TOP_K)
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.layer_types)))
        self.norm = RMSNorm(size, config.rms_norm_eps)


class AssistantChains:
    """Chained drafts from every position t of a batch at once.

    All steps of the chain that starts at t are at the position of x_{t+1}, the newest token, and
    see the trunk's keys 0..t, which end where the reading's row t does.
    """

    def __init__(self, head: Assistant, reading: Reading):
        self.head, self.shared = head, reading.shared
        self.positions = torch.arange(reading.hidden.shape[1]) + 1

    def step(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        x = self.head.pre_projection(torch.cat([embedding, hidden], -1))
        for layer in self.head.layers:
            x = layer(x, self.positions, self.shared)
        return self.head.norm(x)
