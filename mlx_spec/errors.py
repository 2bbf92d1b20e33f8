"""What can go wrong, each in one sentence that says what is wrong and what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

MAX_CHARACTERS = 600  # of what another program says; mlx-lm may list all tensors of a model


class SpecError(Exception):
    """Base of all errors that a user can cause or mend. The message is one sentence.

    `exit_code` is what the command line returns (`inspect` documents 2, 3 and 4).
    """

    exit_code = 1


class CheckpointError(SpecError):
    """A checkpoint that cannot be read, or does not hold what its files promise."""


class NoParts(CheckpointError):
    """A server that sends no parts of a file, all of which is too much."""


class NoDrafter(SpecError):
    """There is no drafter where one was asked for."""

    exit_code = 2


class NotEngaged(SpecError):
    """`--require-spec` was given and speculation did not take place."""

    exit_code = 3


class Incompatible(SpecError):
    """A drafter and a target that do not belong together, or an unsupported one."""

    exit_code = 4


class BadArguments(SpecError):
    """An option that cannot be used as it was given."""

    exit_code = 2


class UnusableDrafter(SpecError):
    """The drafter that was asked for cannot be loaded, or does not fit."""

    exit_code = 4


class ModelUnavailable(SpecError):
    """The model is missing or cannot be read."""

    exit_code = 5


class OutOfMemory(SpecError):
    """A model, or what it computes, does not fit into memory."""

    exit_code = 6


class PortInUse(SpecError):
    """Another program listens there."""

    exit_code = 7


def one_line(error: BaseException) -> str:
    """What the error says, for people: without what addresses may hold of passwords and
    signatures."""
    if isinstance(error, LocalEntryNotFoundError):
        return "The model is not here, and the Hugging Face hub could not be reached for it."
    text = str(error)
    if isinstance(error, HfHubHTTPError):
        text = text.splitlines()[0]
    text = re.sub(r"(https?://)(?:[^/\s'@]*@)?([^?\s']*)(?:\?[^\s']*)?", r"\1\2", text)
    return shorten(text, MAX_CHARACTERS, placeholder=" ...") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """mlx raises a RuntimeError where the allocator or a Metal command buffer fails."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and any(
            words in text
            for words in ("malloc] ", "Insufficient Memory", "OutOfMemory", "out of memory")
        )
    )


@contextmanager
def reported_as(kind: type[SpecError]) -> Iterator[None]:
    """Any error within becomes one of `kind`, or OutOfMemory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            kind = OutOfMemory
        raise kind(one_line(error)) from error
