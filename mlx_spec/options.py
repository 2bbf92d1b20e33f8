"""What a caller may choose: the depth, and the acceptance law."""

import argparse
from dataclasses import dataclass
from typing import Literal, get_args

from mlx_spec.errors import BadArguments
from mlx_spec.sampling import Sampling

DraftTokens = int | Literal["auto"]
DEFAULT_MAX_DRAFT_TOKENS = 8
HELP = {
    "num_draft_tokens": "Tokens to draft in a round; 0: none; auto: as many as pay on this machine "
    "with this text, or none. With a number, not with auto, two runs compute the same "
    "rows. Default: auto.",
    "max_draft_tokens": f"At most so many with auto. Default: {DEFAULT_MAX_DRAFT_TOKENS}.",
    "sampling": "How tokens are drawn. seed: the text depends on the random seed alone, not on "
    "what is drafted; stock: mlx_lm's tokens at the same seed; ratio: rejection "
    "sampling, equal in distribution. Default: auto, which is seed, or stock for a "
    "sampler that mlx_lm did not make. Greedy text is the same with all.",
}


@dataclass(frozen=True)
class SpecOptions:
    """Attributes:
        num_draft_tokens: drafts in a round; 0: none; "auto": as many as pay (depth.py).
        max_draft_tokens: at most so many, where it is "auto".
        sampling: see `mlx_spec.stream_generate`.

    Raises: BadArguments for other values.
    """

    num_draft_tokens: DraftTokens = "auto"
    max_draft_tokens: int = DEFAULT_MAX_DRAFT_TOKENS
    sampling: Sampling = "auto"

    def __post_init__(self) -> None:
        n, most = self.num_draft_tokens, self.max_draft_tokens
        if n != "auto" and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise BadArguments(f"num_draft_tokens is {n!r}; give 0 or more, or 'auto'.")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise BadArguments(f"max_draft_tokens is {most!r}; give 1 or more.")
        if self.sampling not in get_args(Sampling):
            raise BadArguments(
                f"sampling is {self.sampling!r}; give one of {', '.join(get_args(Sampling))}."
            )


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Those that mlx_lm's own parsers lack."""
    parser.add_argument(
        "--max-draft-tokens",
        type=int,
        default=DEFAULT_MAX_DRAFT_TOKENS,
        help=HELP["max_draft_tokens"],
    )
    parser.add_argument(
        "--sampling", choices=get_args(Sampling), default="auto", help=HELP["sampling"]
    )


def draft_tokens(text: str) -> DraftTokens:
    """--num-draft-tokens, N or auto. Raises: BadArguments."""
    if not (text == "auto" or text.isdecimal()):
        raise BadArguments(f"num_draft_tokens is {text!r}; give 0 or more, or 'auto'.")
    return SpecOptions("auto" if text == "auto" else int(text)).num_draft_tokens
