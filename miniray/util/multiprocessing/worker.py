"""The actor that runs the calls of a ``Pool``, a batch of units at a time."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class How(enum.IntEnum):
    """How a unit calls its function with its elements."""

    APPLY = 0  # the only element is (args, kwargs)
    MAP = 1  # with each
    STARMAP = 2  # with the arguments in each


#: A function, how to call it, and its elements.
Work = tuple["Callable[..., Any]", How, "Sequence[Any]"]


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for the result of a call that raised."""

    error: BaseException


class Outcome:
    """What came of a unit: the results of its calls, and whether one of them is ``Failed``."""

    __slots__ = ("failed", "results")

    def __init__(self, results: list[Any], failed: bool) -> None:
        self.results = results
        self.failed = failed

    def __reduce__(self) -> tuple[type[Outcome], tuple[list[Any], bool]]:
        return Outcome, (self.results, self.failed)


class PoolActor:
    """One process of a pool."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: Sequence[Any]) -> None:
        self._outcomes: list[Outcome] = []
        if initializer is not None:
            initializer(*initargs)

    def ping(self) -> None:
        """Answers once the process is ready."""

    def run(self, *units: Work) -> tuple[list[Outcome], float]:
        """Run units one after the other.

        Returns:
            What came of each, and how many seconds all of them took.
        """
        began = time.perf_counter()
        self._outcomes.clear()
        outcomes = [_run(*unit) for unit in units]
        if len(outcomes) > 1:
            self._outcomes = outcomes
        return outcomes, time.perf_counter() - began

    def outcome(self, index: int) -> Outcome:
        """What came of one unit of the last batch, if not all of them can be pickled or read."""
        return self._outcomes[index]


def _run(func: Callable[..., Any], how: How, elements: Iterable[Any]) -> Outcome:
    """Call a function with each element; an error takes its result's place."""
    results: list[Any] = []
    add = results.append
    failed = False
    left = iter(elements)
    while True:
        try:
            if how == How.MAP:
                for element in left:
                    add(func(element))
            elif how == How.STARMAP:
                for element in left:
                    add(func(*element))
            else:
                for args, kwargs in left:
                    add(func(*args, **kwargs))
        except Exception as error:  # noqa: BLE001, PERF203 - the caller's, who raises it; once per error
            add(Failed(error))
            failed = True
        else:
            return Outcome(results, failed)
