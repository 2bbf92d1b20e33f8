"""Train a demo model: a small language model with a head that drafts for it.

    pip install torch safetensors tokenizers
    python scripts/train_demo.py qwen3.5 --out models/tiny-qwen3.5-nextn
    python scripts/train_demo.py gemma4 --out models/tiny-gemma4
    python scripts/train_demo.py gemma4 --evaluate models/tiny-gemma4

qwen3.5 is a Qwen3.5 with a NextN (MTP) head in the same directory, gemma4 a Gemma-4 with its
assistant in a directory beside it, whose name ends in "-assistant".

The text is the Python standard library of the interpreter that runs this script, so nothing is
downloaded. Training takes about an hour on one CPU core and gives the same weights for the same
steps, seed, Python, torch and kind of CPU. Stages:

1. trunk and head together on text: next-token loss plus the head's losses, unrolled to depth 2;
2. trunk frozen (and rounded to bfloat16): the head learns the trunk's own predictions on text,
   unrolled to depth 4;
3. the same on texts that the trunk wrote itself, greedily and sampled;
4. gemma4 only: the clusters of the assistant's output head.

The models are written in the Hugging Face layouts of their families and load with mlx-lm.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from training.batches import Encoded, chat_prompts
from training.corpus import Corpus, read_corpus
from training.evaluation import evaluate, report
from training.files import write_pair
from training.gemma4_pair import Gemma4Pair
from training.loop import Recipe
from training.optimiser import Optimiser
from training.pair import Pair
from training.qwen35_pair import Qwen35Pair
from training.readme import Training, write_readmes
from training.stages import run_stages, text_loss
from training.tokenizer import encode, train_tokenizer

FAMILIES: dict[str, type[Pair]] = {"qwen3.5": Qwen35Pair, "gemma4": Gemma4Pair}
VOCAB_SIZE = 2048


def load(family: type[Pair], directory: Path) -> tuple[Pair, Tokenizer]:
    return family.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


def steps_for(minutes: float, model: Pair, data: Encoded) -> int:
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


def command_of(arguments: argparse.Namespace, steps: int) -> str:
    continued = f" --stage {arguments.stage}" if arguments.stage > 1 else ""
    continued += f" --start-from {arguments.start_from}" if arguments.start_from else ""
    return (
        f"python scripts/train_demo.py {arguments.family} --out {arguments.out} --steps {steps}"
        f" --seed {arguments.seed} --threads {arguments.threads}{continued}"
    )


def train_command(arguments: argparse.Namespace, family: type[Pair], corpus: Corpus) -> None:
    started = time.monotonic()
    torch.manual_seed(arguments.seed)
    if arguments.start_from:
        model, tokenizer = load(family, arguments.start_from)
    else:
        model = family.create()
        documents = corpus.train + corpus.train_chat
        tokenizer = train_tokenizer(documents, VOCAB_SIZE, family.vocabulary)
    data = Encoded(
        encode(tokenizer, corpus.train),
        encode(tokenizer, corpus.train_chat),
        tokenizer.token_to_id(family.vocabulary.separator),
    )
    steps = steps_for(arguments.minutes, model, data) if arguments.minutes else arguments.steps
    recipe = Recipe.of(steps)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {recipe}", flush=True)

    def checkpoint() -> None:
        if arguments.checkpoints:
            write_pair(model, tokenizer, arguments.checkpoints)

    losses = run_stages(
        model,
        data,
        chat_prompts(tokenizer, corpus.train_chat, family.vocabulary.answer, 48),
        recipe,
        arguments.seed,
        arguments.stage,
        checkpoint,
    )
    write_pair(model, tokenizer, arguments.out)
    training = Training(
        family=arguments.family,
        command=command_of(arguments, steps),
        threads=arguments.threads,
        seed=arguments.seed,
        minutes=(time.monotonic() - started) / 60,
        recipe=recipe,
        data=data,
        losses=losses,
    )
    metrics = evaluate(model, tokenizer, corpus)
    write_readmes(model, tokenizer, corpus, training, metrics, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="DIR", help="model directory to write")
    task.add_argument("--evaluate", type=Path, metavar="DIR", help="only measure this model")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=1500, help="first-stage steps (%(default)s)")
    length.add_argument("--minutes", type=float, help="choose the steps for about this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, help="also write the model here, every 4 min")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3, 4), help="first stage")
    parser.add_argument("--start-from", type=Path, help="model to start from (with --stage)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    family = FAMILIES[arguments.family]
    corpus = read_corpus(family.vocabulary)
    if arguments.evaluate:
        print(report(evaluate(*load(family, arguments.evaluate), corpus)))
    else:
        train_command(arguments, family, corpus)


if __name__ == "__main__":
    main()
