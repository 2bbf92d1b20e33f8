"""What lookup gains and costs with a small real model: docs/lookup-smollm2.md.

    scripts/fetch_smollm2.py DIRECTORY
    python scripts/bench_lookup.py DIRECTORY > docs/lookup-smollm2.md

Greedy, each text by stock mlx_lm, at depth 16, and at automatic depth. Compared is the time that
the process computes, which other processes on the machine leave alone; automatic depth itself goes
by the clock. On Linux, OpenBLAS makes it bearable (`LD_PRELOAD=libopenblas.so.0`).
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import mlx_lm

import mlx_spec
from mlx_spec.options import DraftTokens

SOURCE = '''def read_scores(path):
    """Read a table of names and scores."""
    scores = {}
    with open(path) as file:
        for line in file:
            name, value = line.split(",")
            scores[name.strip()] = float(value)
    return scores


def best(scores, count):
    """The names with the highest scores."""
    ordered = sorted(scores, key=scores.get, reverse=True)
    return ordered[:count]


def average(scores):
    return sum(scores.values()) / len(scores)
'''
DOCUMENT = (
    "The harbour of Kalmstad was built in 1874 by the engineer Ida Brenner. It has three basins, "
    "of which the largest is 640 metres long. The lighthouse at its entrance is 31 metres high and "
    "has been run by electricity since 1912. In 1953 a storm destroyed the eastern pier, which was "
    "rebuilt in concrete two years later. Today the harbour is used by ferries to the islands of "
    "Vinga and Orust, and by about forty fishing boats."
)
PROMPTS = {  # an instruction, and how the answer begins
    "edit: rename": (
        "Rewrite this Python file. Rename the function best to top and leave everything else as "
        f"it is.\n\n```python\n{SOURCE}```\n",
        "Here is the file with the function renamed:\n\n```python\ndef read_scores(path):",
    ),
    "edit: comment": (
        f"Here is a Python file:\n\n```python\n{SOURCE}```\n\nWrite the whole file again, with a "
        "comment at the top.",
        "```python\n# Scores of players.\n\n",
    ),
    "document: quote": (
        f"{DOCUMENT}\n\nQuote the sentences which say when something was built or rebuilt, word "
        "for word.",
        'The sentences are:\n\n"The harbour',
    ),
    "document: correct": (
        f"Correct the spelling of this text and write all of it again:\n\n{DOCUMENT}",
        "The harbour of Kalmstad",
    ),
    "prose: story": ("Write a short story about a lighthouse keeper and a storm.", ""),
    "prose: explain": ("Why do people like music? Explain it in your own words.", ""),
}


HEADER = """# Lookup with SmolLM2-135M

Made by `python scripts/bench_lookup.py DIRECTORY --repeats 1`, with the model that
`scripts/fetch_smollm2.py DIRECTORY` takes out of a package of PyPI: greedy, float32, on Linux with
OpenBLAS on one thread. Two edits of a file and two answers that repeat a document, both with the
beginning of the answer given, as a model of this size would wander off; and free prose. Stock's
time over auto's is of computing (the time of the process), so that other programs do not count;
automatic depth itself goes by the clock. On a GPU a further row costs another share of a step:
measure there.
"""


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    cpu_s: float  # of decoding, without the prompt
    stats: mlx_spec.SpecStats | None


def run(model: Any, tokenizer: Any, prompt: list[int], depth: DraftTokens | None, most: int) -> Run:
    """`depth` None: by stock mlx_lm."""
    if depth is None:
        responses = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=most)
    else:
        responses = mlx_spec.stream_generate(
            model, tokenizer, prompt, max_tokens=most, num_draft_tokens=depth
        )
    tokens: list[int] = []
    for response in responses:
        if not tokens:
            began = time.process_time()
        tokens.append(response.token)
    return Run(tokens, time.process_time() - began, getattr(response, "spec", None))


def row(name: str, stock: list[Run], deep: Run, auto: list[Run]) -> str:
    same = all(r.tokens == stock[0].tokens for r in [deep, *auto])
    stats, last = deep.stats, auto[-1].stats
    assert stats is not None
    assert last is not None
    ratio = sum(r.cpu_s for r in stock) / sum(r.cpu_s for r in auto)
    return (
        f"| {name} | {len(stock[0].tokens)} | {stats.drafted} | {stats.accepted} "
        f"| {stats.tokens_per_round:.2f} | {last.tokens_per_round:.2f} | {ratio:.2f} "
        f"| {'yes' if same else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="What scripts/fetch_smollm2.py has written.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="Of stock and of automatic depth.")
    args = parser.parse_args()
    model, tokenizer = mlx_spec.load(args.directory)
    run(model, tokenizer, tokenizer.encode(SOURCE * 2), "auto", args.max_tokens)  # costs
    print(HEADER)
    print(
        "| prompt | tokens | drafted, depth 16 | accepted | tokens a round | the same, auto depth "
        "| stock's time / auto's | stock's text |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: "
        "| --- |"
    )
    for name, (instruction, begin) in PROMPTS.items():
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": instruction}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.encode(text + begin, add_special_tokens=False)
        stock, auto = [], []
        for _ in range(args.repeats):
            stock.append(run(model, tokenizer, prompt, None, args.max_tokens))
            auto.append(run(model, tokenizer, prompt, "auto", args.max_tokens))
        deep = run(model, tokenizer, prompt, 16, args.max_tokens)
        print(row(name, stock, deep, auto), flush=True)
        print(f"{name}: {auto[-1].stats.as_text()}", file=sys.stderr)


if __name__ == "__main__":
    main()
