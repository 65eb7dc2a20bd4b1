"""The worker processes of a node: started, assigned to leases, reused, ended.

A lease holds resources and, while it lives, one worker. The head hears that a lease
has ended only when its devices are really free: when the process is gone, or, for
CPU work, idle again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import pickle
import signal
import time
from typing import TYPE_CHECKING, Any, Protocol

from miniray.accelerators import assigned_environment
from miniray.config import config
from miniray.core.descriptors import require_room
from miniray.core.ids import new_id
from miniray.core.names import short_name
from miniray.exceptions import (
    ActorUnschedulableError,
    RuntimeEnvSetupError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from miniray.node.outputs import OutputPipe
from miniray.node.template import WORKER_VARIABLE
from miniray.node.template_client import TemplateClient, TemplateGoneError

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from miniray.accelerators import NodeAccelerators
    from miniray.runtime_env.install import EnvironmentManager, WorkerEnvironment

logger = logging.getLogger(__name__)

#: Descriptors: two pipes, the file with what a worker is told, and its connection.
_TO_START = 6
#: So many workers in a row that end before they are ready make their tasks fail: it may be
#: their fault if they exit, and hardly if somebody, or the kernel, kills them.
_TRIES_EXITED, _TRIES_KILLED = 3, 20
#: What may keep a worker from being started, and is its lease's to tell.
_START_ERRORS = (
    RuntimeEnvSetupError,
    TemplateGoneError,
    OSError,
    TaskUnschedulableError,
    ActorUnschedulableError,
)
#: Descriptors kept free for drivers, objects and other nodes.
_RESERVE = 32


@dataclasses.dataclass
class NodeLease:
    """What the head granted on this node."""

    number: int
    epoch: int
    owner: bytes
    job_id: bytes
    spec: dict[str, Any]
    allocation: dict[str, Any]
    actor_id: bytes | None = None
    arguments: bytes = b""
    restarts: int = 0
    worker: Worker | None = None
    #: The head, or a rule, ended it; its worker may still be on its way out.
    ending: bool = False
    #: Its actor's constructor has ended well.
    alive: bool = False

    @property
    def devices(self) -> dict[str, list[str]]:
        """Device ids by resource."""
        devices: dict[str, list[str]] = self.allocation["devices"]
        return devices

    @property
    def name(self) -> str:
        """Class of its actor, or a task of its shape."""
        return short_name(self.spec.get("class_name") or self.spec.get("name") or "")

    @property
    def reusable(self) -> bool:
        """Whether its worker may run tasks of other leases of the same shape afterwards.

        Not with a limit of calls: the worker may be about to end by it, and only it and its
        client know. (A task with a device has the limit 1 unless it says otherwise.)
        """
        return self.actor_id is None and not self.spec.get("max_calls", 0)


@dataclasses.dataclass
class Worker:
    """One worker process."""

    process_id: bytes
    pool_key: tuple[Any, ...]
    pid: int = 0
    lease: NodeLease | None = None
    #: Node of its job's driver, which is shown what it prints.
    driver_node: bytes = b""
    #: (resource, device) of what it sees, for as long as it lives.
    devices: frozenset[tuple[str, str]] = frozenset()
    #: Its connection is up and it takes work.
    ready: bool = False
    #: It ends by rule ("exit_actor", "rule", ...); None: it should live.
    exiting: str | None = None
    idle_since: float = 0.0
    environment: WorkerEnvironment | None = None
    template: TemplateClient | None = None
    outputs: list[OutputPipe] = dataclasses.field(default_factory=list)
    started: float = 0.0
    #: Class of its actor, or the first task of its latest lease.
    name: str = ""
    #: The constructor's error, reported before the process ends.
    failed: bool = False
    #: It has begun to end by rule, and may wait for what others need of it.
    finishing: bool = False
    #: While it waits so for calls of its own: the processes that run them.
    callees: list[bytes] = dataclasses.field(default_factory=list)
    #: Set once it does.
    awaits_calls: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    kill_timer: asyncio.TimerHandle | None = None
    #: Set when the process and its children are gone.
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class WorkerEvents(Protocol):
    """What the pool tells the daemon."""

    def lease_started(self, lease: NodeLease, worker: Worker) -> None:
        """A task lease has its worker."""

    def lease_failed(self, lease: NodeLease, error: BaseException, tries: int) -> None:
        """A lease cannot have a worker; it is over. ``tries`` such failures in a row are final."""

    def lease_ended(self, lease: NodeLease) -> None:
        """What a lease held is free."""

    def worker_exited(self, worker: Worker) -> None:
        """A worker process and its children are gone; the pool still knows it."""

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        """The pool has forgotten a worker that is gone."""

    def push(self, process_id: bytes, topic: str, body: tuple[Any, ...]) -> None:
        """Tell a connected process something."""

    def waits_for(self, process_id: bytes, other: bytes) -> Awaitable[bool]:
        """Whether a process that ends waits for what another one does."""

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        """A worker printed lines."""

    def fetch_blob(self, uri: str) -> Awaitable[bytes]:
        """A package that a runtime environment names."""


class WorkerPool:
    """All workers of the node."""

    def __init__(
        self,
        *,
        template: TemplateClient,
        events: WorkerEvents,
        environments: EnvironmentManager,
        accelerators: NodeAccelerators,
        base_spec: dict[str, Any],
        logs: Path,
        soft_limit: int,
    ) -> None:
        #: Templates by the modules that they have imported beyond the runtime's.
        self._templates: dict[tuple[str, ...], TemplateClient] = {(): template}
        self._events = events
        self._environments = environments
        self._accelerators = accelerators
        self._base_spec = base_spec
        self._logs = logs
        self._soft_limit = soft_limit
        self.leases: dict[int, NodeLease] = {}
        self.workers: dict[bytes, Worker] = {}
        self._by_pid: dict[int, Worker] = {}
        self._idle: dict[tuple[Any, ...], list[Worker]] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: Exits that the template reported before the fork's answer was handled.
        self._early_exits: dict[int, int] = {}

    # --- leases ------------------------------------------------------------------
    def start(self, lease: NodeLease) -> None:
        """Give a lease a worker."""
        self.leases[lease.number] = lease
        worker = self._take_idle(lease)
        if worker is not None:
            worker.lease = lease
            worker.name = lease.name
            lease.worker = worker
            self._events.push(worker.process_id, "lease", (self._assignment(lease),))
            self._events.lease_started(lease, worker)
            return
        task = asyncio.get_running_loop().create_task(self._start_process(lease))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, number: int, *, kill: bool) -> None:
        """The head ends a lease."""
        lease = self.leases.get(number)
        if lease is None:
            return
        lease.ending = True
        worker = lease.worker
        if worker is None:
            return  # its start sees that it is over
        if kill:
            self.kill(worker)
        elif lease.reusable and worker.exiting is None:
            self._free(lease)
            self._make_idle(worker)
        else:
            self._ask_to_end(worker)

    def _free(self, lease: NodeLease) -> None:
        self.leases.pop(lease.number, None)
        if lease.worker is not None:
            lease.worker.lease = None
        self._events.lease_ended(lease)

    def _pool_key(self, lease: NodeLease) -> tuple[Any, ...]:
        devices = tuple(
            (name, lease.allocation["resources"].get(name), tuple(ids))
            for name, ids in sorted(lease.devices.items())
        )
        return (lease.job_id, lease.spec["runtime_env"], devices)

    def _assignment(self, lease: NodeLease) -> dict[str, Any]:
        spec = lease.spec
        group = spec["placement_group"]
        assignment = {
            "namespace": spec["namespace"],
            "resources": lease.allocation["resources"],
            "accelerator_ids": lease.devices,
            "placement_group": bytes.fromhex(group) if group else None,
            "capture_child_tasks": spec["capture_child_tasks"],
            "runtime_env": spec["runtime_env"],
            "max_calls": spec.get("max_calls", 0),
        }
        if lease.actor_id is not None:
            assignment["actor"] = {
                "actor_id": lease.actor_id,
                "class_key": bytes.fromhex(spec["class_key"]),
                "class_name": spec["class_name"],
                "name": spec["name"],
                "info": bytes.fromhex(spec["info"]),
                "owner_node": bytes.fromhex(spec["owner_node"]),
                "detached": spec["detached"],
                "max_concurrency": spec["max_concurrency"],
                "concurrency_groups": spec["concurrency_groups"],
                "is_async": spec["is_async"],
                "restarts": lease.restarts,
                "arguments": lease.arguments,
            }
        return assignment

    # --- starting ------------------------------------------------------------------
    async def _start_process(self, lease: NodeLease) -> None:
        job = lease.spec.get("job") or {}
        worker = Worker(
            new_id(),
            self._pool_key(lease),
            lease=lease,
            name=lease.name,
            driver_node=bytes.fromhex(job.get("driver_node", "")),
            devices=frozenset((name, id) for name, ids in lease.devices.items() for id in ids),
            started=time.monotonic(),
        )
        try:
            if worker.devices:
                await self._vacate(worker.devices, lease)
            if lease.spec["runtime_env"]:
                worker.environment = await self._environments.prepare(
                    json.loads(lease.spec["runtime_env"]), self._events.fetch_blob
                )
            if self._is_over(lease):
                self._abandon(lease, worker)
                return
            require_room(self._descriptors_to_start(), "another worker")
            stdout = self._pipe(worker, is_stderr=False)
            stderr = self._pipe(worker, is_stderr=True)
            spec = self._process_spec(lease, worker)
            self.workers[worker.process_id] = worker
            lease.worker = worker
            template = worker.template = self._template(lease)
            worker.pid = await template.fork(spec, stdout.write_end, stderr.write_end)
        except Exception as error:
            if not isinstance(error, _START_ERRORS):
                logger.exception("starting a worker failed")
            self.workers.pop(worker.process_id, None)
            self.leases.pop(lease.number, None)
            self._release_environment(worker)
            for output in worker.outputs:
                output.close()
            self._events.lease_failed(lease, error, 1)
            return
        self._by_pid[worker.pid] = worker
        status = self._early_exits.pop(worker.pid, None)
        if status is not None:
            self.on_exited(worker.pid, status)
        elif self._is_over(lease):
            self.kill(worker)

    def _descriptors_to_start(self) -> int:
        """What a start takes, what workers that are starting will, and a reserve for the rest."""
        starting = sum(not worker.ready for worker in self.workers.values())
        return _TO_START + starting + _RESERVE

    async def _vacate(self, devices: frozenset[tuple[str, str]], lease: NodeLease) -> None:
        """End idle workers that still have devices which a lease holds now.

        Raises:
            TaskUnschedulableError, ActorUnschedulableError: one of them does not end before what
                the lease is for has ended.
        """
        idle = [worker for workers in self._idle.values() for worker in workers]
        for worker in idle:
            if worker.devices & devices:
                self._remove_idle(worker)
                self._ask_to_end(worker)
        for worker in list(self.workers.values()):
            if worker.lease is None and worker.devices & devices:
                await self._await_end(worker, lease)

    async def _await_end(self, worker: Worker, lease: NodeLease) -> None:
        """Wait until a worker is gone, unless that waits for a call which is to get this lease."""
        gone = asyncio.ensure_future(worker.gone.wait())
        waits = asyncio.ensure_future(worker.awaits_calls.wait())
        try:
            await asyncio.wait((gone, waits), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and await self._events.waits_for(worker.process_id, lease.owner):
                kind = TaskUnschedulableError if lease.actor_id is None else ActorUnschedulableError
                name = lease.spec.get("class_name") or lease.spec.get("name") or "This call"
                raise kind(
                    f"{name} needs a device on which the process {worker.pid} of its caller has "
                    f"worked. That one is to end, and first waits for the calls that it has made, "
                    f"of which this is one or on which one waits. Use the result inside the task "
                    f"that makes the call, or make it where that task is called."
                )
            await gone
        finally:
            gone.cancel()
            waits.cancel()

    @staticmethod
    def _is_over(lease: NodeLease) -> bool:
        return lease.ending

    def _template(self, lease: NodeLease) -> TemplateClient:
        """The template that has imported what a lease asks for; made on first use."""
        profile = tuple(lease.spec.get("preload") or ())
        template = self._templates.get(profile)
        if template is None:
            control = self._templates[()].fork_template(list(profile))
            template = self._templates[profile] = TemplateClient(
                control, 0, self.on_exited, lambda: self._template_gone(profile)
            )
        return template

    def _template_gone(self, profile: tuple[str, ...]) -> None:
        """A template with more modules died, and its workers with it: others go on."""
        logger.warning("the template with %s ended", ", ".join(profile))
        gone = self._templates.pop(profile)
        for worker in [w for w in self._by_pid.values() if w.template is gone]:
            self.on_exited(worker.pid, signal.SIGKILL)

    def _abandon(self, lease: NodeLease, worker: Worker) -> None:
        self._release_environment(worker)
        self._free(lease)

    def _pipe(self, worker: Worker, *, is_stderr: bool) -> OutputPipe:
        name = f"worker-{worker.process_id.hex()}.{'err' if is_stderr else 'out'}"
        pipe = OutputPipe(
            self._logs / name, lambda lines: self._events.output(worker, is_stderr, lines)
        )
        worker.outputs.append(pipe)
        return pipe

    def read_output(self, job_id: bytes) -> None:
        """Pass on all that the workers of a job have written, unfinished lines too."""
        for worker in list(self.workers.values()):
            if worker.pool_key[0] == job_id:
                for output in worker.outputs:
                    output.flush()

    def _process_spec(self, lease: NodeLease, worker: Worker) -> dict[str, Any]:
        """What the process is told: everything as plain data."""
        environment = worker.environment
        variables = {WORKER_VARIABLE: worker.process_id.hex()}
        if environment is not None:
            variables.update(environment.env_vars)
        if lease.devices:
            variables.update(assigned_environment(lease.devices, self._accelerators, os.environ))
        job = lease.spec.get("job") or {}
        local = job.get("machine") == self._base_spec["machine"]
        paths = list(environment.sys_path) if environment is not None else []
        cwd = environment.cwd if environment is not None else None
        if local:
            paths += job["sys_path"]
            cwd = cwd or job["cwd"]
        fresh = environment is not None and environment.fresh_interpreter
        return {
            **self._base_spec,
            "process_id": worker.process_id,
            "job_id": lease.job_id,
            "environment": variables,
            "python": environment.python if fresh and environment is not None else None,
            "sys_path": paths,
            "cwd": cwd,
            "assignment": self._assignment(lease),
        }

    def ready(self, process_id: bytes) -> None:
        """A worker is connected and takes work."""
        worker = self.workers.get(process_id)
        if worker is None:
            return
        worker.ready = True
        lease = worker.lease
        if lease is not None and lease.actor_id is None and not lease.ending:
            self._events.lease_started(lease, worker)

    # --- reuse -------------------------------------------------------------------
    def _take_idle(self, lease: NodeLease) -> Worker | None:
        if lease.actor_id is not None:
            return None
        idle = self._idle.get(self._pool_key(lease))
        return idle.pop() if idle else None

    def _make_idle(self, worker: Worker) -> None:
        worker.idle_since = time.monotonic()
        self._idle.setdefault(worker.pool_key, []).append(worker)
        if self._idle_timer is None:
            self._set_idle_timer(config().worker_idle)

    def _set_idle_timer(self, delay: float) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(delay, self._end_idle)

    def _end_idle(self) -> None:
        """End workers that were idle for a while, above as many as there are CPUs."""
        self._idle_timer = None
        now = time.monotonic()
        idle = [worker for workers in self._idle.values() for worker in workers]
        surplus = len(self.workers) - self._soft_limit
        idle.sort(key=lambda worker: worker.idle_since)
        for worker in idle[: max(0, surplus)]:
            if now - worker.idle_since >= config().worker_idle:
                self._remove_idle(worker)
                self._ask_to_end(worker)
        if any(self._idle.values()) and len(self.workers) > self._soft_limit:
            self._set_idle_timer(config().worker_idle)

    def _remove_idle(self, worker: Worker) -> None:
        idle = self._idle.get(worker.pool_key, [])
        if worker in idle:
            idle.remove(worker)
            if not idle:
                del self._idle[worker.pool_key]

    def end_job(self, job_id: bytes) -> None:
        """A job is over: its idle workers are of no use to others."""
        for key in [key for key in self._idle if key[0] == job_id]:
            for worker in list(self._idle[key]):
                self._remove_idle(worker)
                self.kill(worker)

    # --- ending ------------------------------------------------------------------
    def _ask_to_end(self, worker: Worker) -> None:
        """Let a worker end by rule; kill it if it takes too long."""
        if worker.exiting is None:
            worker.exiting = "rule"
        self._events.push(worker.process_id, "exit", ())
        if not worker.finishing:
            self._kill_later(worker)

    def exiting(self, process_id: bytes, why: str) -> None:
        """A worker says that it ends by rule."""
        worker = self.workers.get(process_id)
        if worker is not None:
            worker.exiting = why
            self._remove_idle(worker)

    def finishing(self, process_id: bytes) -> None:
        """A worker ends by rule and waits for what others still need of it."""
        worker = self.workers.get(process_id)
        if worker is None:
            return
        worker.finishing = True
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()

    def awaits_calls(self, process_id: bytes, callees: list[bytes]) -> Worker | None:
        """A worker that ends by rule waits for calls, which these processes run; who it is."""
        worker = self.workers.get(process_id)
        if worker is not None:
            worker.callees = callees
            worker.awaits_calls.set()
        return worker

    def leaving(self, process_id: bytes) -> None:
        """Nothing but exit functions of user code stands between a worker and its end."""
        worker = self.workers.get(process_id)
        if worker is not None:
            self._kill_later(worker)

    def _kill_later(self, worker: Worker) -> None:
        if worker.kill_timer is not None:
            worker.kill_timer.cancel()
        worker.kill_timer = asyncio.get_running_loop().call_later(
            config().stop_grace, self._kill_if_alive, worker.process_id
        )

    def _kill_if_alive(self, process_id: bytes) -> None:
        worker = self.workers.get(process_id)
        if worker is not None:
            logger.warning("worker %d did not end in time and is killed", worker.pid)
            self.kill(worker)

    def kill(self, worker: Worker) -> None:
        """End a worker's process at once."""
        if worker.pid and worker.template is not None:
            worker.template.kill(worker.pid, signal.SIGKILL)

    def on_exited(self, pid: int, status: int) -> None:
        """The template reaped a worker; its children are gone too."""
        worker = self._by_pid.pop(pid, None)
        if worker is None:
            self._early_exits[pid] = status
            return
        self._events.worker_exited(worker)
        for output in worker.outputs:
            output.drain()
        self.workers.pop(worker.process_id, None)
        self._remove_idle(worker)
        self._release_environment(worker)
        worker.gone.set()
        code = os.waitstatus_to_exitcode(status)
        lease = worker.lease
        if lease is not None and lease.actor_id is None and not worker.ready and not lease.ending:
            self.leases.pop(lease.number, None)
            error = WorkerCrashedError(pid=pid, code=code, starting=True)
            tries = _TRIES_KILLED if code < 0 else _TRIES_EXITED
            self._events.lease_failed(lease, error, tries)
        self._events.worker_ended(worker, code)
        if lease is not None and lease.number in self.leases:
            self._free(lease)

    def _release_environment(self, worker: Worker) -> None:
        environment, worker.environment = worker.environment, None
        if environment is not None:
            self._environments.release(environment)

    def close(self) -> None:
        """Hang up on all templates: they end their workers."""
        for template in self._templates.values():
            template.close()

    def template_gone(self) -> None:
        """The template died, and its workers with it."""
        for worker in list(self._by_pid.values()):
            self.on_exited(worker.pid, signal.SIGKILL)


def encode_error(error: BaseException) -> bytes:
    """An exception as it travels to the head."""
    return pickle.dumps(error, 5)
