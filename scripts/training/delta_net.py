"""The gated delta rule and Qwen3.5's linear attention layer that is made of it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .qwen35_config import Qwen35Config


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """The gated delta rule in its chunked form: q, k, v (B, H, T, D); g, beta (B, H, T).

    Within a chunk the recurrence is a triangular system (Yang et al., arXiv:2412.06464, section
    3.3); from chunk to chunk only the state (B, H, Dk, Dv) is carried.
    """
    length = q.shape[2]
    padding = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk)) for x in (g, beta))
    g = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.mT * decay).tril(-1)  # plus the identity, implied by unitriangular
    right = torch.cat([v * beta[..., None], k_beta * g.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, k_decayed = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = q @ k.mT * decay
    q_decayed = q * g.exp()[..., None]
    k_carried = k * (g[..., -1:] - g).exp()[..., None]
    state_decay = g[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for n in range(q.shape[2]):
        fresh = values[:, :, n] - k_decayed[:, :, n] @ state
        outputs.append(q_decayed[:, :, n] @ state + within[:, :, n] @ fresh)
        state = state * state_decay[:, :, n] + k_carried[:, :, n].mT @ fresh
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One step of the rule: q, k, v (B, H, D); g, beta (B, H). Updates the state in place."""
    state *= g.exp()[..., None, None]
    fresh = (v - (k[..., None, :] @ state)[..., 0, :]) * beta[..., None]
    state += k[..., :, None] * fresh[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :]


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    CHUNK = 32

    def __init__(self, config: Qwen35Config):
        super().__init__()
        size = config.hidden_size
        self.k_heads, self.v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.k_dim, self.v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        channels, self.kernel = 2 * self.keys + self.values, config.linear_conv_kernel_dim
        self.in_proj_qkv = nn.Linear(size, channels, bias=False)
        self.in_proj_z = nn.Linear(size, self.values, bias=False)
        self.in_proj_a = nn.Linear(size, self.v_heads, bias=False)
        self.in_proj_b = nn.Linear(size, self.v_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.v_heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.v_heads))
        self.norm = GatedRMSNorm(self.v_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, size, bias=False)

    def convolve(self, x: Tensor) -> Tensor:
        """Depthwise causal convolution of x (B, kernel - 1 + T, C) as shifted products."""
        length = x.shape[1] - self.kernel + 1
        taps = self.conv1d.weight[:, 0].unbind(-1)
        return F.silu(sum(x[:, i : i + length] * tap for i, tap in enumerate(taps)))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, C) -> q, k, v (B, value heads, T, D)."""
        q, k, v = qkv.split([self.keys, self.keys, self.values], -1)
        repeats = self.v_heads // self.k_heads
        q, k = (
            l2_normalise(x.unflatten(-1, (self.k_heads, -1)))
            .transpose(1, 2)
            .repeat_interleave(repeats, 1)
            for x in (q, k)
        )
        return q * self.k_dim**-0.5, k, v.unflatten(-1, (self.v_heads, -1)).transpose(1, 2)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and write strength beta, (B, heads, T)."""
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        return g.transpose(1, 2), torch.sigmoid(self.in_proj_b(x)).transpose(1, 2)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.v_heads, -1))
        return self.out_proj(self.norm(y.transpose(1, 2), z).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.convolve(F.pad(self.in_proj_qkv(x), (0, 0, self.kernel - 1, 0)))
        return self.output(delta_rule(*self.split(qkv), *self.gates(x), self.CHUNK), x)

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One token per sequence: x (B, D)."""
        x = x[:, None]
        qkv = self.in_proj_qkv(x)
        if not cache:
            cache["conv"] = qkv.new_zeros(len(x), self.kernel - 1, qkv.shape[-1])
            cache["state"] = x.new_zeros(len(x), self.v_heads, self.k_dim, self.v_dim)
        recent = torch.cat([cache["conv"], qkv], 1)
        cache["conv"] = recent[:, 1:]
        rows = (*self.split(self.convolve(recent)), *self.gates(x))
        y = delta_step(*(row[:, :, 0] for row in rows), cache["state"])
        return self.output(y[:, :, None], x)[:, 0]
