"""What a node tells a head that it comes back to, and what workers may tell their node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from miniray._proto import head_pb2
from miniray.common.specs import Allocation, CommandSpec, JobSpec
from miniray.messages.plain import Arguments
from miniray.node.membership import Membership, WorkerNotices
from miniray.node.workers.worker import NodeLease, Worker


class NextHead:
    """Welcomes a node, and keeps what that tells it first."""

    def __init__(self) -> None:
        self.news: list[head_pb2.FromNode] = []

    async def join(self, _member: Any, _timeout: float, news: Any) -> head_pb2.Welcome:
        self.news = news()
        return head_pb2.Welcome()

    def notify(self, method: str, *args: Any) -> None:
        """Take what it asks of every head."""


def command(number: int, *, ready: bool) -> NodeLease:
    """The lease of a command, which runs or is being started."""
    lease = NodeLease(
        number=number,
        epoch=1,
        owner=b"",
        job_id=b"job",
        job=JobSpec(),
        spec=CommandSpec(name="a", command=["true"], resources={}),
        allocation=Allocation("node"),
    )
    lease.worker = Worker(b"worker", (b"job",), pid=77, lease=lease, ready=ready)
    return lease


def test_the_next_head_is_told_which_commands_have_started() -> None:
    leases = {number: command(number, ready=number == 1) for number in (1, 2)}
    head = NextHead()
    parts: dict[str, Any] = {
        "config": None,
        "head": head,
        "clients": SimpleNamespace(clients={}),
        "pool": SimpleNamespace(leases=leases, jobs=set),
        "relay": None,
        "adopted": SimpleNamespace(actors=()),
        "events": SimpleNamespace(jobs=set),
    }
    asyncio.run(Membership(**parts).rejoin(1.0))
    started = [message.lease_started for message in head.news]
    assert [(each.lease, each.pid) for each in started] == [(1, 77)]


def test_a_worker_that_leaves_has_the_usual_time_for_it_and_cannot_ask_for_another() -> None:
    given: list[Any] = []

    def kill_later(worker: str, grace: float | None = None) -> None:
        given.append((worker, grace))

    ends = SimpleNamespace(finishing=None, kill_later=kill_later)
    pool: Any = SimpleNamespace(ready=None, ends=ends, workers={b"w": "its worker"})
    clients: Any = SimpleNamespace(notices={})
    head: Any = None
    WorkerNotices(clients, pool, head)
    leaving = clients.notices["leaving"]
    Arguments(leaving, 1).check(())
    leaving(SimpleNamespace(process_id=b"w"))
    leaving(SimpleNamespace(process_id=b"a driver"))
    assert given == [("its worker", None)]
    with pytest.raises(ValueError, match="1 arguments were given"):
        Arguments(leaving, 1).check((1e9,))
