"""The tasks of this process: queued per shape, sent down leases of workers.

A lease is the right to use one worker for tasks of one shape (resources, placement,
environment). The client reports to the head how many leases of a shape it could use;
the head grants them as they come free. Many tasks go down one lease; how many wait
at a worker depends on how long its tasks have taken so far.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.calls.call import Channel
from miniray.calls.task_groups import HeldLease, TaskGroup
from miniray.common.config import config
from miniray.common.names import short_name
from miniray.exceptions import TaskCancelledError, WorkerCrashedError, describe_exit
from miniray.messages import protocol as p
from miniray.messages.value import rebuild_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.common.specs import LeaseSpec
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink
    from miniray.wire.peers import Peer, PeerTable

#: Seconds that a task whose process has ended waits for the reason.
_TO_HEAR = 5.0
#: Shapes that are remembered before unused ones are dropped.
_FEW = 256
#: The most functions whose retries are reported.
_MOST_REPORTED = 100
#: The most leases of one shape that a client requests at once.
_MAX_LEASES = 1024


@dataclasses.dataclass(eq=False, repr=False)
class TaskClient(Channel):
    """Queues and leases of all shapes; ``Call.options`` is the group of a task. Thread-safe."""

    _calls: CallTable
    _peers: PeerTable
    _link: NodeLink
    _loop: IOLoop
    #: Prints a message for the user.
    _warn: Callable[[str], None]
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.finished, _ = self._calls.ended.by_kind["NORMAL_TASK"]
        self._lock = threading.RLock()
        self._numbers = itertools.count(1).__next__
        self._groups: dict[Any, TaskGroup] = {}
        self._by_id: dict[int, TaskGroup] = {}
        self._look_at = _FEW
        self._by_peer: dict[bytes, HeldLease] = {}
        self._sweeping = False
        #: Functions whose retries were reported.
        self._reported: set[str] = set()

    def group(self, key: Any, make_spec: Callable[[], LeaseSpec]) -> TaskGroup:
        """Return the group of a shape; ``make_spec`` is called for a new one."""
        group = self._groups.get(key)
        if group is not None:
            return group
        spec = make_spec()  # may upload a folder, and messages must be handled meanwhile
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                if len(self._by_id) >= self._look_at:
                    self._forget_unused()
                scarce = set(spec.resources) - {"CPU", "memory"}
                keep = 0.0 if scarce else config().lease_idle
                group = TaskGroup(self._numbers(), spec, keep, self._calls, self._clock)
                self._groups[key] = self._by_id[group.id] = group
        return group

    def _forget_unused(self) -> None:
        """Forget shapes without tasks: shapes of removed placement groups stay unused.

        A call that still waits for its refs brings its group back (``_ask``).
        """
        self._groups = {key: group for key, group in self._groups.items() if group.in_use}
        self._by_id = {id: group for id, group in self._by_id.items() if group.in_use}
        self._look_at = max(_FEW, 2 * len(self._by_id))

    # --- calling -----------------------------------------------------------------
    def ready(self, call: Call) -> None:
        """Queue a task that was kept."""
        with self._lock:  # a cancel comes either before this, or finds it in the queue
            if not call.cancelled:
                call.options.enter(call)
                self._pump(call.options)
                return
        self._calls.fail(call, TaskCancelledError(call.name))

    def put_back(self, call: Call) -> None:
        """Keep a task that no lease has any more."""
        call.peer = None

    def answered(self, call: Call, seconds: float | None) -> None:
        """Record how long a task took; its lease may get the next one."""
        group: TaskGroup = call.options
        with self._lock:
            if seconds is not None:
                old = group.duration
                group.duration = seconds if old is None else old + (seconds - old) * 0.2
            lease = self._by_peer.get(call.peer.process_id) if call.peer is not None else None
            if lease is not None:
                lease.window = self._window(group)
                if lease.calls.pop(call.number, None) is not None:
                    self._note_left(lease)
            self._pump(group)

    def cancel(self, call: Call, force: bool, recursive: bool) -> None:
        """Fail a task that is queued, or send its worker a request to cancel it."""
        group: TaskGroup = call.options
        with self._lock:
            if call.peer is not None:
                call.peer.send((p.PEER_CANCEL, call.number, force, recursive))
                return
            group.withdraw(call)
            self._pump(group)
        self._calls.fail(call, TaskCancelledError(call.name))

    @staticmethod
    def _window(group: TaskGroup) -> int:
        """Return how many tasks a worker runs within the time after which they are recalled."""
        if group.duration is None:
            return 1
        tunables = config()
        fitting = int(tunables.recall_after / max(group.duration, 1e-6))
        return max(1, min(tunables.lease_window, fitting))

    # --- sending -----------------------------------------------------------------
    def _pump(self, group: TaskGroup) -> None:
        """Send what the leases take; request more leases for the tasks left over."""
        self._fill(group)
        if group.queue:
            # Only the queue's first tasks decide: a lease serves many of them.
            near = group.hint()
            wanted = min(len(group.leases) + len(group.queue), _MAX_LEASES)
            if wanted > group.asked or (near != group.near and group.asked > len(group.leases)):
                self._ask(group, max(wanted, group.asked), near)
            if group.refused:
                self._look_again(group)
        elif group.leases:
            # After most tasks there is no work for it.
            if not self._sweeping or group.keep == 0.0 or group.asked > len(group.leases):
                self._sweep_later(group)
        elif group.asked:
            self._ask(group, 0)

    def _fill(self, group: TaskGroup) -> None:
        with_capacity, queue = group.with_capacity, group.queue
        index = 0
        while index < len(with_capacity) and queue:
            lease = group.leases[with_capacity[index]]
            # As `lease.open`, which would cost two calls for each task.
            while len(lease.calls) < lease.window and lease.remaining and not lease.leaving:
                call = group.take(lease) if queue else None
                if call is None:
                    index += 1
                    break
                self._send(call, lease)
            else:
                group.note_no_room(lease)

    def _send(self, call: Call, lease: HeldLease) -> None:
        refs = call.refs
        if refs:
            refs, error = self._calls.resolved_refs(call)
            if error is not None:
                # Not under the lock: a call that waits for its result may need another channel's.
                self._loop.call_soon(lambda: self._calls.fail_value(call, error))
                return
        call.peer = peer = lease.give(call)
        peer.post(
            (
                p.PEER_CALL,
                call.number,
                call.target,
                call.arguments,
                refs,
                call.return_ids,
                (call.name, lease.id),
                call.streams,
            )
        )

    def _ask(self, group: TaskGroup, wanted: int, near: bytes = b"") -> None:
        group.asked, group.near = wanted, near
        self._by_id[group.id] = group
        if group.queue and group.queue[0].name != group.spec.name:
            # Functions may share a shape: reports of waiting tasks name one that waits.
            group.spec = dataclasses.replace(group.spec, name=group.queue[0].name)
        self._link.head_notice("want_leases", group.id, group.spec.to_wire(), wanted, near)

    def _look_again(self, group: TaskGroup) -> None:
        """Send tasks that wait for a certain node elsewhere, once they have waited long enough."""
        group.refused = False
        patience = group.patience()
        if patience is None or patience[0] >= group.next_look:
            return
        group.next_look, delay = patience

        def over() -> None:
            with self._lock:
                group.lose_patience()
                self._pump(group)

        self._loop.call_later(delay, over)

    def _note_left(self, lease: HeldLease) -> None:
        """Return a lease that its last task has left, if it takes no more; else it is idle."""
        lease.group.note_capacity(lease)
        if not lease.calls:
            lease.idle_since = time.monotonic()
            lease.group.note_idle(lease.peer.node_id)
            if not lease.open:
                self._return(lease)

    # --- leases ------------------------------------------------------------------
    def on_granted(
        self,
        group_id: int,
        lease_id: int,
        node_id: bytes,
        process_id: bytes,
        max_calls: int,
    ) -> None:
        """Use a granted lease, of a worker that ends after ``max_calls`` tasks (0: no limit)."""
        with self._lock:
            group = self._by_id.get(group_id)
            if group is None:
                self._link.head_notice("return_lease", lease_id)
                return
            if lease_id in group.leases:
                return  # a repeated message
            peer = self._peers.get(node_id, process_id)
            lease = HeldLease(lease_id, peer, group, max_calls)
            lease.window = self._window(group)
            group.add(lease)
            self._by_peer[process_id] = lease
            group.note_idle(node_id)
            self._pump(group)
            if peer.lost:
                self.on_peer_lost(peer)

    def on_failed(self, group_id: int, error: bytes) -> None:
        """Fail the tasks of a shape for which the head will never grant a lease."""
        with self._lock:
            group = self._by_id.get(group_id)
            if group is None:
                return
            failed = group.take_all()
            group.asked = len(group.leases)
            self._pump(group)
        for call in failed:
            self._calls.fail(call, rebuild_error(error))

    def on_revoked(self, lease_id: int, group_id: int) -> None:
        """Return a lease, for which others wait, after the task that runs."""
        with self._lock:
            group = self._by_id.get(group_id)
            lease = group.leases.get(lease_id) if group is not None else None
            if group is None or lease is None:
                return
            if not lease.calls:
                self._return(lease)
                return
            lease.leaving = True
            lease.peer.send((p.PEER_LEASE_END, lease_id))

    def on_head_back(self) -> None:
        """Report to a restarted head what this client wants, and which leases it has."""
        with self._lock:
            groups = list(self._by_id.values())
            held = [number for group in groups for number in group.leases]
            self._link.head_notice("hold_leases", held)
            for group in groups:
                # Leases of before are not counted in what the head grants from now on.
                wanted = min(len(group.queue), _MAX_LEASES)
                group.asked = wanted + len(group.leases)
                if wanted:
                    spec = group.spec.to_wire()
                    self._link.head_notice("want_leases", group.id, spec, wanted, group.near)

    def on_recalled(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_RECALLED: queue the tasks that a worker hands back unbegun."""
        _, numbers = message
        with self._lock:
            lease = self._by_peer.get(peer.process_id)
            if lease is None:
                return
            back: list[Call] = []
            cancelled: list[Call] = []
            for number in numbers:
                call = lease.calls.pop(number, None)
                if call is not None:
                    call.peer = None
                    (cancelled if call.cancelled else back).append(call)
                    if lease.remaining >= 0:
                        lease.remaining += 1
            group = lease.group
            # Its running task is a long one: no more tasks are queued behind it.
            lease.window = 1
            group.duration = max(group.duration or 0.0, config().recall_after)
            group.put_back(back)
            self._note_left(lease)
            self._pump(group)
        for call in cancelled:
            self._calls.fail(call, TaskCancelledError(call.name))

    def _return(self, lease: HeldLease) -> None:
        group = lease.group
        if not group.remove(lease):
            return
        self._by_peer.pop(lease.peer.process_id, None)
        group.asked = max(0, group.asked - 1)
        self._link.head_notice("return_lease", lease.id, False, lease.calls_left)
        if group.queue:
            wanted = min(len(group.leases) + len(group.queue), _MAX_LEASES)
            self._ask(group, wanted, group.hint())

    def _sweep_later(self, group: TaskGroup) -> None:
        """Return leases that stay idle: one timer for all groups."""
        if group.asked > len(group.leases):
            self._ask(group, len(group.leases))  # what is on its way comes back when it arrives
        if group.keep == 0.0:
            for lease in group.idle():
                self._return(lease)
            return
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(group.keep, self._sweep)

    def _sweep(self) -> None:
        with self._lock:
            self._sweeping = False
            now = time.monotonic()
            again = False
            for group in self._by_id.values():
                for lease in group.idle():
                    if now - lease.idle_since >= group.keep * 0.9:
                        self._return(lease)
                    else:
                        again = True
            if again and not self._sweeping:
                self._sweeping = True
                self._loop.call_later(config().lease_idle, self._sweep)

    def on_peer_lost(self, peer: Peer) -> None:
        """Run again, or fail, the tasks of a worker whose process ended."""
        with self._lock:
            lease = self._by_peer.pop(peer.process_id, None)
            if lease is None or lease.peer is not peer:
                if lease is not None:
                    self._by_peer[peer.process_id] = lease
                return
            group = lease.group
            group.remove(lease)
            group.asked = max(0, group.asked - 1)
            # Its process may not be given to another client.
            self._link.head_notice("return_lease", lease.id, True)
            calls = list(lease.calls.values())
            failed = self._sort_lost(calls, group)
            self._pump(group)
        if failed:
            self._fail_crashed(failed, peer)
        elif calls:
            self._report_retry(calls[0], peer)

    def _fail_crashed(self, calls: list[Call], peer: Peer) -> None:
        """Fail the tasks of a process that ended, as soon as it is known how it ended."""

        def fail(
            code: int | None = None, pid: int = 0, with_node: bool = False, detail: str = ""
        ) -> None:
            open_calls, calls[:] = list(calls), []
            for call in open_calls:
                error = WorkerCrashedError(
                    call.name,
                    pid=pid,
                    node_id=peer.node_id.hex(),
                    code=code,
                    with_node=with_node,
                    detail=detail,
                    tries=call.tries,
                    max_retries=call.max_retries,
                )
                self._calls.fail(call, error)

        def answer(error: Any, how: Any, _fd: int) -> None:
            if calls:  # in time
                cancel()
                fail(*how if error is None else ())

        cancel = self._loop.call_later(_TO_HEAR, fail)
        self._link.head_request_async("await_end", (peer.process_id,), answer)

    def _report_retry(self, call: Call, peer: Peer) -> None:
        """Print, once per function, that a task is retried and how its worker ended."""
        name = short_name(call.name)
        if name in self._reported or len(self._reported) == _MOST_REPORTED:
            return
        self._reported.add(name)
        limit = call.max_retries
        of = "" if limit is None or limit < 0 else f" of {limit + 1}"
        attempt = f"attempt {call.tries}{of}"

        def answer(error: Any, how: Any, _fd: int) -> None:
            if error is not None:
                return  # this process leaves its cluster, or its node ends
            code, pid, with_node, detail = how
            ended = "was lost with its node" if with_node else describe_exit(code, hint=not detail)
            worker = f"its worker{f' {pid}' if pid else ''} {ended}."
            self._warn(
                f"{name} runs again ({attempt}): {' '.join(filter(None, [worker, detail]))} "
                f"Further retries of {name} are not reported."
            )

        self._link.head_request_async("await_end", (peer.process_id,), answer)

    def _sort_lost(self, calls: list[Call], group: TaskGroup) -> list[Call]:
        """Queue what may run again; return what may not. Only the first had begun."""
        failed = []
        again = []
        for index, call in enumerate(calls):
            call.peer = None
            if call.cancelled or (index == 0 and call.retries == 0):
                failed.append(call)
                continue
            pause = call.try_again(crashed=True) if index == 0 else 0.0
            if pause:
                self._calls.run_later(call, pause)
            else:
                again.append(call)
        group.put_back(again)
        return failed
