"""What a caller may choose: the depth, and the acceptance law."""

import argparse
from dataclasses import dataclass
from typing import Literal, get_args

from mlx_spec.errors import BadArguments
from mlx_spec.sampling import Sampling

DraftTokens = int | Literal["auto"]
DraftKind = Literal["auto", "lookup", "combined"]
DEFAULT_MAX_DRAFT_TOKENS = 8  # of a drafter that computes something for each
HELP = {
    "num_draft_tokens": "Tokens to draft in a round; 0: none; auto: as many as pay on this machine "
    "with this text, or none. With a number, not with auto, two runs compute the same "
    "rows. Default: auto.",
    "max_draft_tokens": f"At most so many with auto. Default: {DEFAULT_MAX_DRAFT_TOKENS}, or 16 "
    "with lookup.",
    "draft_kind": "What drafts. lookup: what followed earlier in the text, in the prompt for "
    "example; combined: lookup where much of the text repeats, else the drafter; auto: the "
    "drafter, or lookup where there is none. Default: auto.",
    "sampling": "How tokens are drawn. seed: the text depends on the random seed alone, not on "
    "what is drafted; stock: mlx_lm's tokens at the same seed; ratio: rejection "
    "sampling, equal in distribution. Default: auto, which is seed, or stock for a "
    "sampler that mlx_lm did not make. Greedy text is the same with all.",
}


@dataclass(frozen=True)
class SpecOptions:
    """Attributes:
        num_draft_tokens: drafts in a round; 0: none; "auto": as many as pay (depth.py).
        max_draft_tokens: at most so many, where it is "auto"; None: what the drafter suggests.
        draft_kind, sampling: see `mlx_spec.stream_generate`.

    Raises: BadArguments for other values.
    """

    num_draft_tokens: DraftTokens = "auto"
    max_draft_tokens: int | None = None
    sampling: Sampling = "auto"
    draft_kind: DraftKind = "auto"

    def __post_init__(self) -> None:
        n, most = self.num_draft_tokens, self.max_draft_tokens
        if n != "auto" and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
            raise BadArguments(f"num_draft_tokens is {n!r}; give 0 or more, or 'auto'.")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise BadArguments(f"max_draft_tokens is {most!r}; give 1 or more.")
        for name, choices in [("sampling", Sampling), ("draft_kind", DraftKind)]:
            if (given := getattr(self, name)) not in get_args(choices):
                raise BadArguments(
                    f"{name} is {given!r}; give one of {', '.join(get_args(choices))}."
                )


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Those that mlx_lm's own parsers lack."""
    parser.add_argument(
        "--max-draft-tokens",
        type=int,
        help=HELP["max_draft_tokens"],
    )
    parser.add_argument(
        "--draft-kind", choices=get_args(DraftKind), default="auto", help=HELP["draft_kind"]
    )
    parser.add_argument(
        "--sampling", choices=get_args(Sampling), default="auto", help=HELP["sampling"]
    )


def draft_tokens(text: str) -> DraftTokens:
    """--num-draft-tokens, N or auto. Raises: BadArguments."""
    if not (text == "auto" or text.isdecimal()):
        raise BadArguments(f"num_draft_tokens is {text!r}; give 0 or more, or 'auto'.")
    return SpecOptions("auto" if text == "auto" else int(text)).num_draft_tokens
