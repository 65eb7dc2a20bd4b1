"""What this process did and when: calls above a millisecond always, all else while it is recorded.

The calls are in memory that a worker shares with its daemon, which writes them beside the worker's
log when the worker has crashed.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Kind, name, begin on the machine's clock (``time.perf_counter``), seconds, whether it went well,
#: and of a call its caller's process and number.
Span = tuple[str, str, float, float, bool, tuple[bytes, int] | None]

#: Seconds that a call takes at least to be remembered.
LONG = 0.001
#: What one process records at most.
MOST = 10_000
#: Bytes of the memory for calls: how many there were, and the latest of them.
RING_BYTES = 1 << 14
_COUNT = struct.Struct("<Q")
_CALL = struct.Struct("<dd?47p")
_PLACES = RING_BYTES // _CALL.size - 1


class Ring:
    """The last calls that took long, in shared memory."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def write(self, name: str, started: float, seconds: float, ok: bool) -> None:
        """Add a call in the place of the oldest."""
        memory = self._memory
        [count] = _COUNT.unpack_from(memory)
        at = _CALL.size * (1 + count % _PLACES)
        _CALL.pack_into(memory, at, started, seconds, ok, name.encode(errors="replace")[-46:])
        _COUNT.pack_into(memory, 0, count + 1)

    def as_text(self) -> str:
        """Return the calls as lines for a person."""
        ahead = time.time() - time.perf_counter()
        lines = []
        for _, name, started, seconds, ok, _ in self.read():
            when = time.strftime("%H:%M:%S", time.localtime(ahead + started))
            lines.append(f"{when} {1000 * seconds:10.1f} ms  {name}{'' if ok else ' (failed)'}\n")
        return "".join(lines)

    def read(self) -> list[Span]:
        """Return the calls, the oldest first."""
        [count] = _COUNT.unpack_from(self._memory)
        found: list[Span] = []
        for number in range(max(0, count - _PLACES), count):
            at = _CALL.size * (1 + number % _PLACES)
            started, seconds, ok, name = _CALL.unpack_from(self._memory, at)
            found.append(("call", name.decode(errors="replace"), started, seconds, ok, None))
        return found


class Spans:
    """The spans of this process."""

    def __init__(self) -> None:
        #: Seconds that a call takes at least to be noted; negative while all are recorded.
        self.least = LONG
        #: In a worker.
        self.ring: Ring | None = None
        #: While all is recorded.
        self._recorded: list[Span] | None = None
        self._left_out = 0
        self._lock = threading.Lock()
        #: Called with whether all is recorded, when that changes, so that code need not check it
        #: each time.
        self.switches: set[Callable[[bool], object]] = set()

    def write_to(self, ring: Ring) -> None:
        """Keep calls that took long where the daemon finds them, too."""
        self.ring = ring

    def call(self, name: str, started: float, seconds: float, ok: bool, of: Any) -> None:
        """Note a call that has ended; ``of`` is its caller's process and number."""
        if self.ring is not None and seconds > LONG:
            self.ring.write(name, started, seconds, ok)
        self._add(("call", name, started, seconds, ok, of))

    @contextlib.contextmanager
    def timed(self, kind: str, name: str) -> Iterator[None]:
        """Note what the body does, if all is recorded."""
        if self._recorded is None:
            yield
            return
        started, ok = time.perf_counter(), False
        try:
            yield
            ok = True
        finally:
            self._add((kind, name, started, time.perf_counter() - started, ok, None))

    def submitted(self, number: int) -> None:
        """Note that this process made a call."""
        self._add(("submit", "", time.perf_counter(), 0.0, True, (b"", number)))

    def _add(self, span: Span) -> None:
        recorded = self._recorded
        if recorded is None:
            return
        if len(recorded) < MOST:
            recorded.append(span)
        else:
            self._left_out += 1

    def begin(self) -> None:
        """Record all from now on.

        Raises:
            ValueError: A recording is under way already.
        """
        with self._lock:
            if self._recorded is not None:
                raise ValueError("it is being recorded already")
            self._recorded, self._left_out, self.least = [], 0, -1.0
            for switch in list(self.switches):
                switch(True)

    def end(self) -> tuple[list[Span], int]:
        """Return what was recorded, and how much was left out."""
        with self._lock:
            recorded, self._recorded, self.least = self._recorded or [], None, LONG
            for switch in list(self.switches):
                switch(False)
            return recorded, self._left_out


#: The spans of this process.
SPANS = Spans()
