"""Attaching a process to its node's daemon: the I/O thread, the link and the runtime.

A child that user code forks closes the sockets that it inherited, counts no refs, ends nothing of
its parent's when it exits, and is refused the API until it calls ``init()`` itself. It may read the
arrays that its parent had: that memory is never written to again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.client.cluster_runtime import ClusterRuntime, ProcessHooks
from miniray.common.runtime import refuse_runtime
from miniray.objects.ignored_signals import IgnoredSignals
from miniray.wire.io_loop import IOLoop
from miniray.wire.node_link import NodeLink

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Introduction:
    """The message of a process to its node's daemon when it attaches."""

    process_id: bytes
    #: "driver", "worker", or "command", which only sends requests.
    role: str
    job_id: bytes
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


class Attachment:
    """A runtime with the link and loop under it.

    Args:
        node_socket: Of the daemon.
        key: Of the cluster; proves its processes to each other.
        introduction: Of this process.
        timeout: Seconds that the daemon may take to answer.
        on_shutdown: Called when the runtime is shut down; closes this.
        on_lost: Called when the daemon is gone.
        process: What the runtime needs from the process.
    """

    def __init__(
        self,
        node_socket: str,
        key: bytes,
        introduction: Introduction,
        *,
        timeout: float,
        on_shutdown: Callable[[Attachment], None],
        on_lost: Callable[[], object] | None = None,
        process: ProcessHooks | None = None,
    ) -> None:
        self.loop = IOLoop()
        is_driver = introduction.role == "driver"
        self._ignored = IgnoredSignals(self.loop) if is_driver else None
        self.loop.start()
        process_id, job_id = introduction.process_id, introduction.job_id
        try:
            self.link = NodeLink(
                node_socket,
                self.loop,
                key,
                (process_id, introduction.role, os.getpid(), job_id, introduction.details),
                on_lost=on_lost,
            )
            self.welcome = self.link.wait_welcome(timeout)
        except BaseException:
            self.loop.stop()
            raise
        self.facts = context.ProcessFacts(
            process_id=process_id,
            node_id=self.welcome["node_id"],
            job_id=job_id,
            address=self.welcome["address"],
            session_dir=self.welcome["session_dir"],
            namespace=introduction.details.get("namespace", ""),
            default_actor_lifetime=introduction.details.get(
                "default_actor_lifetime", "non_detached"
            ),
        )
        process = process or ProcessHooks()
        self.runtime = ClusterRuntime(
            self.facts, self.link, self.loop, process, lambda: on_shutdown(self)
        )
        if introduction.role != "command":
            _close_in_forked_children(self.runtime, process.in_forked_child)

    def open(self) -> None:
        """Begin to handle pushes: the runtime's handlers are complete."""
        if self._ignored is not None:
            self._ignored.install()
        self.loop.call_soon(self._begin)

    def _begin(self) -> None:
        runtime = self.runtime
        self.link.begin(runtime.on_push, runtime.peers.relayed, runtime.on_link_lost)

    def close(self) -> None:
        """Close all sockets and end the I/O thread."""
        if _open_runtime is not None and _open_runtime[0] is self.runtime:
            _forget_runtime()
        if self._ignored is not None:
            self._ignored.remove()
        self.runtime.peers.close()
        self.runtime.shared_memory.close()
        self.link.close()
        self.loop.stop()


#: The runtime that forked children close, and the function that they call then.
_open_runtime: tuple[ClusterRuntime, Callable[[], None]] | None = None


def _close_in_forked_children(runtime: ClusterRuntime, in_child: Callable[[], None]) -> None:
    global _open_runtime
    _open_runtime = (runtime, in_child)
    _watch_forks()


def _forget_runtime() -> None:
    global _open_runtime
    _open_runtime = None


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(before=_before_fork, after_in_child=_leave_parent)


def _before_fork() -> None:
    """Run in the parent: the child inherits its mappings."""
    if _open_runtime is not None:
        _open_runtime[0].shared_memory.before_fork()


def _leave_parent() -> None:
    """Run in the child before anything else: takes no lock, another thread may have held it."""
    if _open_runtime is None:
        return
    runtime, in_child = _open_runtime
    _forget_runtime()
    runtime.abandon()
    refuse_runtime(
        f"This process ({os.getpid()}) was forked from process {os.getppid()}, which is attached "
        "to a cluster, and shares nothing with it. Use miniray in the parent, and pass plain "
        "values to the child; or call miniray.init() here, to attach this process as a driver of "
        "its own."
    )
    in_child()
