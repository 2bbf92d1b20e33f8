"""A smaller model of mlx-lm with the same tokenizer, of any family, as the drafter.

It sees all tokens and nothing of the target. Its caches are put back after each round's drafts by
keeping what they held before: mlx arrays are never changed in place but for rows past the offset.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters import Drafter, Pick
from mlx_spec.errors import Incompatible
from mlx_spec.rollback import check_class
from mlx_spec.targets.target import Target


class DraftModel(Drafter):
    """See `mlx_spec.drafters.Drafter`.

    Args:
        model: of mlx-lm.
        vocab_size: of the target's logits; they may be padded otherwise than the model's.

    Raises: Incompatible that names a cache which cannot be put back.
    """

    kind = "draft-model"
    learns = True
    needs_hidden = False

    def __init__(self, model: nn.Module, target: Target):
        self.head = model
        self.vocab_size = target.vocab_size
        caches = self.make_cache()
        for cache in caches:
            check_class(cache)
        if not any(hasattr(cache, "offset") for cache in caches):
            raise Incompatible(
                "A draft model without attention does not count its tokens; choose another one."
            )

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.head)

    def position(self, caches: list[Any]) -> Any:
        return [
            {name: list(value) if isinstance(value, list) else value for name, value in held}
            for held in (vars(cache).items() for cache in caches)
        ]

    def rewind(self, caches: list[Any], position: Any) -> None:
        for cache, before in zip(caches, position, strict=True):
            for name, value in before.items():
                vars(cache)[name] = list(value) if isinstance(value, list) else value

    def extend(self, tokens: mx.array, hidden: mx.array | None, caches: list[Any]) -> None:
        self.head(tokens[None], cache=caches)

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array | None,
        n: int,
        pick: Pick,
        caches: list[Any],
        target_caches: list[Any],
    ) -> list[mx.array]:
        drafts: list[mx.array] = []
        logits = self.head(tokens[None], cache=caches)
        learnt = self.position(caches)
        while True:
            drafts.append(pick(self._of_target_size(logits[:, -1]), drafts))
            if len(drafts) == n:
                break
            logits = self.head(drafts[-1][None], cache=caches)
        self.rewind(caches, learnt)
        return drafts

    def _of_target_size(self, logits: mx.array) -> mx.array:
        """(1, V), without padding that the target has not, minus infinity for its padding."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.concatenate([logits, mx.full((1, missing), -mx.inf, logits.dtype)], axis=-1)
        return logits[:, : self.vocab_size]
