"""What clients and the daemon ask of the head, until it is known to be done.

A head that ends takes with it what it had not done or not yet kept: requests without an
answer, and the latest notices, are repeated to its successor. Whatever is repeated can
be done twice without harm.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray._proto import head_pb2

#: Seconds after which a notice is certain to have been done and kept.
_KEPT_AFTER = 2.0


class HeadRequests:
    """Requests that wait for an answer, and notices of the last moments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[tuple[bytes, int], head_pb2.FromNode] = {}
        self._notices: collections.deque[tuple[float, head_pb2.FromNode]] = collections.deque()

    def sent(self, message: head_pb2.FromNode) -> None:
        """A request (its number is not 0) or a notice is on its way."""
        request = message.request
        if request.request:
            self._open[request.process_id, request.request] = message
            return
        now = self._clock()
        self._notices.append((now, message))
        self._drop_older(now)

    def answered(self, process_id: bytes, number: int) -> None:
        """The head answered a request."""
        self._open.pop((process_id, number), None)

    def process_ended(self, process_id: bytes) -> None:
        """Nobody waits for a process's answers any more."""
        for key in [key for key in self._open if key[0] == process_id]:
            del self._open[key]

    def to_repeat(self, waiting: Iterable[head_pb2.FromNode]) -> list[head_pb2.FromNode]:
        """What was sent and may be lost, in the order of sending; requests come last.

        Args:
            waiting: what is still to be sent, and so is not repeated.
        """
        self._drop_older(self._clock())
        unsent = {id(message) for message in waiting}
        sent = [*(message for _, message in self._notices), *self._open.values()]
        return [message for message in sent if id(message) not in unsent]

    def _drop_older(self, now: float) -> None:
        while self._notices and now - self._notices[0][0] > _KEPT_AFTER:
            self._notices.popleft()
