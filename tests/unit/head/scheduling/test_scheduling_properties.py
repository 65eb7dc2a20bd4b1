"""Properties that hold after any sequence of requests."""

from __future__ import annotations

import collections
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.common.amounts import UNIT, parse_needs
from miniray.common.specs import Allocation, BundleAffinity, NodeAffinity, Placement, Spread
from miniray.head.scheduling.bundles import GroupPlacement, plan
from miniray.head.scheduling.demands import Decisions, Demand, LeaseRequest
from miniray.head.scheduling.resources import ResourcePool, node_pool
from miniray.head.scheduling.scheduler import ClusterScheduler

SHAPES: list[dict[str, float]] = [
    {"CPU": 1},
    {"CPU": 0.5},
    {"CPU": 3},
    {},
    {"GPU": 0.25},
    {"CPU": 1, "GPU": 0.18},
    {"GPU": 0.6},
    {"CPU": 1, "GPU": 1},
    {"GPU": 2},
    {"TPU": 1},
    {"TPU": 2},
    {"CPU": 1, "TPU": 4},
    {"CPU": 1, "licence": 1},
    {"FPGA": 1},
]
BUNDLES: list[list[dict[str, float]]] = [
    [{"CPU": 1}, {"CPU": 1}],
    [{"GPU": 1, "CPU": 1}, {"GPU": 0.5}],
    [{"GPU": 0.6}],
    [{"CPU": 2, "licence": 1}],
    [{"TPU": 2}, {"TPU": 1}],
]
STRATEGIES = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
amounts = st.one_of(st.sampled_from([0.1, 0.18, 0.25, 0.5, 0.6, 1.0]), st.integers(1, 4))


def make_node(number: int) -> ResourcePool:
    devices = {"GPU": ["0", "1", "2"], "TPU": ["0", "1", "2", "3"]} if number % 3 else {}
    return node_pool(f"{number:032x}", {"CPU": 4, "licence": 2}, devices)


class World:
    """A scheduler that is driven at random, and what an observer knows from its answers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = ClusterScheduler(reserve_after=20.0)
        #: Share of the demands that are of actors.
        self.actors = (0.0, 0.5, 1.0)[seed % 3]
        self.now = 0.0
        self.count = 0
        self.demands: dict[bytes, Demand] = {}
        self.held: dict[bytes, Allocation] = {}
        self.blocked: set[bytes] = set()
        self.groups: dict[bytes, GroupPlacement] = {}
        self.nodes: set[int] = set()

    def step(self) -> None:
        self.now += 1.0
        eager = len(self.scheduler.waiting()) < 25
        actions = [self.submit] * (20 if eager else 4) + [self.release] * 6 + [self.block] * 3
        actions += [self.cancel, self.advance, self.join, self.leave, self.quarantine, self.empty]
        actions += [self.create_group, self.remove_group]
        self.random.choice(actions)()

    def note(self, out: Decisions) -> None:
        for grant in out.grants:
            assert grant.lease_id not in self.held
            self.held[grant.lease_id] = grant.allocation
        for gone in (*out.lost, *(failure.lease_id for failure in out.failures)):
            self.held.pop(gone, None)
            self.demands.pop(gone, None)
            self.blocked.discard(gone)
        for lease_id in out.to_end:
            self.end(lease_id)

    def placement(self) -> Placement:
        kind = self.random.randrange(8)
        if kind == 0:
            return Spread()
        if kind == 1 and self.nodes:
            number = self.random.choice(sorted(self.nodes))
            return NodeAffinity(f"{number:032x}", soft=self.random.random() < 0.5)
        if kind == 2 and self.groups:
            return BundleAffinity(self.random.choice(sorted(self.groups)), -1)
        return None

    def submit(self) -> None:
        self.count += 1
        demand = Demand.of(
            self.random.choice(SHAPES),
            placement=self.placement(),
            lasting=self.random.random() < self.actors,
        )
        lease_id = self.count
        self.demands[lease_id] = demand
        self.note(self.scheduler.submit(LeaseRequest(lease_id, demand), self.now))

    def end(self, lease_id: int) -> None:
        self.held.pop(lease_id, None)
        self.demands.pop(lease_id, None)
        self.blocked.discard(lease_id)
        self.note(self.scheduler.release(lease_id, self.now))

    def release(self) -> None:
        if self.held:
            self.end(self.random.choice(sorted(self.held)))

    def block(self) -> None:
        if self.blocked and self.random.random() < 0.5:
            lease_id = self.blocked.pop()
            self.scheduler.take_cpu(lease_id)
        elif self.held:
            lease_id = self.random.choice(sorted(self.held))
            self.blocked.add(lease_id)
            self.note(self.scheduler.release_cpu(lease_id, self.now))

    def empty(self) -> None:
        if self.held:
            lease_id = self.random.choice(sorted(self.held))
            self.blocked.discard(lease_id)
            self.held[lease_id] = self.held[lease_id].emptied()
            self.note(self.scheduler.empty_lease(lease_id, self.now))

    def cancel(self) -> None:
        waiting = self.scheduler.waiting()
        if waiting:
            lease_id = self.random.choice(waiting)
            del self.demands[lease_id]
            self.note(self.scheduler.cancel(lease_id, self.now))

    def advance(self) -> None:
        self.note(self.scheduler.advance(self.now))

    def join(self) -> None:
        absent = sorted(set(range(8)) - self.nodes)
        if absent:
            number = self.random.choice(absent)
            self.nodes.add(number)
            self.note(self.scheduler.add_node(make_node(number), self.now))

    def leave(self) -> None:
        if len(self.nodes) > 4:
            number = self.random.choice(sorted(self.nodes))
            self.nodes.remove(number)
            self.note(self.scheduler.remove_node(f"{number:032x}", self.now))

    def create_group(self) -> None:
        if len(self.groups) < 6:
            self.count += 1
            state = GroupPlacement.of(
                b"g%d" % self.count,
                self.random.choice(BUNDLES),
                self.random.choice(STRATEGIES),
            )
            self.groups[state.group_id] = state
            self.note(self.scheduler.create_group(state, self.now))

    def remove_group(self) -> None:
        if self.groups:
            group_id = self.random.choice(sorted(self.groups))
            del self.groups[group_id]
            self.note(self.scheduler.remove_group(group_id, self.now))

    def quarantine(self) -> None:
        if self.nodes:
            node_id = f"{self.random.choice(sorted(self.nodes)):032x}"
            device, back = self.random.choice("012"), self.random.random() < 0.7
            self.note(self.scheduler.set_device_in_service(node_id, "GPU", device, back, self.now))

    # --- what must hold --------------------------------------------------------------
    def check_devices(self) -> None:
        """No device is held beyond its capacity, so none holds a 1.0 and a 0.25 at once."""
        used: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for allocation in self.held.values():
            for name, shares in allocation.devices:
                for id, units in shares:
                    used[allocation.node_id, name, id] += units
        assert all(units <= UNIT for units in used.values())
        for allocation in self.held.values():
            chips = [int(id) for id in allocation.device_ids("TPU")]
            if chips:
                assert chips == [*range(chips[0], chips[0] + len(chips))]
                assert chips[0] % len(chips) == 0

    def check_sums(self) -> None:
        """What is free and what is held is what there is, on every node and in every bundle."""
        pools = dict(self.scheduler.nodes.items())
        held: dict[object, list[Allocation]] = collections.defaultdict(list)
        for lease_id, allocation in self.held.items():
            if lease_id in self.blocked:
                kept = tuple(pair for pair in allocation.scalars if pair[0] != "CPU")
                allocation = allocation._replace(scalars=kept)
            held[allocation.bundle or allocation.node_id].append(allocation)
        for state in self.groups.values():
            for index, allocation in state.allocations.items():
                held[allocation.node_id].append(allocation)
                self.check_bundle((state.group_id, index), allocation, held)
        for node_id, pool in pools.items():
            for name, total in pool.total.items():
                taken = sum(dict(each.scalars).get(name, 0) for each in held[node_id])
                assert pool.free[name] == total - taken
            for name, devices in pool.devices.items():
                taken_of = collections.Counter[str]()
                for each in held[node_id]:
                    taken_of.update(dict(dict(each.devices).get(name, ())))
                out = {id: UNIT * (id in devices.out) for id in devices.ids}
                assert devices.free == [UNIT - taken_of[id] - out[id] for id in devices.ids]

    def check_bundle(
        self,
        key: tuple[bytes, int],
        reserved: Allocation,
        held: dict[object, list[Allocation]],
    ) -> None:
        """Leases in a bundle keep to the devices and the node that it reserved."""
        for allocation in held[key]:
            assert allocation.node_id == reserved.node_id
            for name, _ in allocation.devices:
                assert set(allocation.device_ids(name)) <= set(reserved.device_ids(name))
        for name, shares in reserved.devices:
            used = collections.Counter[str]()
            for allocation in held[key]:
                used.update(dict(dict(allocation.devices).get(name, ())))
            assert all(used[id] <= units for id, units in shares)

    def check_nothing_that_fits_waits(self) -> None:
        for lease_id in self.scheduler.waiting():
            demand = self.demands[lease_id]
            if isinstance(demand.placement, BundleAffinity):
                continue
            placement = demand.placement
            for node_id, pool in self.scheduler.nodes.items():
                if isinstance(placement, NodeAffinity) and placement.node_id != node_id:
                    wanted = self.scheduler.nodes.get(placement.node_id)
                    waits = wanted is not None and wanted.could_fit(demand.placing)
                    if not placement.soft or (waits and not wanted.closed):
                        continue
                assert not pool.admits(None, demand.placing)
        for state in self.groups.values():
            if state.missing and not any(
                pool.reservation is not None for pool in self.scheduler.nodes.values()
            ):
                assert plan(state, self.scheduler.nodes.values(), None) is None


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_held_twice_or_lost_or_kept_waiting_through_4000_random_steps(
    seed: int,
) -> None:
    world = World(seed)
    for step in range(1000):
        world.step()
        world.check_devices()
        if step % 5 == 0:
            world.check_sums()
            world.check_nothing_that_fits_waits()


@pytest.mark.parametrize("seed", range(3))
def test_when_everything_has_ended_everything_is_free(seed: int) -> None:
    world = World(seed)
    for _ in range(500):
        world.step()
    for group_id in sorted(world.groups):
        del world.groups[group_id]
        world.note(world.scheduler.remove_group(group_id, world.now))
    for lease_id in world.scheduler.waiting():
        world.note(world.scheduler.cancel(lease_id, world.now))
    while world.held:
        world.release()

    for pool in world.scheduler.nodes.values():
        assert pool.free == pool.total
        assert pool.load == 0
        assert not pool.leases
        assert pool.reservation is None
        assert all(
            free == (0 if id in devices.out else UNIT)
            for devices in pool.devices.values()
            for id, free in zip(devices.ids, devices.free, strict=True)
        )


@given(st.lists(st.tuples(amounts, st.booleans()), max_size=30))
def test_release_undoes_allocate(steps: list[tuple[float, bool]]) -> None:
    node = node_pool("ab", {"CPU": 16}, {"GPU": [str(number) for number in range(8)]})
    held: list[tuple[Allocation, dict[str, int], list[int]]] = []
    for amount, release_last in steps:
        needs = parse_needs({"CPU": 0.5, "GPU": amount})
        before = dict(node.free), list(node.devices["GPU"].free)
        if node.fits(needs):
            allocation = node.allocate(needs)
            assert min(node.devices["GPU"].free) >= 0
            held.append((allocation, *before))
        if release_last and held:
            allocation, free, devices = held.pop()
            node.release(allocation)
            assert (node.free, node.devices["GPU"].free) == (free, devices)


@given(
    st.lists(st.lists(amounts, min_size=1, max_size=4), min_size=1, max_size=6),
    st.sampled_from(STRATEGIES),
    st.integers(1, 4),
)
def test_a_group_is_placed_whole_or_not_at_all(
    bundles: list[list[float]], strategy: str, count: int
) -> None:
    nodes = [node_pool(f"{n:032x}", {"CPU": 4}, {"GPU": ["0", "1"]}) for n in range(count)]
    named = [{"CPU": 1, "GPU": shares[0]} for shares in bundles]
    state = GroupPlacement.of(b"group", named, strategy)
    made = plan(state, nodes, None)

    if made is None:
        assert all(node.free == node.total for node in nodes)
        assert all(node.devices["GPU"].free == [UNIT, UNIT] for node in nodes)
        return
    assert sorted(made) == list(range(len(bundles)))
    used = [allocation.node_id for _, allocation in made.values()]
    if strategy == "STRICT_PACK":
        assert len(set(used)) == 1
    if strategy == "STRICT_SPREAD":
        assert len(set(used)) == len(used)
    for pool, allocation in made.values():
        pool.release(allocation)
    assert all(node.devices["GPU"].free == [UNIT, UNIT] for node in nodes)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["CPU", "GPU", "memory"]), st.integers(1, 5), max_size=3),
        max_size=30,
    )
)
def test_freed_room_goes_to_those_that_fit_in_order_of_arrival(
    wanted: list[dict[str, float]],
) -> None:
    scheduler = ClusterScheduler()
    has: dict[str, float] = {"CPU": 8, "memory": 9}
    scheduler.add_node(node_pool("ab", has, {"GPU": ["0", "1", "2", "3"]}), 0.0)
    left = has | {"GPU": 4.0}
    assert scheduler.submit(LeaseRequest(b"all", Demand.of(left)), 0.0).grants
    expected = []
    for number, resources in enumerate(wanted):
        id = b"%d" % number
        granted = scheduler.submit(LeaseRequest(id, Demand.of(resources)), 0.0).grants
        assert bool(granted) == (not resources)
        if not granted and all(left[name] >= amount for name, amount in resources.items()):
            expected.append(id)
            left = {name: left[name] - resources.get(name, 0) for name in left}

    out = scheduler.release(b"all", 0.0)

    assert [grant.lease_id for grant in out.grants] == expected


@given(st.lists(st.sampled_from([0.25, 0.5]), min_size=1, max_size=60), st.integers(1, 4))
def test_shares_that_divide_a_device_are_placed_while_their_sum_fits(
    shares: list[float], count: int
) -> None:
    scheduler = ClusterScheduler()
    for number in range(count):
        scheduler.add_node(node_pool(f"{number:032x}", {}, {"GPU": ["0", "1", "2"]}), 0.0)
    ordered = sorted(shares, reverse=True)
    placed = 0.0
    for number, share in enumerate(ordered):
        request = LeaseRequest(b"%d" % number, Demand.of({"GPU": share}))
        if scheduler.submit(request, 0.0).grants:
            placed += share
        else:
            assert placed + share > 3 * count
