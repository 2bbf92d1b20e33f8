"""Decoding speed of stock mlx_lm and of mlx_spec, in one process and in turns.

    python scripts/bench_decode.py
    python scripts/bench_decode.py --model PATH --mlp-width 0 --dtype stored

By default the model is the demo model with its MLPs widened (see cost_padding.py), so that the
target costs like a large model while its text, and with it the acceptance, stays the demo's.
End-of-text tokens do not end a text here: each has `--max-tokens` tokens.

How far is the loop from what the forwards allow? With

    k          tokens per round of the run, 1 + accepted / rounds
    T(1)       stock mlx_lm's time per token in its own loop
    T(n+1)     verify forward over n+1 rows, to the host's read of their argmax
    commit     bringing the caches to the accepted rows (replaying the recurrence)
    draft      learning the tokens of the last round and making n drafts

    ideal    = k * T(1) / (T(n+1) + commit + draft)
    overhead = 1 - measured ratio / ideal ratio

The last three are the means of the rounds of a like run in which each part is waited for before
the next one begins, from a ready graph to its result: what the device needs. T(1) is stock's time
in its loop, in the ideal ratio as in the measured one; so it cancels out, and the overhead is what
our loop adds to our own forwards: building graphs while the device waits, and anything else that
it does. (Stock builds the graph of a token while the device works on the one before. So `fwd(1)`,
a lone forward of one row timed like T(n+1), should be about T(1).)

Wall times of a shared machine are noisy. Only the ratios of one run mean something.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx
import mlx_lm
from cost_padding import parameter_count, widen_mlps
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

import mlx_spec
from mlx_spec.accept import Draws, Greedy
from mlx_spec.demo import demo_model
from mlx_spec.drafters import Drafter, Pick
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.load import pairing_of
from mlx_spec.randomness import integers
from mlx_spec.round import Request, speculate
from mlx_spec.sliding_window import in_time_order
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for

OPENBLAS = [
    Path(f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0")
    for machine in ("x86_64", "aarch64")
]
SLOWER_KERNEL = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # settings that pin a slower kernel

PROMPTS = [
    'class Inventory:\n    """Items in stock, by name."""\n\n    def __init__(self):\n',
    "import json\nimport os\n\n\ndef load_settings(path, default=None):\n",
    "def merge_sorted(left, right):\n    result = []\n    i = j = 0\n",
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
    if sys.platform == "linux" and blas() == "reference":
        print("Slow reference BLAS; apt-get install libopenblas0-pthread.", file=sys.stderr)


def blas() -> str:
    """The BLAS that this process really has."""
    if sys.platform == "darwin":
        return "Accelerate"
    process = ctypes.CDLL(None)
    try:
        config, kernels = process.openblas_get_config, process.openblas_get_corename
    except AttributeError:
        return "reference"
    config.restype = kernels.restype = ctypes.c_char_p
    name = " ".join(config().decode().split()[:2])
    return f"{name} ({kernels().decode()} kernels, threads: {process.openblas_get_num_threads()})"


# ---- whole generations -------------------------------------------------------------------------


def typical(repeats: Iterable[Sequence[float]]) -> float:
    """The mean over the steps of each step's median over the repeats, which all take the same
    steps: bursts of other work on the machine do not count, differences between steps do."""
    return mean(median(step) for step in zip(*repeats, strict=True))


@dataclass
class Run:
    """One generation: its tokens, and the time that each took after the one before it (the first
    one: after the prefill). The tokens of a round come together, so all but one take no time."""

    tokens: list[int]
    seconds: list[float]
    stats: SpecStats | None


def run(stream_generate: Callable, model: Any, tokenizer: Any, prompt: str, **options: Any) -> Run:
    """`stream_generate` is mlx_lm's or mlx_spec's. Greedy."""
    clock = 0.0

    def prefilled(done: int, total: int) -> None:
        nonlocal clock
        if done < total:  # the last prompt token belongs to the first step or round
            clock = time.perf_counter()

    mx.synchronize(generation_stream)  # stock leaves a step under way
    tokens, seconds = [], []
    for response in stream_generate(
        model, tokenizer, prompt, prompt_progress_callback=prefilled, **options
    ):
        tokens.append(response.token)
        before, clock = clock, time.perf_counter()
        seconds.append(clock - before)
    return Run(tokens, seconds, getattr(response, "spec", None))


@dataclass
class Runs:
    """Repeats of one kind of run: for each prompt."""

    by_prompt: dict[str, list[Run]] = field(default_factory=dict)

    def add(self, prompt: str, run: Run) -> None:
        self.by_prompt.setdefault(prompt, []).append(run)

    @property
    def texts(self) -> list[list[int]]:
        return [runs[0].tokens for runs in self.by_prompt.values()]

    @property
    def token_s(self) -> float:
        """Time per token, over all prompts."""
        seconds = tokens = 0.0
        for runs in self.by_prompt.values():
            seconds += typical(run.seconds for run in runs) * len(runs[0].tokens)
            tokens += len(runs[0].tokens)
        return seconds / tokens

    @property
    def stats(self) -> SpecStats:
        """The counters of all prompts together (of one repeat)."""
        total = SpecStats()
        for runs in self.by_prompt.values():
            stats = runs[0].stats
            assert stats is not None
            total.rounds += stats.rounds
            total.drafted += stats.drafted
            total.accepted += stats.accepted
        return total


# ---- the parts of a round ----------------------------------------------------------------------


class Timings:
    """Samples of the times of the parts of a round, for each repeat."""

    def __init__(self) -> None:
        self.repeats: list[dict[tuple[str, int], list[float]]] = []

    def new_repeat(self) -> None:
        self.repeats.append({})

    @contextmanager
    def of(self, part: str, size: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.repeats[-1].setdefault((part, size), []).append(time.perf_counter() - began)

    def __call__(self, part: str, size: int) -> float:
        return typical(samples[part, size] for samples in self.repeats)


class TimedLaw(Greedy):
    """Waits for the draws of each verify forward."""

    def __init__(self, timings: Timings):
        self.timings = timings

    def draw(self, logits: mx.array, drafts: list[mx.array]) -> Draws:
        draws = super().draw(logits, drafts)
        with self.timings.of("forward", logits.shape[1]):
            integers(draws.tokens)
        return draws


class TimedDrafter:
    """Waits for the caches of the round before, then for the drafts."""

    def __init__(self, inner: Drafter, timings: Timings):
        self.inner = inner
        self.timings = timings
        self.kind = inner.kind
        self.make_cache = inner.make_cache
        self.extend = inner.extend
        self.position = inner.position
        self.rewind = inner.rewind

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        """`pick` is not used: it starts the device on each draft before the graph is ready."""
        states = [cache.state for cache in target_caches]
        with self.timings.of("commit", n):
            mx.eval(states)
        drafts = self.inner.draft(tokens, hidden, n, Greedy().pick, caches, target_caches)
        with self.timings.of("draft", n):
            mx.eval(drafts)
        return drafts


def time_parts(model: Any, prompt: list[int], n: int, max_tokens: int, timings: Timings) -> None:
    """The rounds of a generation, one part after the other."""
    drafter = pairing_of(model).drafter
    assert drafter is not None
    request = Request(
        target_for(model),
        TimedDrafter(drafter, timings),
        TimedLaw(timings),
        in_time_order(make_prompt_cache(model)),
        drafter.make_cache(),
        n,
        mx.array(prompt, mx.uint32),
        KVQuantization(),
    )
    with mx.stream(generation_stream):
        request.prefill(2048, lambda done, total: None)
    for _ in speculate(request, generation_stream, max_tokens, SpecStats()):
        pass


# ---- the result --------------------------------------------------------------------------------


def ideal_ratio(tokens_per_round: float, token_s: float, round_s: float) -> float:
    return tokens_per_round * token_s / round_s


def overhead(measured_ratio: float, ideal: float) -> float:
    return 1 - measured_ratio / ideal


@dataclass(frozen=True)
class Row:
    num_draft_tokens: int
    stock_tps: float
    spec_tps: float
    ratio: float
    acceptance: float
    tokens_per_round: float
    stock_token_s: float
    forward_1_s: float
    forward_n_s: float
    commit_s: float
    draft_s: float
    ideal: float
    overhead: float
    identical: bool
    first_difference: str | None


def make_row(
    n: int, stock: Runs, spec: Runs, one_row: Timings, timings: Timings, difference: str | None
) -> Row:
    stats = spec.stats
    acceptance, tokens_per_round = stats.acceptance, stats.tokens_per_round
    assert acceptance is not None
    assert tokens_per_round is not None
    forward, commit, draft = timings("forward", n + 1), timings("commit", n), timings("draft", n)
    ratio = stock.token_s / spec.token_s
    ideal = ideal_ratio(tokens_per_round, stock.token_s, forward + commit + draft)
    return Row(
        num_draft_tokens=n,
        stock_tps=1 / stock.token_s,
        spec_tps=1 / spec.token_s,
        ratio=ratio,
        acceptance=acceptance,
        tokens_per_round=tokens_per_round,
        stock_token_s=stock.token_s,
        forward_1_s=one_row("forward", 1),
        forward_n_s=forward,
        commit_s=commit,
        draft_s=draft,
        ideal=ideal,
        overhead=overhead(ratio, ideal),
        identical=difference is None,
        first_difference=difference,
    )


def first_difference(
    model: Any, prompts: Sequence[list[int]], stock: Runs, spec: Runs
) -> str | None:
    """Where the texts part, with the stock logits' top-2 margin there."""
    for number, prompt in enumerate(prompts):
        a, b = stock.texts[number], spec.texts[number]
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            logits = model(mx.array([prompt + a[:at]]))[0, -1]
            low, high = mx.topk(logits, 2).tolist()
            return f"prompt {number + 1}, token {at + 1}, top-2 margin {abs(high - low):.1e}"
    return None


@dataclass(frozen=True)
class Setting:
    """What was measured, on what."""

    model: str
    parameters: int
    mlp_width: int
    dtype: str
    device: str
    mlx: str
    mlx_lm: str
    blas: str
    load_average: float  # of the machine, at the start
    max_tokens: int
    repeats: int

    def as_text(self) -> str:
        width = f"MLP width {self.mlp_width}" if self.mlp_width else "not widened"
        return (
            f"{self.model}, {width}, {self.parameters / 1e6:.1f} M parameters, {self.dtype}\n"
            f"{self.device}, mlx {self.mlx}, mlx-lm {self.mlx_lm}, BLAS {self.blas}, "
            f"load average {self.load_average:.1f}\n"
            f"greedy, {len(PROMPTS)} prompts, {self.max_tokens} tokens each, "
            f"{self.repeats} repeats; times in ms"
        )


def table(rows: Sequence[Row]) -> str:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("depth", lambda r: str(r.num_draft_tokens)),
        ("stock t/s", lambda r: f"{r.stock_tps:.1f}"),
        ("spec t/s", lambda r: f"{r.spec_tps:.1f}"),
        ("ratio", lambda r: f"{r.ratio:.2f}"),
        ("accepted", lambda r: f"{r.acceptance:.2f}"),
        ("tok/round", lambda r: f"{r.tokens_per_round:.2f}"),
        ("T(1)", lambda r: f"{1e3 * r.stock_token_s:.2f}"),
        ("fwd(1)", lambda r: f"{1e3 * r.forward_1_s:.2f}"),
        ("T(n+1)", lambda r: f"{1e3 * r.forward_n_s:.2f}"),
        ("T(n+1)/T(1)", lambda r: f"{r.forward_n_s / r.stock_token_s:.2f}"),
        ("commit", lambda r: f"{1e3 * r.commit_s:.2f}"),
        ("draft", lambda r: f"{1e3 * r.draft_s:.2f}"),
        ("ideal", lambda r: f"{r.ideal:.2f}"),
        ("overhead", lambda r: f"{r.overhead:.1%}"),
        ("same text", lambda r: r.first_difference or "yes"),
    ]
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


# ---- the command -------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="a directory with a head (default: the demo model)")
    parser.add_argument("--mlp-width", type=int, default=16384, help="0: as stored")
    parser.add_argument("--dtype", choices=["float32", "stored"], default="float32")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    return parser.parse_args(arguments)


def load(path: str, width: int, dtype: str) -> tuple[Any, Any]:
    model, tokenizer = mlx_spec.load(path)
    drafter = pairing_of(model).drafter
    if drafter is None:
        raise SystemExit(f"{path} has no drafter: {pairing_of(model).detail}.")
    if dtype == "float32":
        model.set_dtype(mx.float32)
        drafter.head.set_dtype(mx.float32)
    if width:
        try:
            widen_mlps(model.layers, width)
        except ValueError as error:
            raise SystemExit(f"--mlp-width {width}: {error}") from None
    tokenizer.eos_token_ids = []
    return model, tokenizer


def measure(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[Row]:
    depths, stock = options.num_draft_tokens, Runs()
    spec = {n: Runs() for n in depths}
    timings = {n: Timings() for n in (0, *depths)}

    def stock_run(prompt: str, tokens: int) -> Run:
        return run(mlx_lm.stream_generate, model, tokenizer, prompt, max_tokens=tokens)

    def spec_run(prompt: str, tokens: int, n: int) -> Run:
        return run(
            mlx_spec.stream_generate,
            model,
            tokenizer,
            prompt,
            max_tokens=tokens,
            num_draft_tokens=n,
            require_spec=True,
        )

    stock_run(PROMPTS[0], 16)  # warm-up
    for n in depths:
        spec_run(PROMPTS[0], 16, n)
    prompts = {prompt: tokenizer.encode(prompt) for prompt in PROMPTS}
    for _ in range(options.repeats):
        for samples in timings.values():
            samples.new_repeat()
        for prompt, ids in prompts.items():
            stock.add(prompt, stock_run(prompt, options.max_tokens))
            for n in depths:
                spec[n].add(prompt, spec_run(prompt, options.max_tokens, n))
                time_parts(model, ids, n, options.max_tokens, timings[n])
            time_parts(model, ids, 0, options.max_tokens // 4, timings[0])
    return [
        make_row(
            n,
            stock,
            spec[n],
            timings[0],
            timings[n],
            first_difference(model, list(prompts.values()), stock, spec[n]),
        )
        for n in depths
    ]


def main() -> None:
    use_openblas()
    options = parse()
    path = options.model or str(demo_model())
    model, tokenizer = load(path, options.mlp_width, options.dtype)
    setting = Setting(
        model=Path(path).name,
        parameters=parameter_count(model),
        mlp_width=options.mlp_width,
        dtype=str(model.layers[0].input_layernorm.weight.dtype).removeprefix("mlx.core."),
        device=str(mx.default_device()),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        blas=blas(),
        load_average=os.getloadavg()[0],
        max_tokens=options.max_tokens,
        repeats=options.repeats,
    )
    if not options.json:
        print(setting.as_text(), flush=True)
    rows = measure(model, tokenizer, options)
    if options.json:
        result = {"setting": asdict(setting), "rows": [asdict(row) for row in rows]}
        print(json.dumps(result, indent=2))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
