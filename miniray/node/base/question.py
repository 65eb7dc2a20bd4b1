"""A question to several processes or nodes at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miniray.node.base.tasks import set_within

if TYPE_CHECKING:
    from collections.abc import Iterable


class Question:
    """A question to several; it is over when each has answered or is gone."""

    def __init__(self, whom: Iterable[bytes]) -> None:
        self._missing = set(whom)
        self._over = asyncio.Event()
        self.answers: dict[bytes, Any] = {}
        #: Those that ended before they answered.
        self.gone: set[bytes] = set()
        self._check()

    def answered(self, who: bytes, answer: Any) -> None:
        if who in self._missing:
            self.answers[who] = answer
            self._missing.discard(who)
            self._check()

    def ended(self, who: bytes) -> None:
        """Expect no answer from one that is gone."""
        if who in self._missing:
            self.gone.add(who)
            self._missing.discard(who)
            self._check()

    async def wait(self, seconds: float | None = None) -> None:
        await set_within(self._over, seconds)

    def _check(self) -> None:
        if not self._missing:
            self._over.set()
