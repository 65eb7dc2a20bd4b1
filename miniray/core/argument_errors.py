"""The error of a call that could not run, as one of its arguments has an error instead of a value.

It is the argument's error, so that callers may catch it by its class; a note names the call. Errors
that user code raised name the function that raised them, and are passed on as they are.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from miniray.core import exception_transport as transport
from miniray.core.borrowing import error_value
from miniray.core.names import short_name
from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from miniray.core.objects import Value

#: Notes of an error at most. Of a long chain of calls, each the argument of the next, the first
#: ones and the last are named.
_MOST_NOTES = 8


def error_of_call(value: Value, name: str, where: int | str) -> Value:
    """The error value of a call whose argument has one.

    Args:
        value: That of the argument.
        name: Of the call.
        where: The argument's position, from 0, or its name.
    """
    error = _load_own(value[1])
    if error is None:
        return value
    argument = f"argument {where + 1 if isinstance(where, int) else repr(where)}"
    _add(error, f"{short_name(name)}() did not run: this is the error of its {argument}.")
    return error_value(error)


def _add(error: MinirayError, note: str) -> None:
    """Add a note, within the number of notes that an error may have."""
    notes = transport.state_of(error).setdefault("__notes__", [])
    del notes[_MOST_NOTES - 1 :]
    transport.add_note(error, note)


def _load_own(pickled: bytes) -> MinirayError | None:
    """An error of miniray itself; None if there is anything of the user's in it.

    That is not unpickled here: it would run the user's code in the thread that sends calls.
    """
    try:
        error = _OwnUnpickler(io.BytesIO(pickled)).load()
    except pickle.UnpicklingError:
        return None
    return error if isinstance(error, MinirayError) else None


class _OwnUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == MinirayError.__module__ or (module, name) == _REBUILD:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} may be the user's")


_REBUILD = (transport.rebuild.__module__, transport.rebuild.__name__)
