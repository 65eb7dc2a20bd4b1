"""The new process of a node: forks the head if it is to have one, then runs the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from miniray.accelerators.host import this_host
from miniray.accelerators.node_resources import NodeAccelerators, resolve_node_accelerators
from miniray.common.config import config
from miniray.common.host_port import DaemonAddress, join_host_port, parse_address
from miniray.common.object_ref import new_id
from miniray.exceptions import AuthenticationError, MinirayError
from miniray.node.base.clients import first_of
from miniray.node.base.node_config import MoverConfig, NodeConfig
from miniray.node.head_process import HeadProcess
from miniray.node.process_setup import end_children, reap, stop_on_signals, when_exits
from miniray.node.store.spill_files import spill_folder
from miniray.node.web_door import web_config
from miniray.security import channels
from miniray.security.certificates import (
    load_authority,
    make_credentials,
    meet_head,
    save_head_identity,
)
from miniray.security.token import (
    JoinToken,
    make_secret,
    parse_token,
    web_token,
    write_private,
    write_token_file,
)
from miniray.system.boot_options import (
    BootError,
    BootOptions,
    BootResult,
    advertised_host,
    bind_host,
)
from miniray.system.machine import cpu_count, memory_limit, node_ip, not_found
from miniray.system.session import (
    ClusterRecord,
    ProcessId,
    Session,
    remove_session,
    write_record,
)
from miniray.version import PYTHON_VERSION, VERSION
from miniray.wire.poller import Pace

if TYPE_CHECKING:
    from miniray.node.daemon import NodeDaemon
    from miniray.security.certificates import Credentials

logger = logging.getLogger(__name__)

_NO_FINGERPRINT = bytes(32)


class NodeStart:
    """From options to a running node."""

    def __init__(
        self, options: BootOptions, session: Session, control: socket.socket, template_pid: int
    ) -> None:
        self.options = options
        self.session = session
        #: How the daemon's event loop waits. A call to another node and its answer take eight
        #: wake-ups, most of them in gRPC's threads; the loop stays awake for about that time.
        self.pace = Pace(awake=250e-6, short=400e-6)
        self._daemon: NodeDaemon | None = None
        #: Chosen before anything starts: the folder may be unusable.
        self._spill_folder, self._warning = spill_folder(config().spill_folder, session.folder)
        self._control = control
        self._template_pid = template_pid
        #: Set on the node that has the head.
        self._head: HeadProcess | None = None
        self._address = options.address or ""
        self._node_id = new_id()
        self._token = _token(options, session)
        self._socket_path = str(session.socket_dir / "node.sock")
        self._head_path = str(session.head_socket)
        #: The certificate of this node; None in a cluster without a network.
        self._credentials: Credentials | None = None
        self._node_path = str(session.socket_dir / "peer.sock")
        self._dashboard_url = ""
        self._published = False

    # --- the head ----------------------------------------------------------------
    def fork_head(self, answer: int) -> None:
        """Fork the head: it shares what this process has imported."""
        if not self.options.head:
            return
        tcp = not self.options.embedded
        options = {
            "unix_path": self._head_path,
            "tcp_host": bind_host(self.options) if tcp else None,
            "tcp_port": self.options.port if tcp else None,
            "advertised_host": advertised_host(self.options) if tcp else None,
            "secret": self._token.secret,
            "session_dir": self.session.folder,
            "cluster_id": self.session.id,
        }

        def close_in_child() -> None:
            self._control.close()
            os.close(answer)

        self._head = HeadProcess(options, self.session.logs)
        self._head.fork(close_in_child)

    # --- the node ----------------------------------------------------------------
    async def run(self, answer: Any) -> int:
        """Start everything, answer, and stay until the node ends; return the exit code."""
        from miniray.node.daemon import NodeDaemon  # loaded when the head is forked

        loop = asyncio.get_running_loop()
        accelerators_task = loop.run_in_executor(None, self._detect)
        if self._head is not None:
            facts = await self._head.ready()
            self._address = facts["address"]
            self._token = JoinToken(
                bytes.fromhex(facts["fingerprint"])
                if facts.get("fingerprint")
                else _NO_FINGERPRINT,
                self._token.secret,
            )
            head_target = f"unix:{self._head_path}"
        else:
            head_target = self._address
        pinned: bytes | None = None
        if self.options.drivers_only or not self.options.embedded:
            self._credentials = make_credentials(self._token.members_key)
            pinned = await loop.run_in_executor(None, self._meet_head)
        secret = self._token.grpc_secret
        channel = channels.channel(head_target, secret, self._credentials, pinned)
        server, node_address = self._listen()
        accelerators = await accelerators_task
        node = self._node_config(accelerators, node_address)
        daemon = self._daemon = NodeDaemon(
            node, channel, self._control, self._template_pid, self.pace, self._page_opened
        )
        stop_on_signals(daemon.stop)
        daemon.serve(server)
        await server.start()
        # Before this node is published: its disk may be full.
        write_token_file(self.session.token_file, self._token)
        await self._connect(channel)
        await daemon.membership.join(config().start_timeout)
        if self.options.parent_pid is not None:
            parent = "the driver" if self.options.embedded else "`miniray start --block`"
            when_exits(self.options.parent_pid, lambda: daemon.stop(f"{parent} ended"))
        self._open_dashboard(daemon)
        self._publish()
        self._answer_ready(answer, node)
        await self._stay(daemon)
        await self._end(daemon, server)
        return int(daemon.failed)

    def _refused(self, text: str) -> None:
        if self._daemon is not None:
            self._daemon.tell_event("SECURITY", "wrong_secret", f"{text}.", "WARNING")

    def _detect(self) -> NodeAccelerators:
        options = self.options
        if options.drivers_only:
            return NodeAccelerators()
        return resolve_node_accelerators(
            options.num_gpus,
            options.resources,
            this_host(),
            options.gpu_family,
        )

    def _meet_head(self) -> bytes:
        """Return the head's certificate, if this node has the right token for it."""
        assert self._credentials is not None
        host, port = parse_address(self._address)
        told = self.options.node_ip_address
        expected, timeout = self._token.fingerprint, config().start_timeout
        if not self.options.head or told is None:
            return meet_head(host, port, expected, self._credentials, timeout)
        try:
            # The head serves already. Half the time, so that the start of the node can still fail.
            return meet_head(host, port, expected, self._credentials, timeout / 2)
        except (OSError, AuthenticationError):
            raise BootError(not_found(bind_host(self.options), told)) from None

    async def _connect(self, head: grpc.aio.Channel) -> None:
        """Wait for a connection to the head, or raise an error with the reason.

        gRPC only says that time ran out. The head that answers now may be another one than before.
        """
        deadline = asyncio.get_running_loop().time() + config().start_timeout
        while (state := head.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
            if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE and not self.options.head:
                await asyncio.to_thread(self._meet_head)
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(head.wait_for_state_change(state), left)
            except asyncio.TimeoutError:
                raise BootError(f"The head at {self._address} cannot be reached.") from None

    def _listen(self) -> tuple[grpc.aio.Server, DaemonAddress]:
        """Make the server for other daemons: a Unix socket for this machine, TLS for others."""
        server = channels.server(self._token.grpc_secret, self._refused)
        channels.listen_unix(server, self._node_path)
        if self.options.embedded:
            return server, DaemonAddress(_machine(), self._node_path)
        assert self._credentials is not None
        host = bind_host(self.options)
        # A head's node has its head on the requested port.
        wanted = 0 if self.options.head else self.options.port
        identity, members = self._credentials.identity, self._credentials.authority
        port = channels.listen_tcp(server, host, wanted, identity, members)
        reached = join_host_port(advertised_host(self.options), port)
        return server, DaemonAddress(_machine(), self._node_path, reached)

    def _node_config(
        self, accelerators: NodeAccelerators, node_address: DaemonAddress
    ) -> NodeConfig:
        options = self.options
        head_host = parse_address(options.address)[0] if options.address else None
        host = options.node_ip_address or (
            node_ip(head_host) if options.embedded else advertised_host(options)
        )
        store = options.object_store_memory
        if store is None:
            store = int(memory_limit() * config().object_store_share)
        secret, credentials = self._token.grpc_secret, self._credentials
        return NodeConfig(
            node_id=self._node_id,
            session_dir=self.session.folder,
            logs=self.session.logs,
            socket_path=self._socket_path,
            socket_key=self._token.socket_key,
            host=host,
            address=str(node_address),
            cluster_address=self._address,
            is_head=options.head,
            drivers_only=options.drivers_only,
            scalars=self._scalars(host, store, accelerators),
            accelerators=accelerators,
            labels={
                **accelerators.labels,
                "miniray.io/node-id": self._node_id.hex(),
                "ray.io/node-id": self._node_id.hex(),
                **options.labels,
            },
            object_store_capacity=store,
            environments_folder=self.session.folder.parent / "environments",
            spill_folder=self._spill_folder,
            machine=_machine(),
            mover=self._mover_config(),
            web=web_config(options, self._token.web_key, self.session),
            dial=lambda target: channels.channel(target, secret, credentials),
        )

    def _scalars(self, host: str, store: int, accelerators: NodeAccelerators) -> dict[str, float]:
        options = self.options
        scalars: dict[str, float] = {}
        if not options.drivers_only:
            scalars = {
                "CPU": cpu_count() if options.num_cpus is None else options.num_cpus,
                "memory": int(memory_limit() * 0.7) if options.memory is None else options.memory,
                "object_store_memory": store,
                f"node:{host}": 1.0,
                **accelerators.resources,
            }
            if options.head:
                scalars["node:__internal_head__"] = 1.0
        return scalars | {
            name: amount
            for name, amount in options.resources.items()
            if name not in accelerators.devices and isinstance(amount, (int, float))
        }

    def _mover_config(self) -> MoverConfig:
        network = not self.options.embedded
        return MoverConfig(
            machine=_machine(),
            folder=str(self.session.socket_dir),
            host=bind_host(self.options) if network else "",
            advertised_host=advertised_host(self.options) if network else "",
            credentials=self._credentials,
        )

    def _open_dashboard(self, daemon: NodeDaemon) -> None:
        """Listen for browsers, if that is wanted; a start never fails for it."""
        if not self.options.opens_dashboard:
            return
        try:
            daemon.web.open()
        except OSError as error:
            host = self.options.dashboard_host
            self._warning += f" There is no page: {host} cannot be listened on ({error.strerror})."
            self._warning = self._warning.strip()

    def _page_opened(self, address: str) -> None:
        self._dashboard_url = address
        token = web_token(self._token.web_key, "metrics")
        write_private(self.session.folder / "metrics_token", token.encode())
        if self._published:
            self._publish()

    def _publish(self) -> None:
        """Write the record from which drivers and commands of this user find the node."""
        self._published = True
        processes = {
            "boot": ProcessId.of(os.getpid()),
            "template": ProcessId.of(self._template_pid),
        }
        if self._head is not None:
            processes["head"] = ProcessId.of(self._head.pid)
        write_record(
            ClusterRecord(
                session=self.session,
                address=self._address,
                socket_path=self._socket_path,
                node_id=self._node_id.hex(),
                is_head=self.options.head,
                embedded=self.options.embedded,
                processes=processes,
                python=PYTHON_VERSION,
                miniray=VERSION,
                driver=_process(self.options.parent_pid) if self.options.embedded else None,
                dashboard_url=self._dashboard_url,
            )
        )

    def _answer_ready(self, answer: Any, node: NodeConfig) -> None:
        pids = {"boot": os.getpid(), "node": os.getpid(), "template": self._template_pid}
        if self._head is not None:
            pids["head"] = self._head.pid
        totals = dict(node.scalars)
        totals.update({name: len(group.ids) for name, group in node.accelerators.devices.items()})
        result = BootResult(
            address=self._address,
            node_id=self._node_id.hex(),
            token=str(self._token),
            socket_path=self._socket_path,
            session_dir=str(self.session.folder),
            pids=pids,
            resources=totals,
            warning=self._warning,
            dashboard_url=self._dashboard_url,
        )
        with contextlib.suppress(BrokenPipeError), answer:
            answer.write(json.dumps(dataclasses.asdict(result)))

    async def _stay(self, daemon: NodeDaemon) -> None:
        """Wait until the node has to stop, or its head is gone for good."""
        while await first_of(daemon.stopped.wait(), daemon.membership.session_ended.wait()):
            if self.options.embedded and self.options.head:
                daemon.stop("the head of the cluster is gone", failed=True)
                return
            logger.warning("the head of the cluster is out of reach; waiting for it")
            daemon.membership.head_lost()
            await first_of(daemon.stopped.wait(), self._find_head_again(daemon))

    async def _find_head_again(self, daemon: NodeDaemon) -> None:
        """Open a session with a head again, or stop the node."""
        rejoin = daemon.membership.rejoin
        try:
            if self._head is None:
                await rejoin(config().head_grace)
                return
            lost = 1
            while lost:  # a head may end as soon as it serves
                await self._head.restart()
                self._publish()
                lost = await first_of(rejoin(config().head_grace), self._head.ended())
        except (BootError, MinirayError, OSError) as error:
            reason = f"the head of the cluster is gone and did not come back: {error}"
            daemon.stop(reason, failed=True)

    async def _end(self, daemon: NodeDaemon, server: grpc.aio.Server) -> None:
        await daemon.close()
        grace = 0.1 if self.options.embedded else config().stop_grace
        await asyncio.to_thread(self._end_children, grace)
        await server.stop(None)
        remove_session(self.session)

    def _end_children(self, grace: float) -> None:
        # A template ends with the last process that it has started, and one that hangs may never.
        limit = min(config().stop_grace, config().quarantine_after)
        if not reap(self._template_pid, limit):
            os.kill(self._template_pid, signal.SIGKILL)
            reap(self._template_pid, config().stop_grace)
        # The children of a template that was killed fall to this process.
        end_children({self._head.pid} if self._head is not None else (), config().stop_grace)
        if self._head is not None:
            self._head.end(grace)


def _token(options: BootOptions, session: Session) -> JoinToken:
    """Return the token of the cluster; that of a new one gets its fingerprint from the head.

    A certificate made ahead is put where the head looks for its own.
    """
    if not options.head:
        return parse_token(options.token or "")
    if options.authority is None:
        return JoinToken(_NO_FINGERPRINT, make_secret())
    identity, token = load_authority(Path(options.authority))
    save_head_identity(identity, session.folder)
    return token


def _process(pid: int | None) -> ProcessId | None:
    try:
        return ProcessId.of(pid) if pid is not None else None
    except ProcessLookupError:
        return None


def _machine() -> str:
    """Return a name of this machine, container and user: its nodes can use each other's sockets."""
    if config().machine_id:
        return config().machine_id
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    files = os.readlink("/proc/self/ns/mnt")
    return f"{socket.gethostname()}:{boot_id}:{files}:{os.geteuid()}"
