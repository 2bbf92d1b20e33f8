"""What can go wrong, each in one sentence that says what is wrong and what to do."""


class SpecError(Exception):
    """Base of all errors that a user can cause or mend. The message is one sentence.

    `exit_code` is what the command line returns (`inspect` documents 2, 3 and 4).
    """

    exit_code = 1


class CheckpointError(SpecError):
    """A checkpoint that cannot be read, or does not hold what its files promise."""


class NoDrafter(SpecError):
    """There is no drafter where one was asked for."""

    exit_code = 2


class NotEngaged(SpecError):
    """`--require-spec` was given and speculation did not take place."""

    exit_code = 3


class Incompatible(SpecError):
    """A drafter and a target that do not belong together, or an unsupported one."""

    exit_code = 4
