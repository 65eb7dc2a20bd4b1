"""The worker processes of a node: started, assigned to leases, reused, ended.

A lease holds resources and, while it lives, one worker. Its end is reported to the head only when
its devices are really free: when the process is gone or, for CPU work, idle again. If a process
cannot be killed, the lease ends too, after a report to the head of the devices that are out of
service until that process is gone. Two ends come earlier: a worker that only waits for others
before it exits has let its devices go, and the workers of a larger template that was killed count
as gone with it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Protocol

from miniray._proto import head_pb2
from miniray.common.names import short_name
from miniray.common.object_ref import new_id
from miniray.common.process_state import is_dying, require_descriptors
from miniray.common.series import COUNTED
from miniray.exceptions import (
    ActorUnschedulableError,
    RuntimeEnvSetupError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from miniray.messages.value import encode_error
from miniray.node.base.clients import run_in
from miniray.node.base.template_client import TemplateClient, TemplateGoneError
from miniray.node.workers.lifecycle import (
    DeviceKeptError,
    IdleWorkers,
    Templates,
    WorkerEnds,
    quarantine_of,
    surplus,
)
from miniray.node.workers.worker import (
    CommandOutput,
    Worker,
    interpreter,
    pool_key,
    preload,
    process_spec,
    started_report,
)
from miniray.system.log_file import log_name
from miniray.worker import stdio

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Awaitable

    from miniray.node.base.clients import ClientServer
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.workers.worker import NodeLease
    from miniray.runtime_env.install import EnvironmentManager

logger = logging.getLogger(__name__)

#: Descriptors of a start: two pipes, the file with the worker's spec, and its connection.
_TO_START = 6
#: Workers in a row that end before they are ready and make their tasks fail: it may be their fault
#: if they exit, and hardly if a user or the kernel kills them.
_TRIES_EXITED, _TRIES_KILLED = 3, 20
#: Errors that may keep a worker from starting, and are its lease's to report.
_START_ERRORS = (
    RuntimeEnvSetupError,
    OSError,
    TaskUnschedulableError,
    ActorUnschedulableError,
)
#: Descriptors kept free for drivers, objects and other nodes.
_RESERVE = 32


class WorkerEvents(Protocol):
    """Handlers of the daemon for events of its pool of workers."""

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        """Report the end of a worker that is gone, or given up; the pool has forgotten it."""

    def worker_gone(self, worker: Worker, exit_code: int) -> None:
        """Clean up after a worker that was given up and is gone after all."""

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        """Pass on lines that a worker printed."""

    def fetch_blob(self, uri: str) -> Awaitable[bytes]:
        """Fetch a package that a runtime environment names."""

    def template_gone(self) -> None:
        """End the node: its first template has died, and all workers with it."""


class WorkerPool:
    """All workers of the node; ``control`` is the daemon's end of the first template's socket."""

    def __init__(
        self,
        node: NodeConfig,
        control: socket.socket,
        template_pid: int,
        environments: EnvironmentManager,
        clients: ClientServer,
        head: HeadClient,
        events: WorkerEvents,
    ) -> None:
        self._clients = clients
        self._head = head
        self._events = events
        self._environments = environments
        self._accelerators = node.accelerators
        self._base_spec = {
            "node_id": node.node_id,
            "node_socket": node.socket_path,
            "key": node.socket_key,
            "machine": node.machine,
            "address": node.cluster_address,
        }
        self._logs = node.logs
        self.leases: dict[int, NodeLease] = {}
        self.workers: dict[bytes, Worker] = {}
        #: The workers with a process that is not gone.
        self._by_pid: dict[int, Worker] = {}
        self.ends = WorkerEnds(
            self._by_pid.values,
            lambda worker: clients.push(worker.process_id, "exit", ()),
            self._give_up,
        )
        first = TemplateClient(
            control, template_pid, self._exited, self._template_gone, self._lingers
        )
        self.fork_helper = first.fork_helper
        self._templates = Templates(first, self._by_pid.values, self._exited, self._lingers)
        soft_limit = max(1, int(node.scalars.get("CPU", 1)))
        self._idle = IdleWorkers(lambda: surplus(self.workers.values(), soft_limit), self.ends.ask)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # --- leases ------------------------------------------------------------------
    def start(self, lease: NodeLease) -> None:
        """Give a lease a worker; report a failure, so that its owner stops waiting."""
        try:
            self._start(lease)
        except Exception as error:
            logger.exception("lease %d of process %s cannot start", lease.number, lease.owner.hex())
            self._lease_failed(lease, error)

    def _start(self, lease: NodeLease) -> None:
        self.leases[lease.number] = lease
        worker = self._idle.take(pool_key(lease)) if lease.actor_id is None else None
        if worker is not None:
            worker.lease = lease
            lease.worker = worker
            self._clients.push(worker.process_id, "lease", (lease.to_wire(),))
            self._head.send(started_report(lease, worker))
            return
        run_in(self._tasks, self._start_process(lease, _worker_for(lease)))

    def end(self, number: int, *, kill: bool, calls_left: int = 0, grace: float = 0.0) -> None:
        """End a lease for the head.

        Its worker is reused for leases of the same kind, unless it is an actor, or has run all of
        its ``max_calls``: ``calls_left`` are left, as the client has counted. The command of a job
        has ``grace`` seconds to end before it is killed.
        """
        lease = self.leases.get(number)
        if lease is None:
            return
        worker = lease.worker
        if kill and worker is not None and worker.pid and not worker.asked_to_end:
            # Its caller may have seen it end before this daemon did.
            gone = not os.path.exists(f"/proc/{worker.pid}")
            worker.ended_unasked = gone or is_dying(worker.pid)
        lease.ending = True
        if worker is None:
            return  # _start_process sees that it is over
        if worker.command is not None and not kill:
            if worker.pid and worker.template is not None:
                worker.template.ask(worker.pid)
                self.ends.kill_later(worker, grace)
        elif kill:
            self.ends.kill(worker)
        elif (
            lease.actor_id is None
            and worker.exiting is None
            and (calls_left or not lease.max_calls)
        ):
            worker.calls_left = calls_left
            self._free(lease)
            self._idle.add(worker)
            self._clients.push(worker.process_id, "idle", ())
        else:
            self.ends.ask(worker)

    def _free(self, lease: NodeLease) -> None:
        self.leases.pop(lease.number, None)
        if lease.worker is not None:
            lease.worker.lease = None
        self._head.send(head_pb2.FromNode(lease_ended=head_pb2.LeaseEnded(lease=lease.number)))

    def _lease_failed(self, lease: NodeLease, error: BaseException, tries: int = 0) -> None:
        """Report that a lease is over; ``tries`` such failures in a row are final."""
        self.leases.pop(lease.number, None)
        failed = head_pb2.LeaseFailed(lease=lease.number, error=encode_error(error), tries=tries)
        self._head.send(head_pb2.FromNode(lease_failed=failed))

    # --- starting ------------------------------------------------------------------
    async def _start_process(self, lease: NodeLease, worker: Worker) -> None:
        try:
            if worker.devices:
                for idle in self._idle.all():
                    if idle.devices & worker.devices:
                        self._idle.remove(idle)
                        self.ends.ask(idle)
                for other in list(self._by_pid.values()):
                    if other.lease is None and other.devices & worker.devices:
                        await self.ends.vacate(other)
            if lease.spec.runtime_env:
                worker.environment = await self._environments.prepare(
                    json.loads(lease.spec.runtime_env), lease.job_id, self._events.fetch_blob
                )
            if self._is_over(lease):
                self._release_environment(worker)
                self._free(lease)
                return
            began = time.perf_counter()
            await self._fork(lease, worker)
            COUNTED.took("worker_fork_seconds", time.perf_counter() - began)
        except DeviceKeptError as error:
            self._start_failed(lease, worker, error, _TRIES_KILLED)
            return
        except TemplateGoneError:
            # The node ends with its first template, and another node may start the worker.
            tries = _TRIES_KILLED if self._templates.is_first(worker.template) else 1
            self._start_failed(lease, worker, WorkerCrashedError(starting=True), tries)
            return
        except Exception as error:
            if not isinstance(error, _START_ERRORS):
                logger.exception("starting a worker failed")
            self._start_failed(lease, worker, error, 1)
            return
        self._by_pid[worker.pid] = worker
        COUNTED.count("worker_forks_total")
        if self._is_over(lease):
            self.ends.kill(worker)

    async def _fork(self, lease: NodeLease, worker: Worker) -> None:
        starting = sum(not each.ready for each in self.workers.values())
        require_descriptors(_TO_START + starting + _RESERVE, "another worker")
        python = interpreter(lease, worker, self._accelerators)
        spec = process_spec(lease, worker, python, self._base_spec, self._accelerators)
        file = stdio.make(spec)
        if lease.command is not None:
            await self._fork_command(lease, worker, file)
            return
        stdout, stderr = worker.open_outputs(stdio.NamePage(file), self._events.output)
        self.workers[worker.process_id] = worker
        lease.worker = worker
        template = worker.template = self._templates.get(*preload(lease, python))
        worker.pid = await template.fork(file, stdout.write_end, stderr.write_end)
        actor = lease.actor_id.hex() if lease.actor_id is not None else ""
        work = short_name(lease.name)
        name = log_name(work, worker.pid, worker.process_id.hex(), actor)
        stdout.begin(self._logs / f"{name}.out", work)
        stderr.begin(self._logs / f"{name}.err", work)

    async def _fork_command(self, lease: NodeLease, worker: Worker, file: int) -> None:
        """Have the first template start the command of a job."""
        output = worker.command = CommandOutput(lease.number, self._head)
        self.workers[worker.process_id] = worker
        lease.worker = worker
        worker.template = self._templates.get(())
        ends = output.write_end, os.dup(output.write_end)
        worker.pid = await worker.template.fork(file, *ends)
        worker.ready = True
        output.begin()
        self._head.send(started_report(lease, worker))

    def _start_failed(self, lease: NodeLease, worker: Worker, error: Exception, tries: int) -> None:
        self.workers.pop(worker.process_id, None)
        self._release_environment(worker)
        for output in worker.outputs:
            output.close()
        if worker.command is not None:
            worker.command.close()
        self._lease_failed(lease, error, tries)

    @staticmethod
    def _is_over(lease: NodeLease) -> bool:
        """Return whether a lease has ended, maybe during an await."""
        return lease.ending

    def read_output(self, job_id: bytes) -> None:
        for worker in list(self.workers.values()):
            if worker.job_id == job_id:
                for output in worker.outputs:
                    output.flush()

    def ready(self, worker: Worker) -> None:
        worker.ready = True
        lease = worker.lease
        if lease is not None and lease.actor_id is None and not lease.ending:
            self._head.send(started_report(lease, worker))

    # --- planned exits -----------------------------------------------------------------
    def end_job(self, job_id: bytes) -> None:
        """Kill the idle workers of a job whose driver is gone: no other job can use them."""
        for worker in self._idle.end_job(job_id):
            worker.exiting = "planned"
            self.ends.kill(worker)

    def jobs(self) -> set[bytes]:
        return {worker.job_id for worker in self.workers.values()}

    def exiting(self, worker: Worker, why: str) -> None:
        worker.exiting = why
        self._idle.remove(worker)
        if why == "cancelled":  # its next message is its end
            self.ends.kill_later(worker)

    # --- ends ------------------------------------------------------------------------
    def _exited(self, pid: int, status: int) -> None:
        """Handle the end of a worker that a template has reaped; its children are gone too."""
        worker = self._by_pid.pop(pid, None)
        if worker is None:
            return  # its template has died before, or its start has failed
        self.ends.gone(worker)
        worker.vacated.set()
        code = os.waitstatus_to_exitcode(status)
        if worker.quarantine is None:
            self._end_of(worker, code)
            return
        logger.warning("worker %d, which could not be killed, is gone now", pid)
        worker.quarantine = None
        self._events.worker_gone(worker, code)
        self._report_quarantines()

    def _lingers(self, pid: int, left: list[int]) -> None:
        """Record that a worker was reaped, but that some of its killed children are not gone."""
        worker = self._by_pid.get(pid)
        if worker is None:
            return
        self.ends.lingers(worker, left)
        if worker.quarantine is not None:
            self._put_into_quarantine(worker, quarantine_of(worker, worker.quarantine.since))

    def _give_up(self, worker: Worker) -> None:
        """Give up a worker that was killed and is not gone: only its devices stay taken."""
        self._put_into_quarantine(worker, quarantine_of(worker))
        worker.vacated.set()
        self._end_of(worker, None)

    def _put_into_quarantine(self, worker: Worker, quarantine: head_pb2.Quarantine) -> None:
        if quarantine != worker.quarantine:
            worker.quarantine = quarantine
            left = [(process.pid, process.name) for process in quarantine.processes]
            logger.error("worker %d could not be killed, left is %s", worker.pid, left)
            self._report_quarantines()

    def quarantines(self) -> head_pb2.Quarantines:
        found = (worker.quarantine for worker in self._by_pid.values())
        return head_pb2.Quarantines(all=[each for each in found if each is not None])

    def _report_quarantines(self) -> None:
        self._head.send(head_pb2.FromNode(quarantines=self.quarantines()))

    def _end_of(self, worker: Worker, code: int | None) -> None:
        """End the lease of a worker, that of a command when the head has all of its output."""
        if worker.command is None:
            self._over(worker, code)
            return
        finishing = run_in(self._tasks, worker.command.finish())
        finishing.add_done_callback(lambda _: self._over(worker, code))

    def _over(self, worker: Worker, code: int | None) -> None:
        """End the lease of a worker that is gone, or given up (``code`` is None then)."""
        self._clients.ended(worker.process_id)
        if worker.quarantine is not None:
            # Its sockets may be open for as long as it runs, so its peers do not see its end.
            for process_id in list(self._clients.clients):
                self._clients.push(process_id, "process_died", (worker.process_id,))
        for output in worker.outputs:
            output.drain()
        self.workers.pop(worker.process_id, None)
        self._idle.remove(worker)
        self._release_environment(worker)
        lease = worker.lease
        if lease is not None and lease.actor_id is None and not worker.ready and not lease.ending:
            killed = code is None or code < 0
            error = WorkerCrashedError(
                pid=worker.pid, code=code, starting=True, detail=worker.where_log_is()
            )
            tries = _TRIES_KILLED if killed else _TRIES_EXITED
            self._lease_failed(lease, error, tries)
        self._events.worker_ended(worker, code)
        if lease is not None and lease.number in self.leases:
            self._free(lease)

    def _release_environment(self, worker: Worker) -> None:
        environment, worker.environment = worker.environment, None
        if environment is not None:
            self._environments.release(environment)

    def close(self) -> None:
        """Hang up on all templates: they end their workers."""
        self._closed = True
        self.ends.close()
        self._templates.close()

    def _template_gone(self) -> None:
        if self._closed:
            return
        for worker in list(self._by_pid.values()):
            self._exited(worker.pid, signal.SIGKILL)
        self._events.template_gone()


def _worker_for(lease: NodeLease) -> Worker:
    return Worker(
        new_id(),
        pool_key(lease),
        lease=lease,
        driver_node=lease.job.driver_node,
        devices=frozenset((name, id) for name, ids in lease.devices.items() for id in ids),
    )
