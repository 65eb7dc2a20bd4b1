"""What the worker pool tells its daemon, and asks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from miniray.node.workers.worker import NodeLease, Worker


class WorkerEvents(Protocol):
    """What the pool tells the daemon."""

    def lease_started(self, lease: NodeLease, worker: Worker) -> None:
        """A task lease has its worker."""

    def lease_failed(self, lease: NodeLease, error: BaseException, tries: int) -> None:
        """A lease cannot have a worker; it is over. ``tries`` such failures in a row are final."""

    def lease_ended(self, lease: NodeLease) -> None:
        """What a lease held is free."""

    def worker_exited(self, worker: Worker) -> None:
        """A worker process and its children are gone, or given up; the pool still knows it."""

    def worker_ended(self, worker: Worker, exit_code: int | None) -> None:
        """The pool has forgotten a worker that is gone, or given up."""

    def quarantines_changed(self) -> None:
        """Other workers than before are given up and not gone, or other processes of one."""

    def worker_gone(self, worker: Worker, exit_code: int) -> None:
        """A worker that was given up is gone after all."""

    def push(self, process_id: bytes, topic: str, body: tuple[Any, ...]) -> None:
        """Tell a connected process something."""

    def output(self, worker: Worker, is_stderr: bool, lines: list[Any]) -> None:
        """A worker printed lines."""

    def fetch_blob(self, uri: str) -> Awaitable[bytes]:
        """A package that a runtime environment names."""
