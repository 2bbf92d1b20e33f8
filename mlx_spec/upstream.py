"""What mlx-spec relies on inside mlx_lm. It is checked at the start, so that nothing runs
unpatched in silence."""

from importlib import import_module
from importlib.metadata import version
from types import CodeType
from typing import Any

from mlx_spec.errors import Incompatible

SUPPORTED = "0.32"  # versions of mlx-lm that this was made for

# The functions of mlx_lm that rely on a hooked name: module, function, name.
CALLERS = (
    ("mlx_lm.utils", "load", "load_model"),
    ("mlx_lm.generate", "generate", "stream_generate"),
    ("mlx_lm.generate", "stream_generate", "generate_step"),
    ("mlx_lm.generate", "stream_generate", "speculative_generate_step"),
    ("mlx_lm.generate", "batch_generate", "BatchGenerator"),
    ("mlx_lm.server", "main", "ModelProvider"),
    ("mlx_lm.server", "run", "ResponseGenerator"),
    ("mlx_lm.server", "ResponseGenerator._generate", "BatchGenerator"),
    ("mlx_lm.server", "ResponseGenerator._serve_single", "stream_generate"),
    ("mlx_lm.server", "ModelProvider._load", "load"),
)
# What batch.py and server/generation.py work with inside mlx_lm's classes.
INTERNALS = (
    ("mlx_lm.generate", "BatchGenerator._next", "_unprocessed_sequences"),
    ("mlx_lm.generate", "BatchGenerator._next", "_prompt_batch"),
    ("mlx_lm.generate", "BatchGenerator._next", "_generation_batch"),
    ("mlx_lm.generate", "BatchGenerator._next", "_currently_processing"),
    ("mlx_lm.generate", "BatchGenerator._next", "_make_batch"),
    ("mlx_lm.generate", "BatchGenerator._next", "_counters"),
    ("mlx_lm.generate", "GenerationBatch._step", "_next_tokens"),
    ("mlx_lm.generate", "GenerationBatch._step", "_next_logprobs"),
    ("mlx_lm.generate", "GenerationBatch._step", "_token_context"),
    ("mlx_lm.generate", "GenerationBatch.next", "_num_tokens"),
    ("mlx_lm.generate", "GenerationBatch.next", "_matchers"),
    ("mlx_lm.server", "ResponseGenerator._run_generate", "_generate"),
    ("mlx_lm.server", "ResponseGenerator._generate", "_next_request"),
    ("mlx_lm.server", "ResponseGenerator._generate", "_tokenize"),
    ("mlx_lm.server", "ResponseGenerator._generate", "_serve_single"),
)


def check_mlx_lm() -> None:
    """Raises Incompatible where mlx_lm no longer uses one of these names."""
    for module, function, name in CALLERS + INTERNALS:
        caller: Any = import_module(module)
        for part in function.split("."):
            caller = getattr(caller, part, None)
        code = getattr(caller, "__code__", None)
        if code is None or name not in names_in(code):
            raise Incompatible(
                f"mlx-lm {version('mlx-lm')} has no {module}.{function} that uses {name}, so "
                f"mlx-spec cannot work with it; it knows mlx-lm {SUPPORTED}."
            )


def names_in(code: CodeType) -> set[str]:
    """Global names and attributes that a function uses, and those of functions within it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))
