"""The error of a call that could not run, as one of its arguments has an error instead of a value.

It is a ``TaskError`` that names the call, and of the argument's class too. Errors that a task or a
method has raised name what raised them, and are passed on as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.names import short_name
from miniray.common.task_error import MinirayError, text_only, wrap_pickled
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from miniray.objects.objects import Value


def error_of_call(value: Value, name: str, where: int | str) -> Value:
    """The error value of a call whose argument has one.

    Args:
        value: That of the argument.
        name: Of the call.
        where: The argument's position, from 0, or its name.
    """
    error = text_only(value[1])  # to load it whole would run user code in the thread that sends
    if not isinstance(error, MinirayError):
        return value
    argument = f"argument {where + 1 if isinstance(where, int) else repr(where)}"
    text = f"{error}\n{short_name(name)}() did not run: this is the error of its {argument}."
    return (p.VALUE_ERROR, wrap_pickled(name, text, error, value[1]), ())
