"""The benchmark of `mlx-spec bench` on the demo models, made to cost like large ones.

    python scripts/bench_demos.py
    python scripts/bench_demos.py --random-drafter --depths auto --out docs/bench-random-drafter

The demo models have their MLPs widened (cost_padding.py), so that a step costs like that of a large
model while the text, and with it the acceptance, stays the demo's. Written are OUT.json, a list of
results, and OUT.md, their tables, with two more columns:

    ideal       tokens per round over the cost of a round's forwards in steps: the ratio that the
                forwards allow
    overhead    1 - ratio / ideal: what the loop adds, graphs that are built while the device waits

A summary comes first: `auto` against the best fixed depth, chosen afterwards, and against stock.
OUT-FAMILY/ gets the plots of each family.

Wall times of a shared machine are noisy. Only the ratios mean something.
"""

import argparse
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from cost_padding import parameter_count, widen_mlps

import mlx_spec
from mlx_spec.bench.measure import DEPTHS, Plan, bench_loaded
from mlx_spec.bench.plots import write_png
from mlx_spec.bench.prompts import CLASSES, read_class
from mlx_spec.bench.report import COLUMNS, as_markdown, number
from mlx_spec.bench.result import Result, write_json, write_text
from mlx_spec.candidates import Candidates
from mlx_spec.demo import MODELS, demo_model
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.drafters.wrapped import Wrapped
from mlx_spec.load import pairing_of
from mlx_spec.options import draft_tokens

OPENBLAS = [
    Path(f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0")
    for machine in ("x86_64", "aarch64")
]
SLOWER_KERNEL = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # settings that pin a slower kernel
DOCS = Path(__file__).parent.parent / "docs"
WITH_OVERHEAD = [
    *COLUMNS,
    ("ideal", lambda row: number(row.ideal_ratio)),
    ("overhead", lambda row: number(row.overhead, ".1%")),
]


# ---- BLAS ----------------------------------------------------------------------------------------


def environment_with_openblas(
    system: str, environment: Mapping[str, str], library: Path | None
) -> dict[str, str] | None:
    """The environment to start again in; None where there is nothing to gain from it.

    mlx's Linux wheel links the reference BLAS, which is some forty times slower than OpenBLAS.
    """
    preloaded = environment.get("LD_PRELOAD", "")
    if system != "linux" or library is None or "openblas" in preloaded:
        return None
    kept = {name: value for name, value in environment.items() if name not in SLOWER_KERNEL}
    preload = f"{library}:{preloaded}" if preloaded else str(library)
    return {**kept, "LD_PRELOAD": preload, "OPENBLAS_NUM_THREADS": "1"}


def use_openblas() -> None:
    """Start this process again with OpenBLAS, where it is installed and not in use."""
    library = next((path for path in OPENBLAS if path.exists()), None)
    environment = environment_with_openblas(sys.platform, os.environ, library)
    if environment is not None:
        print(f"Starting again with {library}, one thread.", file=sys.stderr, flush=True)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    if sys.platform == "linux" and blas() == "reference BLAS":
        print("Slow reference BLAS; apt-get install libopenblas0-pthread.", file=sys.stderr)


def blas() -> str:
    """The BLAS that this process really has."""
    if sys.platform == "darwin":
        return "Accelerate"
    process = ctypes.CDLL(None)
    try:
        config, kernels = process.openblas_get_config, process.openblas_get_corename
    except AttributeError:
        return "reference BLAS"
    config.restype = kernels.restype = ctypes.c_char_p
    name = " ".join(config().decode().split()[:2])
    return f"{name} ({kernels().decode()} kernels, threads: {process.openblas_get_num_threads()})"


# ---- the models ----------------------------------------------------------------------------------


class RandomDrafter(Wrapped):
    """Proposes tokens at random, at the cost of the drafter that it stands in for."""

    def __init__(self, inner: Drafter, vocab_size: int, seed: int = 0):
        super().__init__(inner)
        self.kind = "random"
        self.vocab_size = vocab_size
        self.random = Random(seed)

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        """The shift by a random number depends on the real draft, so that it is computed."""

        def shifted(logits: mx.array | Candidates, drafts: list[mx.array]) -> mx.array:
            shift = self.random.randrange(self.vocab_size)
            return (pick(logits, drafts) + shift) % self.vocab_size

        return self.inner.draft(tokens, hidden, n, shifted, caches, target_caches)


def load(family: str, width: int, random_drafter: bool = False) -> tuple[Any, Any]:
    """A demo model and its tokenizer, in float32, its MLPs `width` units wide (0: as stored)."""
    model, tokenizer = mlx_spec.load(str(demo_model(family)))
    pairing = pairing_of(model)
    drafter: Any = pairing.drafter
    if drafter is None:
        raise SystemExit(f"The demo model {family} has no drafter: {pairing.detail}.")
    model.set_dtype(mx.float32)
    drafter.head.set_dtype(mx.float32)
    if width:
        try:
            widen_mlps(model.layers, width)
        except ValueError as error:
            raise SystemExit(f"--mlp-width {width}: {error}") from None
    if random_drafter:
        random = RandomDrafter(drafter, tokenizer.vocab_size)
        model.mlx_spec = replace(pairing, drafter=random)
    return model, tokenizer


# ---- the command ---------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--mlp-width", type=int, default=6144, help="0: as stored")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="longer ones are cut")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temp", type=float, default=0)
    parser.add_argument(
        "--depths", nargs="+", type=draft_tokens, default=list(DEPTHS), metavar="N|auto"
    )
    parser.add_argument("--random-drafter", action="store_true", help="drafts that are no good")
    parser.add_argument("--out", type=Path, default=DOCS / "bench-demos", help="without suffix")
    return parser.parse_args(arguments)


def measure(family: str, options: argparse.Namespace) -> Result:
    model, tokenizer = load(family, options.mlp_width, options.random_drafter)
    plan = Plan(
        options.depths,
        options.max_tokens,
        options.repeats,
        temp=options.temp,
        max_prompt_tokens=options.max_prompt_tokens,
    )
    prompts = [read_class(name) for name in options.classes]
    width = f", MLPs widened to {options.mlp_width}" if options.mlp_width else ""
    name = f"{MODELS[family]}{width}, {parameter_count(model) / 1e6:.1f} M parameters"
    result = bench_loaded(model, tokenizer, name, prompts, plan)
    path = pairing_of(model).path
    setting = replace(
        result.setting,
        drafter=path.name if path else None,
        device=f"{result.setting.device}, {blas()}",
    )
    return Result(setting, result.rows)


def summary(results: Sequence[Result]) -> str:
    """In Markdown: of each prompt class, the ratios to stock of the best fixed depth and of auto,
    medians of the repeats."""
    lines = [
        "| model | prompt | best fixed depth | ratio | auto | auto / best | state |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        model = result.setting.model.partition(",")[0]
        for auto in (row for row in result.rows if row.depth == "auto"):
            rows = [r for r in result.rows if r.prompt_class == auto.prompt_class]
            fixed = {r.depth: r.ratio for r in rows if isinstance(r.depth, int) and r.ratio}
            assert auto.ratio is not None
            compared = "| | "
            if fixed:
                best = max(fixed, key=lambda n: fixed[n])
                compared = f"| {best} | {fixed[best]:.2f} "
            against = f"{auto.ratio / max(fixed.values()):.2f}" if fixed else ""
            lines.append(
                f"| {model} | {auto.prompt_class} {compared}| {auto.ratio:.2f} | {against} "
                f"| {auto.why or auto.state} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    use_openblas()
    options = parse()
    with TemporaryDirectory() as cache:  # what earlier runs have taught `auto` does not count
        os.environ["XDG_CACHE_HOME"] = cache
        results = [measure(family, options) for family in options.families]
    tables = "\n".join([summary(results), *(as_markdown(r, WITH_OVERHEAD) for r in results)])
    name = options.out.name
    for family, result in zip(options.families, results, strict=True):
        write_png(result.as_dict(), options.out.with_name(f"{name}-{family}"))
    write_json(options.out.with_name(f"{name}.json"), [result.as_dict() for result in results])
    write_text(options.out.with_name(f"{name}.md"), tables)
    print(tables)


if __name__ == "__main__":
    main()
