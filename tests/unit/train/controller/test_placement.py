"""Which size a group gets, with a head that answers at once; and what it is told to wait for."""

from __future__ import annotations

import asyncio

import pytest

from miniray.train import ScalingConfig
from miniray.train.controller import placement
from miniray.train.controller.placement import Fit, Growth, explain, largest_reservation


class Nodes:
    """A cluster with slots for workers, some of them held by others."""

    def __init__(self, slots, held=0):
        self.slots = slots
        self.held = held
        self.asked = []
        self.open = []
        self.changed = asyncio.Event()

    def ask(self, size):
        made = FakeReservation(self, size)
        self.asked.append(size)
        self.open.append(made)
        return made

    def set_held(self, held):
        self.held = held
        self.changed.set()


class FakeReservation:
    def __init__(self, nodes, size):
        self.nodes = nodes
        self.size = size

    async def ready(self):
        while self.fit() is not Fit.NOW:
            await self.nodes.changed.wait()
            self.nodes.changed.clear()

    def fit(self):
        if self.size > self.nodes.slots:
            return Fit.NEVER
        return Fit.NOW if self.size <= self.nodes.slots - self.nodes.held else Fit.BUSY

    def remove(self):
        self.nodes.open.remove(self)


@pytest.fixture(autouse=True)
def short_settling(monkeypatch):
    monkeypatch.setattr(placement, "SETTLE_TIMEOUT", 0.05)


def place(sizes, slots, held=0, then=None):
    async def scenario():
        nodes = Nodes(slots, held)
        if then is not None:
            asyncio.get_running_loop().call_later(0.01, nodes.set_held, then)
        waited = []
        found = await asyncio.wait_for(largest_reservation(nodes.ask, sizes, waited.append), 10)
        assert nodes.open == [found], "room that is not used was kept"
        assert waited[-1] is found
        return found.size, nodes

    return asyncio.run(scenario())


@pytest.mark.parametrize("slots", range(2, 12))
def test_a_group_takes_the_largest_size_that_fits(slots):
    size, _ = place(range(2, 9), slots)
    assert size == min(slots, 8)


@pytest.mark.parametrize("held", range(6))
def test_room_that_others_keep_is_not_waited_for(held):
    assert place(range(2, 9), 8, held)[0] == 8 - held


def test_room_that_is_free_in_a_moment_is_waited_for():
    assert place(range(1, 5), 4, held=4, then=0)[0] == 4


def test_room_that_is_lost_as_soon_as_it_was_there_is_not_waited_for_again():
    class Once(FakeReservation):
        async def ready(self):
            await super().ready()
            self.nodes.slots = 1  # its node dies

    async def scenario():
        nodes = Nodes(2)

        def ask(size):
            nodes.open.append(Once(nodes, size))
            return nodes.open[-1]

        found = await asyncio.wait_for(largest_reservation(ask, range(1, 3), lambda _: None), 10)
        return found.size

    # What follows from the loss is found when the workers start.
    assert asyncio.run(scenario()) == 2


def test_the_largest_size_is_asked_for_first():
    _, nodes = place(range(1, 1001), 2000)
    assert nodes.asked == [1000, 1000]


def test_few_questions_find_the_size_among_many():
    size, nodes = place(range(1, 1001), 700, held=100)
    assert size == 600
    assert len(nodes.asked) < 30


def test_below_the_least_a_group_waits_until_it_fits():
    async def scenario():
        nodes = Nodes(1)
        placing = asyncio.ensure_future(largest_reservation(nodes.ask, range(2, 5), lambda _: None))
        await asyncio.sleep(0)
        done, _ = await asyncio.wait({placing}, timeout=0.2)
        assert not done
        nodes.slots = 2
        nodes.changed.set()
        return (await placing).size

    assert asyncio.run(scenario()) == 2


def test_sizes_are_whole_steps():
    assert place(range(2, 9, 2), 7)[0] == 6


def test_more_room_is_asked_for_one_worker_after_the_other_and_given_back():
    async def scenario():
        growth = Growth(ScalingConfig(num_workers=(1, 3)).group, 0)
        growth.begin(1, lambda _: nodes.ask(1))
        while nodes.asked != [1]:
            await asyncio.sleep(0)
        assert not growth.at_checkpoint()
        nodes.set_held(0)
        while nodes.asked != [1, 1]:
            await asyncio.sleep(0)
        assert growth.at_checkpoint()
        await growth.end()
        assert nodes.open == []

    nodes = Nodes(1, held=1)
    asyncio.run(scenario())


def test_room_to_grow_is_given_back_whole_although_that_is_cancelled():
    async def scenario():
        growth = Growth(ScalingConfig(num_workers=(1, 4)).group, 0)
        growth.begin(1, lambda _: nodes.ask(1))
        while len(nodes.open) < 3:
            await asyncio.sleep(0)
        ending = asyncio.ensure_future(growth.end())
        while len(nodes.open) == 3:
            await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait([ending])
        await growth.end()
        assert nodes.open == []

    nodes = Nodes(1)
    asyncio.run(scenario())


def test_a_search_that_is_cancelled_as_its_room_is_there_ends():
    async def scenario():
        nodes = Nodes(2, held=2)
        search = asyncio.ensure_future(largest_reservation(nodes.ask, [1, 2], lambda _: None))
        while not nodes.open or nodes.open[-1].size != 2 or len(nodes.asked) < 2:
            await asyncio.sleep(0)
        nodes.set_held(0)
        await asyncio.sleep(0)  # it is placed, and the search does not know
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    asyncio.run(scenario())


def test_an_elastic_group_grows_by_whole_slices_up_to_the_most():
    group = ScalingConfig(
        num_workers=(2, 6), use_tpu=True, topology="2x2x2", accelerator_type="TPU-V4"
    ).group
    assert (group.least, group.num_workers, group.step) == (2, 6, 2)
    assert group.wanted(2) == 4
    assert group.grown(2, 1) is None
    assert group.grown(2, 3).num_workers == 4
    assert group.grown(4, 9).num_workers == 6
    assert group.wanted(6) == 0


def test_a_group_of_a_fixed_size_does_not_grow():
    assert ScalingConfig(num_workers=2).group.wanted(1) == 0


def test_what_a_group_waits_for_is_told_with_how_much_is_short():
    text = explain(4, {"CPU": 2.0, "GPU": 0.5}, {"CPU": 16, "GPU": 2}, {"CPU": 5, "GPU": 2}, "busy")
    assert text == (
        "Waiting for the resources of 4 workers with {'CPU': 2.0, 'GPU': 0.5} each. "
        "CPU is short by 3: 8 are needed, 5 of the cluster's 16 are free. "
        "The scheduler says: busy."
    )


def test_a_resource_that_the_cluster_does_not_have_is_short_by_all_of_it():
    assert "GPU is short by 2: 2 are needed, 0 of the cluster's 0 are free." in explain(
        2, {"GPU": 1.0}, {"CPU": 4}, {"CPU": 4}
    )


def test_an_accelerator_type_that_no_node_has_is_named():
    resources = {"GPU": 1.0, "accelerator_type:A100": 0.001}
    text = explain(1, resources, {"GPU": 1}, {"GPU": 1})
    assert "No node has the accelerator type A100." in text
    assert "short" not in text
