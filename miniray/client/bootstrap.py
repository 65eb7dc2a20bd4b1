"""What ``init()`` does: find a cluster or start one, and attach this process as its driver."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from miniray.client import forks
from miniray.client.attach import Attachment
from miniray.client.handover import leave_to_actors
from miniray.client.places import Place, place_of, start_node
from miniray.common.config import config
from miniray.common.ids import new_id
from miniray.common.names import printable
from miniray.common.process_limits import ENOUGH, raise_limit
from miniray.exceptions import NodeDiedError
from miniray.security.token import TOKEN_VARIABLE, take_token

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.client.init_options import InitOptions
    from miniray.common.runtime import Runtime

logger = logging.getLogger(__name__)


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
    take_token()  # needed or not: children and workers would inherit it
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
                "default_actor_lifetime": options.default_actor_lifetime,
                "metadata": dict(options.metadata),
            },
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: _shut_down(attachment, place.process),
        )
    except BaseException:
        place.end()
        raise
    runtime = attachment.runtime
    runtime.facts.namespace = namespace
    runtime.facts.default_actor_lifetime = options.default_actor_lifetime
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
        "webui_url": None,  # as in Ray where there is no dashboard
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


def _find(options: InitOptions) -> Place | None:
    """The node here to attach to; None if one is to be started for this driver."""
    from miniray.client.cluster_choice import latest_cluster, running_here
    from miniray.client.init_options import refuse_node_arguments

    if options.address == "local":
        return None
    wanted = None if options.address in (None, "auto") else options.address
    record = latest_cluster(wanted)
    if record is not None:
        if wanted is None:
            refuse_node_arguments(options, record.address)
        return place_of(record)
    if options.address is None:
        return None
    if options.address == "auto":
        raise ConnectionError(
            "There is no running cluster of this user on this machine. Start one with "
            "`miniray start --head`, or leave address out to start an embedded one."
        )
    if take_token():
        refuse_node_arguments(options, options.address)
        return None
    raise ConnectionError(
        f"No node of a cluster at {options.address} runs on this machine. {running_here()} Set "
        f"{TOKEN_VARIABLE} to its token, which `miniray start --head` printed, to attach from "
        f"outside; or join it with `miniray start --address {options.address}`."
    )


def _start_node(options: InitOptions) -> Place:
    """Start a cluster for this driver, or a node that attaches it to one elsewhere."""
    from miniray.system.boot_options import BootOptions

    elsewhere = options.address not in (None, "local", "auto")
    return start_node(
        BootOptions(
            head=not elsewhere,
            address=options.address if elsewhere else None,
            token=take_token() if elsewhere else None,
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


# --- while attached --------------------------------------------------------------------


def _prepare_job(runtime: ClusterRuntime, runtime_env: Mapping[str, Any] | None) -> None:
    """Upload the job's environment; tasks and actors merge theirs with it."""
    from miniray.client.job_environment import JobEnvironment

    environment = JobEnvironment(runtime)
    runtime.prepare_runtime_env = environment.prepare
    if runtime_env:
        runtime.facts.runtime_env = environment.upload(runtime_env)


def _print_logs(attachment: Attachment, *, wanted: bool) -> None:
    """Print the warnings of the head, and what workers print if that is wanted."""
    from miniray.client.waiting_news import WaitingNews
    from miniray.logs.log_printer import LogBatch
    from miniray.logs.log_thread import LogThread, left_out_note

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

    def on_warning(text: str) -> None:
        thread.put_note("miniray: " + "\n".join(map(printable, text.split("\n"))))

    runtime.on_topic["log"] = on_log if wanted else _ignore
    runtime.on_topic["output_left_out"] = on_left_out if wanted else _ignore
    news = WaitingNews(runtime.loop, attachment.link, on_warning)
    runtime.on_topic["pending"] = news.on_pending
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
