"""The demo: a model that comes with the package, decoded plainly and speculatively."""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from mlx_spec.errors import CheckpointError
from mlx_spec.generate import GenerationResponse, stream_generate
from mlx_spec.load import load

MODELS = {"qwen3.5": "tiny-qwen3.5-nextn", "gemma4": "tiny-gemma4"}
DEFAULT_FAMILY = "qwen3.5"
SEED = 1
PROMPT = "import os\n\n\ndef read_lines(path):\n"


def demo_model(family: str = DEFAULT_FAMILY) -> Path:
    """Its directory: inside an installed package, or in a checkout of the repository.

    Raises CheckpointError where neither is there.
    """
    package = Path(__file__).parent
    for place in (package / "demo_models", package.parent / "models"):
        if (place / MODELS[family] / "config.json").is_file():
            return place / MODELS[family]
    raise CheckpointError(
        f"The demo model {MODELS[family]} is not installed; install mlx-spec again, or give a "
        "model of your own to mlx-spec generate --model."
    )


@dataclass(frozen=True)
class Comparison:
    """The same prompt decoded by stock mlx_lm and with drafts."""

    prompt: str
    plain_text: str
    text: str
    plain_tps: float  # generation tokens per second
    tps: float
    last: GenerationResponse

    @property
    def same_text(self) -> bool:
        return self.text == self.plain_text

    def as_text(self) -> str:
        assert self.last.spec is not None
        verdict = "the same text" if self.same_text else "ANOTHER TEXT"
        lines = [
            self.prompt + self.text,
            "",
            f"plain        {self.plain_tps:7.1f} tokens/s",
            f"speculative  {self.tps:7.1f} tokens/s, {verdict}",
            self.last.spec.as_text(),
        ]
        if self.tps < self.plain_tps:
            lines.append(
                "Slower here: for so small a model, checking several tokens costs this device as "
                "much as computing them one by one."
            )
        return "\n".join(lines)


def compare(
    family: str, prompt: str, max_tokens: int, temp: float, num_draft_tokens: int
) -> Comparison:
    """Raises NotEngaged where nothing would be drafted."""
    model, tokenizer = load(str(demo_model(family)))
    options = {"max_tokens": max_tokens, "sampler": make_sampler(temp, top_p=0.95)}
    for _ in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8):
        pass  # the first tokens after loading are slow
    mx.random.seed(SEED)
    plain = list(mlx_lm.stream_generate(model, tokenizer, prompt, **options))
    mx.random.seed(SEED)
    ours = list(
        stream_generate(
            model,
            tokenizer,
            prompt,
            num_draft_tokens=num_draft_tokens,
            sampling="stock",
            require_spec=True,
            **options,
        )
    )
    return Comparison(
        prompt,
        "".join(r.text for r in plain),
        "".join(r.text for r in ours),
        plain[-1].generation_tps,
        ours[-1].generation_tps,
        ours[-1],
    )
