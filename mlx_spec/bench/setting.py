"""The head line of a benchmark: what the model, the drafter and the machine are."""

import platform
from importlib.metadata import version
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlx_spec.drafters import Drafter

QUANTIZED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def quantization(module: nn.Module) -> str:
    """As "4 bits, groups of 64", or the dtype that most of the weights have."""
    layers = [m for m in module.modules() if isinstance(m, QUANTIZED)]
    if not layers:
        sizes: dict[str, int] = {}
        for _, weight in weights_of(module):
            name = str(weight.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + weight.size
        return max(sizes, key=lambda name: sizes[name])
    kinds = sorted({(layer.bits, layer.group_size) for layer in layers})
    return "; ".join(f"{bits} bits, groups of {group_size}" for bits, group_size in kinds)


def weights_of(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(module.parameters()))


def drafter_quantization(drafter: Drafter) -> str | None:
    """None for a drafter without weights of its own."""
    return None if drafter.head is None else quantization(drafter.head)


def device() -> str:
    """The device that mlx computes on, by name."""
    info = mx.device_info()
    name = info.get("device_name", platform.machine())
    memory = info.get("memory_size")
    size = f", {int(memory) / 2**30:.0f} GiB" if memory else ""
    return f"{name} ({mx.default_device().type.name}{size})"


def versions() -> dict[str, str]:
    return {
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "mlx_spec": version("mlx-spec"),
    }
