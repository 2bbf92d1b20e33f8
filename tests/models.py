"""The models that tests share: tiny reference checkpoints, loaded in float32 with their heads."""

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer
from reference_files import REFERENCE, checkpoints

from mlx_spec.accept import Acceptance, Greedy
from mlx_spec.demo import demo_model
from mlx_spec.depth import Fixed
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.wrapped import Wrapped
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.load import load_drafter
from mlx_spec.round import Request
from mlx_spec.sliding_window import SlidingWindow, in_time_order
from mlx_spec.targets import target_for
from mlx_spec.targets.target import Target

RANDOM = ["qwen3-5", "qwen3-5-tied", "qwen3-5-moe", "qwen3-6-moe", "qwen3-next"]
TRAINED = ["qwen3-5-trained", "qwen3-6-moe-trained"]
DEMO = "demo"
GEMMA_DEMO = "gemma4-demo"
DEMOS = {DEMO: "qwen3.5", GEMMA_DEMO: "gemma4"}
GEMMA_RANDOM = ["gemma4-dense", "gemma4-e2b", "gemma4-moe"]
GEMMA_TRAINED = ["gemma4-dense-trained", "gemma4-e2b-trained"]
DEEPSEEK = "deepseek-v3-trained"
DEEPSEEK_RANDOM = ["deepseek-v3-fp8", "glm4-moe", "mimo"]
EAGLE = "llama-target-trained"  # its head is EAGLE_HEAD
EAGLE_HEAD = "llama-eagle3-trained"
WINDOW = 8  # of the Gemma checkpoints, in tokens


@dataclass(frozen=True)
class Pair:
    path: Path
    model: nn.Module
    tokenizer: Any  # without end tokens
    target: Target
    drafter: Drafter
    prompt: list[int]

    @property
    def layers(self) -> int:
        """How many caches the model has."""
        return len(make_prompt_cache(self.model))

    @property
    def full(self) -> int:
        """The cache whose offset counts tokens and whose rows are all kept."""
        kinds = [type(c) for c in make_prompt_cache(self.model)]
        return kinds.index(KVCache)


def checkpoint_path(name: str) -> Path:
    return demo_model(DEMOS[name]) if name in DEMOS else checkpoints() / name


def strip_head(path: Path) -> None:
    """Take the mtp tensors out of a model's one file, as most conversions do."""
    weights = mx.load(str(path / "model.safetensors"))
    kept = {k: v for k, v in weights.items() if not k.startswith("mtp.")}
    mx.eval(kept)
    mx.save_safetensors(str(path / "model.safetensors"), kept, metadata={"format": "pt"})


def dump(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(REFERENCE / "dumps" / f"{name}.npz"))


def drafter_path(name: str) -> Path:
    if name == EAGLE:
        return checkpoint_path(EAGLE_HEAD)
    path = checkpoint_path(name)
    assistant = path.with_name(f"{path.name}-assistant")
    return assistant if assistant.exists() else path


@cache
def pair(name: str, window: int | None = None) -> Pair:
    """`window`: in place of the sliding window of the checkpoint."""
    path = checkpoint_path(name)
    changes = {}
    if window is not None:
        text = json.loads((path / "config.json").read_text())["text_config"]
        changes = {"text_config": text | {"sliding_window": window}}
    # mlx-lm takes DeepSeek's head out of models of 61 layers only
    model, _ = load_model(path, strict="deepseek" not in name, model_config=changes)
    model.set_dtype(mx.float32)
    tokenizer = load_tokenizer(path)
    if name in DEMOS:
        prompt = tokenizer.encode(
            "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n"
        )
    elif name == "mimo":
        prompt = dump("mimo_target")["input_ids"].reshape(-1).tolist()
    else:
        reference = dump(f"{EAGLE_HEAD if name == EAGLE else name}_generate")
        prompt = reference["prompt"].reshape(-1).tolist()
    tokenizer.eos_token_ids = []
    target = target_for(model)
    return Pair(path, model, tokenizer, target, load_drafter(drafter_path(name), target), prompt)


def make_request(
    pair: Pair,
    prompt: list[int],
    num_draft_tokens: int,
    drafter: Any = None,
    law: Acceptance | None = None,
    kv_quantization: KVQuantization | None = None,
    prefill_step: int = 2048,
) -> Request:
    """A prefilled request."""
    drafter = drafter or pair.drafter
    request = Request(
        pair.target,
        drafter,
        law or Greedy(),
        in_time_order(make_prompt_cache(pair.model)),
        in_time_order(drafter.make_cache()),
        [Fixed(num_draft_tokens) for _ in drafter.parts],
        mx.array(prompt, mx.uint32),
        kv_quantization or KVQuantization(),
    )
    request.prefill(prefill_step, lambda done, total: None)
    return request


class ScriptedDrafter(Wrapped):
    """Learns with a real drafter, but proposes what `script(position, n)` says for the n tokens
    from `position` on; the prompt's first token is at position 0."""

    def __init__(self, inner: Drafter, script):
        super().__init__(inner)
        self.kind = "scripted"
        self.script = script

    def draft(self, tokens, hidden, n, pick, caches, target_caches):
        self.inner.extend(tokens, hidden, caches)
        offsets = [c.offset for c in target_caches if hasattr(c, "offset")]
        next_position = offsets[0] + 1
        proposals = self.script(next_position, n)
        assert len(proposals) == n
        return [mx.array([token], mx.uint32) for token in proposals]


def recomputed_drafts(drafter: Any, tokens: mx.array, hidden: mx.array, n: int) -> list[int]:
    """What a NextN head drafts by DeepSeek-V3's rule, without any cache: layer k pairs layer k-1's
    output of row t with the token at t+1+k; layers repeat from the first one when there are more
    drafts than layers."""
    drafts: list[int] = []
    known = tokens.tolist()
    for step in range(n):
        if step < len(drafter.head.layers):
            m = hidden
            for k in range(step + 1):
                ids = mx.array((known + drafts)[k : k + m.shape[1]])
                cache = drafter.make_cache()[0]
                m = drafter.head(drafter.embed(ids[None]), m, k, cache)
        logits = drafter.lm_head(m[:, -1])
        drafts.append(mx.argmax(logits[0]).item())
    return drafts


def right(text: list[int]):
    """A script that proposes the given text (prompt and continuation), zeros after its end."""
    return lambda position, n: (text + [0] * n)[position : position + n]


def often_right(text: list[int], vocab_size: int):
    """As `right`, but wrong at two of seven tokens: blocks are accepted in part, in full and
    not at all, at every depth."""

    def script(position: int, n: int) -> list[int]:
        return [
            (token + 1) % vocab_size if at % 7 in (0, 3) else token
            for at, token in enumerate(right(text)(position, n), start=position)
        ]

    return script


def cache_arrays(cache: Any) -> list[mx.array]:
    """The valid contents of a cache: rows up to the offset, those in the window in time order,
    or the recurrent state."""
    if type(cache) is RotatingKVCache:
        cache = SlidingWindow(copy.copy(cache))  # which takes the arrays of what it is given
    if type(cache) in (KVCache, SlidingWindow):
        return [] if cache.keys is None or cache.offset == 0 else list(cache.keys_and_values())
    if hasattr(cache, "bits"):
        return [x[..., : cache.offset, :] for x in (*cache.keys, *cache.values)]
    return [x for x in cache.cache if x is not None]


def assert_same_caches(got: list[Any], expected: list[Any], atol: float = 0.0) -> None:
    """Classes, offsets, rows and states; byte for byte unless a tolerance is given.

    A RotatingKVCache and the SlidingWindow in its place are the same."""
    kinds = [[getattr(c, "ring", c) for c in caches] for caches in (got, expected)]
    assert [type(c) for c in kinds[0]] == [type(c) for c in kinds[1]]
    for layer, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert getattr(a, "offset", None) == getattr(b, "offset", None), f"layer {layer}"
        arrays_a, arrays_b = cache_arrays(a), cache_arrays(b)
        assert len(arrays_a) == len(arrays_b), f"layer {layer}"
        for x, y in zip(arrays_a, arrays_b, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(
                np.array(x), np.array(y), rtol=0, atol=atol, err_msg=f"layer {layer}"
            )
