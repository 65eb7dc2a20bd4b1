"""Says which part of a value cannot be pickled, so that the user need not search."""

from __future__ import annotations

import inspect
import traceback

from miniray.values.call_signature import UnpicklableArgumentError
from miniray.values.parts import parts_of
from miniray.values.serialization import pickled

#: How deep the search looks. Each level pickles again what is at fault.
_DEPTH = 50
#: Whose frames are those of a pickler.
_PICKLERS = ("cloudpickle", "copyreg", "miniray", "pickle")


def explain(
    value: object, error: BaseException, name: str = "", inside: str = "task or actor"
) -> TypeError:
    """An error that names the attribute, item or variable at fault.

    Args:
        value: What cannot be pickled.
        error: What pickling it raised.
        name: What the value is to the user; empty: its type is all that is known.
        inside: What it is sent to.
    """
    path = _find(value, "", _DEPTH, set())
    what = f"{name}, {_describe(value)}," if name else _describe(value)
    if path:
        return TypeError(
            f"{what} cannot be pickled: {path[0]} is a {type(path[1]).__qualname__} "
            f"({type(error).__name__}: {error}). Create it inside the {inside} instead, "
            f"or leave it out with __getstate__."
        )
    return TypeError(f"{what} cannot be pickled ({type(error).__name__}: {error}).")


def cause_to_show(error: BaseException) -> BaseException | None:
    """What pickling raised, if it came out of the user's code, as a ``__reduce__``; else None.

    What the pickler itself raised is in the text of ``explain``: its frames tell a user nothing.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return None if module.partition(".")[0] in _PICKLERS else error


def pass_interruption(value: object, error: Exception) -> None:
    """Raise what pickling a value raised once more, if it is no fault of the value.

    One that can be pickled was interrupted by a signal whose handler raised, as that of a time
    limit does. The handler's error is the caller's, and says nothing of the value.
    """
    if not _fails(value):
        raise error


def explain_arguments(
    args: tuple[object, ...], kwargs: dict[str, object], error: BaseException
) -> TypeError:
    """As ``explain``, for the arguments of a call: says which one is at fault."""
    placed: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    for where, value in placed:
        if _fails(value):
            fault = str(explain(value, error, "argument")).removeprefix("argument")
            return UnpicklableArgumentError(where, fault)
    return explain((args, kwargs), error)  # each of them can be, by itself


def _describe(value: object) -> str:
    if inspect.isfunction(value):
        return f"function {value.__qualname__}"
    if inspect.ismethod(value):
        return f"method {value.__qualname__}"
    if inspect.isclass(value):
        return f"class {value.__qualname__}"
    return f"a value of type {type(value).__qualname__}"


def at_fault(value: object, depth: int) -> tuple[str, object, Exception] | None:
    """Where in a value the innermost part is that cannot be pickled, the part, and the error.

    None if the value can be pickled; an empty place if none of its parts is at fault by itself.
    """
    error = _error_of(value)
    if error is None:
        return None
    place, part = _find(value, "", depth, set()) or ("", value)
    return place, part, _error_of(part) or error


def _fails(value: object) -> bool:
    return _error_of(value) is not None


def _error_of(value: object) -> Exception | None:
    try:
        # Not by cloudpickle alone: refs in it would be kept to the end of the process.
        pickled(value)
    except Exception as error:  # noqa: BLE001 - any failure to pickle is what is asked for
        return error
    return None


def _find(value: object, path: str, depth: int, seen: set[int]) -> tuple[str, object] | None:
    """The path and value of the innermost part that fails by itself."""
    if depth == 0 or id(value) in seen:
        return None
    seen.add(id(value))
    for part in parts_of(value):
        if id(part.value) not in seen and _fails(part.value):
            inner = f"{path}{part.step()}"
            return _find(part.value, inner, depth - 1, seen) or (inner.lstrip(".: "), part.value)
    return None
