"""`kv_bits`, `kv_group_size` and `quantized_kv_start`, as mlx_lm.generate_step takes them."""

import sys
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache


@dataclass(frozen=True)
class KVQuantization:
    bits: int | None = None
    group_size: int = 64
    start: int = 0  # in tokens

    def apply(self, caches: list[Any]) -> None:
        """Replace the caches in the list that have reached `start`.

        Raises: NotImplementedError, as mlx-lm does, where one of them has a sliding window.
        """
        try:
            maybe_quantize_kv_cache(caches, self.start, self.group_size, self.bits)
        except NotImplementedError as error:
            raise NotImplementedError(
                "mlx-lm does not quantise the caches of sliding windows; leave out kv_bits."
            ) from error

    def rows_left(self, caches: list[Any]) -> int:
        """How many rows, at least one, may be computed at once: mlx-lm quantises after the token
        that reaches `start`, so no block of rows may straddle that point."""
        if self.bits is None:
            return sys.maxsize
        unquantised = [cache.offset for cache in caches if type(cache) is KVCache]
        return max(1, self.start - max(unquantised)) if unquantised else sys.maxsize
