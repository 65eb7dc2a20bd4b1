"""Functions and classes of jobs, by name: kept by each daemon, fetched from the head on demand.

Code is told to the daemon and the head by one path and needed by workers that hear
of it by another, so a name may be asked for before it is known: who asks waits a while.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Any

from miniray.node.allocator import trim

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Seconds between questions to the head for a name that it does not know, and how many.
_FIRST_PAUSE = 0.01
_PAUSES = 10
#: Bytes of code that went at once, of which the C library would keep most.
_MUCH = 16 * 1024 * 1024


class CodeCache:
    """The code that this node has seen lately.

    Args:
        ask_head: Asks the head for what it keeps under a name; None if it does not know it.
        limit: Bytes that all of it may take: what was not used for longest goes first.
    """

    def __init__(self, ask_head: Callable[[bytes], Awaitable[bytes | None]], limit: int) -> None:
        self._ask_head = ask_head
        self._limit = limit
        self.used = 0
        self._code: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        #: What each job has used or made known here.
        self._names: dict[bytes, set[bytes]] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}

    def put(self, job_id: bytes, name: bytes, content: bytes) -> bool:
        """Keep code of a job; False if the job has used it here before, so that the head has it."""
        names = self._names.setdefault(job_id, set())
        is_new = name not in names
        names.add(name)
        self._keep(name, content)
        awaited = self._awaited.pop(name, None)
        if awaited is not None:
            awaited.set()
        return is_new

    def known(self, job_id: bytes, name: bytes) -> bytes | None:
        """The code, if it is here."""
        content = self._code.get(name)
        if content is not None:
            self._code.move_to_end(name)
            self._names.setdefault(job_id, set()).add(name)
        return content

    async def get(self, job_id: bytes, name: bytes) -> bytes | None:
        """The code, from the head if need be; None if nobody has told it for some seconds."""
        pause = _FIRST_PAUSE
        for _ in range(_PAUSES):
            content: Any = self.known(job_id, name) or await self._ask_head(name)
            if content is not None:
                self.put(job_id, name, content)
                return bytes(content)
            event = self._awaited.setdefault(name, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), pause)
            except asyncio.TimeoutError:
                pause *= 2
        return self.known(job_id, name)

    def jobs(self) -> set[bytes]:
        """The jobs whose code is here."""
        return set(self._names)

    def end_job(self, job_id: bytes) -> None:
        """A job is over: what no other one has used goes."""
        names = self._names.pop(job_id, set())
        before = self.used
        for name in names.difference(*self._names.values()):
            self.used -= len(self._code.pop(name, b""))
            self._awaited.pop(name, None)
        if before - self.used > _MUCH:
            trim()

    def _keep(self, name: bytes, content: bytes) -> None:
        self.used += len(content) - len(self._code.pop(name, b""))
        self._code[name] = content
        while self.used > self._limit and len(self._code) > 1:
            self.used -= len(self._code.popitem(last=False)[1])
