"""Train the demo model `models/tiny-qwen3.5-nextn`: a small Qwen3.5 with a NextN (MTP) head.

    pip install torch safetensors tokenizers
    python scripts/train_demo.py --out models/tiny-qwen3.5-nextn
    python scripts/train_demo.py --evaluate models/tiny-qwen3.5-nextn

The text is the Python standard library of the interpreter that runs this script, so nothing is
downloaded. Training takes about an hour on one CPU core and gives the same weights for the same
steps, seed, Python, torch and kind of CPU. Stages:

1. trunk and head together on text: next-token loss plus the head's losses, unrolled to depth 2;
2. trunk frozen (and rounded to bfloat16): the head learns the trunk's own predictions on text,
   unrolled to depth 4;
3. the same on texts that the trunk wrote itself, greedily and sampled.

The model is written in the Hugging Face layout of Qwen3.5 checkpoints and loads with mlx-lm.
"""

import argparse
import ast
import copy
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- text --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Documents by use. Held-out documents are chosen by the hash of their name."""

    train: list[str]
    train_chat: list[str]
    held_out: list[str]
    held_out_chat: list[str]


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def is_table(source: str) -> bool:
    """Generated files (character tables, opcodes) are mostly digits and teach nothing."""
    return sum(c.isdigit() for c in source) > 0.1 * len(source)


def standard_library() -> Iterator[tuple[str, str]]:
    """Names and sources of the standard library, without tests and generated encodings."""
    skipped = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            source = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if len(source) > 200 and not is_table(source):
            yield relative.as_posix(), source


def help_topics() -> Iterator[tuple[str, str]]:
    """The language reference that `help()` shows: the prose of the corpus."""
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def chat(user: str, assistant: str) -> str:
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant.rstrip()}{IM_END}\n"


def dedent_source(source: str, node: ast.FunctionDef) -> str:
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)


def chat_examples(name: str, source: str) -> Iterator[str]:
    """Questions about a module and requests for its functions, answered from its source."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    purpose = (ast.get_docstring(tree) or "").split("\n\n")[0]
    if len(purpose) > 30:
        yield chat(f"What is the module {module} for?", purpose)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        doc = ast.get_docstring(node) or ""
        code = dedent_source(source, node)
        if len(doc) < 20 or not 100 < len(code) < 1500:
            continue
        yield chat(f"Write the function {node.name}: {doc.splitlines()[0]}", code)
        if len(doc) > 80:
            yield chat(f"What does the function {node.name} of {module} do?", doc)


def read_corpus(chat_share: float = 0.15) -> Corpus:
    """Read all text. Chat examples are thinned, by hash, to `chat_share` of the characters."""
    corpus = Corpus([], [], [], [])
    for name, source in standard_library():
        held_out = is_held_out(name)
        (corpus.held_out if held_out else corpus.train).append(source)
        (corpus.held_out_chat if held_out else corpus.train_chat).extend(
            chat_examples(name, source)
        )
    for name, text in help_topics():
        (corpus.held_out if is_held_out(name) else corpus.train).append(text)
    wanted = chat_share / (1 - chat_share) * sum(map(len, corpus.train))
    share = wanted / sum(map(len, corpus.train_chat))
    kept = [
        example
        for example in dict.fromkeys(corpus.train_chat)
        if int(hashlib.sha256(example.encode()).hexdigest()[:8], 16) < share * 2**32
    ]
    return Corpus(corpus.train, kept, corpus.held_out, list(dict.fromkeys(corpus.held_out_chat)))


# ---- tokenizer ---------------------------------------------------------------------------------


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE with Qwen's splitting rule, special tokens last. No text normalisation."""
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.train + corpus.train_chat, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(documents, add_special_tokens=False)]


def windows(documents: list[list[int]], separator: int, length: int, seed: int) -> Tensor:
    """Shuffle the documents, join them and cut the stream into rows of `length` ids."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
    ids: list[int] = []
    for i in order.tolist():
        ids += documents[i] + [separator]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


# ---- model -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes of a dense text-only Qwen3.5, by their names in config.json."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    vocab_size: int = 2048

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    @property
    def rotary_dim(self) -> int:
        return self.head_dim // 4

    @classmethod
    def load(cls, directory: Path) -> "Qwen35Config":
        text = json.loads((directory / "config.json").read_text())["text_config"]
        return cls(**{name: text[name] for name in cls.__dataclass_fields__})

    def to_json(self, eos: int, pad: int) -> dict[str, object]:
        text = asdict(self) | {
            "model_type": "qwen3_5_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": eos,
            "pad_token_id": pad,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": self.layer_types,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 4096,
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.25,
                "rope_theta": ROPE_THETA,
                "rope_type": "default",
            },
        }
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }


ROPE_THETA = 10_000_000


class RMSNorm(nn.Module):
    """Qwen's RMS norm: the stored weight is the scale minus one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate)


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
    """The language model. Returns hidden states after the final norm, as the head needs them."""

    def __init__(self, config: Qwen35Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def step(self, ids: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        x = self.embed_tokens(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer.step(x, cache)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


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


class Model(nn.Module):
    def __init__(self, config: Qwen35Config):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.head = Head(config)

    def follow(self, hidden: Tensor, ids: Tensor, depth: int) -> Iterator[Tensor]:
        """Head states at depths 1..depth with the chains fed from the text.

        hidden (B, T, D), ids (B, T + depth); row t of depth k is fed x_{t+k}.
        """
        chains, length = DraftChains(self.head), hidden.shape[1]
        for k in range(1, depth + 1):
            hidden = chains.step(self.trunk.embed_tokens(ids[:, k : k + length]), hidden)
            yield hidden

    def draft(self, hidden: Tensor, ids: Tensor, depth: int) -> Tensor:
        """Greedy drafts (B, T, depth) of every position; ids (B, T + 1) starts the chains."""
        chains, fed, drafts = DraftChains(self.head), ids[:, 1:], []
        for _ in range(depth):
            hidden = chains.step(self.trunk.embed_tokens(fed), hidden)
            fed = self.trunk.logits(hidden).argmax(-1)
            drafts.append(fed)
        return torch.stack(drafts, -1)


def initialise(model: Model) -> None:
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


# ---- optimiser ---------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al., 2024) on a stack of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


class Muon:
    """Muon for the matrices of the layers; matrices of one shape are stepped together."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95):
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, mean in self.groups:
            gradient = torch.stack([p.grad for p in group])
            mean.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(mean, self.momentum))
            scale = rate * max(1.0, mean.shape[1] / mean.shape[2]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter -= scale * change


class Optimiser:
    """Muon for layer matrices, AdamW for the rest, one learning-rate schedule for both."""

    def __init__(self, module: nn.Module, steps: int, muon_rate: float, adam_rate: float):
        matrices, rest = [], []
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 16 and "embed" not in name
            (matrices if is_matrix else rest).append(parameter)
        self.muon, self.muon_rate = Muon(matrices), muon_rate
        self.adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self.adam_rate, self.steps, self.done = adam_rate, steps, 0

    def schedule(self) -> float:
        """Warm up over 3 % of the steps; decay to zero over the last third."""
        warm_up = (self.done + 1) / max(1, 0.03 * self.steps)
        decay = 3 * (self.steps - self.done) / self.steps
        return min(1.0, warm_up, decay)

    def step(self, loss: Tensor) -> None:
        loss.backward()
        factor = self.schedule()
        self.muon.step(factor * self.muon_rate)
        self.adam.param_groups[0]["lr"] = factor * self.adam_rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for group, _ in self.muon.groups:
            for parameter in group:
                parameter.grad = None
        self.done += 1


# ---- training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Steps of the three stages and their batches."""

    text_steps: int
    distil_steps: int
    self_steps: int
    length: int = 512  # positions per row that are trained
    rows: int = 4
    depth: int = 4  # unrolled drafts; the first stage unrolls two
    self_length: int = 192
    self_rows: int = 12

    @classmethod
    def of(cls, steps: int) -> "Recipe":
        """`steps` of the first stage and a fixed share for the others."""
        return cls(steps, steps // 5, steps // 5)


@dataclass(frozen=True)
class Encoded:
    """Token ids of the corpus."""

    text: list[list[int]]
    chat: list[list[int]]
    separator: int

    def rows(self, length: int, seed: int) -> Tensor:
        """One epoch of shuffled rows (N, length); text and chat rows keep their shares."""
        text = windows(self.text, self.separator, length, seed)
        chats = windows(self.chat, self.separator, length, seed + 1)
        rows = torch.cat([text, chats])
        return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + 2))]

    def batches(self, rows: int, length: int, seed: int) -> Iterator[Tensor]:
        while True:
            yield from self.rows(length, seed).split(rows)
            seed += 1000


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_loss(model: Model, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Next-token loss and, on every second row, the head's losses at depths 1 and 2."""
    length = ids.shape[1] - 3
    hidden = model.trunk(ids[:, :length])
    losses = [token_loss(model.trunk.logits(hidden), ids[:, 1 : length + 1])]
    ids = ids[::2]
    for k, state in enumerate(model.follow(hidden[::2], ids, 2), 1):
        targets = ids[:, k + 1 : k + 1 + length]
        losses.append(token_loss(model.trunk.logits(state), targets))
    total = losses[0] + 0.3 * losses[1] + 0.15 * losses[2]
    return total, [loss.item() for loss in losses]


def distil_loss(model: Model, ids: Tensor, depth: int) -> tuple[Tensor, list[float]]:
    """At each depth the mean of the KL divergence from the trunk and the loss on its argmax."""
    length = ids.shape[1] - depth
    with torch.no_grad():
        hidden = model.trunk(ids)
        teacher = model.trunk.logits(hidden).log_softmax(-1)
    losses = []
    for k, state in enumerate(model.follow(hidden[:, :length], ids, depth), 1):
        student = model.trunk.logits(state).log_softmax(-1).flatten(0, 1)
        wanted = teacher[:, k : k + length].flatten(0, 1)
        divergence = F.kl_div(student, wanted, reduction="batchmean", log_target=True)
        losses.append(0.5 * divergence + 0.5 * F.nll_loss(student, wanted.argmax(-1)))
    return torch.stack(losses).mean(), [loss.item() for loss in losses]


def train(
    name: str,
    batches: Iterator[Tensor],
    optimiser: Optimiser,
    loss_of: Callable[[Tensor], tuple[Tensor, list[float]]],
    checkpoint: Callable[[], None],
) -> list[float]:
    """Run one stage. Logs, and returns at the end, mean losses of the last 50 steps."""
    recent: list[list[float]] = []
    start = saved = time.monotonic()
    for step, ids in zip(range(1, optimiser.steps + 1), batches, strict=False):
        loss, parts = loss_of(ids)
        optimiser.step(loss)
        recent = [*recent[-49:], parts]
        if step % 25 == 0 or step == optimiser.steps:
            means = [sum(column) / len(recent) for column in zip(*recent, strict=True)]
            shown = " ".join(f"{value:.3f}" for value in means)
            seconds = time.monotonic() - start
            print(f"{name} {step}/{optimiser.steps} {seconds:.0f} s: {shown}", flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            checkpoint()
    return [sum(column) / len(recent) for column in zip(*recent, strict=True)]


@torch.no_grad()
def generate(
    trunk: Trunk, prompts: list[list[int]], length: int, temperature: float, seed: int = 0
) -> Tensor:
    """Continue the prompts to `length` ids each, (B, length). Temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    given = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    caches: list[dict[str, Tensor]] = [{} for _ in trunk.layers]
    for t in range(length - 1):
        logits = trunk.logits(trunk.step(ids[:, t], caches))
        if temperature == 0:
            chosen = logits.argmax(-1)
        else:
            weights = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(weights, 1, generator=generator)[:, 0]
        ids[:, t + 1] = torch.where(t + 1 < given, ids[:, t + 1], chosen)
    return ids


def chat_prompts(tokenizer: Tokenizer, examples: list[str], longest: int) -> list[list[int]]:
    marker = f"{IM_START}assistant\n"
    prompts = encode(tokenizer, [e[: e.index(marker) + len(marker)] for e in examples])
    return [prompt for prompt in prompts if len(prompt) <= longest]


def self_text(model: Model, data: Encoded, chats: list[list[int]], recipe: Recipe) -> Tensor:
    """Rows written by the trunk: half greedy, half at temperature 0.8; a third are chats."""
    batch, longest = 128, 48
    rows = math.ceil(recipe.self_steps * recipe.self_rows / 2)  # each row is used twice
    starts = data.rows(longest, 71)[:, : longest - 8].tolist()
    written = []
    for i in range(math.ceil(rows / batch)):
        texts = starts[i * batch : i * batch + batch - batch // 3]
        # From 8 to `longest - 8` ids of text, so that drafts are learned right after a start.
        prompts = [text[: 8 + j % (longest - 15)] for j, text in enumerate(texts)]
        prompts += chats[i * (batch // 3) : (i + 1) * (batch // 3)]
        length = recipe.self_length + recipe.depth
        written.append(generate(model.trunk, prompts, length, 0.8 * (i % 2), seed=i))
    return torch.cat(written)


def shuffled(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        yield from rows[order].split(size)
        seed += 1000


def run_stages(
    model: Model,
    data: Encoded,
    chats: list[list[int]],
    recipe: Recipe,
    seed: int,
    first: int,
    checkpoint: Callable[[], None],
) -> dict[str, list[float]]:
    """Train from stage `first` on. Returns the last training losses of every stage."""
    losses: dict[str, list[float]] = {}
    if first <= 1:
        optimiser = Optimiser(model, recipe.text_steps, muon_rate=0.03, adam_rate=1e-2)
        batches = data.batches(recipe.rows, recipe.length + 3, seed)
        losses["text"] = train(
            "text", batches, optimiser, lambda ids: text_loss(model, ids), checkpoint
        )
    round_to_bfloat16(model.trunk)
    model.trunk.requires_grad_(False)

    def distil(ids: Tensor) -> tuple[Tensor, list[float]]:
        return distil_loss(model, ids, recipe.depth)

    if first <= 2:
        optimiser = Optimiser(model.head, recipe.distil_steps, muon_rate=0.02, adam_rate=4e-3)
        batches = data.batches(recipe.rows, recipe.length + recipe.depth, seed + 100_000)
        losses["distil"] = train("distil", batches, optimiser, distil, checkpoint)
    started = time.monotonic()
    rows = self_text(model, data, chats, recipe)
    print(f"wrote {rows.numel()} tokens in {time.monotonic() - started:.0f} s", flush=True)
    optimiser = Optimiser(model.head, recipe.self_steps, muon_rate=0.01, adam_rate=2e-3)
    batches = shuffled(rows, recipe.self_rows, seed + 200_000)
    losses["self"] = train("self", batches, optimiser, distil, checkpoint)
    round_to_bfloat16(model.head)
    return losses


# ---- files -------------------------------------------------------------------------------------


def stays_float32(name: str) -> bool:
    """Qwen3.5 keeps these two in float32, everything else in bfloat16."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


@torch.no_grad()
def round_to_bfloat16(module: nn.Module) -> None:
    """Round to what the file will hold, so that later stages see the model as it is loaded.

    mlx-lm adds the one to norm weights in bfloat16: the sum is rounded, which makes both exact.
    """
    for part in module.modules():
        offset = 1.0 if isinstance(part, RMSNorm) else 0.0
        for name, parameter in part.named_parameters(recurse=False):
            if name != "A_log" and not isinstance(part, GatedRMSNorm):
                parameter.copy_((parameter + offset).bfloat16() - offset)


def file_name(name: str) -> str:
    """`trunk.x` -> `model.language_model.x` and `head.x` -> `mtp.x`."""
    part, rest = name.split(".", 1)
    return {"trunk": "model.language_model.", "head": "mtp."}[part] + rest


def write_model(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model directory beside `out` and move it into place."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {
        file_name(name): tensor.clone() if stays_float32(name) else tensor.bfloat16()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    (new / "model.safetensors").chmod(0o644)
    tokenizer.save(str(new / "tokenizer.json"))
    eos, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    named = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    files = {
        "config.json": model.config.to_json(eos, pad),
        "generation_config.json": {"eos_token_id": [eos, pad], "pad_token_id": pad},
        "special_tokens_map.json": named,
        "tokenizer_config.json": named
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": [IM_START],
            "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {"content": token, "special": True} | flags
                for token in SPECIAL_TOKENS
            },
        },
    }
    for name, content in files.items():
        (new / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def read_model(directory: Path) -> tuple[Model, Tokenizer]:
    model = Model(Qwen35Config.load(directory))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({k: tensors[file_name(k)].float() for k in model.state_dict()})
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


# ---- evaluation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """Drafts by depth: how often a draft was right when all drafts before it were right."""

    offered: list[int]
    accepted: list[int]

    @classmethod
    def count(cls, right: Tensor) -> "Acceptance":
        """right (rounds, depth): whether each draft is the trunk's choice."""
        accepted = right.long().cumprod(-1).sum(0).tolist()
        return cls([len(right), *accepted[:-1]], accepted)

    @property
    def rates(self) -> list[float]:
        return [a / max(1, o) for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def tokens_per_round(self) -> float:
        return 1 + sum(self.accepted) / self.offered[0]


@torch.no_grad()
def text_metrics(model: Model, rows: Tensor, depth: int) -> tuple[float, Acceptance]:
    """Trunk loss in nats per token, and acceptance with the chains fed from the text."""
    length, losses, right = rows.shape[1] - depth, [], []
    for ids in rows.split(8):
        hidden = model.trunk(ids)
        logits = model.trunk.logits(hidden)
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
        choices = logits.argmax(-1)
        found = [
            model.trunk.logits(state).argmax(-1) == choices[:, k : k + length]
            for k, state in enumerate(model.follow(hidden[:, :length], ids, depth), 1)
        ]
        right.append(torch.stack(found, -1).flatten(0, 1))
    return sum(losses) / len(losses), Acceptance.count(torch.cat(right))


@torch.no_grad()
def decoding_metrics(
    model: Model, prompts: list[list[int]], new_tokens: int, depth: int, eos: int
) -> Acceptance:
    """Greedy speculative decoding of every prompt, replayed on the trunk's own continuation."""
    rows = generate(model.trunk, prompts, max(map(len, prompts)) + new_tokens, 0)
    length = rows.shape[1] - depth
    rounds = []
    for ids, prompt in zip(rows.split(1), prompts, strict=True):
        drafts = model.draft(model.trunk(ids[:, : length - 1]), ids[:, :length], depth)[0]
        ended = (ids[0, len(prompt) :] == eos).nonzero()
        stop = len(prompt) + (int(ended[0]) if len(ended) else new_tokens)
        t = len(prompt) - 1  # h_t and x_{t+1} are known; the chain drafts x_{t+2}, ...
        while t + 1 + depth < min(stop, length):
            right = drafts[t] == ids[0, t + 2 : t + 2 + depth]
            rounds.append(right)
            t += 1 + int(right.long().cumprod(0).sum())
    return Acceptance.count(torch.stack(rounds))


@dataclass(frozen=True)
class Metrics:
    losses: dict[str, float]
    acceptance: dict[str, Acceptance]
    samples: list[tuple[str, str]]


SAMPLE_PROMPTS = (
    "def main(argv):\n",
    "import os\n\ndef read_file(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    f"{IM_START}user\nWrite the function read_file: Return the contents of a file.{IM_END}\n"
    f"{IM_START}assistant\n",
)


def evaluate(model: Model, tokenizer: Tokenizer, corpus: Corpus, depth: int = 4) -> Metrics:
    separator, eos = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    text, chats = encode(tokenizer, corpus.held_out), encode(tokenizer, corpus.held_out_chat)
    losses, acceptance = {}, {}
    for name, documents in {"text": text, "chat": chats}.items():
        rows = windows(documents, separator, 512 + depth, 5)[:48]
        losses[name], acceptance[f"held-out {name}, fed from it"] = text_metrics(model, rows, depth)
    code = [ids[:32] for ids in windows(text, separator, 512, 7)[:48].tolist()]
    questions = chat_prompts(tokenizer, corpus.held_out_chat, 48)[:48]
    for name, prompts in {"text": code, "chat": questions}.items():
        acceptance[f"greedy decoding, {name} prompts"] = decoding_metrics(
            model, prompts, 128, depth, eos
        )
    samples = []
    for prompt in SAMPLE_PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        new = generate(model.trunk, [ids], len(ids) + 96, 0)[0, len(ids) :].tolist()
        new = new[: new.index(eos)] if eos in new else new
        samples.append((prompt, tokenizer.decode(new)))
    return Metrics(losses, acceptance, samples)


def report(metrics: Metrics) -> str:
    """The metrics as Markdown."""
    lines = [
        f"- held-out {name}: {loss:.3f} nats per token" for name, loss in metrics.losses.items()
    ]
    lines += [
        "",
        "| drafts | depth 1 | 2 | 3 | 4 | tokens per round |",
        "|---|---|---|---|---|---|",
    ]
    for name, counts in metrics.acceptance.items():
        cells = [
            f"{rate:.3f} ({a}/{o})"
            for rate, a, o in zip(counts.rates, counts.accepted, counts.offered, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {counts.tokens_per_round:.2f} |")
    for prompt, continuation in metrics.samples:
        lines += ["", "```", f"{prompt}>>> {continuation}", "```"]
    return "\n".join(lines)


# ---- command -----------------------------------------------------------------------------------

DEFAULT_STEPS = 1500
README = """# tiny-qwen3.5-nextn

A Qwen3.5 of {millions:.2f} million parameters with a NextN (MTP) head, for tests and
demonstrations of speculative decoding. It writes text that looks like Python and knows nothing.

- Layout: Hugging Face `Qwen3_5ForConditionalGeneration`, text only: {layers} layers of which one
  is full attention, hidden size {hidden}, tied embeddings, one `mtp` layer; bfloat16.
- Tokenizer: byte-level BPE, {vocab} tokens, ChatML template.
- Size: {bytes:.1f} MB of weights.

## Training

`{command}`

Python {python}, torch {torch}, {threads} thread, seed {seed}; {minutes:.0f} minutes on an
`{machine}` CPU. Same versions, arguments and kind of CPU give the same weights.

- Data: the Python {python} standard library (sources without tests and tables, and the topics of
  `help()`), {text_tokens:,} tokens, and {chat_tokens:,} tokens of chat examples made from its
  docstrings and functions. One file in twenty, by hash, is held out.
- Text digest: sha256 `{digest}`.
- Stage 1, {text_steps} steps of {rows} x {length} tokens: trunk and head on text.
- Stage 2, {distil_steps} steps of {rows} x {length}: head on the trunk's predictions, depth 4.
- Stage 3, {self_steps} steps of {self_rows} x {self_length}: the same on text the trunk wrote.

Mean losses of the last 50 training steps (stage 1: next token, depth 1, depth 2; the others: mean
of divergence and argmax loss at depths 1 to 4):
{losses}

## Results

`python scripts/train_demo.py --evaluate {out}`, in float32.

A draft counts as right when it is the trunk's most likely token, and rates are conditional: a
depth is counted when the drafts before it were right. "Fed from it" gives the chain the real
tokens of the text; "greedy decoding" is speculative decoding at depth 4 of the trunk's own
continuation, 48 prompts, up to 128 tokens. A model this small soon repeats itself when decoded
greedily, and repetitions are easy to draft: the rates on held-out text are the sober ones.

{report}

## Licence

The weights are under the MIT licence. They were trained on the Python standard library, which is
under the PSF License Agreement, (c) Python Software Foundation.
"""


def digest(corpus: Corpus) -> str:
    everything = "\0".join(corpus.train + corpus.train_chat)
    return hashlib.sha256(everything.encode()).hexdigest()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def steps_for(minutes: float, model: Model, data: Encoded) -> int:
    """First-stage steps so that all stages take about `minutes`, from a short measurement."""
    probe, recipe = copy.deepcopy(model), Recipe.of(1)
    batches = data.batches(recipe.rows, recipe.length + recipe.depth, 0)
    optimiser = Optimiser(probe, 4, 0.0, 0.0)
    seconds = []
    for _ in range(4):
        started = time.monotonic()
        optimiser.step(text_loss(probe, next(batches))[0])
        seconds.append(time.monotonic() - started)
    return max(5, int(60 * minutes / (1.5 * min(seconds))))


def train_command(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    torch.manual_seed(arguments.seed)
    corpus = read_corpus()
    if arguments.start_from:
        model, tokenizer = read_model(arguments.start_from)
    else:
        model = Model(Qwen35Config())
        initialise(model)
        tokenizer = train_tokenizer(corpus, model.config.vocab_size)
    data = Encoded(
        encode(tokenizer, corpus.train),
        encode(tokenizer, corpus.train_chat),
        tokenizer.token_to_id(END_OF_TEXT),
    )
    steps = steps_for(arguments.minutes, model, data) if arguments.minutes else arguments.steps
    recipe = Recipe.of(steps)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {recipe}", flush=True)

    def checkpoint() -> None:
        if arguments.checkpoints:
            write_model(model, tokenizer, arguments.checkpoints)

    losses = run_stages(
        model,
        data,
        chat_prompts(tokenizer, corpus.train_chat, 48),
        recipe,
        arguments.seed,
        arguments.stage,
        checkpoint,
    )
    write_model(model, tokenizer, arguments.out)
    minutes = (time.monotonic() - started) / 60
    continued = f" --stage {arguments.stage}" if arguments.stage > 1 else ""
    continued += f" --start-from {arguments.start_from}" if arguments.start_from else ""
    readme = README.format(
        millions=parameters / 1e6,
        layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        vocab=tokenizer.get_vocab_size(),
        bytes=(arguments.out / "model.safetensors").stat().st_size / 1e6,
        command=f"python scripts/train_demo.py --out {arguments.out} --steps {steps}"
        f" --seed {arguments.seed} --threads {arguments.threads}{continued}",
        python=platform.python_version(),
        torch=torch.__version__,
        threads=arguments.threads,
        seed=arguments.seed,
        minutes=minutes,
        machine=cpu_name(),
        text_tokens=sum(map(len, data.text)),
        chat_tokens=sum(map(len, data.chat)),
        digest=digest(corpus),
        losses="\n".join(
            f"- {name}: {', '.join(f'{value:.3f}' for value in values)}"
            for name, values in losses.items()
        ),
        out=arguments.out,
        report=report(evaluate(model, tokenizer, corpus)),
        **asdict(recipe),
    )
    (arguments.out / "README.md").write_text(readme)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="model directory to write")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only measure this model")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="first-stage steps (%(default)s)"
    )
    length.add_argument("--minutes", type=float, help="choose the steps for about this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="also write the model here, every 4 min")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3), help="first stage")
    parser.add_argument("--start-from", type=Path, help="model to start from (with --stage)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.evaluate:
        print(report(evaluate(*read_model(arguments.evaluate), read_corpus())))
    elif arguments.out:
        train_command(arguments)
    else:
        parser.error("give --out or --evaluate")


if __name__ == "__main__":
    main()
