"""Workers and leases at their daemon, the spec of a new process, and the output of workers.

A submitted job's command is a worker too: a child of the template with a lease, an environment and
devices. It has no connection to a daemon; the drivers in it do. ``workers.py`` acts on all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.accelerators.node_resources import assigned_environment, needs_fresh_interpreter
from miniray.client.init_options import ADDRESS_VARIABLE, JOB_CONFIG_VARIABLE, JOB_ID_VARIABLE
from miniray.common.log_lines import LineSplitter, LogLine, bar_row
from miniray.common.specs import ActorSpec, GrantedLease, LeaseSpec
from miniray.exceptions import ITS_LOG, JobError
from miniray.node.base.clients import first_of
from miniray.node.workers.template import WORKER_VARIABLE
from miniray.system.log_file import LogFile, stamped
from miniray.worker.stdio import has_unread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from miniray.accelerators.node_resources import NodeAccelerators
    from miniray.common.spans import Ring
    from miniray.common.specs import CommandSpec
    from miniray.node.base.head_client import HeadClient
    from miniray.node.base.template_client import TemplateClient
    from miniray.runtime_env.install import WorkerEnvironment
    from miniray.worker.stdio import NamePage

_READ_SIZE = 64 * 1024
#: Seconds of silence after which an unfinished line is shown.
_SETTLE_AFTER = 0.2


class OutputPipe:
    """One stream of one worker.

    ``running`` returns the number and the name under which the worker writes now; ``on_lines`` gets
    the lines that a read completed.
    """

    def __init__(
        self,
        running: Callable[[], tuple[int, str]],
        on_lines: Callable[[list[LogLine]], None],
    ) -> None:
        #: The file of its lines, from ``begin`` on.
        self.log: LogFile | None = None
        self._default = ""
        self._running = running
        self._on_lines = on_lines
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._closed = False
        self._settling: asyncio.TimerHandle | None = None

    def named(self) -> tuple[int, str]:
        """Return number and name under which the worker writes; ``(0, "")`` before the first."""
        return max(self._running(), self._splitter.named)

    def begin(self, path: Path, default: str) -> None:
        """Read what is written, into a file; ``default`` is the name until the worker has one."""
        self.log, self._default = LogFile(path), default
        self._loop.add_reader(self._read, self._on_readable)

    def _on_readable(self) -> None:
        """Read what is there; the pipe itself says where the name changes within it."""
        running = self._running()
        try:
            data = os.read(self._read, _READ_SIZE)
        except BlockingIOError:
            return
        if data:
            self._take(data, running)
        else:
            self.close()

    def _take(self, data: bytes, running: tuple[int, str]) -> None:
        self._pass_on(self._splitter.feed(data, *running))
        if self._splitter.unsettled and self._settling is None:
            self._settling = self._loop.call_later(_SETTLE_AFTER, self._settle)

    def _settle(self) -> None:
        """Show the last state of a progress bar even if no output follows."""
        self._settling = None
        if not self._closed:
            self._pass_on(self._splitter.settle())

    def _pass_on(self, lines: list[LogLine]) -> None:
        if not lines or self.log is None:
            return
        now = time.time()
        finished = "".join(
            stamped(now, line.name or self._default, line.text)
            for line in lines
            if bar_row(line.text) is None
        )
        if finished:
            self.log.write(finished)
        self._on_lines(lines)

    def flush(self) -> None:
        """Pass on what was written up to now, with an unfinished line as if it were finished."""
        if self._closed:
            return
        if has_unread(self._read):
            self._on_readable()  # one read takes all that a pipe holds
        if not self._closed:
            self._pass_on(self._splitter.close())

    def drain(self) -> None:
        """Read the rest of the pipe of a worker that has ended."""
        while not self._closed and has_unread(self._read):
            self._on_readable()
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._read)
        os.close(self._read)
        self._pass_on(self._splitter.close())


logger = logging.getLogger(__name__)

#: Bytes that a command has in flight to the head; then its pipe fills, and its ``print`` waits.
_PIECE = 64 * 1024
#: Seconds until output is sent again that the head could not write.
_AGAIN_AFTER = 1.0


def command_variables(
    command: CommandSpec, environment: WorkerEnvironment | None, address: str
) -> dict[str, str]:
    """Return the variables by which a command finds its tools, and its drivers their cluster.

    Args:
        command: Of a submitted job.
        environment: Its runtime environment, whose variables go before these.
        address: Of the cluster.
    """
    own = environment.env_vars if environment is not None else {}
    paths = environment.sys_path if environment is not None else ()
    config = {
        "metadata": {**command.metadata, "job_submission_id": command.name},
        "runtime_env": json.loads(command.runtime_env or "{}"),
    }
    tools = os.path.dirname(sys.executable)  # `python` is the one that runs the node
    path = own.get("PATH", f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    variables = {"PYTHONUNBUFFERED": "1", **own, "PATH": path}
    if paths:
        further = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        variables["PYTHONPATH"] = os.pathsep.join([*paths, *([further] if further else [])])
    return {
        **variables,
        ADDRESS_VARIABLE: address,
        JOB_ID_VARIABLE: command.name,
        JOB_CONFIG_VARIABLE: json.dumps(config),
    }


class CommandOutput:
    """The output of one command, both streams in one, on its way to the head, which keeps it.

    One piece is in flight at a time. A head that starts again is sent the piece again, with the
    same offset, so that each byte is kept once.
    """

    def __init__(self, lease: int, head: HeadClient) -> None:
        self._lease = lease
        self._head = head
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._offset = 0
        #: The command is gone, with all that it had started.
        self._over = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to read, as the command runs."""
        self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def finish(self) -> None:
        """Wait until the head has all output of a command that is gone."""
        self._over.set()
        if self._sending is not None:
            await self._sending

    async def _send_all(self) -> None:
        wanted = True
        try:
            while data := await self._next():
                if wanted:
                    wanted = await self._send(data)
                self._offset += len(data)
        finally:
            self.close()

    async def _send(self, data: bytes) -> bool:
        """Have the head keep a piece; return whether it takes more."""
        while True:
            try:
                await self._head.ask("job_output", self._lease, self._offset, data)
                return True
            except JobError:
                return False  # the job is given up
            except Exception as error:  # noqa: BLE001 - as of a full disk
                logger.warning("the output of a job could not be kept: %s", error)
            await asyncio.sleep(_AGAIN_AFTER)

    async def _next(self) -> bytes:
        """Return what the command has printed since; empty at the end."""
        loop = asyncio.get_running_loop()
        while True:
            over = self._over.is_set()
            try:
                return os.read(self._read, _PIECE)
            except BlockingIOError:
                if over:  # what still holds the pipe is no part of the job
                    return b""
            readable = asyncio.Event()
            loop.add_reader(self._read, readable.set)
            try:
                await first_of(readable.wait(), self._over.wait())
            finally:
                loop.remove_reader(self._read)

    def close(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class NodeLease(GrantedLease):
    """A lease that the head granted on this node, and its state here."""

    worker: Worker | None = None
    #: The head ended it; its worker may still be on its way out.
    ending: bool = False
    #: Its actor's constructor has returned.
    alive: bool = False
    #: Its work waits for other work, and has given its CPU back meanwhile.
    blocked: bool = False


@dataclasses.dataclass(eq=False, repr=False)
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
    #: Its last calls that took long.
    calls: Ring | None = None
    #: What the command of a submitted job prints, if it is one.
    command: CommandOutput | None = None
    #: Why this daemon has killed it, for errors about its lost objects.
    why_killed: str = ""
    #: Its planned exit has begun, and may wait for what others need of it.
    finishing: bool = False
    #: Kills it if it does not exit in time, and gives it up if it is not gone then.
    kill_timer: asyncio.TimerHandle | None = None
    give_up_timer: asyncio.TimerHandle | None = None
    #: It had ended, or was about to, before its end was requested.
    ended_unasked: bool = False
    #: It has ended: its children that were killed and are not gone.
    left: tuple[int, ...] = ()
    #: It, or one of these, could not be killed: its lease is over, its devices stay taken.
    quarantine: head_pb2.Quarantine | None = None
    #: It no longer needs its lease, as it only waits for others before it exits.
    has_let_go: bool = False
    #: Set then, and when the process and its children are gone, or it was put into quarantine.
    vacated: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def attached(self, pid: int) -> None:
        """Take its pid from itself: the template's answer may be read later."""
        self.pid = pid

    def open_outputs(
        self, names: NamePage, on_lines: Callable[[Worker, bool, list[LogLine]], None]
    ) -> tuple[OutputPipe, OutputPipe]:
        """Make the pipes that it prints to; the page of names also has its last long calls."""
        self.calls = names.calls
        for is_stderr in (False, True):
            running = functools.partial(names.read, is_stderr)
            on_own = functools.partial(on_lines, self, is_stderr)
            self.outputs.append(OutputPipe(running, on_own))
        out, err = self.outputs
        return out, err

    @property
    def asked_to_end(self) -> bool:
        """Whether its end was requested, by the head, this daemon or user code."""
        ends = self.exiting is not None or (self.lease is not None and self.lease.ending)
        return ends and not self.ended_unasked

    @property
    def name(self) -> str:
        """Return its actor's class, or the task that it runs or ran last; empty if there is none.

        A lease is named after the task that requested it, and serves others of the same shape.
        """
        _, name = max((output.named() for output in self.outputs), default=(0, ""))
        return name or (self.lease.name if self.lease is not None else "")

    def log_path(self, is_stderr: bool) -> str:
        log = self.outputs[is_stderr].log
        return "" if log is None else str(log.path)

    def where_log_is(self) -> str:
        """Return a sentence that names its logs and what shows them; empty if it wrote nothing."""
        logs = [output.log for output in reversed(self.outputs) if output.log is not None]
        written = [log.path for log in logs if log.path.exists()]
        if not written:
            return ""
        return f"{ITS_LOG} {' and '.join(map(str, written))}: `miniray logs {self.pid}` shows it."

    def keep_calls(self) -> str:
        """Write its last long calls beside its log; return a sentence, empty if there were none."""
        text = self.calls.as_text() if self.calls is not None else ""
        log = self.outputs[-1].log if self.outputs else None
        if not text or log is None:
            return ""
        path = log.path.with_suffix(".calls")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            logger.warning("the last calls of worker %d cannot be written: %s", self.pid, error)
            return ""
        return f"Its last calls above 1 ms are in {path}."

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
    modules = tuple(lease.spec.preload) if isinstance(lease.spec, LeaseSpec) else ()
    return (lease.job_id, lease.spec.runtime_env, lease.allocation.devices, counted, modules)


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
        "daemon": os.getpid(),
        "process_id": worker.process_id,
        "environment": variables,
        "command": list(lease.command.command) if lease.command is not None else [],
        "python": python,
        "sys_path": paths,
        "cwd": cwd,
        "lease": lease.to_wire(),
    }


def preload(lease: NodeLease, python: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules that a worker's template must have, and the ones that it should have."""
    if python is not None:
        return (), ()
    spec = lease.spec
    if isinstance(spec, ActorSpec):
        return tuple(spec.preload), tuple(spec.preload_later)
    return (tuple(spec.preload), ()) if isinstance(spec, LeaseSpec) else ((), ())
