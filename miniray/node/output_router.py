"""Where the output of this node's workers goes: to the driver of their job, on any node.

Responsible for the way, and for bringing everything up to a moment to a driver that
leaves; reading and splitting is ``outputs.py``'s work. Output whose driver is gone is
in the log files only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from miniray.node.relayed import PUSH, Relayed

if TYPE_CHECKING:
    from miniray.node.clients import Client, ClientServer
    from miniray.node.log_lines import LogLine
    from miniray.node.relay import RelayHub
    from miniray.node.worker import Worker

_FLUSH = "flush output"  # (job, number)
_FLUSHED = "output flushed"  # (number,)
#: Seconds that other nodes have to send what their workers wrote.
_FLUSH_TIMEOUT = 1.0


class Pipes(Protocol):
    """The part of a worker pool that is needed here."""

    def read_output(self, job_id: bytes) -> None:
        """Pass on all that the workers of a job have written."""


class OutputRouter:
    """The way of output to drivers, here and on other nodes."""

    def __init__(
        self, node_id: bytes, clients: ClientServer, relay: RelayHub, pipes: Pipes
    ) -> None:
        self._node_id = node_id
        self._clients = clients
        self._relay = relay
        self._pipes = pipes
        relay.notices[_FLUSH] = self._flush_for
        relay.notices[_FLUSHED] = self._flushed
        self._numbers = 0
        #: Flushes under way: the nodes that have not answered, and what is set when all have.
        self._flushes: dict[int, tuple[set[bytes], asyncio.Event]] = {}

    def send(self, worker: Worker, is_stderr: bool, lines: list[LogLine]) -> None:
        """A worker printed lines: they go to the driver of its job, if that is still there."""
        job_id = worker.pool_key[0]
        # What native code writes before anything was printed from Python is under no name.
        name = "" if worker.lease is None else worker.lease.name
        named = [(line.name or name, line.text) for line in lines]
        body = (worker.pid, self._node_id.hex()[:8], is_stderr, named)
        if self._clients.push(job_id, "log", body):
            return
        node = worker.driver_node
        if node and node != self._node_id:
            self._relay.send(node, Relayed(to=job_id, notice=PUSH, items=("log", body)))

    async def flush(self, client: Client) -> tuple[None, int]:
        """Answer a driver when all that its workers wrote so far is on its way to it."""
        self._pipes.read_output(client.job_id)
        self._numbers += 1
        number = self._numbers
        flush = Relayed(notice=_FLUSH, items=(client.job_id, number))
        missing = {node for node in self._relay.connected() if self._relay.send(node, flush)}
        if missing:
            done = asyncio.Event()
            self._flushes[number] = (missing, done)
            try:
                await asyncio.wait_for(done.wait(), _FLUSH_TIMEOUT)
            except asyncio.TimeoutError:
                pass  # such a node is on its way out or overloaded; the log files have it all
            finally:
                del self._flushes[number]
        return None, -1

    def _flush_for(self, node: bytes, message: Relayed) -> None:
        """Another daemon's driver wants what its workers here have written."""
        job_id, number = message.items
        self._pipes.read_output(job_id)
        self._relay.send(node, Relayed(notice=_FLUSHED, items=(number,)))

    def _flushed(self, node: bytes, message: Relayed) -> None:
        """Another daemon has sent what there was."""
        (number,) = message.items
        if number in self._flushes:
            missing, done = self._flushes[number]
            missing.discard(node)
            if not missing:
                done.set()
