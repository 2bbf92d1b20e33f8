"""Speculative decoding for mlx-lm: the same text, sooner."""

from mlx_spec.generate import (
    GenerationResponse,
    generate,
    speculative_generate_step,
    stream_generate,
)
from mlx_spec.load import load
from mlx_spec.options import SpecOptions
from mlx_spec.plugin import install, uninstall
from mlx_spec.stats import SpecStats

__all__ = [
    "GenerationResponse",
    "SpecOptions",
    "SpecStats",
    "generate",
    "install",
    "load",
    "speculative_generate_step",
    "stream_generate",
    "uninstall",
]
