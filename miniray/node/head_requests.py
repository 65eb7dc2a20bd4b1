"""What clients and the daemon ask of the head, until it is known to be done and kept.

A head that ends takes with it what it had not done or not yet kept. Its successor is
asked again: all that was not answered, and what made or ended something of late, in the
same order. Whatever is repeated can be done twice without harm.
"""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray._proto import head_pb2

#: Seconds of a session after which the head has certainly kept what it was asked.
_KEPT_AFTER = 2.0
#: Bytes of the reports that one message takes.
_LARGEST = 16 << 20
#: Requests that make or end something. What a client wants to hear of, and which leases it
#: wants, it tells every head anew (`ClusterRuntime._on_head_back`).
_LASTING = frozenset(
    {
        "create_actor",
        "start_actor",
        "kill_actor",
        "actor_out_of_scope",
        "create_placement_group",
        "remove_placement_group",
        "return_lease",
        "put_code",
        "use_code",
        "kv_put",
        "kv_del",
    }
)


class HeadRequests:
    """Requests that wait for an answer, and those of the last moments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[tuple[bytes, int], head_pb2.FromNode] = {}
        self._recent: collections.deque[tuple[float, head_pb2.FromNode]] = collections.deque()
        #: How actors ended, of late.
        self._reports: collections.deque[tuple[float, head_pb2.FromNode]] = collections.deque()
        #: When the session ended; None while there is one. However long it takes until there is
        #: another head, nobody has kept anything meanwhile.
        self._ended: float | None = None

    def session_ended(self) -> None:
        """There is no head to ask, until ``to_repeat`` is called for the next one."""
        if self._ended is None:
            self._ended = self._clock()

    def sent(self, message: head_pb2.FromNode) -> None:
        """A request, or a notice (its number is 0), is on its way."""
        request = message.request
        if request.request:
            self._open[request.process_id, request.request] = message
        if request.method in _LASTING:
            now = self._clock()
            self._recent.append((now, message))
            self.drop_older()

    def reported(self, message: head_pb2.FromNode) -> None:
        """The head is told how an actor ends, or has ended."""
        now = self._clock()
        self._reports.append((now, message))
        self.drop_older()

    def reports(self) -> list[head_pb2.FromNode]:
        """What was told of ends and may be lost, as far as one message can take it."""
        self.drop_older()
        left = _LARGEST
        found: list[head_pb2.FromNode] = []
        for _, message in self._reports:
            left -= message.ByteSize()
            if left < 0:
                break
            found.append(message)
        return found

    def answered(self, process_id: bytes, number: int) -> None:
        """The head answered a request."""
        self._open.pop((process_id, number), None)
        self.drop_older()

    def process_ended(self, process_id: bytes) -> None:
        """Nobody waits for a process's answers any more."""
        for key in [key for key in self._open if key[0] == process_id]:
            del self._open[key]

    def to_repeat(self, waiting: Iterable[head_pb2.FromNode]) -> list[head_pb2.FromNode]:
        """What was sent and may be lost, in the order of sending; what is only open comes last.

        Args:
            waiting: what is still to be sent, and so is not repeated.
        """
        now = self._clock()
        self.drop_older()
        self._ended = None
        # This head may end too before it has kept them.
        self._recent = collections.deque((now, message) for _, message in self._recent)
        self._reports = collections.deque((now, message) for _, message in self._reports)
        sent = {id(message): message for _, message in self._recent}
        sent.update((id(message), message) for message in self._open.values())
        for message in waiting:
            sent.pop(id(message), None)
        return list(sent.values())

    def drop_older(self) -> None:
        """Let go of what the head has certainly kept; called now and then, as it may be large."""
        until = self._clock() if self._ended is None else self._ended
        for told in (self._recent, self._reports):
            while told and until - told[0][0] > _KEPT_AFTER:
                told.popleft()
