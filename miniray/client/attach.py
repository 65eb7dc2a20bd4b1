"""Attaching a process to its node's daemon: the I/O thread, the link and the runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.client.cluster_runtime import ClusterRuntime, ProcessHooks
from miniray.objects.ignored_signals import IgnoredSignals
from miniray.wire.io_loop import IOLoop
from miniray.wire.node_link import NodeLink

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Introduction:
    """What a process tells the daemon of its node when it attaches."""

    process_id: bytes
    #: "driver", "worker", or "command": it only asks.
    role: str
    job_id: bytes
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


class Attachment:
    """A runtime with the link and loop under it.

    Args:
        node_socket: Of the daemon.
        key: By which processes of the cluster know each other.
        introduction: Of this process.
        timeout: Seconds that the daemon may take to answer.
        on_shutdown: Called when the runtime is shut down; closes this.
        on_lost: Called when the daemon is gone.
        process: What the runtime asks of the process.
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
        #: What came before ``open``; used in the loop's turns only, as ``_open``.
        self._early: list[Callable[[], None]] = []
        self._open = False
        self._on_lost = on_lost
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
                on_push=self._on_push,
                on_relayed=self._on_relayed,
                on_lost=self._link_lost,
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
        self.runtime = ClusterRuntime(
            self.facts,
            self.link,
            self.loop,
            process or ProcessHooks(),
            lambda: on_shutdown(self),
        )

    def open(self) -> None:
        """Begin to handle pushes: the runtime's handlers are complete."""
        if self._ignored is not None:
            self._ignored.install()
        self.loop.call_soon(self._handle_early)

    def _handle_early(self) -> None:
        self._open = True
        early, self._early = self._early, []
        with contextlib.ExitStack() as all_of_them:  # whatever one raises
            for handle in reversed(early):
                all_of_them.callback(handle)

    def _when_open(self, handle: Callable[[], None]) -> None:
        if self._open:
            handle()
        else:
            self._early.append(handle)

    def _on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        self._when_open(lambda: self.runtime.on_push(topic, body))

    def _on_relayed(self, *messages: Any) -> None:
        self._when_open(lambda: self.runtime.peers.relayed(*messages))

    def _link_lost(self) -> None:
        # There may be no runtime yet.
        self._when_open(lambda: self.runtime.on_link_lost())  # noqa: PLW0108
        if self._on_lost is not None:
            self._on_lost()

    def close(self) -> None:
        """Close all sockets and end the I/O thread."""
        if self._ignored is not None:
            self._ignored.remove()
        self.runtime.peers.close()
        self.runtime.shared_memory.close()
        self.link.close()
        self.loop.stop()
