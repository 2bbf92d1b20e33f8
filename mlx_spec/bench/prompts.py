"""The prompts of a benchmark: a text file of each class, or a file of the user's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadArguments

TEXTS = Path(__file__).with_name("prompts")
CONTINUED = ("code",)  # texts to be continued; the others are instructions
CLASSES = ("code", "edit", "json", "prose", "translation", "reasoning", "long")


@dataclass(frozen=True)
class Prompt:
    """A prompt's class, its text, and whether it is an instruction."""

    prompt_class: str
    text: str
    instruction: bool = True


def read_class(prompt_class: str) -> Prompt:
    """Raises BadArguments for an unknown class."""
    if prompt_class not in CLASSES:
        raise BadArguments(
            f"There is no prompt class {prompt_class!r}; choose from {', '.join(CLASSES)}."
        )
    text = (TEXTS / f"{prompt_class}.txt").read_text(encoding="utf-8")
    return Prompt(prompt_class, text, prompt_class not in CONTINUED)


def read_file(path: str | Path) -> Prompt:
    """An instruction from a text file. Raises BadArguments where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadArguments(f"{path} is not a text file in UTF-8.") from None
    except OSError as error:
        raise BadArguments(f"The prompt file {path} cannot be read ({error.strerror}).") from None
    if not text.strip():
        raise BadArguments(f"The prompt file {path} is empty.")
    return Prompt(Path(path).name, text)


def encode(prompt: Prompt, tokenizer: Any, max_prompt_tokens: int | None = None) -> list[int]:
    """Token ids, an instruction through the chat template if there is one, as mlx_lm.generate
    does it. Of a longer prompt, `max_prompt_tokens` are kept, from its beginning and its end."""
    templated = prompt.instruction and tokenizer.has_chat_template
    text = prompt.text
    if templated:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not templated)
    if max_prompt_tokens is None or len(ids) <= max_prompt_tokens:
        return ids
    head = max_prompt_tokens // 2
    return ids[:head] + ids[len(ids) - (max_prompt_tokens - head) :]
