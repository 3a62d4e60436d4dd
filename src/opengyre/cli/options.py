"""A command whose options are the fields of one frozen dataclass.

Owns: handing a dataclass's fields to Typer as parameters. Must not know: any option.
Invariant: a command gets one checked value, however many options it has.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command_of(options: type[Options], run: Callable[[Options], None]) -> Callable[..., None]:
    """A function for `app.command()`; the help text is that of `run`."""

    def command(**values: Any) -> None:
        run(options(**values))

    hints = get_type_hints(options, include_extras=True)
    signature = inspect.signature(options)
    parameters = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
    command.__doc__ = run.__doc__
    command.__annotations__ = hints
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]  # read by Typer
        parameters=parameters, return_annotation=None
    )
    return command
