"""Stock mlx_lm and mlx_spec in turns: the same process, the same prompts, the same weights.

Stock opens each repeat of each prompt; the depths follow in an order that turns round from repeat
to repeat, so that a machine that gets slower or faster does not favour one of them. A ratio is
taken within a repeat. Every text has the same length: no end-of-text token ends it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm  # type: ignore[import-untyped]

from mlx_spec.accept import make_law
from mlx_spec.bench.parts import Parts, time_parts
from mlx_spec.bench.prompts import Prompt, encode
from mlx_spec.bench.result import (
    FirstDifference,
    Result,
    Row,
    RowDepth,
    Setting,
    add_positions,
    break_even,
)
from mlx_spec.bench.setting import device, drafter_quantization, quantization, versions
from mlx_spec.drafters import Drafter
from mlx_spec.errors import BadArguments, NoDrafter
from mlx_spec.generate import choose_drafter, stream_generate
from mlx_spec.load import pairing_of
from mlx_spec.options import DraftKind, DraftTokens, SpecOptions
from mlx_spec.sampling import Sampling
from mlx_spec.stats import SpecStats

DEPTHS: tuple[DraftTokens, ...] = (1, 2, 3, 4, "auto")
SEED = 1  # of every run
WARM_UP_TOKENS = 16
ROUNDS_OF_PARTS = 8


@dataclass(frozen=True)
class Plan:
    """How a benchmark goes on. Raises BadArguments for what cannot be measured.

    Attributes:
        max_tokens: length of each text.
        cooldown_s: pause before each run, in seconds.
        max_prompt_tokens: longer prompts lose their middle.
        draft_kind: as `stream_generate` takes it.
    """

    depths: Sequence[DraftTokens] = DEPTHS
    max_tokens: int = 256
    repeats: int = 3
    cooldown_s: float = 0
    temp: float = 0
    sampling: Sampling = "auto"
    max_prompt_tokens: int | None = None
    draft_kind: DraftKind = "auto"

    def __post_init__(self) -> None:
        if not self.depths or any(n != "auto" and n < 1 for n in self.depths):
            raise BadArguments("Depths are numbers from 1 on, or 'auto'; give at least one.")
        if self.max_tokens < 2 or self.repeats < 1:
            raise BadArguments("A benchmark needs at least 2 tokens a text, and 1 repeat.")
        if self.cooldown_s < 0 or self.temp < 0:
            raise BadArguments("The cooldown and the temperature must not be below 0.")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise BadArguments("The longest prompt must have at least 1 token.")

    @property
    def fixed_depths(self) -> list[int]:
        return [n for n in self.depths if n != "auto"]

    def order(self, repeat: int) -> list[RowDepth]:
        depths = list(self.depths)
        return ["stock", *(depths if repeat % 2 == 0 else reversed(depths))]


def bench_loaded(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: bool = True,
) -> Result:
    """Measure a model that `mlx_spec.load` has loaded; `name` is what the result calls it.

    Raises: NoDrafter where mlx_spec cannot draft for it.
    """
    drafter = drafter_of(model, name, plan.draft_kind)
    texts = {prompt: encode(prompt, tokenizer, plan.max_prompt_tokens) for prompt in prompts}
    bench = Bench(model, tokenizer, drafter, plan)
    total = len(prompts) * (plan.repeats * (1 + len(plan.depths)) + 1) + 1
    rows = []
    with (
        without_end_of_text(tokenizer),
        tqdm(total=total, unit="run", disable=None if progress else True) as bar,
    ):
        bench.warm_up(next(iter(texts.values())))
        bar.update()
        for prompt, ids in texts.items():
            bar.set_description(prompt.prompt_class)
            rows += bench.rows(prompt.prompt_class, ids, bar.update)
    path = None if drafter.kind == "lookup" else pairing_of(model).path
    setting = Setting(
        model=name,
        target_quantization=quantization(model),
        drafter=str(path) if path else None,
        drafter_kind=drafter.kind,
        drafter_quantization=drafter_quantization(drafter),
        device=device(),
        **versions(),
        sampling=bench.law,
        temp=plan.temp,
        max_tokens=plan.max_tokens,
        repeats=plan.repeats,
        cooldown_s=plan.cooldown_s,
    )
    return Result(setting, rows)


def drafter_of(model: nn.Module, name: str, kind: DraftKind = "auto") -> Drafter:
    """What `stream_generate` drafts with. Raises: NoDrafter."""
    stats = SpecStats()
    drafter = choose_drafter(model, None, SpecOptions(draft_kind=kind), {}, stats)
    if drafter is None:
        raise NoDrafter(f"There is nothing to measure for {name}: {stats.detail}.")
    return drafter


@contextmanager
def without_end_of_text(tokenizer: Any) -> Iterator[None]:
    ends = tokenizer.eos_token_ids
    tokenizer.eos_token_ids = []
    try:
        yield
    finally:
        tokenizer.eos_token_ids = ends


# ---- one run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One generation.

    Attributes:
        depths: drafts in the round that each token comes from; empty for stock.
        prompt_s: from the start to the end of the prefill, that is of all prompt tokens but one.
        generation_s: from there to the last token.
    """

    tokens: list[int]
    depths: list[int]
    prompt_tokens: int
    prompt_s: float
    generation_s: float
    peak_memory_bytes: int
    stats: SpecStats | None

    @property
    def prompt_tps(self) -> float | None:
        return (self.prompt_tokens - 1) / self.prompt_s if self.prompt_tokens > 1 else None

    @property
    def generation_tps(self) -> float:
        return len(self.tokens) / self.generation_s


def run(stream: Callable[..., Iterator[Any]], prompt: list[int]) -> Run:
    """`stream` is stream_generate of mlx_lm or of mlx_spec, with all its arguments but the prompt
    and the callback for its progress."""
    prefilled = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal prefilled
        if done < total:  # the last prompt token belongs to the first step or round
            prefilled = time.perf_counter()

    mx.synchronize(generation_stream)  # stock leaves a step under way
    mx.reset_peak_memory()
    mx.random.seed(SEED)
    tokens: list[int] = []
    depths: list[int] = []
    rounds = drafted = depth = 0
    began = time.perf_counter()
    for response in stream(prompt, prompt_progress_callback=progress):
        tokens.append(response.token)
        stats = getattr(response, "spec", None)
        if stats is not None:
            if stats.rounds > rounds:
                depth = stats.drafted - drafted
                rounds, drafted = stats.rounds, stats.drafted
            depths.append(depth)
    ended = time.perf_counter()
    peak = mx.get_peak_memory()
    return Run(tokens, depths, len(prompt), prefilled - began, ended - prefilled, peak, stats)


# ---- all runs of a prompt ------------------------------------------------------------------------


class Bench:
    """The runs of a model and its drafter.

    Attributes:
        law: by which the drafted runs sample; known after the warm-up.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, drafter: Drafter, plan: Plan):
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.plan = plan
        self.sampler = make_sampler(plan.temp)
        self.law = "greedy"

    def run(self, depth: RowDepth, prompt: list[int], max_tokens: int) -> Run:
        options = {"max_tokens": max_tokens, "sampler": self.sampler}
        if depth == "stock":
            function: Callable[..., Any] = mlx_lm.stream_generate
        else:
            function = stream_generate
            options |= {
                "num_draft_tokens": depth,
                "sampling": self.plan.sampling,
                "draft_kind": self.plan.draft_kind,
            }
        return run(
            lambda prompt, **more: function(self.model, self.tokenizer, prompt, **options, **more),
            prompt,
        )

    def warm_up(self, prompt: list[int]) -> None:
        """A short run of every setting: the first ones after loading are slow."""
        for depth in self.plan.order(0):
            stats = self.run(depth, prompt, WARM_UP_TOKENS).stats
            if stats is not None and stats.sampling is not None:
                self.law = stats.sampling

    def rows(self, prompt_class: str, prompt: list[int], done: Callable[[], object]) -> list[Row]:
        """The rows of one prompt: stock's, then each depth's. Calls `done` after each run."""
        runs: dict[RowDepth, list[Run]] = {depth: [] for depth in self.plan.order(0)}
        for repeat in range(self.plan.repeats):
            for depth in self.plan.order(repeat):
                time.sleep(self.plan.cooldown_s)
                runs[depth].append(self.run(depth, prompt, self.plan.max_tokens))
                done()
        law = make_law(self.sampler, None, mx.array(prompt), self.plan.sampling)
        fixed = self.plan.fixed_depths
        parts = {}
        if self.drafter.text(self.drafter.make_cache()) is None:  # else the text says how many
            parts = time_parts(self.model, self.drafter, law, prompt, fixed, ROUNDS_OF_PARTS)
        done()
        expected = self.expected(prompt, runs["stock"][0])
        rows = []
        for depth, repeats in runs.items():
            row = make_row(
                prompt_class,
                depth,
                repeats,
                runs["stock"],
                parts.get(depth) if isinstance(depth, int) else None,
            )
            if depth != "stock" and expected is not None:
                difference = self.first_difference(prompt, expected, repeats)
                row = replace(row, identical=difference is None, first_difference=difference)
            rows.append(row)
        return rows

    def expected(self, prompt: list[int], stock: Run) -> list[int] | None:
        """The text that drafts must not change; None where the law does not promise one."""
        if self.law in ("greedy", "stock"):
            return stock.tokens
        if self.law == "seed":
            return self.run(0, prompt, self.plan.max_tokens).tokens
        return None

    def first_difference(
        self, prompt: list[int], expected: list[int], repeats: Sequence[Run]
    ) -> FirstDifference | None:
        """Of the first repeat whose text is another one."""
        for run in repeats:
            if run.tokens != expected:
                pairs = enumerate(zip_longest(run.tokens, expected))
                at = next(i for i, (token, other) in pairs if token != other)
                greedy = self.law == "greedy"
                margin = top_2_margin(self.model, prompt + expected[:at]) if greedy else None
                return FirstDifference(at, margin, run.depths[at])
        return None


def top_2_margin(model: nn.Module, tokens: list[int]) -> float:
    """Between the two largest logits for the token after `tokens`, in stock's own loop."""
    rows: list[mx.array] = []

    def note(history: mx.array, logits: mx.array) -> mx.array:
        rows.append(logits[0])
        return logits

    next(generate_step(mx.array(tokens), model, max_tokens=1, logits_processors=[note]))
    highest = cast(list[float], mx.topk(rows[0].astype(mx.float32), 2).tolist())
    return max(highest) - min(highest)


def make_row(
    prompt_class: str,
    depth: RowDepth,
    repeats: Sequence[Run],
    stock: Sequence[Run],
    parts: Parts | None,
) -> Row:
    """The figures of some repeats, without a verdict on their texts."""
    speeds = [run.generation_tps for run in repeats]
    ratios = [run.generation_tps / s.generation_tps for run, s in zip(repeats, stock, strict=True)]
    prompt_speeds = [run.prompt_tps for run in repeats if run.prompt_tps is not None]
    row = Row(
        prompt_class,
        depth,
        repeats[0].prompt_tokens,
        prompt_tps=median(prompt_speeds) if prompt_speeds else None,
        generation_tps=median(speeds),
        generation_tps_low=min(speeds),
        generation_tps_high=max(speeds),
        ratio=median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        step_s=1 / median(run.generation_tps for run in stock),
        peak_memory_bytes=max(run.peak_memory_bytes for run in repeats),
    )
    if parts is not None and isinstance(depth, int):
        row = replace(
            row,
            verify_ratio=parts.verify_ratio,
            draft_steps=parts.draft_steps,
            break_even=break_even(depth, parts.verify_ratio + parts.draft_steps),
        )
    all_stats = [run.stats for run in repeats if run.stats is not None]
    return with_counters(row, all_stats) if all_stats else row


def with_counters(row: Row, repeats: Sequence[SpecStats]) -> Row:
    """Counters are added up over the repeats; the state is that of the last one."""
    drafted = sum(stats.drafted for stats in repeats)
    accepted = sum(stats.accepted for stats in repeats)
    rounds = sum(stats.rounds for stats in repeats)
    return replace(
        row,
        acceptance=accepted / drafted if drafted else None,
        drafted_by_position=add_positions([s.drafted_by_position for s in repeats]),
        accepted_by_position=add_positions([s.accepted_by_position for s in repeats]),
        tokens_per_round=1 + accepted / rounds if rounds else None,
        state=repeats[-1].state,
        why=repeats[-1].state_reason,
    )
