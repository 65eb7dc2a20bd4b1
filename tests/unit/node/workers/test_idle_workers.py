from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.node.workers.lifecycle import IdleWorkers, surplus

if TYPE_CHECKING:
    import pytest


def worker(exiting: str | None = None) -> Any:
    return types.SimpleNamespace(exiting=exiting, pool_key=("key",), job_id=b"job", idle_since=0.0)


def test_workers_that_were_asked_to_end_are_no_surplus() -> None:
    assert surplus([worker(), worker("planned"), worker(), worker("planned"), worker()], 2) == 1


def test_as_many_idle_workers_stay_as_the_soft_limit_says_though_others_end_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINIRAY_WORKER_IDLE", "0.01")
    config.cache_clear()
    workers = [worker() for _ in range(6)]

    def end(ending: Any) -> None:
        ending.exiting = "planned"  # it stays one of the node's until its process is gone

    async def scenario() -> list[Any]:
        idle = IdleWorkers(lambda: surplus(workers, 2), end)
        for each in workers:
            idle.add(each)
        while idle._timer is not None:  # another round follows
            await asyncio.sleep(0.001)
        return idle.all()

    try:
        assert asyncio.run(scenario()) == workers[4:]
    finally:
        monkeypatch.undo()
        config.cache_clear()
