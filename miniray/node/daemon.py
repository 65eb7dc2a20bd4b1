"""The node daemon: puts its parts together and passes messages between them.

Clients (drivers and workers of this machine) on one side, the head and other
daemons on the other; worker processes and shared memory in between. What each part
does is in its own module.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import marshal
import os
import pickle
import platform
import signal
import socket
from typing import TYPE_CHECKING, Any

from miniray._proto import common_pb2, head_pb2
from miniray.core import protocol as p
from miniray.core.peers import socket_path
from miniray.exceptions import NodeDiedError, RuntimeEnvSetupError
from miniray.node.addresses import DaemonAddress
from miniray.node.adopted_service import AdoptedService
from miniray.node.async_poller import AsyncPoller
from miniray.node.clients import Client, ClientServer
from miniray.node.code_cache import CodeCache
from miniray.node.head_requests import HeadRequests
from miniray.node.head_session import HeadSession
from miniray.node.objects import NodeObjects
from miniray.node.output_router import OutputRouter
from miniray.node.relay import RelayHub
from miniray.node.relayed import Relayed
from miniray.node.segments import SegmentStore
from miniray.node.services import add_services
from miniray.node.store_requests import StoreRequests
from miniray.node.template_client import TemplateClient
from miniray.node.watches import Watches
from miniray.node.workers import NodeLease, Worker, WorkerPool, encode_error
from miniray.runtime_env.install import EnvironmentManager
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

    from miniray.core.pace import Pace
    from miniray.node.node_config import NodeConfig

logger = logging.getLogger(__name__)

#: More messages than this in one batch are bulk, for which a wake-up more or less is nothing.
_FEW = 2

#: Packages travel to the head and back in pieces of this size.
BLOB_PIECE = 8 * 1024 * 1024


class NodeDaemon:
    """One node."""

    def __init__(
        self, node: NodeConfig, control: socket.socket, template_pid: int, pace: Pace
    ) -> None:
        self._config = node
        self._pace = pace
        self.node_id = node.node_id
        self._loop = asyncio.get_running_loop()
        self._poller = AsyncPoller(self._loop)
        self._watches = Watches()
        self._code = CodeCache(lambda key: self._ask_head("get_code", key))
        self._requests = HeadRequests()
        self._head_answers: dict[int, asyncio.Future[bytes]] = {}
        self._head_numbers = 0
        self._actor_leases: dict[bytes, NodeLease] = {}
        self.stopped = asyncio.Event()
        self.stop_reason = ""
        self._template = TemplateClient(
            control, template_pid, self._worker_exited, self._template_gone
        )
        self._relay = RelayHub(self.node_id, node.dial, self._relayed, self._node_unreachable)
        room = asyncio.Event()
        self.store = SegmentStore(
            node.object_store_capacity,
            lambda process, memory: self._clients.push(process, "give_up_memory", (memory,)),
            lambda process, segments: self._clients.push(process, "forget_segments", (segments,)),
            room.set,
        )
        self._objects = NodeObjects(self.node_id, self.store, self._relay)
        self._environments = EnvironmentManager(node.environments_folder)
        self._clients = ClientServer(node.socket_path, self._poller, node.socket_key, self)
        self._adopted = AdoptedService(self.node_id, self._clients, self._relay, self._objects)
        self._outputs = OutputRouter(self.node_id, self._clients, self._relay)
        self._install_handlers()
        StoreRequests(self.node_id, self._objects, self._clients, self._runs, room)
        self._session: HeadSession
        self._head_epoch = 0
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

    def _install_handlers(self) -> None:
        self._clients.requests.update(
            {
                "get_code": self._get_code,
                "flush_output": lambda client: self._outputs.flush(client, self._pool),
            }
        )
        self._clients.quick.update(
            {
                "get_code": self._known_code,
            }
        )
        self._clients.notices.update(
            {
                "put_code": self._put_code,
                "watch": self._watch,
                "ready": lambda client: self._pool.ready(client.process_id),
                "blocked": self._blocked,
                "exiting": self._exiting,
                "finishing": lambda client: self._pool.finishing(client.process_id),
                "leaving": lambda client: self._pool.leaving(client.process_id),
                "actor_ready": self._actor_ready,
                "actor_failed": self._actor_failed,
                "shutdown": lambda _client: self.stop("the driver called shutdown()"),
            }
        )

    # --- the head ----------------------------------------------------------------
    async def join(self, channel: grpc.aio.Channel, timeout: float) -> head_pb2.Welcome:
        """Open the session with the head."""
        self._session = HeadSession(channel, self._hello, self._from_head, self._usage)
        welcome = await self._session.open(timeout)
        self._head_epoch = welcome.epoch
        for node in welcome.nodes:
            self._joined(node)
        return welcome

    async def rejoin(self, timeout: float) -> None:
        """Open a session with the head again, or with its successor.

        Raises:
            MinirayError: the head refuses this node.
            ConnectionError: there is no head within ``timeout`` seconds.
        """
        welcome = await self._session.reopen(timeout, self._tell_again)
        self._head_epoch = welcome.epoch
        for node in welcome.nodes:
            self._joined(node)
        for process_id in self._clients.clients:
            self._clients.push(process_id, "head_back", ())
        logger.info("the session with the head is open again")

    def _tell_again(self, waiting: list[head_pb2.FromNode]) -> list[head_pb2.FromNode]:
        """What a head must know that knows of this node only what its hello said."""
        attached = [self._attached(client) for client in self._clients.clients.values()]
        living = [
            _actor_report(lease.worker, lease)
            for lease in self._pool.leases.values()
            if lease.alive and lease.worker is not None
        ]
        return [*living, *attached, *self._requests.to_repeat(waiting)]

    @property
    def session(self) -> HeadSession:
        """The session with the head."""
        return self._session

    def _hello(self) -> head_pb2.NodeHello:
        node = self._config
        return head_pb2.NodeHello(
            node_id=self.node_id,
            version=VERSION,
            python=platform.python_version(),
            host=node.host,
            address=node.address,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            resources=json.dumps(
                {
                    "scalars": node.scalars,
                    "devices": {
                        name: list(group.ids) for name, group in node.accelerators.devices.items()
                    },
                    "fractional": {
                        name: group.fractional for name, group in node.accelerators.devices.items()
                    },
                    "labels": node.labels,
                }
            ).encode(),
            leases=[
                head_pb2.RunningLease(
                    lease=lease.number,
                    epoch=lease.epoch,
                    process_id=lease.worker.process_id if lease.worker is not None else b"",
                    owner=lease.owner,
                    actor_id=lease.actor_id or b"",
                    allocation=json.dumps(lease.allocation).encode(),
                )
                for lease in self._pool.leases.values()
            ],
            session_dir=str(node.session_dir),
            socket_path=node.socket_path,
            is_head_node=node.is_head,
            takes_batches=True,
        )

    def _usage(self) -> head_pb2.Heartbeat:
        return head_pb2.Heartbeat(
            object_store_used=self.store.used, object_store_capacity=self.store.capacity
        )

    def _from_head(self, message: head_pb2.ToNode) -> None:
        kind = message.WhichOneof("kind")
        if kind == "reply":
            self._head_reply(message.reply)
        elif kind == "push":
            push = message.push
            self._clients.push(push.process_id, push.topic, marshal.loads(push.body))
        elif kind == "start_lease":
            self._start_lease(message.start_lease)
        elif kind == "start_actor":
            self._start_actor(message.start_actor)
        elif kind == "end_lease":
            self._pool.end(message.end_lease.lease, kill=message.end_lease.kill)
        elif kind == "end_actor":
            self._pool.end(message.end_actor.lease, kill=message.end_actor.kill)
        elif kind == "node_joined":
            self._joined(message.node_joined)
        elif kind == "node_died":
            self._node_died(message.node_died.node_id)
        elif kind == "stop":
            self.stop(message.stop.reason)

    def _joined(self, node: head_pb2.NodeJoined) -> None:
        address = DaemonAddress.parse(node.address)
        self._relay.joined(node.node_id, address.target_from(self._config.machine))

    def _start_lease(self, start: head_pb2.StartLease) -> None:
        self._pool.start(
            NodeLease(
                number=start.lease,
                epoch=start.epoch,
                owner=start.owner,
                job_id=start.job_id,
                spec=json.loads(start.spec),
                allocation=json.loads(start.allocation),
            )
        )

    def _start_actor(self, start: head_pb2.StartActor) -> None:
        lease = NodeLease(
            number=start.lease,
            epoch=start.epoch,
            owner=start.owner,
            job_id=start.job_id,
            spec=json.loads(start.spec),
            allocation=json.loads(start.allocation),
            actor_id=start.actor_id,
            arguments=start.arguments,
            restarts=start.restarts,
        )
        self._actor_leases[start.actor_id] = lease
        self._pool.start(lease)

    def _tell_head(self, **kind: Any) -> None:
        self._session.send(head_pb2.FromNode(**kind))

    def head_request(self, client: Client, number: int, method: str, body: bytes) -> None:
        """A client's request to the head."""
        self._request(client.process_id, number, method, body)

    def _request(self, process_id: bytes, number: int, method: str, body: bytes) -> None:
        message = head_pb2.FromNode(
            request=common_pb2.ClientRequest(
                process_id=process_id, request=number, method=method, body=body
            )
        )
        self._requests.sent(message)
        self._session.send(message)

    def _head_reply(self, reply: common_pb2.ClientReply) -> None:
        error = reply.error or None
        self._requests.answered(reply.process_id, reply.request)
        if reply.process_id == self.node_id:
            future = self._head_answers.pop(reply.request, None)
            if future is not None and not future.done():
                if error is not None:
                    future.set_exception(pickle.loads(error))
                else:
                    future.set_result(reply.body)
            return
        client = self._clients.clients.get(reply.process_id)
        if client is not None:
            client.conn.send((p.HEAD_REPLY, reply.request, error, reply.body))

    async def _ask_head(self, method: str, *args: Any) -> Any:
        """The daemon's own requests."""
        self._head_numbers += 1
        number = self._head_numbers
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._head_answers[number] = future
        self._request(self.node_id, number, method, marshal.dumps(args))
        return marshal.loads(await future)

    # --- clients -----------------------------------------------------------------
    def expects(self, process_id: bytes, role: str) -> bool:
        """Workers are this daemon's own, and may be gone before their first word is read."""
        return role != "worker" or process_id in self._pool.workers

    def welcome(self, client: Client) -> dict[str, Any]:
        """A process introduced itself."""
        self._session.send(self._attached(client))
        return {
            "node_id": self.node_id,
            "address": self._config.cluster_address,
            "session_dir": str(self._config.session_dir),
        }

    def _attached(self, client: Client) -> head_pb2.FromNode:
        attached = head_pb2.ProcessAttached(
            process_id=client.process_id, pid=client.pid, job_id=client.job_id
        )
        if client.is_driver:
            attached.driver = True
            attached.details = json.dumps({**client.details, "machine": self._config.machine})
        return head_pb2.FromNode(attached=attached)

    def gone(self, client: Client) -> None:
        """A process hung up."""
        if client.is_driver:
            self._pool.end_job(client.job_id)
            self._process_ended(client.process_id, client.pid, None, planned=True)
            return
        if client.is_command:
            self._process_ended(client.process_id, client.pid, None, planned=True)
            return
        worker = self._pool.workers.get(client.process_id)
        if worker is not None and worker.exiting is None:
            # It usually is ending; if only its socket broke, it is of no use any more.
            self._pool.kill(worker)

    def _process_ended(
        self, process_id: bytes, pid: int, code: int | None, *, planned: bool, lease: int = 0
    ) -> None:
        self._objects.process_died(process_id)
        self._adopted.process_died(process_id)
        self._requests.process_ended(process_id)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path(os.path.dirname(self._config.socket_path), process_id))
        for node, watcher in self._watches.ended_here(process_id):
            if node == self.node_id:
                self._clients.push(watcher, "process_died", (process_id,))
            else:
                self._relay.send(node, Relayed(to=watcher, sender=process_id, gone=True))
        unclaimed = self._objects.unclaimed(process_id)
        if code != 0:  # else it had told everybody what it wrote for them
            for node, owner, segments in unclaimed:
                self._push_anywhere(node, owner, "unclaimed", (process_id, self.node_id, segments))
        self._tell_head(
            ended=head_pb2.ProcessEnded(
                process_id=process_id,
                pid=pid,
                exit_code=code or 0,
                exit_known=code is not None,
                planned=planned,
                lease=lease,
            )
        )

    def _push_anywhere(self, node: bytes, to: bytes, topic: str, body: tuple[Any, ...]) -> None:
        if node == self.node_id:
            self._clients.push(to, topic, body)
        else:
            self._relay.send(node, Relayed(to=to, topic=topic, bodies=[marshal.dumps(body)]))

    def _runs(self, process_id: bytes) -> bool:
        """Whether a process of this node has not ended."""
        return process_id in self._clients.clients or process_id in self._pool.workers

    def _known_code(self, _client: Client, key: bytes) -> tuple[bytes, int] | None:
        blob = self._code.known(key)
        return (blob, -1) if blob is not None else None

    def _put_code(self, _client: Client, key: bytes, blob: bytes) -> None:
        if self._code.put(key, blob):
            self._request(self.node_id, 0, "put_code", marshal.dumps((key, blob)))

    async def _get_code(self, _client: Client, key: bytes) -> tuple[bytes | None, int]:
        return await self._code.get(key), -1

    async def fetch_blob(self, uri: str) -> bytes:
        """A package of a runtime environment."""
        pieces = await self._ask_head("kv_get", "packages", uri)
        if pieces is None:
            raise RuntimeEnvSetupError(f"The package {uri} is not known to the cluster.")
        return b"".join(
            [
                await self._ask_head("kv_get", "packages", f"{uri}#{number}")
                for number in range(int(pieces))
            ]
        )

    def _blocked(self, client: Client, blocked: bool) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None and worker.lease is not None:
            self._tell_head(
                blocked=head_pb2.LeaseBlocked(lease=worker.lease.number, blocked=blocked)
            )

    # --- workers -----------------------------------------------------------------
    def _exiting(self, client: Client, why: str) -> None:
        self._pool.exiting(client.process_id, why)
        worker = self._pool.workers.get(client.process_id)
        if why == "exit_actor" and worker is not None and worker.lease is not None:
            self._report_actor(worker, exiting=True)

    def _report_actor(self, worker: Worker, **facts: Any) -> None:
        lease = worker.lease
        if lease is not None and lease.actor_id is not None:
            self._session.send(_actor_report(worker, lease, **facts))

    def _actor_ready(self, client: Client) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None:
            worker.pid = client.pid
            if worker.lease is not None:
                worker.lease.alive = True
            self._report_actor(worker)

    def _actor_failed(self, client: Client, error: bytes) -> None:
        worker = self._pool.workers.get(client.process_id)
        if worker is not None:
            worker.failed = True
            worker.exiting = "failed"
            self._report_actor(worker, error=error)

    def lease_started(self, lease: NodeLease, worker: Worker) -> None:
        """A task lease has its worker."""
        self._tell_head(
            lease_started=head_pb2.LeaseStarted(
                lease=lease.number, process_id=worker.process_id, pid=worker.pid
            )
        )

    def lease_failed(self, lease: NodeLease, error: BaseException) -> None:
        """A lease cannot have a worker."""
        self._tell_head(
            lease_failed=head_pb2.LeaseFailed(lease=lease.number, error=encode_error(error))
        )

    def lease_ended(self, lease: NodeLease) -> None:
        """What a lease held is free."""
        if lease.actor_id is not None:
            self._actor_leases.pop(lease.actor_id, None)
        self._tell_head(lease_ended=head_pb2.LeaseEnded(lease=lease.number))

    def worker_exited(self, worker: Worker) -> None:
        """A worker process is gone; what it said last counts."""
        self._clients.ended(worker.process_id)

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        """A worker process is gone."""
        self._process_ended(
            worker.process_id,
            worker.pid,
            exit_code,
            planned=worker.exiting is not None,
            lease=worker.lease.number if worker.lease is not None else 0,
        )

    def push(self, process_id: bytes, topic: str, body: tuple[Any, ...]) -> None:
        """Tell a connected process something."""
        self._clients.push(process_id, topic, body)

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        """A worker printed lines: they go to the driver of its job."""
        self._outputs.send(worker, is_stderr, lines)

    def _worker_exited(self, pid: int, status: int) -> None:
        self._pool.on_exited(pid, status)

    def _template_gone(self) -> None:
        if not self.stopped.is_set():
            logger.error("the template process ended; the node stops")
            self._pool.template_gone()
            self.stop("the template process of the node was killed")

    # --- other nodes ---------------------------------------------------------------
    def relay(self, client: Client, node_id: bytes, process_id: bytes, bodies: list[bytes]) -> None:
        """A client's messages to a process of another node."""
        if node_id == self.node_id:
            self._deliver(self.node_id, client.process_id, process_id, bodies)
            return
        if len(bodies) > _FEW:
            self._pace.rest()
        message = Relayed(to=process_id, sender=client.process_id, bodies=bodies)
        if not self._relay.send(node_id, message):
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _deliver(self, from_node: bytes, sender: bytes, to: bytes, bodies: Sequence[bytes]) -> bool:
        if len(bodies) > _FEW:
            self._pace.rest()
        client = self._clients.clients.get(to)
        if client is not None:
            client.conn.post((p.NODE_RELAYED, from_node, sender, bodies))
            return True
        if self._adopted.speaks_for(to):
            self._adopted.answer(from_node, sender, to, bodies)
            return True
        if to == self.node_id:
            return True  # answers to what the daemon said in its own name
        if from_node == self.node_id:
            self._clients.push(sender, "process_died", (to,))
        else:
            self._relay.send(from_node, Relayed(to=sender, sender=to, gone=True))
        return False

    def _relayed(self, node_id: bytes, message: Relayed) -> None:
        """A message from another daemon."""
        if message.topic and message.to == self.node_id:
            body = marshal.loads(message.bodies[0])
            self._outputs.relayed(node_id, message.topic, body, self._pool)
        elif message.topic:
            self._clients.push(message.to, message.topic, marshal.loads(message.bodies[0]))
        elif message.bodies:
            self._deliver(node_id, message.sender, message.to, message.bodies)
        elif message.watch:
            self._add_watch(message.to, node_id, message.sender)
        elif message.gone:
            if message.to == self.node_id:
                self._objects.process_died(message.sender)
                self._adopted.process_died(message.sender)
            for watcher in self._watches.ended_there(node_id, message.sender) | {message.to}:
                self._clients.push(watcher, "process_died", (message.sender,))
        elif message.freed:
            self._objects.free_here(message.freed)
        elif message.freed_copies:
            self._objects.free_copies(node_id, message.freed_copies)
        elif message.adopted:
            for number in message.adopted:
                self._objects.adopt(number, node_id)

    def _watch(self, client: Client, process_id: bytes, node_id: bytes) -> None:
        if node_id == self.node_id:
            self._add_watch(process_id, self.node_id, client.process_id)
            return
        message = Relayed(to=process_id, sender=client.process_id, watch=True)
        if self._relay.send(node_id, message):
            self._watches.add_there(node_id, process_id, client.process_id)
        else:
            client.conn.send((p.NODE_PUSH, "process_died", (process_id,)))

    def _add_watch(self, process_id: bytes, watcher_node: bytes, watcher: bytes) -> None:
        # Daemons watch processes; processes watch whoever answers under a process's id.
        by_daemon = watcher == watcher_node
        answered = process_id == self.node_id or self._adopted.speaks_for(process_id)
        if self._runs(process_id) or (answered and not by_daemon):
            self._watches.add_here(process_id, watcher_node, watcher)
        elif watcher_node == self.node_id:
            self._clients.push(watcher, "process_died", (process_id,))
        else:
            self._relay.send(watcher_node, Relayed(to=watcher, sender=process_id, gone=True))

    def _node_died(self, node_id: bytes) -> None:
        self._relay.died(node_id)
        self._objects.node_died(node_id)
        self._tell_watchers("process_died", self._watches.node_ended(node_id))

    def _node_unreachable(self, node_id: bytes) -> None:
        self._tell_watchers("process_unreachable", self._watches.out_of_reach(node_id))

    def _tell_watchers(self, topic: str, watched: dict[bytes, set[bytes]]) -> None:
        for process_id, watchers in watched.items():
            for watcher in watchers:
                self._clients.push(watcher, topic, (process_id,))

    def serve(self, server: grpc.aio.Server) -> None:
        """Let a server answer what other daemons call."""
        add_services(server, self._relay, self._objects)

    # --- ending ------------------------------------------------------------------
    def stop(self, reason: str) -> None:
        """End the node."""
        if not self.stopped.is_set():
            self.stop_reason = reason
            logger.info("the node stops: %s", reason)
            self.stopped.set()

    def head_lost(self) -> NodeDiedError:
        """The error of everything that waits for the head."""
        return NodeDiedError(self.node_id.hex(), "the head of the cluster is gone")

    async def close(self) -> None:
        """Give everything back; the template ends the workers."""
        self._pool.close()
        self._clients.close()
        await asyncio.sleep(0)  # the hang-ups are written
        await self._relay.close()
        await self._session.close()
        self.store.close()


def _actor_report(worker: Worker, lease: NodeLease, **facts: Any) -> head_pb2.FromNode:
    return head_pb2.FromNode(
        actor=head_pb2.ActorReported(
            actor_id=lease.actor_id,
            lease=lease.number,
            process_id=worker.process_id,
            pid=worker.pid,
            **facts,
        )
    )


def stop_on_signals(daemon: NodeDaemon) -> None:
    """SIGTERM and SIGINT end the node gently."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop, f"signal {signal.Signals(number).name}")


def when_exits(pid: int, callback: Callable[[], None]) -> None:
    """Call back when a process that is not our child ends."""
    loop = asyncio.get_running_loop()
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        callback()
        return

    def ended() -> None:
        loop.remove_reader(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
        callback()

    loop.add_reader(fd, ended)
