"""What ``init()`` does: find a cluster or start one, and attach this process as its driver."""

from __future__ import annotations

import logging
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from miniray.client import forks
from miniray.client.attach import Attachment, Introduction
from miniray.client.cluster_choice import (
    LocalNode,
    latest_cluster,
    node_of_cluster,
    running_here,
    start_node,
)
from miniray.client.driver_output import DriverOutput
from miniray.client.handover import leave_to_actors
from miniray.common.config import config
from miniray.common.ids import new_id
from miniray.common.process_limits import ENOUGH, raise_limit
from miniray.engines import choose, start_ray
from miniray.security.token import TOKEN_VARIABLE, take_token

if TYPE_CHECKING:
    import subprocess

    from miniray.client.init_options import InitOptions
    from miniray.common.runtime import Runtime

logger = logging.getLogger(__name__)


def connect(options: InitOptions) -> tuple[Runtime, dict[str, Any]]:
    """Attach this process; return the runtime and what init() tells of the cluster.

    Raises:
        ConnectionError: there is no cluster at the address.
        AuthenticationError: it is another user's, or another cluster's.
        BootError: an embedded cluster could not be started.
        RuntimeEnvSetupError: the files of the runtime_env could not be uploaded.
        FileNotFoundError: the working directory of this process was removed.
    """
    choose(options.engine)
    return start_ray(options) if options.engine == "ray" else _attach(options)


def _attach(options: InitOptions) -> tuple[Runtime, dict[str, Any]]:
    """Do as ``connect`` with a cluster of miniray."""
    cwd = _working_directory()  # before anything is started in vain
    raise_limit(ENOUGH)
    take_token()  # needed or not: children and workers would inherit it
    node = _find(options) or _start_node(options)
    job_id = new_id()
    namespace = options.namespace or f"anonymous-{new_id().hex()}"
    try:
        attachment = Attachment(
            node.node_socket,
            node.key,
            Introduction(
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
            ),
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: _shut_down(attachment, output, node.process),
        )
    except BaseException:
        node.end()
        raise
    runtime = attachment.runtime
    output = DriverOutput(runtime, wanted=options.log_to_driver)
    try:
        if options.runtime_env:  # tasks and actors merge theirs with it
            runtime.facts.runtime_env = runtime.uploads.upload(options.runtime_env)
    except BaseException:
        runtime.shutdown()
        raise
    if node.warning:
        runtime.loop.call_soon(lambda: output.warn(node.warning))
    forks.guard(attachment)
    attachment.open()
    return runtime, {
        "node_id": node.node_id,
        "address": node.address,
        "session_dir": node.session_dir,
        "namespace": namespace,
        "python_version": platform.python_version(),
        "job_id": job_id.hex(),
        "webui_url": None,  # as in Ray where there is no dashboard
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "The working directory of this process was removed, and its workers are to have the "
            "same one. Change to another one first, as with os.chdir()."
        ) from None


def _worker_paths(cwd: str) -> list[str]:
    """Return the driver's module search path, as its workers get it."""
    return [os.path.abspath(path) if path else cwd for path in sys.path]


# --- finding and starting ------------------------------------------------------------


def _find(options: InitOptions) -> LocalNode | None:
    """Return the node here to attach to; None if one is to be started for this driver."""
    from miniray.client.init_options import refuse_node_arguments

    if options.address == "local":
        return None
    wanted = None if options.address in (None, "auto") else options.address
    record = latest_cluster(wanted)
    if record is not None:
        if wanted is None:
            refuse_node_arguments(options, record.address)
        return node_of_cluster(record)
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


def _start_node(options: InitOptions) -> LocalNode:
    """Start a cluster for this driver, or a node that attaches it to one elsewhere."""
    from miniray.system.boot_options import BootOptions

    elsewhere = options.address not in (None, "local", "auto")
    return start_node(
        BootOptions(
            head=not elsewhere,
            address=options.address if elsewhere else None,
            token=take_token() if elsewhere else None,
            **options.node,
            embedded=True,
            parent_pid=os.getpid(),
        )
    )


# --- the end -------------------------------------------------------------------------


def _shut_down(
    attachment: Attachment, output: DriverOutput, process: subprocess.Popen[bytes] | None
) -> None:
    """Leave the cluster; an embedded one ends, and its last process is awaited."""
    forks.unguard()
    try:
        output.fetch()
        if process is not None:
            attachment.link.node_notice("shutdown")
            attachment.link.flush()
        else:
            leave_to_actors(attachment.runtime)
        output.drain()
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
