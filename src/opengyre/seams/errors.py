"""Errors by who is at fault: the user (ConfigError), a boundary we crossed (BoundaryError).

Ours is `control.errors.InvariantError`. A failed execution is data, never an error.
Must not know: exit codes and wording of the command line.
"""


class ConfigError(Exception):
    """The user's input cannot work. The text names the thing, what was expected and what to do.

    One line for each problem; the command line prints it and exits with 2.
    """


class BoundaryError(Exception):
    """A call across `boundary` (engine, weights, disk, network, process, ...) failed.

    `retryable` is True only if the same call may succeed later without another effect
    having happened twice.
    """

    def __init__(self, boundary: str, reason: str, *, retryable: bool) -> None:
        super().__init__(f"{boundary}: {reason}")
        self.boundary = boundary
        self.reason = reason
        self.retryable = retryable


class NoAnswer(BoundaryError):
    """The other side took the call and said nothing in time: whether it has acted is unknown."""


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside nested groups, in order; of a plain error, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in leaves(one)]


def words_of(error: BaseException) -> str:
    """What the errors of a group say, each once, one line each."""
    return "\n".join(dict.fromkeys(str(leaf) for leaf in leaves(error)))
