"""mlx_lm.server's prompt cache, which leaves at least one token of a prompt to be processed."""

from typing import Any

from mlx_lm.models.cache import LRUPromptCache


class PromptCache(LRUPromptCache):
    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """As mlx_lm's, but where a cache holds the whole prompt, the next shorter one is taken:
        with nothing to process there would be no next token, and mlx_lm.server's decoding thread
        ends with an error."""
        caches, rest = super().fetch_nearest_cache(model, tokens)
        if rest or not tokens:
            return caches, rest
        if len(tokens) == 1:
            return None, tokens
        caches, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return caches, [*rest, tokens[-1]]
