"""Where the ranks of an attempt wait for each other: keys, barriers and broadcasts.

Runs in the controller's event loop, so only processes of the cluster reach it. Each wait ends: when
all have come, when a rank can no longer come, when ranks called different things, or after a time.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from miniray.train.base.exceptions import CollectiveError, CollectiveTimeoutError
from miniray.train.base.ranks import listed
from miniray.train.worker.controller_client import CollectiveOutcome

if TYPE_CHECKING:
    from collections.abc import Callable


class GroupKeys:
    """Keys of one attempt. Values are bytes; a counter is its decimal digits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        #: Set when the key comes, or when it can't come any more.
        self._waited_for: dict[str, asyncio.Event] = {}
        self._closed = ""

    def close(self, why: str) -> None:
        """Fail all waits, with a sentence that says why."""
        self._closed = why
        for event in self._waited_for.values():
            event.set()

    async def wait(self, keys: list[str], timeout: float) -> list[str]:
        """Wait for the values of these keys; return those without one after ``timeout`` seconds.

        Raises:
            CollectiveError: They can't come any more.
        """
        deadline = time.monotonic() + timeout
        for key in keys:
            if key in self._values:
                continue
            event = self._waited_for.setdefault(key, asyncio.Event())
            try:
                if not self._closed:
                    await asyncio.wait_for(event.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                break
            if key not in self._values and self._closed:
                raise CollectiveError(self._closed)
        return await self.absent(keys)

    async def absent(self, keys: list[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    async def get(self, keys: list[str], timeout: float) -> tuple[list[bytes], list[str]]:
        """Wait for keys; return their values, and those without one after ``timeout`` seconds."""
        absent = await self.wait(keys, timeout)
        return ([] if absent else [self._values[key] for key in keys]), absent

    async def set(self, values: dict[str, bytes]) -> None:
        self._values.update(values)
        for key in values:
            event = self._waited_for.pop(key, None)
            if event is not None:
                event.set()

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; return its value then."""
        count = int(self._values.get(key, b"0")) + amount
        await self.set({key: str(count).encode()})
        return count

    async def append(self, key: str, value: bytes) -> None:
        """Add to the end of a value, which begins empty."""
        await self.set({key: self._values.get(key, b"") + value})

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key that has the expected value, or none if that is empty.

        Returns:
            Its value then; the expected one if the key has none.
        """
        current = self._values.get(key, b"")
        if current != expected:
            return current or expected
        await self.set({key: desired})
        return desired

    async def delete(self, key: str) -> bool:
        """Delete a key; return whether there was one."""
        return self._values.pop(key, None) is not None

    async def count(self) -> int:
        return len(self._values)


#: Seconds after which the user reads for which ranks others wait.
NOTE_AFTER = 60.0


class _Meeting:
    """The ranks in one collective call."""

    def __init__(self, call: str, first: int) -> None:
        self.call = call
        self.first = first
        self.begun = time.monotonic()
        self.here: set[int] = set()
        self.value = b""
        self.outcome: asyncio.Future[CollectiveOutcome] = asyncio.Future()
        self.timers: list[asyncio.TimerHandle] = []

    def end(self, outcome: CollectiveOutcome) -> None:
        for timer in self.timers:
            timer.cancel()
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class Rendezvous:
    """The collective calls of one attempt; the n-th call of each rank belong together.

    Args:
        timeout: Seconds after which a call ends whose ranks have not all come; 0 is no limit.
        tell: Called with a sentence for the user when a call takes long.
    """

    def __init__(self, world_size: int, timeout: float, tell: Callable[[str], None]) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._tell = tell
        self._meetings: dict[int, _Meeting] = {}
        self._gone: dict[int, str] = {}
        self._broken: CollectiveError | None = None

    async def join(self, rank: int, number: int, call: str, value: bytes) -> CollectiveOutcome:
        """Wait for all other ranks in the collective call of this number, counted from 0."""
        if self._broken is not None:
            return CollectiveOutcome(error=self._broken)
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = self._open(number, call, rank)
        if meeting.call != call:
            self._break(
                CollectiveError(
                    f"Rank {rank} called {call} while rank {meeting.first} called {meeting.call}: "
                    f"every rank has to make the same collective calls in the same order."
                )
            )
            return await asyncio.shield(meeting.outcome)
        meeting.here.add(rank)
        if rank == 0:
            meeting.value = value
        if len(meeting.here) == self._world_size:
            del self._meetings[number]
            meeting.end(CollectiveOutcome(meeting.value))
        else:
            self._check(meeting)
        # Shielded: when one caller goes away, the others still wait for the same future.
        return await asyncio.shield(meeting.outcome)

    def leave(self, rank: int, how: str) -> None:
        """Enter that a rank will come to no further call; ``how`` ends a sentence about it."""
        self._gone.setdefault(rank, how)
        for meeting in list(self._meetings.values()):
            self._check(meeting)

    def close(self, why: str) -> None:
        """End all calls, and those that still come, with a sentence that says why."""
        self._break(CollectiveError(why))

    def waiting(self, rank: int) -> tuple[str, float, list[int]] | None:
        """Return the call in which a rank waits, the seconds, and the missing ranks; or None."""
        for meeting in self._meetings.values():
            if rank in meeting.here:
                return meeting.call, time.monotonic() - meeting.begun, self._missing(meeting)
        return None

    def _open(self, number: int, call: str, rank: int) -> _Meeting:
        meeting = _Meeting(call, rank)
        loop = asyncio.get_running_loop()
        meeting.timers.append(loop.call_later(NOTE_AFTER, self._note, meeting))
        if self._timeout:
            meeting.timers.append(loop.call_later(self._timeout, self._expire, meeting))
        return meeting

    def _note(self, meeting: _Meeting) -> None:
        self._tell(
            f"For {NOTE_AFTER:g} s, {listed(meeting.here)} waited in {meeting.call} for "
            f"{listed(self._missing(meeting))}."
        )

    def _missing(self, meeting: _Meeting) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in meeting.here]

    def _check(self, meeting: _Meeting) -> None:
        """Break the calls that a rank which has gone would have to join."""
        for rank, how in self._gone.items():
            if rank not in meeting.here:
                waited = time.monotonic() - meeting.begun
                self._break(
                    CollectiveError(
                        f"Rank {rank} {how}, while {listed(meeting.here)} waited for it in "
                        f"{meeting.call}, {waited:.1f} s by then."
                    )
                )
                return

    def _expire(self, meeting: _Meeting) -> None:
        missing = self._missing(meeting)
        self._break(
            CollectiveTimeoutError(
                f"After {self._timeout:g} s in {meeting.call}, {listed(meeting.here)} still waited "
                f"for {listed(missing)}, which did not call it. "
                f"MINIRAY_TRAIN_COLLECTIVE_TIMEOUT sets the limit."
            )
        )

    def _break(self, error: CollectiveError) -> None:
        """End all calls: after one has failed, the numbers of the others are void."""
        self._broken = error
        meetings, self._meetings = list(self._meetings.values()), {}
        for meeting in meetings:
            meeting.end(CollectiveOutcome(error=error))
