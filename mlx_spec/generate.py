"""mlx_lm's `load`, `stream_generate` and `generate`, with drafts.

Names, arguments and results are mlx_lm's. Around the token loop everything is mlx_lm's own code:
its functions run here with one name of theirs bound to ours.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_PREFILL_STEP_SIZE,
    DEFAULT_QUANTIZED_KV_START,
    generation_stream,
)
from mlx_lm.generate import GenerationResponse as StockResponse
from mlx_lm.generate import generate as stock_generate
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from mlx_spec.accept import make_law, plain_sampler
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.combined import Combined
from mlx_spec.drafters.lookup import LONG
from mlx_spec.errors import Incompatible, NotEngaged
from mlx_spec.kept import first_pair, keep, take_kept
from mlx_spec.knowledge import depths_for, remember
from mlx_spec.kv_quantization import KVQuantization
from mlx_spec.load import draft_model_of, lookup_of, pairing_of
from mlx_spec.options import DraftKind, DraftTokens, SpecOptions
from mlx_spec.rollback import check_caches, tokens_in
from mlx_spec.round import Request, speculate
from mlx_spec.sampling import Sampling
from mlx_spec.sliding_window import in_time_order, settled
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for


@dataclass
class GenerationResponse(StockResponse):
    """mlx_lm's response, with the counters of the generation so far."""

    spec: SpecStats | None = None


def bound(function: Callable, **names: Any) -> Callable:
    """A copy of a stock function that sees `names` in place of its module's globals.

    Raises AttributeError where the module no longer has one of the names.
    """
    for name in names:
        if name not in function.__globals__ or name not in function.__code__.co_names:
            raise AttributeError(f"{function.__module__}.{function.__name__} does not use {name}")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


def speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Drafter,
    stream: Any = generation_stream,
    *,
    num_draft_tokens: DraftTokens | None = None,
    max_draft_tokens: int | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    sampling: Sampling = "auto",
    stats: SpecStats | None = None,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    """A generator of the tokens that mlx_lm.generate.generate_step yields, with drafts.

    Args as there, and:
        prompt: (T,) token ids, T >= 1.
        draft_model: a drafter for `model`.
        num_draft_tokens, max_draft_tokens: as `stream_generate` takes them.
        prompt_cache: the model's caches, or these and the drafter's in one list, as
            `mlx_lm.generate.speculative_generate_step` takes them. Updated in place; afterwards
            it holds the prompt and all yielded tokens; until then it is not to be read. What the
            drafter knows of it is kept with it for the next turn.
        sampling: the law by which tokens are drawn, as `stream_generate` takes it.
        stats: counters to be filled in.

    Yields: token, its log-probabilities (V,), and whether the drafter had proposed it.
    Raises: Incompatible if the model or one of its caches cannot be rolled back, BadArguments
    if the law cannot follow the sampler.
    """
    if len(prompt) == 0:
        raise ValueError("The prompt is empty; give at least one token.")
    options = SpecOptions(
        "auto" if num_draft_tokens is None else num_draft_tokens, max_draft_tokens, sampling
    )
    stats = stats if stats is not None else SpecStats()
    law = make_law(sampler, logits_processors, prompt, options.sampling)
    stats.kind, stats.num_draft_tokens = draft_model.kind, options.num_draft_tokens
    stats.sampling = law.name

    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model, max_kv_size=max_kv_size)
    target = target_for(model)
    own = caches_of(model, prompt_cache)
    check_caches(target, own)
    kept = take_kept(own, draft_model)
    draft_caches = prompt_cache[len(own) :] or (kept.caches if kept else [])
    if not draft_caches:
        draft_caches = draft_model.make_cache()
        stats.unprimed = tokens_in(own) if draft_caches else 0
    request = Request(
        target,
        draft_model,
        law,
        own,
        draft_caches,
        depths_for(options, model, draft_model),
        prompt.astype(mx.uint32),
        KVQuantization(kv_bits, kv_group_size, quantized_kv_start),
        first_pair(draft_model, kept, prompt),
    )
    progress = prompt_progress_callback or (lambda done, total: None)
    try:
        in_time_order(own)
        in_time_order(draft_caches)
        with mx.stream(stream):
            request.prefill(prefill_step_size, progress)
        with closing(speculate(request, stream, max_tokens, stats)) as tokens:
            for at, token in enumerate(tokens):
                if at == 0:
                    progress(len(prompt), len(prompt))
                yield token
    finally:
        prompt_cache[: len(own)] = settled(own)  # mlx-lm replaces what it quantises
        settled(draft_caches)
        hidden = request.drawn.hidden if request.drawn else None
        keep(own, draft_model, draft_caches, hidden)
        remember(draft_model)


def caches_of(model: nn.Module, prompt_cache: list[Any] | None) -> list[Any]:
    """The model's own caches in a list that may also hold the drafter's. There may be fewer of
    them than layers: some layers of Gemma-4 use those of others."""
    own = make_prompt_cache(model)
    return own if prompt_cache is None else prompt_cache[: len(own)]


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: Any = None,
    *args: Any,
    num_draft_tokens: DraftTokens | None = None,
    max_draft_tokens: int | None = None,
    sampling: Sampling = "auto",
    draft_kind: DraftKind = "auto",
    require_spec: bool = False,
    stats: SpecStats | None = None,
    **kwargs: Any,
) -> Generator[GenerationResponse, None, None]:
    """mlx_lm.stream_generate, with drafts where `model` has a drafter.

    Args as there, and:
        draft_model: a drafter, or a model of mlx-lm with the same tokenizer; None takes what
            `mlx_spec.load` found.
        num_draft_tokens: drafts in a round; 0 switches drafting off; "auto", the default: as many
            as pay on this machine with this text, or none.
        max_draft_tokens: at most so many, with "auto"; None: 8, or 16 with lookup.
        draft_kind: "lookup": drafts are what followed earlier in the text; "combined": that where
            much of the text repeats, else the drafter; "auto": the drafter.
        sampling: "seed": the text depends on mlx's random seed alone, not on what is drafted;
            "stock": mlx_lm's tokens at the same seed; "ratio": rejection sampling, equal in
            distribution; "auto": "seed", or "stock" for a sampler that mlx_lm did not make.
            Greedy decoding is the same under all of them.
        require_spec: fail where nothing is drafted, instead of decoding without drafts.
        stats: counters to be filled in.

    Yields: GenerationResponse; its `spec` says what was drafted and accepted, or why not.
    Raises: NotEngaged with require_spec, before the first token where that can be known;
    BadArguments if the law cannot follow the sampler.
    """
    options = SpecOptions(
        "auto" if num_draft_tokens is None else num_draft_tokens,
        max_draft_tokens,
        sampling,
        draft_kind,
    )
    stats = stats if stats is not None else SpecStats()
    drafter = choose_drafter(model, draft_model, options, kwargs, stats)
    if require_spec and drafter is None:
        raise NotEngaged(f"Speculation is required but cannot be engaged: {stats.why}.")
    step = None
    if drafter is not None:
        progress = kwargs.pop("prompt_progress_callback", None)
        step = partial(
            speculative_generate_step,
            prompt_progress_callback=progress,
            max_draft_tokens=max_draft_tokens,
            sampling=sampling,
            stats=stats,
        )
    else:
        kwargs["sampler"], stats.sampling = plain_sampler(kwargs.get("sampler"), sampling)
    run = bound(
        stock_stream_generate, generate_step=stock_generate_step, speculative_generate_step=step
    )
    if drafter is not None:
        kwargs["num_draft_tokens"] = options.num_draft_tokens
    responses = run(model, tokenizer, prompt, max_tokens, drafter, *args, **kwargs)
    for response in responses:
        if response.finish_reason:
            responses.close()  # the caches are settled when the caller sees the end
            stats.conclude()
        values = {field.name: getattr(response, field.name) for field in fields(response)}
        yield GenerationResponse(**values, spec=stats.copy())
    if require_spec and not stats.engaged:
        raise NotEngaged(f"Speculation was required but not engaged: {stats.why}.")


def choose_drafter(
    model: nn.Module,
    draft_model: Drafter | nn.Module | None,
    options: SpecOptions,
    generation: dict[str, Any],
    stats: SpecStats,
) -> Drafter | None:
    """What is to draft for this generation; None, with a reason in `stats`, if nothing can.

    Args:
        draft_model: a drafter, or a model of mlx-lm; None: what was found for the model.
        generation: the arguments of mlx_lm's that tell of prompt and caches.
    """
    pairing = pairing_of(model)
    given = draft_model if draft_model is not None else pairing.drafter
    if given is None and options.draft_kind == "auto":
        stats.reason, stats.detail = pairing.reason, pairing.detail
    elif options.num_draft_tokens == 0:
        stats.reason = "num-draft-tokens-0"
    elif generation.get("input_embeddings") is not None:
        stats.reason = "input-embeddings"
    else:
        try:
            stats.reason = "unsupported-model"
            target = target_for(model)
            stats.reason = "unsupported-cache"
            check_caches(target, own_caches(model, generation))
            drafter = draft_model_of(given, target) if isinstance(given, nn.Module) else given
            stats.reason = None
            chosen = of_kind(options.draft_kind, drafter, model)
            if pairing.drafter in chosen.parts:
                stats.detail = pairing.detail  # why it is lookup, if it is
            return chosen
        except Incompatible as error:
            stats.detail = str(error)
    return None


def of_kind(kind: DraftKind, drafter: Drafter | None, model: nn.Module) -> Drafter:
    """The drafter, or lookup in its place or beside it."""
    if drafter is None or kind == "lookup":
        return lookup_of(model)
    if kind == "combined" and len(drafter.parts) == 1 and drafter.kind != "lookup":
        return Combined(lookup_of(model, LONG), drafter)
    return drafter


def own_caches(model: nn.Module, generation: dict[str, Any]) -> list[Any]:
    """The target's caches of a generation with such arguments."""
    if generation.get("prompt_cache") is not None:
        return caches_of(model, generation["prompt_cache"])
    return make_prompt_cache(model, max_kv_size=generation.get("max_kv_size"))


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int],
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """mlx_lm.generate, with drafts where `model` has a drafter; see `stream_generate`."""
    run = bound(stock_generate, stream_generate=stream_generate)
    return run(model, tokenizer, prompt, verbose, **kwargs)
