"""The node daemon: puts its parts together and passes messages between them.

Clients (drivers and workers of this machine) on one side, the head and other
daemons on the other; worker processes and shared memory in between. What each part
does is in its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.exceptions import describe_exit
from miniray.messages.errors import encode_error
from miniray.node.base.async_poller import AsyncPoller
from miniray.node.base.clients import Client, ClientServer
from miniray.node.base.template_client import TemplateClient
from miniray.node.code_requests import CodeRequests
from miniray.node.head_client import HeadClient
from miniray.node.hello import attached
from miniray.node.membership import Membership
from miniray.node.objects.adopted_service import AdoptedService
from miniray.node.objects.fetch_requests import FetchRequests
from miniray.node.objects.left_copies import LeftCopies
from miniray.node.objects.memory_service import MemoryService
from miniray.node.objects.objects import NodeObjects
from miniray.node.objects.store_requests import StoreRequests
from miniray.node.output_router import OutputRouter
from miniray.node.relay.relay import RelayHub
from miniray.node.store.memory_report import describe_holders
from miniray.node.store.segments import SegmentStore
from miniray.node.store.spill_files import SpillFiles
from miniray.node.store.spilling import Spilling
from miniray.node.traffic import Traffic
from miniray.node.transfer.mover_client import MoverClient
from miniray.node.transfer.services import add_services
from miniray.node.transfer.serving import Serving
from miniray.node.transfer.transfers import Transfers
from miniray.node.worker_notices import WorkerNotices
from miniray.node.workers.memory_kills import MemoryKills
from miniray.node.workers.process_names import ProcessNames
from miniray.node.workers.workers import WorkerPool
from miniray.runtime_env.install import EnvironmentManager
from miniray.wire.peers import socket_path

if TYPE_CHECKING:
    import socket

    import grpc

    from miniray.node.base.node_config import NodeConfig
    from miniray.node.workers.worker import NodeLease, Worker
    from miniray.wire.poller import Pace

logger = logging.getLogger(__name__)


class NodeDaemon:
    """One node."""

    def __init__(
        self, node: NodeConfig, control: socket.socket, template_pid: int, pace: Pace
    ) -> None:
        self._config = node
        self.node_id = node.node_id
        self.stopped = asyncio.Event()
        #: What the head and the processes of this node hear of its end.
        self._leaving = head_pb2.Leaving()
        self._template = TemplateClient(
            control, template_pid, self._worker_exited, self._template_gone, self._worker_lingers
        )
        poller = AsyncPoller(asyncio.get_running_loop())
        self._clients = ClientServer(node.socket_path, poller, node.socket_key, self)
        self._head = HeadClient(self.node_id, self._clients)
        self._code = CodeRequests(self._clients, self._head)
        self._relay = RelayHub(self.node_id, node.dial, only_dials=node.drivers_only)
        self.store = SegmentStore(
            node.object_store_capacity, SpillFiles(node.spill_folder), self._clients.push
        )
        self._spilling = Spilling(
            self.store,
            lambda: describe_holders(self.store, self._names.of),
            self.node_id,
        )
        self._mover = MoverClient(
            lambda: self._template.fork_helper("miniray.node.transfer.mover"), node.mover
        )
        pace.gives_way_while = self._mover.is_busy
        self._transfers = Transfers(
            self.node_id, self.store, self._spilling, self._relay, self._mover
        )
        self._serving = Serving(
            self.node_id, self.store, self._spilling, self._relay, self._transfers, self._mover
        )
        self._objects = NodeObjects(
            self.node_id,
            self.store,
            self._spilling,
            self._relay,
            self._transfers,
            self._serving,
        )
        self._environments = EnvironmentManager(node.environments_folder, node.session_dir / "jobs")
        self._adopted = AdoptedService(
            self.node_id, self._clients, self._relay, self._objects, self._runs
        )
        self._traffic = Traffic(
            self.node_id, self._clients, self._relay, self._adopted, self._runs, pace
        )
        self._traffic.on_ended_there = self._ended_there
        self._left = LeftCopies(
            self.node_id, self._clients, self._relay, self._objects, self._adopted, self._runs
        )
        self._traffic.on_unreachable = self._node_unreachable
        StoreRequests(self.node_id, self._objects, self._clients, self._spilling, self._runs)
        FetchRequests(self._objects, self._clients, self._runs)
        self._pool = WorkerPool(
            template=self._template,
            events=self,
            environments=self._environments,
            accelerators=node.accelerators,
            base_spec={
                "node_id": self.node_id,
                "node_socket": node.socket_path,
                "key": node.socket_key,
                "machine": node.machine,
            },
            logs=node.logs,
            soft_limit=max(1, int(node.scalars.get("CPU", 1))),
        )
        WorkerNotices(self._clients, self._pool, self._head)
        self._names = ProcessNames(self.node_id, self._clients, self._pool)
        self._memory_kills = MemoryKills()
        self._traffic.describe_ended = self._names.of_ended
        self._memory = MemoryService(
            self.node_id,
            self._objects,
            self._adopted,
            self._clients,
            self._relay,
            self._names,
            (self._objects, self._transfers, self._serving),
        )
        self._outputs = OutputRouter(self.node_id, self._clients, self._relay, self._pool)
        self.membership = Membership(
            node,
            self._head,
            self._clients,
            self._pool,
            self._relay,
            self._adopted,
            usage=self._usage,
            node_died=self._node_died,
            stop=self.stop,
            keepers=(self._environments, self._code.cache),
        )
        self._adopted.await_death = self.membership.await_death
        self._clients.requests["flush_output"] = self._outputs.flush
        self._clients.notices["shutdown"] = lambda _client: self.stop(
            "the driver called shutdown()"
        )

    # --- the head ----------------------------------------------------------------
    def _usage(self) -> head_pb2.Heartbeat:
        self._memory_kills.look()
        return head_pb2.Heartbeat(
            object_store_used=self.store.used,
            object_store_capacity=self.store.capacity,
            object_store_spilled=self._spilling.spilled,
        )

    def head_request(self, client: Client, number: int, method: str, body: bytes) -> None:
        """A client's request to the head."""
        self._head.request(client.process_id, number, method, body)

    # --- clients -----------------------------------------------------------------
    def expects(self, process_id: bytes, role: str) -> bool:
        """Workers are this daemon's own, and may be gone before their first word is read."""
        return role != "worker" or process_id in self._pool.workers

    def welcome(self, client: Client) -> dict[str, Any]:
        """A process introduced itself."""
        self._head.session.send(attached(client, self._config.machine))
        return {
            "node_id": self.node_id,
            "address": self._config.cluster_address,
            "session_dir": str(self._config.session_dir),
            "head_lost": self._head.session.lost_for(),
        }

    def gone(self, client: Client, refused: str) -> None:
        """A process hung up, or was refused."""
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
            # It usually is ending; if only its socket broke, it is of no use any more.
            worker.why_killed = refused
            self._pool.kill(worker)

    def _process_ended(
        self, ended: head_pb2.ProcessEnded, work: str, *, gone: bool = True, why: str = ""
    ) -> None:
        """A process of this node has ended, or is given up.

        Args:
            ended: What the head is told of it.
            work: What it ran.
            gone: False: it was killed, and is still there.
            why: Why this daemon has killed it, if it has.
        """
        process_id = ended.process_id
        code = ended.exit_code if ended.exit_known else None
        self._names.ended(process_id, work, ended.pid, code, why)
        if gone:
            # Who has an exit code was reaped, after its children; a driver may live on.
            self._objects.process_died(process_id, may_look=code is None)
        else:
            self._objects.asks_no_more(process_id)
        self._adopted.process_died(process_id)
        self._memory.ended(process_id)
        self._head.process_ended(process_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path(os.path.dirname(self._config.socket_path), process_id))
        self._traffic.ended_here(process_id)
        if gone:
            self._tell_unclaimed(process_id, code)
        self._head.report(head_pb2.FromNode(ended=ended))

    def _tell_unclaimed(self, process_id: bytes, code: int | None) -> None:
        """Let owners free what a process wrote for them and had not told them of."""
        unclaimed = self._objects.unclaimed(process_id)
        if code != 0:  # else it had told everybody what it wrote for them
            for node, owner, segments in unclaimed:
                self._traffic.push(node, owner, "unclaimed", (process_id, self.node_id, segments))

    def _runs(self, process_id: bytes) -> bool:
        """Whether a process of this node has not ended."""
        return process_id in self._clients.clients or process_id in self._pool.workers

    async def fetch_blob(self, uri: str) -> bytes:
        """A package of a runtime environment."""
        return await self._code.package(uri)

    # --- workers -----------------------------------------------------------------
    def lease_started(self, lease: NodeLease, worker: Worker) -> None:
        """A task lease has its worker."""
        self._head.tell(
            lease_started=head_pb2.LeaseStarted(
                lease=lease.number,
                process_id=worker.process_id,
                pid=worker.pid,
                calls_left=worker.calls_left,
            )
        )

    def lease_failed(self, lease: NodeLease, error: BaseException, tries: int) -> None:
        """A lease cannot have a worker."""
        self._head.tell(
            lease_failed=head_pb2.LeaseFailed(
                lease=lease.number, error=encode_error(error), tries=tries
            )
        )

    def lease_ended(self, lease: NodeLease) -> None:
        """What a lease held is free."""
        self._head.tell(lease_ended=head_pb2.LeaseEnded(lease=lease.number))

    def worker_exited(self, worker: Worker) -> None:
        """A worker process is gone, or given up; what it said last counts."""
        self._clients.ended(worker.process_id)
        if worker.quarantine is not None:
            # Its sockets may be open for as long as it is there, so that they tell nobody.
            for process_id in list(self._clients.clients):
                self._clients.push(process_id, "process_died", (worker.process_id,))

    def quarantines_changed(self) -> None:
        """Tell the head which devices are out of service."""
        self._head.tell(quarantines=self._pool.quarantines())

    def worker_gone(self, worker: Worker, exit_code: int) -> None:
        """A worker that was given up is gone: what it had mapped counts no more."""
        self._objects.process_died(worker.process_id, may_look=False)
        self._tell_unclaimed(worker.process_id, exit_code)

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        """A worker process is gone, or given up."""
        if exit_code is not None and not (worker.asked_to_end or self.stopped.is_set()):
            what = f"worker {worker.pid}{f' of {worker.name}' if worker.name else ''}"
            logger.warning("%s %s", what, describe_exit(exit_code, hint=False))
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

    def _about(self, worker: Worker, exit_code: int | None) -> str:
        """What else is known of a worker's end, as sentences."""
        why = self._memory_kills.explain(exit_code)
        if worker.why_killed:
            why = f"The reason: {worker.why_killed}."
        return f"{why} {worker.where_log_is()}".strip()

    def push(self, process_id: bytes, topic: str, body: tuple[Any, ...]) -> None:
        """Tell a connected process something."""
        self._clients.push(process_id, topic, body)

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        """A worker printed lines: they go to the driver of its job."""
        self._outputs.send(worker, is_stderr, lines)

    def _worker_exited(self, pid: int, status: int) -> None:
        self._pool.on_exited(pid, status)

    def _worker_lingers(self, pid: int, left: list[int]) -> None:
        self._pool.on_lingers(pid, left)

    def _template_gone(self) -> None:
        if not self.stopped.is_set():
            self._pool.template_gone()
            self.stop("the template process of the node was killed", failed=True)

    # --- other nodes ---------------------------------------------------------------
    def relay(self, client: Client, node_id: bytes, process_id: bytes, bodies: list[bytes]) -> None:
        """A client's messages to a process that it has no socket to."""
        self._traffic.send(client, node_id, process_id, bodies)

    def _ended_there(self, process_id: bytes) -> None:
        self._objects.process_died(process_id)
        self._adopted.process_died(process_id)

    def _node_unreachable(self, node_id: bytes) -> None:
        self._transfers.node_unreachable(node_id)
        self._objects.node_unreachable(node_id)
        self._left.node_unreachable(node_id)

    def _node_died(self, node_id: bytes) -> None:
        self._relay.died(node_id)
        self._objects.node_died(node_id)
        self._left.node_died(node_id)
        self._adopted.node_died(node_id)
        self._serving.node_died(node_id)
        self._transfers.node_died(node_id)
        self._traffic.node_died(node_id)
        self._memory.ended(node_id)

    def serve(self, server: grpc.aio.Server) -> None:
        """Let a server answer what other daemons call."""
        add_services(server, self._relay, self._serving, self._transfers)

    # --- ending ------------------------------------------------------------------
    def stop(self, reason: str, *, failed: bool = False) -> None:
        """End the node; ``failed``: as it cannot go on, and not because it was asked to."""
        if not self.stopped.is_set():
            logger.log(logging.ERROR if failed else logging.INFO, "the node stops: %s", reason)
            how = "it detached" if self._config.drivers_only else "it was stopped"
            told = reason if failed else f"{how} ({reason})"
            self._leaving = head_pb2.Leaving(reason=told, failed=failed)
            self.stopped.set()

    async def close(self) -> None:
        """Give everything back; the template ends the workers."""
        for process_id in self._clients.clients:
            self.push(process_id, "node_stops", (self._leaving.reason, not self._leaving.failed))
        self._pool.close()
        self._clients.close()
        await asyncio.sleep(0)  # the hang-ups are written
        await self._transfers.close()
        await self._relay.close()
        self._mover.close()
        await self._head.session.close(self._leaving)
        await self._spilling.close()
        self.store.close()
