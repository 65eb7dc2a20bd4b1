"""The calls of this process to one actor: kept in order, sent when it lives, failed when not.

The head reports where the actor is and every change of that; when a connection is lost, calls only
wait for the head's report. It may overtake the actor's last replies: calls that were sent fail, or
go to its next process, once no more replies can come.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import operator
import threading
from typing import TYPE_CHECKING

from miniray.calls.call import Channel
from miniray.common.state_types import ALIVE, DEAD, PENDING
from miniray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    DeathCause,
    MinirayError,
    PendingCallsLimitExceededError,
    TaskCancelledError,
    describe_exit,
)
from miniray.messages import protocol as p
from miniray.messages.value import error_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.messages.value import Value
    from miniray.wire.peers import Peer, PeerTable


@dataclasses.dataclass(eq=False, repr=False)
class ActorClient(Channel):
    """One actor, seen from one caller. Thread-safe."""

    actor_id: bytes
    name: str
    _calls: CallTable
    _peers: PeerTable
    #: Calls that may wait or run; -1: no limit.
    _max_pending: int

    takes_force = False

    def __post_init__(self) -> None:
        self.finished, _ = self._calls.ended.by_kind["ACTOR_TASK"]
        # Reentrant: a garbage collection may run user code, which may call, in any section.
        self._lock = threading.RLock()
        self.state = PENDING
        self._epoch = -1
        self._peer: Peer | None = None
        #: Where it lived last, while its replies may be on their way.
        self._ending: Peer | None = None
        #: Where it lives, as (node, process); the connection is made when those calls are settled.
        self._place: tuple[bytes, bytes] = (b"", b"")
        #: Not sent yet, in order.
        self._queue: collections.deque[Call] = collections.deque()
        #: Not sent yet, to make lost values again: queued ones may wait for what these make.
        self._repeats: list[Call] = []
        #: Sent, without a reply, in order.
        self._sent: dict[int, Call] = {}
        #: Sent on a connection that broke; what they get depends on the head's report.
        self._lost: list[Call] = []
        #: Calls to fail once the lock is free: a call of another client may wait for such a
        #: result, and failing it needs that client's lock.
        self._failed: collections.deque[tuple[Call, Value]] = collections.deque()
        self._cause: Callable[[], MinirayError] | None = None

    # --- calling -----------------------------------------------------------------
    def submit(self, call: Call, ready: bool) -> None:
        """Send a call, or queue it."""
        with self._lock:
            limit = self._max_pending
            if limit >= 0 and not call.repeats and len(self._queue) + len(self._sent) >= limit:
                raise PendingCallsLimitExceededError(
                    limit=limit, actor_id=self.actor_id.hex(), class_name=self.name
                )
            if self.state == DEAD:
                assert self._cause is not None
                self._failed.append((call, error_value(self._cause())))
            elif call.repeats or self._queue or not ready or self._peer is None:
                (self._repeats if call.repeats else self._queue).append(call)
                self._pump()  # its refs may have got their values meanwhile
            else:
                self._send(call, self._peer)
        if self._failed:
            self._fail_outside()

    def _fail_outside(self) -> None:
        while True:
            try:
                call, error = self._failed.popleft()
            except IndexError:  # the queue is empty, or another thread answers it
                return
            self._calls.fail_value(call, error)

    def _send(self, call: Call, peer: Peer) -> None:
        refs = call.refs
        if refs:
            refs, error = self._calls.resolved_refs(call)
            if error is not None:
                self._failed.append((call, error))
                return
        call.peer = peer
        self._sent[call.number] = call
        peer.post(
            (
                p.PEER_CALL,
                call.number,
                call.target,
                call.arguments,
                refs,
                call.return_ids,
                call.options,
                call.streams,
            )
        )

    def _pump(self) -> None:
        if self.state == DEAD:  # these were to be sent once more, or waited for their refs again
            self._fail_queued()
            return
        peer = self._peer
        queue = self._queue
        if self._repeats and peer is not None:
            ready = [call for call in self._repeats if not call.waiting]
            self._repeats = [call for call in self._repeats if call.waiting]
            for call in ready:
                self._send(call, peer)
        while queue and peer is not None and not queue[0].waiting:
            self._send(queue.popleft(), peer)

    def ready(self, call: Call) -> None:
        """Send the calls that no longer wait."""
        with self._lock:
            self._pump()
        self._fail_outside()

    def answered(self, call: Call, seconds: float | None) -> None:
        """Forget a call that the actor has answered."""
        self._sent.pop(call.number, None)

    def put_back(self, call: Call) -> None:
        """Queue a call that was sent, before later calls: they may need its result.

        A call that waits for its refs holds up all that are queued behind it, so one that it waits
        for must not be among these.
        """
        with self._lock:
            call.peer = None
            if call.cancelled:
                self._failed.append((call, error_value(TaskCancelledError(call.name))))
            elif call.repeats:
                self._repeats.append(call)
            else:
                numbers = operator.attrgetter("number")
                place = bisect.bisect_left(self._queue, call.number, key=numbers)
                self._queue.insert(place, call)
        self._fail_outside()

    def cancel(self, call: Call, force: bool, recursive: bool) -> None:
        """Fail a call that is queued, or send the actor a request to cancel it."""
        with self._lock:
            queue = self._repeats if call.repeats else self._queue
            if call in queue:
                queue.remove(call)
                self._failed.append((call, error_value(TaskCancelledError(call.name))))
                self._pump()  # it may have been the one that the others waited behind
            elif call.peer is not None:
                call.peer.send((p.PEER_CANCEL, call.number, force, recursive))
            elif call.tries > 1 and call not in self._lost:  # its time to run again has not come
                self._failed.append((call, error_value(TaskCancelledError(call.name))))
        self._fail_outside()

    # --- reports of the head and the sockets -----------------------------------------
    def on_state(
        self,
        state: str,
        node_id: bytes,
        process_id: bytes,
        epoch: int,
        cause: Callable[[], MinirayError] | None,
        *,
        at_once: bool = False,
    ) -> None:
        """Take the head's report of where the actor is.

        Args:
            state: What it is now.
            node_id: Where it lives, if it does.
            process_id: Of its process, if it lives.
            epoch: Counts its processes.
            cause: Makes the error of a dead actor, or of one that restarts.
            at_once: Calls in flight have failed, whatever it may still have answered.
        """
        with self._lock:
            if self.state == DEAD or (state == ALIVE and epoch <= self._epoch):
                return
            self.state = state
            self._place = (node_id, process_id) if state == ALIVE else (b"", b"")
            self._cause = cause or self._cause
            if state == ALIVE:
                self._epoch = epoch
            elif state == DEAD:
                assert self._cause is not None
                self._fail(self._lost)
                self._lost = []
                self._fail_queued()
            self._leave(at_once)
        self._fail_outside()

    def on_peer_lost(self, peer: Peer) -> None:
        """Keep the calls in flight for the head's report: the connection to the actor broke."""
        with self._lock:
            if peer is self._ending:
                self._settle()
            elif peer is self._peer:
                self._lose()
                if peer.unreachable:
                    # To the head it lives, so there will be no report; what may have run is not
                    # repeated unless it may be.
                    self._requeue("its node could not be reached while {1} was in flight")
                    self._go_on()
        self._fail_outside()

    def _leave(self, at_once: bool) -> None:
        """Settle the calls sent to its last process, once all replies from there have come."""
        if self._peer is not None:
            self._ending, self._peer = self._peer, None
        ending = self._ending
        if at_once or not self._sent or ending is None or ending.lost:
            self._settle()

    def _settle(self) -> None:
        """Fail, or queue once more, the calls that its last process has not answered."""
        self._ending = None
        self._lose()
        if self.state == DEAD:
            self._fail(self._lost)
            self._lost = []
            return
        self._requeue()
        if self.state == ALIVE:
            self._go_on()

    def _go_on(self) -> None:
        self._peer = self._peers.get(*self._place)
        self._pump()

    def _fail(self, calls: Iterable[Call]) -> None:
        assert self._cause is not None
        cause = self._cause
        self._failed.extend((call, error_value(cause())) for call in calls)

    def _fail_queued(self) -> None:
        self._fail([*self._repeats, *self._queue])
        self._repeats = []
        self._queue.clear()

    def _lose(self) -> None:
        self._peer = None
        self._lost.extend(self._sent.values())
        self._sent.clear()

    def _requeue(self, why: str = "its process {} while {} was in flight, and it restarts") -> None:
        """Queue the calls of unknown fate that may be repeated before all others; fail the rest."""
        cause, self._cause = self._cause, None  # it belongs to no later end
        died = cause() if cause is not None else None
        ended = "ended"
        if isinstance(died, ActorDiedError):
            by_itself = died.cause is DeathCause.EXITED
            ended = describe_exit(died.exit_code, hint=by_itself and not died.detail)
        again = []
        for call in self._lost:
            call.peer = None
            if call.retries != 0 and not call.cancelled:
                call.try_again()
                again.append(call)
            else:
                error = ActorUnavailableError(
                    why.format(ended, call.name),
                    actor_id=self.actor_id.hex(),
                    class_name=self.name,
                    tries=call.tries,
                )
                self._failed.append((call, error_value(error)))
        self._lost = []
        self._queue.extendleft(reversed(again))

    @property
    def process_id(self) -> bytes:
        """The process in which it lives, or b""."""
        _, process_id = self._place
        return process_id

    @property
    def settling(self) -> bool:
        """Return whether replies of the actor's last process may still be in flight."""
        return self._ending is not None
