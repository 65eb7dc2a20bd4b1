"""The node daemon: puts its parts together and passes messages between them.

Processes of this machine on one side, the head and other daemons on the other; workers and shared
memory in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.accelerators.host import this_host
from miniray.common.series import COUNTED
from miniray.exceptions import describe_exit
from miniray.node.base.clients import Client, ClientServer
from miniray.node.base.head_client import HeadClient
from miniray.node.code_cache import CodeRequests
from miniray.node.membership import Membership, WorkerNotices, attached
from miniray.node.metrics import DeviceUse, NodeMetrics
from miniray.node.objects.objects import SharedObjects
from miniray.node.probes import Probes
from miniray.node.relay.questions import Questions
from miniray.node.relay.relay import NodeRequests, RelayHub
from miniray.node.traffic import OutputRouter, Traffic
from miniray.node.web_door import WebDoor
from miniray.node.workers.process_names import MemoryKills, ProcessNames
from miniray.node.workers.workers import WorkerPool
from miniray.runtime_env.install import EnvironmentManager
from miniray.wire.peers import socket_path

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import grpc

    from miniray.node.base.node_config import NodeConfig
    from miniray.node.metrics import Sample
    from miniray.node.workers.worker import Worker
    from miniray.wire.poller import Pace

logger = logging.getLogger(__name__)


class NodeDaemon:
    """One node.

    Args:
        node: The node's facts.
        head: The channel to the head.
        control: The socket of the template.
        template_pid: The template's pid.
        pace: How the event loop waits.
        page_opened: Called with ``HOST:PORT`` when this node listens for browsers.
    """

    def __init__(
        self,
        node: NodeConfig,
        head: grpc.aio.Channel,
        control: socket.socket,
        template_pid: int,
        pace: Pace,
        page_opened: Callable[[str], object],
    ) -> None:
        self._config = node
        self.node_id = node.node_id
        self.stopped = asyncio.Event()
        #: The announcement of its end, to the head and to its processes.
        self._leaving = head_pb2.Leaving()
        self._clients = clients = ClientServer(node.socket_path, node.socket_key, self)
        self._head = to_head = HeadClient(self.node_id, clients, head)
        self._code = CodeRequests(clients, to_head)
        self._relay = relay = RelayHub(
            self.node_id, node.dial, self._messages_lost, only_dials=node.drivers_only
        )
        self._requests = requests = NodeRequests(relay)
        self._questions = questions = Questions(self.node_id, clients, relay, requests)
        self._environments = EnvironmentManager(node.environments_folder, node.session_dir / "jobs")
        self._pool = pool = WorkerPool(
            node, control, template_pid, self._environments, clients, to_head, self
        )
        self._names = names = ProcessNames(self.node_id, clients, pool)
        self._probes = Probes(clients, questions, names, node)
        self._memory_kills = MemoryKills()
        self._objects = objects = SharedObjects(
            node, clients, relay, questions, names, pool.fork_helper, to_head
        )
        pace.give_way_while(objects.moves_values)
        self._traffic = Traffic(self.node_id, clients, relay, objects.adopted, names, pace)
        devices = DeviceUse(node.accelerators, node.labels, this_host())
        self._metrics = NodeMetrics(
            clients, questions, str(node.session_dir), self._figures, devices, names.work_of
        )
        self.web = WebDoor(node, clients, pool.fork_helper, page_opened)
        WorkerNotices(clients, pool, to_head)
        self._outputs = OutputRouter(self.node_id, clients, relay, questions, pool.read_output)
        self.membership = Membership(node, to_head, clients, pool, relay, objects.adopted, self)
        clients.notices["shutdown"] = lambda _client: self.stop("the driver called shutdown()")

    # --- the head ----------------------------------------------------------------
    def heartbeat(self) -> head_pb2.Heartbeat:
        self._memory_kills.look()
        self._metrics.look(self._objects.store.used, self._objects.spilling.spilled)
        return head_pb2.Heartbeat(
            object_store_used=self._objects.store.used,
            object_store_capacity=self._objects.store.capacity,
            object_store_spilled=self._objects.spilling.spilled,
        )

    def jobs(self) -> set[bytes]:
        return self._environments.jobs() | self._code.cache.jobs()

    def end_job(self, job_id: bytes) -> None:
        self._environments.end_job(job_id)
        self._code.cache.end_job(job_id)

    # --- processes ---------------------------------------------------------------
    def expects(self, process_id: bytes, role: str) -> bool:
        """Return whether a process may connect; a worker may be gone before its hello is read."""
        return role != "worker" or process_id in self._pool.workers

    def welcome(self, client: Client) -> dict[str, Any]:
        """Report a new process to the head; return the facts that it needs."""
        self._head.send(attached(client, self._config.machine))
        self._probes.joined(client)
        return {
            "node_id": self.node_id,
            "address": self._config.cluster_address,
            "session_dir": str(self._config.session_dir),
            "head_lost": self._head.session.lost_for(),
        }

    def gone(self, client: Client, refused: str) -> None:
        if not client.is_command:
            self._metrics.count_cpu(client)
        if client.is_driver or client.is_command:
            if client.is_driver:
                self._pool.end_job(client.job_id)
            ended = head_pb2.ProcessEnded(
                process_id=client.process_id, pid=client.pid, planned=True
            )
            self._process_ended(ended, "the driver" if client.is_driver else "a command")
            return
        worker = self._pool.workers.get(client.process_id)
        if worker is not None and worker.exiting is None:
            worker.ended_unasked = not worker.asked_to_end
            # It is ending most likely; if only its socket broke, it is useless without it.
            worker.why_killed = refused
            self._pool.ends.kill(worker)

    def _process_ended(
        self, ended: head_pb2.ProcessEnded, work: str, *, gone: bool = True, why: str = ""
    ) -> None:
        """Clean up after a process that ended, or that was killed and given up (not ``gone``).

        ``why`` says why this daemon has killed it; empty if it has not.
        """
        process_id = ended.process_id
        code = ended.exit_code if ended.exit_known else None
        self._names.ended(process_id, work, ended.pid, code, why)
        # A process with an exit code was reaped, after its children; a driver may live on.
        self._objects.process_ended(process_id, gone=gone, may_look=code is None)
        self._questions.ended(process_id)
        self._metrics.ended(process_id)
        self._head.process_ended(process_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path(os.path.dirname(self._config.socket_path), process_id))
        self._traffic.ended_here(process_id)
        if gone:
            self._report_unclaimed(process_id, code)
        self._head.report(head_pb2.FromNode(ended=ended))

    def _report_unclaimed(self, process_id: bytes, code: int | None) -> None:
        """Have owners free what a process wrote for them without reporting it."""
        unclaimed = self._objects.unclaimed(process_id)
        if code != 0:  # else it had reported all of it
            for node, owner, segments in unclaimed:
                self._traffic.push(node, owner, "unclaimed", (process_id, self.node_id, segments))

    async def fetch_blob(self, uri: str) -> bytes:
        return await self._code.package(uri)

    # --- workers -----------------------------------------------------------------
    def worker_gone(self, worker: Worker, exit_code: int) -> None:
        self._objects.process_ended(worker.process_id, gone=True, may_look=False)
        self._report_unclaimed(worker.process_id, exit_code)

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        event = "planned"
        is_done = worker.command is not None and exit_code == 0  # the task of a job's command
        if exit_code is not None and not (is_done or worker.asked_to_end or self.stopped.is_set()):
            what = f"worker {worker.pid}{f' of {worker.name}' if worker.name else ''}"
            how = describe_exit(exit_code, hint=False)
            logger.warning("%s", f"{what} {how}. {worker.keep_calls()}".strip(" ."))
            memory = self._memory_kills.explain(exit_code)
            text = f"{what[0].upper()}{what[1:]} {how}. {memory}".rstrip()
            event = "killed_for_memory" if memory else "crashed"
            self.tell_event("WORKER", event, text, "ERROR" if memory else "WARNING")
        COUNTED.count("worker_exits_total", (("cause", event),))
        ended = head_pb2.ProcessEnded(
            process_id=worker.process_id,
            pid=worker.pid,
            exit_code=exit_code or 0,
            exit_known=exit_code is not None,
            planned=worker.exiting is not None,
            lease=worker.lease.number if worker.lease is not None else 0,
            detail=self._about(worker, exit_code),
        )
        self._process_ended(
            ended, worker.work, gone=worker.quarantine is None, why=worker.why_killed
        )

    def _figures(self) -> list[Sample]:
        kills = float(self._memory_kills.count())
        return [("node_oom_kills_total", {}, kills), *self._objects.figures()]

    def tell_event(self, source: str, event: str, message: str, severity: str) -> None:
        """Report an event of this node to the head (head/directories/events.py)."""
        self._head.notify("event", source, event, message, severity)

    def _about(self, worker: Worker, exit_code: int | None) -> str:
        """Return further details of a worker's end, as sentences."""
        why = self._memory_kills.explain(exit_code)
        if worker.why_killed:
            why = f"The reason: {worker.why_killed}."
        return f"{why} {worker.where_log_is()}".strip()

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        stream = "err" if is_stderr else "out"
        COUNTED.count("log_lines_total", (("stream", stream),), len(lines))
        self._outputs.send(worker, is_stderr, lines)

    def template_gone(self) -> None:
        self.stop("the template process of the node was killed", failed=True)

    # --- other nodes ---------------------------------------------------------------
    def _messages_lost(self, node_id: bytes) -> None:
        self._traffic.messages_lost(node_id)
        self._objects.messages_lost(node_id)
        self._requests.node_unreachable(node_id)

    def node_died(self, node_id: bytes) -> None:
        self._relay.died(node_id)
        self._objects.node_died(node_id)
        self._requests.node_unreachable(node_id)
        self._traffic.node_died(node_id)

    def serve(self, server: grpc.aio.Server) -> None:
        self._relay.add_to(server)

    # --- the end -------------------------------------------------------------------
    def stop(self, reason: str, *, failed: bool = False) -> None:
        """End the node; ``failed``: because it cannot go on, not on request."""
        if not self.stopped.is_set():
            logger.log(logging.ERROR if failed else logging.INFO, "the node stops: %s", reason)
            how = "it detached" if self._config.drivers_only else "it was stopped"
            told = reason if failed else f"{how} ({reason})"
            self._leaving = head_pb2.Leaving(reason=told, failed=failed)
            self.stopped.set()

    @property
    def failed(self) -> bool:
        """Whether the node ends because it cannot go on; False: on request."""
        return self._leaving.failed

    async def close(self) -> None:
        """Give everything back; the template ends the workers."""
        for process_id in self._clients.clients:
            self._clients.push(
                process_id, "node_stops", (self._leaving.reason, not self._leaving.failed)
            )
        self.web.close()
        self._pool.close()
        self._clients.close()
        await asyncio.sleep(0)  # the hang-ups are written
        await self._relay.close()
        self._objects.stop_transfers()
        await self._head.session.close(self._leaving)
        await self._objects.close()
