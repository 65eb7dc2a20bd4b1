"""Functions and classes of jobs, by key: kept by each daemon, fetched from the head on demand.

Code is told to the daemon and the head by one path and needed by workers that hear
of it by another, so a key may be asked for before it is known: who asks waits a while.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Seconds between questions to the head for a key that it does not know, and how many.
_FIRST_PAUSE = 0.01
_PAUSES = 10


class CodeCache:
    """The code that this node has seen.

    Args:
        ask_head: Asks the head for the code of a key; None if it does not know it.
    """

    def __init__(self, ask_head: Callable[[bytes], Awaitable[bytes | None]]) -> None:
        self._ask_head = ask_head
        self._code: dict[bytes, bytes] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}

    def put(self, key: bytes, blob: bytes) -> bool:
        """Keep code; False if it was known."""
        if key in self._code:
            return False
        self._code[key] = blob
        awaited = self._awaited.pop(key, None)
        if awaited is not None:
            awaited.set()
        return True

    def known(self, key: bytes) -> bytes | None:
        """The code, if it is here."""
        return self._code.get(key)

    async def get(self, key: bytes) -> bytes | None:
        """The code, from the head if need be; None if nobody has told it for some seconds."""
        pause = _FIRST_PAUSE
        for _ in range(_PAUSES):
            blob: Any = self._code.get(key) or await self._ask_head(key)
            if blob is not None:
                self.put(key, blob)
                return bytes(blob)
            event = self._awaited.setdefault(key, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), pause)
            except asyncio.TimeoutError:
                pause *= 2
        return self._code.get(key)
