"""The demo: the model that comes with the package, decoded plainly and speculatively."""

from dataclasses import dataclass
from pathlib import Path

import mlx_lm

from mlx_spec.errors import CheckpointError
from mlx_spec.generate import GenerationResponse, stream_generate
from mlx_spec.load import load

NAME = "tiny-qwen3.5-nextn"
PROMPT = "import os\n\n\ndef read_lines(path):\n"


def demo_model() -> Path:
    """Its directory: inside an installed package, or in a checkout of the repository.

    Raises CheckpointError where neither is there.
    """
    package = Path(__file__).parent
    for path in (package / "demo_model", package.parent / "models" / NAME):
        if (path / "config.json").is_file():
            return path
    raise CheckpointError("The demo model is not installed; give a model with --model.")


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
        return "\n".join(
            [
                self.prompt + self.text,
                "",
                f"plain        {self.plain_tps:7.1f} tokens/s",
                f"speculative  {self.tps:7.1f} tokens/s, "
                + ("the same text" if self.same_text else "ANOTHER TEXT"),
                self.last.spec.as_text(),
            ]
        )


def compare(prompt: str, max_tokens: int, num_draft_tokens: int | None) -> Comparison:
    """Raises NotEngaged where nothing would be drafted."""
    model, tokenizer = load(str(demo_model()))
    for _ in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8):
        pass  # the first tokens after loading are slow
    plain = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
    ours = list(
        stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            require_spec=True,
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
