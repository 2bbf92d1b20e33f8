"""The README of a trained model."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .batches import Encoded
from .corpus import Corpus, digest
from .evaluation import Metrics, report
from .loop import Recipe
from .pair import Pair

README = """# {name}

{introduction}
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
{stage_note}
Mean losses of the last 50 training steps (stage 1: next token, depth 1, depth 2; the others: mean
of divergence and argmax loss at depths 1 to 4):
{losses}
{losses_note}
## Results

`python scripts/train_demo.py {family} --evaluate {out}`, in float32.

A draft counts as right when it is the trunk's most likely token, and rates are conditional: a
depth is counted when the drafts before it were right. "Fed from it" gives the chain the real
tokens of the text; "greedy decoding" is speculative decoding at depth 4 of the trunk's own
continuation, 48 prompts, up to {tokens} tokens. A model this small soon repeats itself when decoded
greedily, and repetitions are easy to draft: the rates on held-out text are the sober ones.
{results_note}
{report}

## Licence

The weights are under the MIT licence. They were trained on the Python standard library, which is
under the PSF License Agreement, (c) Python Software Foundation.
"""


@dataclass(frozen=True)
class Training:
    """How a pair was trained."""

    family: str
    command: str
    threads: int
    seed: int
    minutes: float
    recipe: Recipe
    data: Encoded
    losses: dict[str, list[float]]


def write_readmes(
    pair: Pair,
    tokenizer: Tokenizer,
    corpus: Corpus,
    training: Training,
    metrics: Metrics,
    out: Path,
) -> None:
    recipe = asdict(training.recipe)
    for suffix, checkpoint in pair.checkpoints(tokenizer).items():
        directory = out.with_name(out.name + suffix)
        text = README.format(
            name=directory.name,
            introduction=checkpoint.readme,
            bytes=(directory / "model.safetensors").stat().st_size / 1e6,
            family=training.family,
            command=training.command,
            python=platform.python_version(),
            torch=torch.__version__,
            threads=training.threads,
            seed=training.seed,
            minutes=training.minutes,
            machine=cpu_name(),
            text_tokens=sum(map(len, training.data.text)),
            chat_tokens=sum(map(len, training.data.chat)),
            digest=digest(corpus),
            stage_note=pair.notes.stage.format(**recipe),
            losses="\n".join(
                f"- {name}: {', '.join(f'{value:.3f}' for value in values)}"
                for name, values in training.losses.items()
            ),
            losses_note=pair.notes.losses,
            results_note=pair.notes.results,
            out=out,
            tokens=pair.decoded_tokens,
            report=report(metrics),
            **recipe,
        )
        (directory / "README.md").write_text(text)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
