"""What a worker group makes of the answers of its workers, without workers."""

from __future__ import annotations

import asyncio
import types

import pytest

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train import Backend, ScalingConfig
from miniray.train.base.exceptions import GroupStartError
from miniray.train.base.ranks import WorkerInfo
from miniray.train.controller import worker_group
from miniray.train.controller.worker_group import WorkerGroup, gather_workers
from miniray.train.worker.worker import TrainWorker


async def never():
    await asyncio.Event().wait()


async def dies():
    raise ActorDiedError(DeathCause.EXITED, exit_code=-9)


async def answers(value):
    return value


def test_answers_come_in_the_order_of_the_workers():
    async def late():
        await asyncio.sleep(0)
        return "late"

    assert asyncio.run(gather_workers([late(), answers("early")])) == ["late", "early"]


def test_a_worker_that_dies_is_named_while_others_still_wait_for_it(monkeypatch):
    monkeypatch.setattr(worker_group, "START_GRACE", 0.01)
    with pytest.raises(GroupStartError) as caught:
        asyncio.run(gather_workers([never(), answers(1), dies()]))
    assert list(caught.value.failures) == [2]
    assert "SIGKILL" in caught.value.failures[2].summary


def test_workers_that_fail_together_are_all_named():
    async def soon():
        await asyncio.sleep(0.01)
        await dies()

    with pytest.raises(GroupStartError) as caught:
        asyncio.run(gather_workers([dies(), soon()]))
    assert sorted(caught.value.failures) == [0, 1]


def test_an_error_that_is_no_workers_is_raised_as_it_is():
    async def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(gather_workers([answers(1), broken()]))


def test_a_wait_that_is_cancelled_leaves_no_task():
    async def scenario():
        waiting = asyncio.ensure_future(gather_workers([never(), never()]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(scenario()) == set()


def group(workers=2):
    scaling = ScalingConfig(num_workers=workers)
    spec = types.SimpleNamespace(scaling_config=scaling, backend=Backend())
    return WorkerGroup(spec, scaling.group)


def info(node, address, *gpus):
    return WorkerInfo(node, address, 5000, 1, {"GPU": list(gpus)} if gpus else {})


def test_each_rank_is_told_its_own_address_and_that_of_rank_0():
    first, second = group()._take_ranks([info("a", "10.0.0.1"), info("b", "10.0.0.2")], None, 1)
    assert [first.address, second.address] == ["10.0.0.1", "10.0.0.2"]
    assert {first.master_address, second.master_address} == {"10.0.0.1"}
    assert not first.shares_devices


def test_a_worker_listens_at_the_address_of_its_node(monkeypatch):
    place = types.SimpleNamespace(
        get_node_id=lambda: "b", get_worker_id=str, get_accelerator_ids=dict
    )
    monkeypatch.setattr("miniray.train.worker.worker.get_runtime_context", lambda: place)
    monkeypatch.setattr("miniray.train.worker.worker.output_of_this_process", str)
    worker = TrainWorker(Backend())
    told = worker.describe({"a": "127.0.0.1", "b": "127.0.0.2"})
    with worker._listener as listener:
        assert listener.getsockname() == ("127.0.0.2", told.port)
    assert told.address == "127.0.0.2"


def test_ranks_are_told_whether_they_share_a_device():
    members = group()._take_ranks([info("a", "10.0.0.1", "0"), info("a", "10.0.0.1", "0")], None, 1)
    assert [member.shares_devices for member in members] == [True, True]


def test_nodes_that_can_not_reach_each_other_end_the_start():
    with pytest.raises(GroupStartError) as caught:
        group()._take_ranks([info("a", "10.0.0.1"), info("b", "127.0.1.1")], None, 1)
    assert "--host" in caught.value.failures[0].summary


def test_a_group_that_looks_for_its_size_says_why_it_waits(monkeypatch):
    monkeypatch.setattr(worker_group.api, "cluster_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(worker_group.api, "available_resources", lambda: {"CPU": 1.0})
    assert "Waiting for the resources of 4 workers" in group((2, 4)).why_waiting()
