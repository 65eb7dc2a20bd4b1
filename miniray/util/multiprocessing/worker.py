"""The actor that runs the calls of a ``Pool``, a batch at a time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Positional and keyword arguments of one call.
Arguments = tuple["Sequence[Any]", "Mapping[str, Any]"]


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for the result of a call that raised."""

    error: BaseException


class PoolActor:
    """One process of a pool."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: Sequence[Any]) -> None:
        if initializer is not None:
            initializer(*initargs)

    def ping(self) -> None:
        """Answers once the process is ready."""

    def run_batch(self, func: Callable[..., Any], batch: Sequence[Arguments]) -> list[Any]:
        """Call ``func`` with each of the arguments; an error takes its result's place."""
        return [_call(func, args, kwargs) for args, kwargs in batch]


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - it is the caller's, who raises it
        return Failed(error)
