"""Find or start a cluster for ``init()``, attach this process as its driver, print its output.

Prints warnings, work that waits for resources, and the output of workers.
"""

from __future__ import annotations

import collections
import importlib
import itertools
import logging
import operator
import os
import sys
from typing import TYPE_CHECKING, Any

from miniray.client.cluster_choice import (
    LocalNode,
    latest_cluster,
    node_of_cluster,
    running_here,
    start_node,
)
from miniray.common.config import config
from miniray.common.names import printable, short_name
from miniray.common.object_ref import new_id
from miniray.common.process_state import ENOUGH, raise_limit
from miniray.engines import choose, start_ray
from miniray.exceptions import NodeDiedError
from miniray.logs.log_printer import LogBatch, LogThread, left_out_note
from miniray.security.token import TOKEN_VARIABLE, take_token
from miniray.version import PYTHON_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from miniray.client.attach import Attachment
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.client.init_options import InitOptions
    from miniray.common.runtime import Runtime
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

logger = logging.getLogger(__name__)

#: The first reminder comes after this many times ``pending_warning``; each later one takes twice as
#: long, up to this many seconds.
_FIRST = 6
_LONGEST = 3600.0
#: The most lines of one reminder.
_LINES = 5


class WaitingNews:
    """Warns the user repeatedly of work that waits for resources. Runs in the loop's thread.

    The head notifies this driver when work of its job has waited long, or cannot be served; the
    driver requests the list. While some of it still waits, all is printed again from time to time.
    """

    def __init__(self, loop: IOLoop, link: NodeLink, tell: Callable[[str], None]) -> None:
        self._loop = loop
        self._link = link
        self._tell: Callable[[str], None] = lambda text: tell(printable(text))
        #: When each waiting demand was shown last, by the head's clock.
        self._warned: dict[tuple[str, int], float] = {}
        self._delay = 0.0
        self._cancel: Callable[[], object] = lambda: None

    def on_pending(self) -> None:
        """Warn of demands that were not shown yet."""
        self._link.head_request_async("waiting_of_job", (), self._tell_new)

    def _tell_new(self, _error: Any, waiting: list[dict[str, Any]] | None, _fd: int) -> None:
        named = _named(waiting or ())
        # A demand waits again if its oldest request is younger than the last warning.
        new = [each for key, each in named.items() if each["since"] >= self._warned.get(key, 0.0)]
        self._warned = {key: each["since"] + each["seconds"] for key, each in named.items()}
        if not new:
            return
        self._tell_all(new, still=False)
        first = _FIRST * config().pending_warning
        if not 0 < self._delay <= first:  # nothing waited, or the next reminder is far
            self._arm(first)

    def _remind(self, error: Any, waiting: list[dict[str, Any]] | None, _fd: int) -> None:
        if error is not None or not waiting:
            self._delay = 0.0  # until the head's next notice
            return
        self._tell_all(waiting, still=True)
        self._arm(min(2 * self._delay, _LONGEST))

    def _tell_all(self, waiting: list[dict[str, Any]], *, still: bool) -> None:
        for each in waiting[:_LINES]:
            names = ", ".join(short_name(name) for name in each["names"] if name)
            count, kind = each["count"], each["kind"].replace("_", " ")
            who = f"{count:,} {kind}{'s' * (count != 1)}{f' ({names})' if names else ''}"
            if not still and names and (kind == "task" or (kind == "actor" and count == 1)):
                who, count = names, len(each["names"])
            verb = f"{'still ' * still}wait{'s' * (count == 1)}"
            since = f", {each['seconds']:.0f} s" * still
            hint = " It waits until a node joins that can serve it." * each["infeasible"]
            self._tell(f"{who} {verb}{since}: {each['reason']}.{hint}")
        if len(waiting) > _LINES:
            self._tell(f"{len(waiting) - _LINES} more wait; `miniray status` has them all.")

    def _arm(self, delay: float) -> None:
        self._cancel()
        self._delay = delay
        self._cancel = self._loop.call_later(
            delay,
            lambda: self._link.head_request_async("waiting_of_job", (), self._remind),
        )


def _named(waiting: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return demands by kind and shape; equal ones are numbered."""
    alike: collections.Counter[str] = collections.Counter()
    named = {}
    for each in waiting:
        shape = f"{each['kind']} {each['shape']} {each['infeasible']}"
        alike[shape] += 1
        named[shape, alike[shape]] = each
    return named


class DriverOutput:
    """Prints, in a thread of its own, the output that a driver's runtime receives."""

    def __init__(self, runtime: ClusterRuntime, *, wanted: bool) -> None:
        self._link = runtime.link
        self._wanted = wanted
        self._own_node = runtime.facts.node_id.hex()[:8]
        self._thread = LogThread(os.path.join(runtime.facts.session_dir, "logs"))
        news = WaitingNews(runtime.loop, runtime.link, self.warn)
        runtime.on_topic.update(
            {
                "log": self._on_log,
                "output_left_out": self._on_left_out,
                "pending": news.on_pending,
                "warning": self.warn,
            }
        )

    def warn(self, text: str) -> None:
        self._thread.put("miniray: " + "\n".join(map(printable, text.split("\n"))))

    def _on_log(
        self, pid: int, node: str, is_stderr: bool, _path: str, lines: list[tuple[str, str]]
    ) -> None:
        if not self._wanted:
            return
        shown = "" if node == self._own_node else node
        for name, group in itertools.groupby(lines, operator.itemgetter(0)):
            texts = [text for _, text in group]
            self._thread.put(LogBatch(name, pid, shown, is_stderr, texts))

    def _on_left_out(self, counts: Sequence[tuple[str, str, int]]) -> None:
        if self._wanted:
            self._thread.put(left_out_note(counts, self._own_node))

    def fetch(self) -> None:
        """Let everything come that workers have printed up to now."""
        if not self._wanted:
            return
        try:
            self._link.node_request("flush_output", (), config().stop_grace)
        except (NodeDiedError, TimeoutError) as error:
            logger.debug("the last output of workers may be missing: %s", error)

    def drain(self) -> None:
        self._thread.close()


def connect(options: InitOptions) -> tuple[Runtime, dict[str, Any]]:
    """Attach this process; return the runtime and the address info of the cluster.

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
    cwd = _working_directory()  # before anything is started: it may be refused
    raise_limit(ENOUGH)
    take_token()  # needed or not: children and workers would inherit it
    node = _find(options) or _start_node(options)
    from miniray.client.attach import Attachment, Introduction

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
                    "sys_path": [os.path.abspath(path) if path else cwd for path in sys.path],
                    "cwd": cwd,
                    "entrypoint": " ".join(sys.argv)[:1000],
                    "default_actor_lifetime": options.default_actor_lifetime,
                    "metadata": dict(options.metadata),
                },
            ),
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: _shut_down(attachment, output, node),
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
    if node.dashboard_url and node.process is not None:  # it listens as this program has requested
        opens = f"`miniray dashboard --address {node.address}` opens it"
        text = f"The page of this cluster is at {node.dashboard_url}: {opens}."
        runtime.loop.call_soon(lambda: output.warn(text))
    attachment.open()
    return runtime, {
        "node_id": node.node_id,
        "address": node.address,
        "session_dir": node.session_dir,
        "namespace": namespace,
        "python_version": PYTHON_VERSION,
        "job_id": job_id.hex(),
        "webui_url": node.dashboard_url or None,
    }


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "The working directory of this process, which workers use too, was removed. Change to "
            "another one first, as with os.chdir()."
        ) from None


# --- finding and starting ------------------------------------------------------------


def _find(options: InitOptions) -> LocalNode | None:
    """Return the node here to attach to; None if the driver has to start one."""
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
    if options.address.startswith("unix:"):
        raise ConnectionError(
            f"The cluster at {options.address}, which MINIRAY_ADDRESS names, has ended or could "
            "not be started."
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
    """Start a cluster for this driver, or a node that attaches it to one elsewhere.

    What attaches this process is imported while the node starts.
    """
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
        ),
        meanwhile=lambda: importlib.import_module("miniray.client.attach"),
    )


# --- the end -------------------------------------------------------------------------


def _shut_down(attachment: Attachment, output: DriverOutput, node: LocalNode) -> None:
    """Leave the cluster; an embedded one ends, and its last process is awaited."""
    try:
        output.fetch()
        if node.process is not None:
            attachment.link.node_notice("shutdown")
            attachment.link.flush()
        else:
            from miniray.client.handover import leave_to_actors

            leave_to_actors(attachment.runtime)
        output.drain()
    finally:  # Ctrl-C ends the wait for a paused terminal
        attachment.close()
    if node.process is not None:
        node.await_end()
