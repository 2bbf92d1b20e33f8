"""The plugin: mlx_lm's own commands, and programs that import mlx_lm, decode with drafts.

These names of mlx_lm are replaced by `install`; nothing is at import:

- `utils.load_model` notes where a model came from, and takes the directory of a drafter, which
  programs load as their draft model;
- `generate.stream_generate` is ours;
- `generate.generate_step` and `generate.speculative_generate_step`, which the stock
  `stream_generate` calls, serve programs that imported that one before;
- `generate.BatchGenerator`, which `batch_generate` uses, is ours;
- `server.ModelProvider` and `server.ResponseGenerator`, which `mlx_lm.server` starts, are ours.
"""

import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator as StockBatchGenerator
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import generation_stream
from mlx_lm.generate import speculative_generate_step as stock_speculative_generate_step
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.utils import load_config
from mlx_lm.utils import load_model as stock_load_model

from mlx_spec.accept import plain_sampler
from mlx_spec.batch import Plan, SpecBatchGenerator
from mlx_spec.drafters import Drafter
from mlx_spec.errors import Incompatible
from mlx_spec.families import family_of_drafter
from mlx_spec.generate import (
    caches_of,
    choose_drafter,
    speculative_generate_step,
    stream_generate,
)
from mlx_spec.load import load_drafter, pair_loaded
from mlx_spec.options import DraftTokens, SpecOptions
from mlx_spec.server.generation import SpecModelProvider, SpecResponseGenerator
from mlx_spec.stats import SpecStats
from mlx_spec.targets import target_for
from mlx_spec.upstream import check_mlx_lm

Report = Callable[[SpecStats], None]


class DrafterDirectory(nn.Module):
    """What a stock program holds as its draft model: a drafter that waits for its model."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self._made_for: weakref.ref | None = None
        self._drafter: Drafter | None = None

    def drafter_for(self, model: nn.Module) -> Drafter:
        """Raises: SpecError where they do not fit."""
        if self._drafter is None or self._made_for is None or self._made_for() is not model:
            self._drafter = load_drafter(self.path, target_for(model))
            self._made_for = weakref.ref(model)
        return self._drafter


@dataclass
class Installation:
    """Attributes:
    report: is called with the counters of each generation when it ends.
    options: depth and acceptance law.
    replaced: what to put back, by module and name.
    """

    report: Report
    options: SpecOptions
    replaced: dict[tuple[str, str], Callable] = field(default_factory=dict)

    def replace(self, module: str, name: str, hook: Callable) -> None:
        owner = import_module(module)
        self.replaced[module, name] = getattr(owner, name)
        setattr(owner, name, hook)


_installed: Installation | None = None


def install(report: Report | None = None, options: SpecOptions | None = None) -> None:
    """Decode with drafts in all programs of this process that generate with mlx_lm.

    A second call only changes `report` and `options`.

    Args:
        report: is called with the counters of each generation when it ends.
        options: depth and acceptance law. A program's own num_draft_tokens counts where it names
            a draft model, too, or is 0; mlx_lm's commands have a default that they always give.

    Raises: Incompatible that names what this version of mlx-lm lacks.
    """
    global _installed
    report = report or (lambda stats: None)
    options = options or SpecOptions()
    if _installed is not None:
        _installed.report, _installed.options = report, options
        return
    check_mlx_lm()
    _installed = Installation(report, options)
    _installed.replace("mlx_lm.utils", "load_model", _load_model)
    _installed.replace("mlx_lm.generate", "generate_step", _generate_step)
    _installed.replace("mlx_lm.generate", "speculative_generate_step", _speculative_generate_step)
    _installed.replace("mlx_lm.server", "ModelProvider", SpecModelProvider)
    _installed.replace("mlx_lm.server", "ResponseGenerator", _ResponseGenerator)
    imported: list[tuple[str, Callable, Callable]] = [
        ("stream_generate", stock_stream_generate, _stream_generate),
        ("BatchGenerator", StockBatchGenerator, _BatchGenerator),
    ]
    for name, stock, hook in imported:
        for module in [module for module in sys.modules if module.split(".")[0] == "mlx_lm"]:
            if vars(sys.modules[module]).get(name) is stock:
                _installed.replace(module, name, hook)


def uninstall() -> None:
    """Put mlx_lm's own functions back. Modules that have imported a hook since get mlx_lm's own
    behaviour from it."""
    global _installed
    if _installed is not None:
        for (module, name), function in _installed.replaced.items():
            setattr(import_module(module), name, function)
        _installed = None


def _report(stats: SpecStats) -> None:
    stats.conclude()
    if _installed is not None:
        _installed.report(stats)


def _options(num_draft_tokens: DraftTokens | None, draft_model: Any) -> SpecOptions:
    assert _installed is not None
    if num_draft_tokens == 0 or (num_draft_tokens is not None and draft_model is not None):
        return replace(_installed.options, num_draft_tokens=num_draft_tokens)
    return _installed.options


def of_step(options: SpecOptions) -> dict[str, Any]:
    """Those that `speculative_generate_step` takes, beside a drafter."""
    return {name: value for name, value in asdict(options).items() if name != "draft_kind"}


def _load_model(model_path: Path, *args: Any, **kwargs: Any) -> tuple[nn.Module, dict[str, Any]]:
    path = Path(model_path)
    if _installed is not None and (path / "config.json").is_file():
        config = load_config(path)
        if family_of_drafter(config) is not None:
            if not any(path.glob("tokenizer*")):
                raise Incompatible(
                    f"The drafter {path} has no tokenizer, which mlx_lm loads with each model; "
                    f"make one that has: mlx-spec convert --from {path} --to DIR --target MODEL"
                )
            return DrafterDirectory(path), config
    model, config = stock_load_model(model_path, *args, **kwargs)
    model.mlx_spec_source = path
    return model, config


def _stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    max_tokens: int = 256,
    draft_model: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Iterator[Any]:
    if _installed is None:
        yield from stock_stream_generate(
            model, tokenizer, prompt, max_tokens, draft_model, *args, **kwargs
        )
        return
    pair_loaded(model)
    options = _options(kwargs.pop("num_draft_tokens", None), draft_model)
    if isinstance(draft_model, DrafterDirectory):
        draft_model = draft_model.drafter_for(model)
    stats = SpecStats()
    try:
        for response in stream_generate(
            model, tokenizer, prompt, max_tokens, draft_model, *args, **asdict(options), **kwargs
        ):
            stats = response.spec or stats
            yield response
    finally:
        _report(stats)


def _generate_step(
    prompt: mx.array, model: nn.Module, stream: Any = generation_stream, **kwargs: Any
) -> Generator[tuple[int, mx.array], None, None]:
    if _installed is None or kwargs.get("max_tokens") == 0:  # 0: only process the prompt
        yield from stock_generate_step(prompt, model, stream, **kwargs)
        return
    pair_loaded(model)
    stats = SpecStats()
    options = _installed.options
    drafter = choose_drafter(model, None, options, kwargs, stats)
    try:
        if drafter is None:
            sampler = kwargs.pop("sampler", None)
            kwargs["sampler"], stats.sampling = plain_sampler(sampler, options.sampling)
            yield from stock_generate_step(prompt, model, stream, **kwargs)
        else:
            kwargs.pop("input_embeddings", None)
            generation = speculative_generate_step(
                prompt, model, drafter, stream, stats=stats, **of_step(options), **kwargs
            )
            with closing(generation):
                for token, logprobs, _ in generation:
                    yield token, logprobs
    finally:
        _report(stats)


def _speculative_generate_step(
    prompt: mx.array,
    model: nn.Module,
    draft_model: Any,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[tuple[int, mx.array, bool], None, None]:
    if _installed is None:
        yield from stock_speculative_generate_step(prompt, model, draft_model, stream, **kwargs)
        return
    stats = SpecStats()
    options = _options(kwargs.pop("num_draft_tokens", None), draft_model)
    if isinstance(draft_model, DrafterDirectory):
        draft_model = draft_model.drafter_for(model)
    drafter = choose_drafter(model, draft_model, options, kwargs, stats)
    try:
        if drafter is None:
            kwargs["prompt_cache"] = caches_of(model, kwargs.pop("prompt_cache", None))
            sampler = kwargs.pop("sampler", None)
            kwargs["sampler"], stats.sampling = plain_sampler(sampler, options.sampling)
            for token, logprobs in stock_generate_step(prompt, model, stream, **kwargs):
                yield token, logprobs, False
        else:
            yield from speculative_generate_step(
                prompt, model, drafter, stream, stats=stats, **of_step(options), **kwargs
            )
    finally:
        _report(stats)


class _BatchGenerator(SpecBatchGenerator):
    def __init__(self, model: nn.Module, **options: Any):
        if _installed is None:  # as stock
            super().__init__(model, plan=lambda: Plan(SpecOptions(0, sampling="stock")), **options)
        else:
            pair_loaded(model)
            plan = partial(Plan, _installed.options)
            super().__init__(model, plan=plan, ended=_report, **options)


class _ResponseGenerator(SpecResponseGenerator):
    def __init__(self, model_provider: Any, prompt_cache: Any):
        super().__init__(
            model_provider, prompt_cache, options=self._options_of_request, ended=_report
        )

    def _options_of_request(self, args: Any) -> SpecOptions:
        """mlx_lm.server's own number is meant for draft models, unless a request differs."""
        if _installed is None:
            return SpecOptions(0, sampling="stock")
        own = self.cli_args
        if args.num_draft_tokens == own.num_draft_tokens and own.draft_model is None:
            return _options(None, None)
        return _options(args.num_draft_tokens, self)
