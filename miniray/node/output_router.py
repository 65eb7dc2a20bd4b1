"""The way of worker output to the driver of its job, on any node.

Responsible for routing, for leaving lines out if the driver does not read, and for bringing all
output up to a moment to a driver that leaves. ``workers/worker.py`` reads and splits it. Lines that
are left out, and those of a driver that is gone, are in the log files only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.log_lines import LogLine
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.relay.questions import Questions
    from miniray.node.relay.relay import RelayHub
    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)

#: Jobs, and log files of each, with counts of lines that were left out.
_JOBS, _FILES = 1000, 1000


@dataclasses.dataclass(eq=False, repr=False)
class OutputRouter:
    """The way of output to drivers, here and on other nodes."""

    node_id: bytes
    clients: ClientServer
    relay: RelayHub
    questions: Questions
    #: Passes on all that the workers of a job have written.
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
                tell = functools.partial(self._tell_left_out, job_id, driver_node)
                client.conn.when_drained(tell)
            return
        if topic == "log":  # other pushes say nothing of whether lines are read again
            self._tell_left_out(job_id, driver_node)
        self._push(job_id, driver_node, topic, body)

    def _count(self, job_id: bytes, node: str, path: str, lines: int) -> None:
        counts = self._left_out.setdefault(job_id, collections.Counter())
        if len(counts) >= _FILES and (node, path) not in counts:
            path = os.path.dirname(path)
        counts[node, path] += lines
        if len(self._left_out) > _JOBS:  # as of drivers that ended before they were told
            del self._left_out[next(iter(self._left_out))]

    def _is_full(self, job_id: bytes, waiting: int) -> bool:
        """Return whether to leave lines out; once begun, until most of the backlog was read."""
        limit = config().unread_output
        return waiting > (limit // 8 if job_id in self._left_out else limit)

    def _tell_left_out(self, job_id: bytes, driver_node: bytes) -> None:
        """Send a driver the counts of the lines that were left out."""
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
        self._tell_left_out(job_id, node)
