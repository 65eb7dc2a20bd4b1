"""A worker process and a lease as their daemon knows them: plain state.

Responsible for what belongs to one of them alone; what is done with them is in ``workers.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.common.specs import GrantedLease
from miniray.exceptions import ITS_LOG

if TYPE_CHECKING:
    from miniray._proto import head_pb2
    from miniray.node.base.template_client import TemplateClient
    from miniray.node.workers.outputs import OutputPipe
    from miniray.runtime_env.install import WorkerEnvironment


@dataclasses.dataclass(kw_only=True)
class NodeLease(GrantedLease):
    """What the head granted on this node, and how far that is."""

    worker: Worker | None = None
    #: The head, or a rule, ended it; its worker may still be on its way out.
    ending: bool = False
    #: Its actor's constructor has ended well.
    alive: bool = False
    #: What runs on it waits for others, and gave its CPU back meanwhile.
    blocked: bool = False


@dataclasses.dataclass
class Worker:
    """One worker process."""

    process_id: bytes
    #: What workers that do the same have in common; the job is first.
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
    #: With a limit of calls: how many it has left, since it was given back; 0 if it never was.
    calls_left: int = 0
    environment: WorkerEnvironment | None = None
    template: TemplateClient | None = None
    outputs: list[OutputPipe] = dataclasses.field(default_factory=list)
    #: Why this daemon has killed it, for those who lose what it owned.
    why_killed: str = ""
    #: The constructor's error, reported before the process ends.
    failed: bool = False
    #: It has begun to end by rule, and may wait for what others need of it.
    finishing: bool = False
    #: When it is killed, if it does not end by rule; and given up, if it is not gone then.
    kill_timer: asyncio.TimerHandle | None = None
    give_up_timer: asyncio.TimerHandle | None = None
    #: It had ended, or was about to, before anybody asked for it.
    ended_unasked: bool = False
    #: It has ended: what it had started that was killed and is not gone.
    left: tuple[int, ...] = ()
    #: It, or some of that, could not be killed: it is over for everybody, and keeps its devices.
    quarantine: head_pb2.Quarantine | None = None
    #: Set when the process and its children are gone.
    gone: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    #: Set when it was put into quarantine.
    given_up: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def asked_to_end(self) -> bool:
        """Whether a rule, the head or user code ends it."""
        ends = self.exiting is not None or (self.lease is not None and self.lease.ending)
        return ends and not self.ended_unasked

    @property
    def name(self) -> str:
        """The class of its actor, or the task that it runs or ran last; empty if it has begun none.

        A lease is named after the task that it was asked for, and serves others of the same shape.
        """
        _, name = max((output.named() for output in self.outputs), default=(0, ""))
        return name or (self.lease.name if self.lease is not None else "")

    def log_path(self, is_stderr: bool) -> str:
        """Where what it writes to a stream is kept."""
        log = self.outputs[is_stderr].log
        return "" if log is None else str(log.path)

    def where_log_is(self) -> str:
        """A sentence that says where its log is; empty if it wrote nothing."""
        logs = [output.log for output in reversed(self.outputs) if output.log is not None]
        written = [log.path for log in logs if log.has_lines()]
        return f"{ITS_LOG} {' and '.join(map(str, written))}." if written else ""

    @property
    def work(self) -> str:
        """What it does, for errors."""
        return f"a worker of {self.name}" if self.name else "a worker"

    @property
    def job_id(self) -> bytes:
        """The job that it works for."""
        job_id: bytes = self.pool_key[0]
        return job_id
