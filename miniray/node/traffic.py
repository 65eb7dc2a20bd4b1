"""Messages to processes of this node and of others, notices of ends, and output.

Responsible for routing: to a process of this node, to this daemon in place of an owner that has
exited as planned, or to another daemon. The stream to another daemon is ``relay.py``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.messages import protocol as p
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.common.log_lines import LogLine
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.objects.adopted import AdoptedObjects
    from miniray.node.relay.questions import Questions
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.process_names import ProcessNames
    from miniray.node.workers.worker import Worker
    from miniray.wire.poller import Pace

logger = logging.getLogger(__name__)

#: Batches of more messages than this are bulk, for which one wake-up more does not matter.
_FEW = 2
#: Jobs, and log files of each, with counts of lines that were left out.
_JOBS, _FILES = 1000, 1000


@dataclasses.dataclass(eq=False, repr=False)
class Traffic:
    """Routes all messages for processes.

    ``adopted`` speaks for owners that have exited as planned; ``pace`` is the event loop's: bulk
    makes it rest.
    """

    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    adopted: AdoptedObjects
    names: ProcessNames
    pace: Pace

    def __post_init__(self) -> None:
        #: Watched process of this node → its watchers as (node, process).
        self._watched_here: dict[bytes, set[tuple[bytes, bytes]]] = {}
        self.clients.kinds[p.NODE_RELAY] = self._send
        self.relay.notices[r.MESSAGES] = self._relayed
        self.clients.notices["watch"] = self._watch
        self.relay.notices[r.WATCH] = lambda node, message: self._add_watch(
            message.to, node, message.sender
        )
        self.relay.notices[r.GONE] = self._ended_there

    # --- messages ----------------------------------------------------------------
    def _send(self, client: Client, node_id: bytes, process_id: bytes, bodies: list[bytes]) -> None:
        """Send a client's messages to a process that it has no socket to."""
        if set(map(type, (node_id, process_id, *bodies))) != {bytes}:
            raise ValueError("ids and messages to another process are bytes")
        if node_id == self.node_id:
            self._deliver(node_id, client.process_id, process_id, bodies)
            return
        if len(bodies) > _FEW:
            self.pace.rest()
        message = Relayed(to=process_id, sender=client.process_id, bodies=bodies)
        if not self.relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _relayed(self, node_id: bytes, message: Relayed) -> None:
        if message.bodies:
            self._deliver(node_id, message.sender, message.to, message.bodies)

    def _deliver(self, from_node: bytes, sender: bytes, to: bytes, bodies: Sequence[bytes]) -> None:
        if len(bodies) > _FEW:
            self.pace.rest()
        client = self.clients.clients.get(to)
        if self.adopted.speaks_for(to):  # though the process may still run, on its way out
            self.adopted.answer(from_node, sender, to, bodies)
            left = self.adopted.speaks_for(to) or self.names.runs(to) or to == self.node_id
            if not left:  # all of its objects were released
                self.ended_here(to)
        elif client is not None:
            client.conn.post((p.NODE_RELAYED, from_node, sender, bodies))
        elif to != self.node_id:  # else they answer messages of this daemon itself
            self._report_gone(to, from_node, sender)

    def push(self, node_id: bytes, to: bytes, topic: str, body: tuple[Any, ...]) -> None:
        if node_id == self.node_id:
            self.clients.push(to, topic, body)
        else:
            self.relay.send(node_id, Relayed(to=to, notice=r.PUSH, items=(topic, body)))

    # --- ends --------------------------------------------------------------------
    def _watch(self, client: Client, process_id: bytes, node_id: bytes) -> None:
        if node_id == self.node_id:
            self._add_watch(process_id, node_id, client.process_id)
            return
        message = Relayed(to=process_id, sender=client.process_id, notice=r.WATCH)
        if not self.relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _add_watch(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        # Daemons watch processes; processes watch what answers under a process's id.
        by_daemon = watcher == watcher_node
        answered = process_id == self.node_id or self.adopted.speaks_for(process_id)
        if self.names.runs(process_id) or (answered and not by_daemon):
            self._watched_here.setdefault(process_id, set()).add((watcher_node, watcher))
        else:
            self._report_gone(process_id, watcher_node, watcher)

    def _report_gone(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        what = self.names.of_ended(process_id)
        if watcher_node == self.node_id:
            self.clients.push(watcher, "process_died", (process_id, what))
        else:
            gone = Relayed(to=watcher, sender=process_id, notice=r.GONE, items=(what,))
            self.relay.send(watcher_node, gone)

    def ended_here(self, process_id: bytes) -> None:
        for node, watcher in self._watched_here.pop(process_id, ()):
            self._report_gone(process_id, node, watcher)

    def _ended_there(self, _node_id: bytes, message: Relayed) -> None:
        if message.to == self.node_id:
            self.adopted.process_died(message.sender)
        else:
            self.clients.push(message.to, "process_died", (message.sender, *message.items))

    def node_died(self, node_id: bytes) -> None:
        for watchers in self._watched_here.values():
            watchers.difference_update({each for each in watchers if each[0] == node_id})
        self._push_to_all("node_died", node_id)

    def messages_lost(self, node_id: bytes) -> None:
        """Notify this node's processes that those of another are out of reach, and may live."""
        self._push_to_all("node_unreachable", node_id)

    def _push_to_all(self, topic: str, node_id: bytes) -> None:
        for process_id in list(self.clients.clients):
            self.clients.push(process_id, topic, (node_id,))


@dataclasses.dataclass(eq=False, repr=False)
class OutputRouter:
    """Routes output of workers to the driver of their job, here or on another node.

    It leaves lines out if the driver does not read, and brings all output up to a moment to a
    driver that leaves. ``workers/worker.py`` reads and splits it. Lines that are left out, and
    lines for a driver that is gone, are in the log files only.
    """

    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    questions: Questions
    #: Passes on all output of a job's workers.
    read_output: Callable[[bytes], object]

    def __post_init__(self) -> None:
        #: Lines that were left out and not reported yet: job → (node, log file) → count.
        self._left_out: dict[bytes, collections.Counter[tuple[str, str]]] = {}
        self.clients.requests["flush_output"] = self.flush
        self.relay.notices[r.PUSH] = lambda _, message: self._pass_on(
            message.to, b"", *message.items
        )
        self.questions.answers["output"] = self._flush_for

    def send(self, worker: Worker, is_stderr: bool, lines: list[LogLine]) -> None:
        """Send lines that a worker printed to the driver of its job, if that still runs."""
        # Output from before a function runs, as of its interpreter, has no name.
        name = "" if worker.lease is None else worker.lease.name
        named = [(line.name or name, line.text) for line in lines]
        body = (worker.pid, self.node_id.hex()[:8], is_stderr, worker.log_path(is_stderr), named)
        self._pass_on(worker.job_id, worker.driver_node, "log", body)

    def _pass_on(
        self, job_id: bytes, driver_node: bytes, topic: str, body: tuple[Any, ...]
    ) -> None:
        """Send a push on to its process; output to a driver that has much unread is left out."""
        client = self.clients.clients.get(job_id)
        if client is None and driver_node in (b"", self.node_id):
            return  # it is gone
        waiting = self.relay.backlog(driver_node) if client is None else client.conn.backlog()
        if topic == "log" and self._is_full(job_id, waiting):
            _, node, _, path, lines = body
            self._count(job_id, node, path, len(lines))
            if client is not None:
                tell = functools.partial(self._report_left_out, job_id, driver_node)
                client.conn.when_drained(tell)
            return
        if topic == "log":  # other pushes do not show that lines are read again
            self._report_left_out(job_id, driver_node)
        self._push(job_id, driver_node, topic, body)

    def _count(self, job_id: bytes, node: str, path: str, lines: int) -> None:
        counts = self._left_out.setdefault(job_id, collections.Counter())
        if len(counts) >= _FILES and (node, path) not in counts:
            path = os.path.dirname(path)
        counts[node, path] += lines
        if len(self._left_out) > _JOBS:  # as of drivers that ended before their notice
            del self._left_out[next(iter(self._left_out))]

    def _is_full(self, job_id: bytes, waiting: int) -> bool:
        """Return whether to leave lines out; once begun, until most of the backlog was read."""
        limit = config().unread_output
        return waiting > (limit // 8 if job_id in self._left_out else limit)

    def _report_left_out(self, job_id: bytes, driver_node: bytes) -> None:
        """Send a driver the counts of lines that were left out."""
        counts = self._left_out.pop(job_id, None)
        if counts:
            body = (tuple((*place, count) for place, count in counts.items()),)
            self._push(job_id, driver_node, "output_left_out", body)

    def _push(self, job_id: bytes, driver_node: bytes, topic: str, body: tuple[Any, ...]) -> None:
        if not self.clients.push(job_id, topic, body) and driver_node:
            self.relay.send(driver_node, Relayed(to=job_id, notice=r.PUSH, items=(topic, body)))

    async def flush(self, client: Client) -> tuple[None, int]:
        """Answer a driver once all output of its workers up to now is on its way to it."""
        self._flush_for(0, client.job_id, self.node_id)
        question, nodes = (client.job_id, self.node_id), self.relay.connected()
        for node, _, why in await self.questions.ask_nodes("output", question, 0, nodes):
            if why:  # as it is ending or overloaded; its log files have all lines
                logger.info("node %s did not send its last output: %s", node.hex(), why)
        return None, -1

    def _flush_for(self, _seconds: float, job_id: bytes, node: bytes) -> None:
        """Send the output of workers here to the driver of their job, on whichever node."""
        self.read_output(job_id)
        self._report_left_out(job_id, node)
