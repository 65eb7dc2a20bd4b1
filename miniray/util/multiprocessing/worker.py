"""The actor that runs the calls of a ``Pool``, a batch of units at a time."""

from __future__ import annotations

import collections
import dataclasses
import time
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


#: How a unit calls its function: ``APPLY`` with its only element, which is (args, kwargs), ``MAP``
#: with each, ``STARMAP`` with the arguments in each. Numbers, as they pickle quickly.
APPLY, MAP, STARMAP = range(3)

#: Seconds that a batch of several units should take at most: others could run those behind a long
#: one.
TOGETHER = 0.01

#: A function, how to call it, and its elements.
Work = tuple["Callable[..., Any]", int, "Sequence[Any]"]
#: What came of a unit: the results of its calls, and whether one of them is ``Failed``.
Outcome = tuple[list[Any], bool]


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for the result of a call that raised."""

    error: BaseException  # in the process that raised it the standard library's wrapper of that


class PoolActor:
    """One process of a pool."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: Sequence[Any]) -> None:
        #: What came of the last two batches: the second is sent before the first is read.
        self._kept: collections.deque[tuple[int, list[Outcome]]] = collections.deque(maxlen=2)
        if initializer is not None:
            initializer(*initargs)

    def ping(self) -> None:
        """Answer once the process is ready."""

    def run(self, number: int, *units: Work) -> tuple[list[Outcome], float]:
        """Run units one after the other, as many as end within ``TOGETHER``, and at least one.

        Returns:
            What came of each, and how many seconds all of them took.
        """
        began = time.perf_counter()
        outcomes: list[Outcome] = []
        seconds = 0.0
        for unit in units:
            outcomes.append(_run(*unit))
            seconds = time.perf_counter() - began
            if seconds > TOGETHER:  # the others are shared out anew
                break
        self._kept.append((number, outcomes if len(units) > 1 else []))
        return outcomes, seconds

    def outcome(self, number: int, index: int) -> Outcome | None:
        """Return the outcome of one unit of a batch, if all together cannot be pickled or read.

        None if it did not run.
        """
        outcomes = dict(self._kept)[number]
        return outcomes[index] if index < len(outcomes) else None


def _run(func: Callable[..., Any], how: int, elements: Iterable[Any]) -> Outcome:
    """Call a function with each element; an error takes its result's place."""
    results: list[Any] = []
    add = results.append
    failed = False
    left = iter(elements)
    while True:
        try:
            if how == MAP:
                for element in left:
                    add(func(element))
            elif how == STARMAP:
                for element in left:
                    add(func(*element))
            else:
                for args, kwargs in left:
                    add(func(*args, **kwargs))
        except Exception as error:  # noqa: BLE001, PERF203 - the caller's, who raises it; once per error
            add(Failed(ExceptionWithTraceback(error, error.__traceback__)))
            failed = True
        else:
            return results, failed
