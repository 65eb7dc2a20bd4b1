"""A worker process and a lease as their daemon knows them, and the spec of a new process.

State and its description only; ``workers.py`` acts on them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.accelerators import assigned_environment, needs_fresh_interpreter
from miniray.common.specs import GrantedLease
from miniray.exceptions import ITS_LOG
from miniray.node.workers.commands import command_variables
from miniray.node.workers.template import WORKER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.accelerators import NodeAccelerators
    from miniray.node.base.template_client import TemplateClient
    from miniray.node.workers.commands import CommandOutput
    from miniray.node.workers.outputs import OutputPipe
    from miniray.runtime_env.install import WorkerEnvironment


@dataclasses.dataclass(kw_only=True)
class NodeLease(GrantedLease):
    """A lease that the head granted on this node, and its state here."""

    worker: Worker | None = None
    #: The head ended it; its worker may still be on its way out.
    ending: bool = False
    #: Its actor's constructor has returned.
    alive: bool = False
    #: Its work waits for other work, and has given its CPU back meanwhile.
    blocked: bool = False


@dataclasses.dataclass
class Worker:
    """One worker process."""

    process_id: bytes
    #: Equal for workers that can stand in for each other; the job is first.
    pool_key: tuple[Any, ...]
    pid: int = 0
    lease: NodeLease | None = None
    #: Node of its job's driver, which gets its output.
    driver_node: bytes = b""
    #: (resource, device) that it sees, for as long as it lives.
    devices: frozenset[tuple[str, str]] = frozenset()
    #: Its connection is up and it takes work.
    ready: bool = False
    #: Why its exit is planned ("exit_actor", "planned", ...); None: it should live.
    exiting: str | None = None
    idle_since: float = 0.0
    #: With max_calls: the calls left since its last lease was returned; 0 if none was.
    calls_left: int = 0
    environment: WorkerEnvironment | None = None
    template: TemplateClient | None = None
    outputs: list[OutputPipe] = dataclasses.field(default_factory=list)
    #: What the command of a submitted job prints, if it is one.
    command: CommandOutput | None = None
    #: Why this daemon has killed it, for the errors of those who lose its objects.
    why_killed: str = ""
    #: The constructor's error, reported before the process ends.
    failed: bool = False
    #: Its planned exit has begun, and may wait for what others need of it.
    finishing: bool = False
    #: Kills it if it does not exit in time, and gives it up if it is not gone then.
    kill_timer: asyncio.TimerHandle | None = None
    give_up_timer: asyncio.TimerHandle | None = None
    #: It had ended, or was about to, before it was asked to.
    ended_unasked: bool = False
    #: It has ended: its children that were killed and are not gone.
    left: tuple[int, ...] = ()
    #: It, or one of these, could not be killed: its lease is over, its devices stay taken.
    quarantine: head_pb2.Quarantine | None = None
    #: Set when the process and its children are gone.
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    #: Set when it was put into quarantine.
    given_up: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def asked_to_end(self) -> bool:
        """Whether it was asked to end, by the head, this daemon or user code."""
        ends = self.exiting is not None or (self.lease is not None and self.lease.ending)
        return ends and not self.ended_unasked

    @property
    def name(self) -> str:
        """Return its actor's class, or the task that it runs or ran last; empty if there is none.

        A lease is named after the task that it was asked for, and serves others of the same shape.
        """
        _, name = max((output.named() for output in self.outputs), default=(0, ""))
        return name or (self.lease.name if self.lease is not None else "")

    def log_path(self, is_stderr: bool) -> str:
        log = self.outputs[is_stderr].log
        return "" if log is None else str(log.path)

    def where_log_is(self) -> str:
        """Return a sentence that names its logs; empty if it wrote nothing."""
        logs = [output.log for output in reversed(self.outputs) if output.log is not None]
        written = [log.path for log in logs if log.has_lines()]
        return f"{ITS_LOG} {' and '.join(map(str, written))}." if written else ""

    @property
    def work(self) -> str:
        return f"a worker of {self.name}" if self.name else "a worker"

    @property
    def job_id(self) -> bytes:
        job_id: bytes = self.pool_key[0]
        return job_id


def started_report(lease: NodeLease, worker: Worker) -> head_pb2.FromNode:
    """Report that the worker of a lease runs."""
    return head_pb2.FromNode(
        lease_started=head_pb2.LeaseStarted(
            lease=lease.number,
            process_id=worker.process_id,
            pid=worker.pid,
            calls_left=worker.calls_left,
        )
    )


def pool_key(lease: NodeLease) -> tuple[Any, ...]:
    """Return the key that is equal for leases whose workers can stand in for each other."""
    # Calls are counted per function.
    counted = (lease.max_calls, lease.name) if lease.max_calls else None
    return (lease.job_id, lease.spec.runtime_env, lease.allocation.devices, counted)


def interpreter(lease: NodeLease, worker: Worker, accelerators: NodeAccelerators) -> str | None:
    """Return the Python that a worker needs; None: a fork of the template will do."""
    environment = worker.environment
    if environment is not None and environment.fresh_interpreter:
        return environment.python
    return sys.executable if needs_fresh_interpreter(lease.devices, accelerators) else None


def process_spec(
    lease: NodeLease,
    worker: Worker,
    python: str | None,
    base: Mapping[str, Any],
    accelerators: NodeAccelerators,
) -> dict[str, Any]:
    """Make the spec of a worker's process, as plain data.

    ``python`` is its interpreter, from ``interpreter``; ``base`` what all processes of the node
    share.
    """
    environment = worker.environment
    variables = {WORKER_VARIABLE: worker.process_id.hex()}
    if environment is not None:
        variables.update(environment.env_vars)
    if lease.devices:
        variables.update(assigned_environment(lease.devices, accelerators, os.environ))
    job = lease.job
    paths = list(environment.sys_path) if environment is not None else []
    cwd = environment.cwd if environment is not None else None
    if job.machine == base["machine"]:
        paths += job.sys_path
        cwd = cwd or job.cwd
    if lease.command is not None:
        variables.update(command_variables(lease.command, environment, base["address"]))
    return {
        **base,
        "process_id": worker.process_id,
        "environment": variables,
        "command": list(lease.command.command) if lease.command is not None else [],
        "python": python,
        "sys_path": paths,
        "cwd": cwd,
        "lease": lease.to_wire(),
    }


def preload(lease: NodeLease, python: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules that a worker's template must have, and those that it should have."""
    if python is not None:
        return (), ()
    actor = lease.actor
    return (tuple(actor.preload), tuple(actor.preload_later)) if actor is not None else ((), ())
