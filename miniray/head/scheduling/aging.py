"""Who has waited long: those that room is to be set aside for, the first that came first.

Responsible for finding them, and for when the next one has waited long, without looking at all
who wait.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Aging(Generic[T]):
    """Owners by the number of what waits longest of theirs.

    Who began to wait later has a higher number. An owner may be entered again and again; what
    does not hold any more is dropped when it is come upon.
    """

    def __init__(self, is_current: Callable[[T, int], bool]) -> None:
        """Start with nobody.

        Args:
            is_current: whether what waits longest of an owner's still has this number.
        """
        self._is_current = is_current
        self._serial = itertools.count().__next__
        #: (number, tie-breaker, since when, owner): those that have not waited long, and the rest.
        self._young: list[tuple[int, int, float, T]] = []
        self._old: list[tuple[int, int, float, T]] = []

    def add(self, owner: T, number: int, since: float) -> None:
        """An owner waits with this number from this time on."""
        heapq.heappush(self._young, (number, self._serial(), since, owner))

    def take_old(self, since: float) -> tuple[T, int, float] | None:
        """The first owner that waits since then or longer, with its number and time; None if none.

        It is out of here until it is added again.
        """
        self._ripen(since)
        while self._old:
            number, _, began, owner = heapq.heappop(self._old)
            if self._is_current(owner, number):
                return owner, number, began
        return None

    def first_after(self, since: float) -> float | None:
        """Since when the first owner waits that began to wait after this time; None if none did."""
        self._ripen(since)
        while self._young:
            number, _, began, owner = self._young[0]
            if self._is_current(owner, number):
                return began
            heapq.heappop(self._young)
        return None

    def _ripen(self, since: float) -> None:
        """Those that wait since then or longer have waited long."""
        while self._young and self._young[0][2] <= since:
            heapq.heappush(self._old, heapq.heappop(self._young))
