"""Attaching a process to its node's daemon: the I/O thread, the link and the runtime."""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.client.cluster_runtime import ClusterRuntime
from miniray.objects.ignored_signals import IgnoredSignals
from miniray.wire.io_loop import IOLoop
from miniray.wire.node_link import NodeLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.logs.log_thread import LogThread


class Attachment:
    """A runtime with the link and loop under it."""

    def __init__(
        self,
        node_socket: str,
        key: bytes,
        process_id: bytes,
        role: str,
        job_id: bytes,
        details: dict[str, Any],
        *,
        timeout: float,
        on_shutdown: Callable[[Attachment], None],
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._early: list[tuple[str, tuple[Any, ...]]] = []
        self._early_relayed: list[tuple[bytes, bytes, list[bytes]]] = []
        self._lock = threading.Lock()
        self._runtime: ClusterRuntime | None = None
        self._on_lost = on_lost
        #: Prints what workers print and the head warns of, in a driver.
        self.log_thread: LogThread | None = None
        self.loop = IOLoop()
        self._ignored = IgnoredSignals(self.loop) if role == "driver" else None
        self.loop.start()
        try:
            self.link = NodeLink(
                node_socket,
                self.loop,
                key,
                (process_id, role, os.getpid(), job_id, details),
                on_push=self._on_push,
                on_relayed=self._on_relayed,
                on_lost=self._link_lost,
            )
            self.welcome = self.link.wait_welcome(timeout)
        except BaseException:
            self.loop.stop()
            raise
        self.facts = context.ProcessFacts()
        self.facts.job_id = job_id
        self.facts.address = self.welcome["address"]
        self.facts.session_dir = self.welcome["session_dir"]
        self.runtime = ClusterRuntime(
            loop=self.loop,
            link=self.link,
            process_id=process_id,
            node_id=self.welcome["node_id"],
            facts=self.facts,
            on_shutdown=lambda: on_shutdown(self),
        )

    def open(self) -> None:
        """Begin to handle pushes: the runtime's handlers are complete."""
        if self._ignored is not None:
            self._ignored.install()
        with self._lock:
            self._runtime = self.runtime
            early, self._early = self._early, []
            relayed, self._early_relayed = self._early_relayed, []
        on_push, on_relayed = self.runtime.on_push, self.runtime.peers.relayed
        for push in early:
            self.loop.call_soon(functools.partial(on_push, *push))
        for message in relayed:
            self.loop.call_soon(functools.partial(on_relayed, *message))
        if self.link.lost:
            self.runtime.on_link_lost()

    def _on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        with self._lock:
            runtime = self._runtime
            if runtime is None:
                self._early.append((topic, body))
                return
        runtime.on_push(topic, body)

    def _on_relayed(self, node_id: bytes, process_id: bytes, messages: list[bytes]) -> None:
        with self._lock:
            runtime = self._runtime
            if runtime is None:
                self._early_relayed.append((node_id, process_id, messages))
                return
        runtime.peers.relayed(node_id, process_id, messages)

    def _link_lost(self) -> None:
        if self._runtime is not None:
            self._runtime.on_link_lost()
        if self._on_lost is not None:
            self._on_lost()

    def drain_logs(self) -> None:
        """Print what is still to be printed."""
        if self.log_thread is not None:
            self.log_thread.close()

    def close(self) -> None:
        """Close all sockets and end the I/O thread."""
        if self._ignored is not None:
            self._ignored.remove()
        self.runtime.close_sockets()
        self.runtime.shared_memory.close()
        self.link.close()
        self.loop.stop()
