"""Heads of one cluster, one after another, and what daemons tell them of what runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, report

from miniray._proto import head_pb2
from miniray.head.storage import SqliteStorage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.common.specs import GrantedLease
    from miniray.head.storage import Saved

ARGUMENTS = (0, b"args", ())
GPU = {"resources": {"GPU": 1}, "placement_resources": {"GPU": 1, "CPU": 1}}


class Restarts:
    """Heads of one cluster, one after another, over one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.saved: Saved

    def run(self, use: Callable[[FakeCluster], None]) -> None:
        """What one head does until it ends without a word."""

        async def life() -> None:
            storage = SqliteStorage(self._path)
            self.saved = storage.start("first")
            cluster = FakeCluster(storage, self.saved.epoch)
            cluster.head.recovery.restore(self.saved)
            use(cluster)
            await storage.close()

        asyncio.run(life())


class Running:
    """What a daemon has running, as it tells a new head."""

    def __init__(self, start: GrantedLease, process_id: bytes = b"") -> None:
        self.report = report(start, process_id)


def make_actor(daemon: FakeDaemon, owner: bytes, **spec: Any) -> tuple[bytes, Running]:
    """An actor that lives; what its daemon would report of it."""
    id = owner + new_id()
    daemon.notice(owner, "create_actor", id, actor_spec(**spec), False)
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    start = daemon.one("start_actor")
    process_id = daemon.worker(owner)
    daemon.tell(
        actor=head_pb2.ActorReported(actor_id=id, lease=start.number, process_id=process_id)
    )
    return id, Running(start, process_id)


def attach(daemon: FakeDaemon, process_id: bytes) -> None:
    daemon.tell(
        attached=head_pb2.ProcessAttached(process_id=process_id, driver=True, job_id=process_id)
    )
