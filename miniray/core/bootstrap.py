"""What ``init()`` does: find a cluster or start one, and attach this process as its driver."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from miniray.config import config
from miniray.core import forks
from miniray.core.attach import Attachment
from miniray.core.descriptors import ENOUGH, raise_limit
from miniray.core.handover import leave_to_actors
from miniray.core.ids import new_id
from miniray.core.names import short_name
from miniray.exceptions import NodeDiedError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence

    from miniray.core.cluster_runtime import ClusterRuntime
    from miniray.core.init_options import InitOptions
    from miniray.core.node_link import NodeLink
    from miniray.core.runtime import Runtime
    from miniray.session import ClusterRecord
    from miniray.util.memory_types import NodeMemory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where to attach."""

    node_socket: str
    key: bytes
    address: str
    session_dir: str
    node_id: str
    #: The embedded cluster that this process started, if it did.
    process: subprocess.Popen[bytes] | None = None
    #: What is wrong with what was started, though it runs; empty if nothing is.
    warning: str = ""


def connect(options: InitOptions) -> tuple[Runtime, dict[str, Any]]:
    """Attach this process; returns the runtime and what init() tells of the cluster.

    Raises:
        ConnectionError: there is no cluster at the address.
        AuthenticationError: it is another user's, or another cluster's.
        BootError: an embedded cluster could not be started.
        FileNotFoundError: the working directory of this process was removed.
    """
    cwd = _working_directory()  # before anything is started in vain
    raise_limit(ENOUGH)
    place = _find(options) or _start_node(options)
    job_id = new_id()
    namespace = options.namespace or f"anonymous-{new_id().hex()}"
    try:
        attachment = Attachment(
            place.node_socket,
            place.key,
            job_id,
            "driver",
            job_id,
            {
                "namespace": namespace,
                "sys_path": _worker_paths(cwd),
                "cwd": cwd,
                "entrypoint": " ".join(sys.argv)[:1000],
            },
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: _shut_down(attachment, place.process),
        )
    except BaseException:
        if place.process is not None:
            place.process.terminate()
            place.process.wait()
        raise
    runtime = attachment.runtime
    runtime.facts.namespace = namespace
    _prepare_job(runtime, options.runtime_env)
    _print_logs(attachment, wanted=options.log_to_driver)
    if place.warning:
        runtime.loop.call_soon(lambda: runtime.on_topic["warning"](place.warning))
    forks.guard(attachment)
    attachment.open()
    return runtime, {
        "node_id": place.node_id,
        "address": place.address,
        "session_dir": place.session_dir,
        "namespace": namespace,
        "python_version": platform.python_version(),
        "job_id": job_id.hex(),
    }


def _working_directory() -> str:
    """Where this process works, and so will its workers."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "The working directory of this process was removed, and its workers are to have the "
            "same one. Change to another one first, as with os.chdir()."
        ) from None


def _worker_paths(cwd: str) -> list[str]:
    """The driver's module search path, as its workers get it."""
    return [os.path.abspath(path) if path else cwd for path in sys.path]


# --- finding and starting ------------------------------------------------------------


def _find(options: InitOptions) -> _Place | None:
    """The node here to attach to; None if one is to be started for this driver."""
    from miniray.core.init_options import refuse_node_arguments
    from miniray.security.token import TOKEN_VARIABLE
    from miniray.session import latest_cluster

    if options.address == "local":
        return None
    wanted = None if options.address in (None, "auto") else options.address
    record = latest_cluster(wanted)
    if record is not None:
        if wanted is None:
            refuse_node_arguments(options, record.address)
        return _place_of(record)
    if options.address is None:
        return None
    if options.address == "auto":
        raise ConnectionError(
            "There is no running cluster of this user on this machine. Start one with "
            "`miniray start --head`, or leave address out to start an embedded one."
        )
    if os.environ.get(TOKEN_VARIABLE):
        refuse_node_arguments(options, options.address)
        return None
    raise ConnectionError(
        f"No node of a cluster at {options.address} runs on this machine. Set {TOKEN_VARIABLE} to "
        f"its token, which `miniray start --head` printed, to attach from outside; or join it with "
        f"`miniray start --address {options.address} --token TOKEN`."
    )


def _place_of(record: ClusterRecord) -> _Place:
    from miniray.exceptions import VersionMismatchError
    from miniray.security.token import read_token_file
    from miniray.version import VERSION

    if record.miniray != VERSION:
        raise VersionMismatchError("miniray", VERSION, record.miniray)
    ours = platform.python_version()
    if record.python.split(".")[:2] != ours.split(".")[:2]:
        raise VersionMismatchError("Python", ours, record.python)
    token = read_token_file(record.session.token_file)
    return _Place(
        record.socket_path,
        token.socket_key,
        record.address,
        str(record.session.folder),
        record.node_id,
    )


def _start_node(options: InitOptions) -> _Place:
    """Start a cluster for this driver, or a node that attaches it to one elsewhere."""
    from miniray.node.boot import launch
    from miniray.node.boot_options import BootOptions
    from miniray.security.token import TOKEN_VARIABLE, parse_token

    elsewhere = options.address not in (None, "local", "auto")
    started = launch(
        BootOptions(
            head=not elsewhere,
            address=options.address if elsewhere else None,
            token=os.environ[TOKEN_VARIABLE] if elsewhere else None,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            gpu_family=options.gpu_family,
            resources=dict(options.resources),
            labels=dict(options.labels),
            object_store_memory=options.object_store_memory,
            memory=options.memory,
            temp_dir=options.temp_dir,
            embedded=True,
            parent_pid=os.getpid(),
        )
    )
    result = started.result
    return _Place(
        result.socket_path,
        parse_token(result.token).socket_key,
        result.address,
        result.session_dir,
        result.node_id,
        started.process,
        result.warning,
    )


# --- while attached --------------------------------------------------------------------


def _prepare_job(runtime: ClusterRuntime, runtime_env: Mapping[str, Any] | None) -> None:
    """Upload the job's environment; tasks and actors merge theirs with it."""
    from miniray.core.job_environment import JobEnvironment

    environment = JobEnvironment(runtime)
    runtime.prepare_runtime_env = environment.prepare
    if runtime_env:
        runtime.facts.runtime_env = environment.upload(runtime_env)


def _print_logs(attachment: Attachment, *, wanted: bool) -> None:
    """Print the warnings of the head, and what workers print if that is wanted."""
    from miniray.core.log_printer import LogBatch
    from miniray.core.log_thread import LogThread, left_out_note

    runtime = attachment.runtime
    thread = LogThread(os.path.join(attachment.facts.session_dir, "logs"))
    own_node = runtime.node_id.hex()[:8]

    def on_log(
        pid: int, node: str, is_stderr: bool, _path: str, lines: list[tuple[str, str]]
    ) -> None:
        shown = "" if node == own_node else node
        for name, group in itertools.groupby(lines, operator.itemgetter(0)):
            texts = [text for _, text in group]
            thread.put(LogBatch(name, pid, shown, is_stderr, texts))

    def on_left_out(counts: Sequence[tuple[str, str, int]]) -> None:
        thread.put_note(left_out_note(counts, own_node))

    def on_pending(name: str, reason: str, infeasible: bool) -> None:
        hint = " No node of the cluster can ever serve it; one that can may still join."
        thread.put_note(f"miniray: {short_name(name)} waits: {reason}.{hint * infeasible}")

    def on_warning(text: str) -> None:
        thread.put_note(f"miniray: {text}")

    runtime.on_topic["log"] = on_log if wanted else _ignore
    runtime.on_topic["output_left_out"] = on_left_out if wanted else _ignore
    runtime.on_topic["pending"] = on_pending
    runtime.on_topic["warning"] = on_warning
    attachment.log_thread = thread


def _ignore(*_: object) -> None:
    """The driver does not want to see this."""


def _fetch_output(attachment: Attachment) -> None:
    """Let everything come that workers have printed up to now."""
    if attachment.runtime.on_topic["log"] is _ignore:
        return
    try:
        attachment.link.node_request("flush_output", (), config().stop_grace)
    except (NodeDiedError, TimeoutError) as error:
        logger.debug("the last output of workers may be missing: %s", error)


def _shut_down(attachment: Attachment, process: subprocess.Popen[bytes] | None) -> None:
    """Leave the cluster; an embedded one ends, and its last process is awaited."""
    forks.unguard()
    try:
        _fetch_output(attachment)
        if process is not None:
            attachment.link.node_notice("shutdown")
            attachment.link.flush()
        else:
            leave_to_actors(attachment.runtime)
        attachment.drain_logs()
    finally:  # Ctrl-C ends the wait for a paused terminal
        attachment.close()
    if process is not None:
        import subprocess

        try:
            process.wait(config().stop_grace)
        except subprocess.TimeoutExpired:
            logger.warning("the embedded cluster did not end in time and is killed")
            process.kill()
            process.wait()


# --- for commands ----------------------------------------------------------------------


class CommandConnection:
    """What `miniray status` and `miniray memory` need of a cluster."""

    def __init__(self, record: ClusterRecord) -> None:
        self._place = _place_of(record)

    def status(self) -> Any:
        """The cluster's status (util/state_types.ClusterStatus)."""
        return self._ask("status")

    def listing(self, what: str) -> list[dict[str, Any]]:
        """One of the head's listings: "actors", "nodes", ..."""
        listing: list[dict[str, Any]] = self._ask("state", what)
        return listing

    def drain(self, prefix: str, *, undo: bool) -> str:
        """Place nothing new on a node, or again; returns its id.

        Raises:
            ValueError: not exactly one living node has an id that begins so.
        """
        node_id: str = self._ask("undo_drain" if undo else "drain_node", prefix)
        return node_id

    def wait_drained(self, node_id: str, seconds: float | None) -> bool:
        """Wait until nothing runs on a drained node; False if it is not drained any more.

        Raises:
            TimeoutError: something still runs there after so many seconds.
        """
        with self._attached() as link:
            return bool(link.head_request("await_drained", node_id, timeout=seconds))

    def memory_report(self, limit: int, detail: bool, seconds: float) -> list[NodeMemory]:
        """What every node and process holds; each process has so many seconds to answer."""
        with self._attached() as link:
            return link.memory_report(limit, detail, seconds)

    def _ask(self, method: str, *args: Any) -> Any:
        with self._attached() as link:
            return link.head_request(method, *args, timeout=30.0)

    @contextlib.contextmanager
    def _attached(self) -> Iterator[NodeLink]:
        process_id = new_id()
        attachment = Attachment(
            self._place.node_socket,
            self._place.key,
            process_id,
            "command",
            process_id,
            {},
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: attachment.close(),
        )
        try:
            attachment.open()
            yield attachment.link
        finally:
            attachment.runtime.shutdown()

    def close(self) -> None:
        """Nothing is held between calls."""


def connect_for_cli(record: ClusterRecord) -> CommandConnection:
    """A connection for a command of this user on this machine."""
    return CommandConnection(record)
