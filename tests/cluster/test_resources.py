"""The resource table with real processes: who gets which device, when it is free again, and
which worker runs what."""

from __future__ import annotations

import collections
import os
import random
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from running_cluster import running_cluster

import miniray
from miniray.exceptions import ActorUnschedulableError, RayActorError, TaskUnschedulableError
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

GPUS = 8
MIB = 1024 * 1024


class Place(NamedTuple):
    node: str
    devices: tuple[str, ...]
    pid: int


def here() -> Place:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = tuple(filter(None, visible.split(",")))
    return Place(miniray.get_runtime_context().get_node_id(), devices, os.getpid())


@miniray.remote(num_cpus=0)
class Holder:
    """Holds what it was given."""

    def place(self) -> Place:
        return here()

    def crash(self) -> None:
        os._exit(1)

    def start_child(self) -> int:
        """Start a process in a session of its own that ignores requests to end."""
        return subprocess.Popen(
            ["sh", "-c", "trap '' TERM HUP INT; exec sleep 1000"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).pid


@miniray.remote
def task() -> Place:
    return here()


@miniray.remote(max_calls=0)
def task_without_limit() -> Place:
    return here()


@miniray.remote(max_calls=3)
def task_with_limit() -> Place:
    return here()


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes of eight logical GPUs each."""
    arguments: dict[str, Any] = {"num_cpus": 4, "num_gpus": GPUS, "memory": 1024 * MIB}
    with running_cluster(
        arguments,
        {
            **arguments,
            "resources": {"custom": 2, "accelerator_type:A100": 1},
            "labels": {"zone": "b"},
        },
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _everything_is_given_back() -> Iterator[None]:
    total = miniray.cluster_resources()
    yield
    # A node that a test had for itself is gone a moment after it was removed.
    wait_until(lambda: miniray.cluster_resources() == total == miniray.available_resources())


def taken(places: list[Place], amount: float) -> dict[tuple[str, str], float]:
    """Use of each device if every place is of an actor with this amount of GPU."""
    use: collections.Counter[tuple[str, str]] = collections.Counter()
    for place in places:
        for device in place.devices:
            use[place.node, device] += round(min(amount, 1.0) * 10_000)
    return {device: units / 10_000 for device, units in use.items()}


# --- fractions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "amount"), [(48, 0.3), (10, 0.6)])
def test_fractional_gpus_that_fit_are_placed_on_several_nodes(count: int, amount: float) -> None:
    holders = [Holder.options(num_gpus=amount).remote() for _ in range(count)]
    places = miniray.get([holder.place.remote() for holder in holders], timeout=50)
    assert all(len(place.devices) == 1 for place in places)
    use = taken(places, amount)
    assert max(use.values()) <= 1
    # As few devices as can be: an opened one is filled before the next.
    assert len(use) == -(-count // int(1 / amount))


class Ledger:
    """What living actors hold, from what they say of themselves."""

    def __init__(self, nodes: list[str]) -> None:
        self.free = {(node, str(device)): 10_000 for node in nodes for device in range(GPUS)}
        self.actors: list[tuple[Any, Place, int]] = []

    def fits(self, units: int) -> bool:
        if units <= 10_000:
            return max(self.free.values()) >= units
        whole = collections.Counter(node for (node, _), free in self.free.items() if free == 10_000)
        return any(count * 10_000 >= units for count in whole.values())

    def enter(self, actor: Any, place: Place, units: int) -> None:
        self.actors.append((actor, place, units))
        self._add(place, -units)
        assert min(self.free.values()) >= 0, f"{place} was given beyond a device's capacity"

    def remove(self, index: int) -> tuple[Any, Place]:
        actor, place, units = self.actors.pop(index)
        self._add(place, units)
        return actor, place

    def _add(self, place: Place, units: int) -> None:
        for device in place.devices:
            self.free[place.node, device] += units // len(place.devices)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_a_whole_device_is_never_shared_with_a_fraction_of_it(nodes: Cluster, steps: int) -> None:
    """Each actor that is placed tells which devices it sees."""
    ledger = Ledger([node.node_id for node in nodes.list_all_nodes()])
    random_ = random.Random(7)
    dead: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    for _ in range(steps):
        amount = random_.choice([0.25, 0.25, 0.4, 1.0, 1.0, 2.0])
        units = round(amount * 10_000)
        if ledger.actors and (random_.random() < 0.45 or not ledger.fits(units)):
            actor, place = ledger.remove(random_.randrange(len(ledger.actors)))
            for device in place.devices:
                dead[place.node, device].add(place.pid)
            miniray.kill(actor)
        elif ledger.fits(units):
            actor = Holder.options(num_gpus=amount).remote()
            place = miniray.get(actor.place.remote(), timeout=30)
            assert len(place.devices) == max(1, int(amount))
            ledger.enter(actor, place, units)
    assert sum(map(len, dead.values())) > 20


@pytest.mark.parametrize("amount", [1.25, 2.5])
def test_two_actors_cannot_ask_for_parts_of_one_device_beyond_a_whole_one(amount: float) -> None:
    with pytest.raises(ValueError, match=f"num_gpus.*{amount}"):
        Holder.options(num_gpus=amount)


def test_devices_of_bundles_are_not_mixed_up() -> None:
    """Two halves in each bundle of one GPU, beside shares that others hold."""
    others = [Holder.options(num_gpus=0.3).remote() for _ in range(3)]
    groups = [placement_group([{"GPU": 1}] * 3, strategy="SPREAD") for _ in range(2)]
    assert all(group.wait(30) for group in groups)
    halves = [
        Holder.options(
            num_gpus=0.5,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote()
        for group in groups
        for index in (0, 1, 2)
        for _ in range(2)
    ]
    places = miniray.get([half.place.remote() for half in halves], timeout=50)
    bundles = [(place.node, place.devices) for place in places]
    assert bundles[::2] == bundles[1::2]
    assert len(set(bundles)) == 6
    shared = miniray.get([other.place.remote() for other in others], timeout=50)
    assert not {(place.node, place.devices) for place in shared} & set(bundles)
    for group in groups:
        remove_placement_group(group)


# --- when a device is free again -------------------------------------------------------------


@pytest.fixture
def one_device(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Options that place on a node whose environment restricts it to the device "5"."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    node = nodes.add_node(num_cpus=1, num_gpus=1, resources={"restricted": 10})
    yield {"num_cpus": 0, "num_gpus": 1, "resources": {"restricted": 1}}
    nodes.remove_node(node)


def test_a_device_of_a_dead_actor_is_used_again_on_a_node_restricted_to_it(
    one_device: dict[str, Any],
) -> None:
    for end in ("crash", "kill", "out of scope"):
        holder = Holder.options(**one_device).remote()
        assert miniray.get(holder.place.remote(), timeout=30).devices == ("5",)
        if end == "crash":
            with pytest.raises(RayActorError):
                miniray.get(holder.crash.remote())
        elif end == "kill":
            miniray.kill(holder)
        del holder
    assert miniray.get(task.options(**one_device).remote(), timeout=30).devices == ("5",)


def test_a_device_is_handed_out_after_its_process_and_that_ones_children_are_gone(
    one_device: dict[str, Any],
) -> None:
    first = Holder.options(**one_device).remote()
    pid = miniray.get(first.place.remote()).pid
    child = miniray.get(first.start_child.remote())
    assert is_alive(child)

    @miniray.remote
    class Next:
        def __init__(self, pids: list[int]) -> None:
            self.alive = [pid for pid in pids if is_alive(pid)]

        def left(self) -> list[int]:
            return self.alive

    waiting = Next.options(**one_device).remote([pid, child])
    left = waiting.left.remote()
    assert miniray.wait([left], timeout=0.2)[0] == []
    miniray.kill(first)
    assert miniray.get(left, timeout=30) == []


def test_a_task_that_had_a_device_ends_its_worker(one_device: dict[str, Any]) -> None:
    places = miniray.get([task.options(**one_device).remote() for _ in range(3)], timeout=30)
    assert len({place.pid for place in places}) == 3
    wait_until(lambda: not any(is_alive(place.pid) for place in places))


def test_with_max_calls_of_zero_a_worker_with_a_device_is_used_again(
    one_device: dict[str, Any],
) -> None:
    kept = task_without_limit.options(**one_device)
    first = miniray.get(kept.remote(), timeout=30)
    wait_until(lambda: miniray.available_resources().get("GPU") == 2 * GPUS + 1)
    assert miniray.get(kept.remote(), timeout=30) == first
    # Who gets the device next has it for itself.
    holder = Holder.options(**one_device).remote()
    assert miniray.get(holder.place.remote(), timeout=30).devices == ("5",)
    assert not is_alive(first.pid)


# --- workers ---------------------------------------------------------------------------------


def test_a_worker_ends_after_max_calls_tasks() -> None:
    pids = [miniray.get(task_with_limit.remote()).pid for _ in range(7)]
    assert list(collections.Counter(pids).values()) == [3, 3, 1]


def test_workers_without_devices_run_task_after_task() -> None:
    pids = {miniray.get(task.remote()).pid for _ in range(20)}
    assert len(pids) == 1


def test_workers_are_not_shared_between_runtime_environments() -> None:
    @miniray.remote
    def variable() -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("FLAVOUR")

    found: dict[str | None, set[int]] = {}
    for flavour in ("sweet", "sour", None, "sweet", "sour", None):
        env = {"env_vars": {"FLAVOUR": flavour}} if flavour else None
        pid, seen = miniray.get(variable.options(runtime_env=env).remote(), timeout=30)
        assert seen == flavour
        found.setdefault(flavour, set()).add(pid)
    assert not found["sweet"] & found["sour"]
    assert not found[None] & (found["sweet"] | found["sour"])


def test_idle_workers_beyond_the_number_of_cpus_end(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINIRAY_WORKER_IDLE", "0.1")
    node = nodes.add_node(num_cpus=2, resources={"short": 100})

    @miniray.remote(num_cpus=0, resources={"short": 1})
    def hold(started: Path, go: Path) -> int:
        started.touch()
        wait_for_file(go)
        return os.getpid()

    try:
        refs = [hold.remote(tmp_path / str(number), tmp_path / "go") for number in range(6)]
        for number in range(6):
            wait_for_file(tmp_path / str(number))
        (tmp_path / "go").touch()
        pids = set(miniray.get(refs))
        assert len(pids) == 6
        wait_until(lambda: sum(map(is_alive, pids)) == 2)
        time.sleep(0.3)  # more rounds, none of which may end one: as many as there are CPUs stay
        assert sum(map(is_alive, pids)) == 2
    finally:
        nodes.remove_node(node)


def test_an_actor_that_is_dropped_before_it_has_started_ends_at_once(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_STOP_GRACE", "1000")
    node = nodes.add_node(num_cpus=1, resources={"dropped": 20})

    @miniray.remote(num_cpus=0, resources={"dropped": 1})
    class Dropped:
        pass

    for _ in range(20):
        Dropped.remote()
    wait_until(lambda: miniray.available_resources().get("dropped") == 20)
    for _ in range(20):  # these are further on their way
        actor = Dropped.remote()
        wait_until(lambda: miniray.available_resources().get("dropped") == 19)
        del actor
        wait_until(lambda: miniray.available_resources().get("dropped") == 20)
    nodes.remove_node(node)


# --- resources other than devices ------------------------------------------------------------


def count_running(folder: Path) -> int:
    return len(list(folder.glob("running-*")))


def run_until(folder: Path, number: int) -> None:
    (folder / f"running-{number}").touch()
    wait_for_file(folder / "go")


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        ({"num_cpus": 0, "resources": {"custom": 1}}, 2),
        ({"num_cpus": 0, "resources": {"custom": 0.5}}, 4),
        ({"num_cpus": 0, "memory": 600 * MIB}, 2),
        ({"num_cpus": 2.5}, 2),
        ({"num_cpus": 0}, 12),
    ],
    ids=["custom", "half of a custom one", "memory", "cpu", "none"],
)
def test_so_many_run_at_once_as_the_resource_lasts(
    options: dict[str, Any], at_once: int, tmp_path: Path
) -> None:
    count = min(at_once + 2, 12)
    refs = [miniray.remote(run_until).options(**options).remote(tmp_path, n) for n in range(count)]
    wait_until(lambda: count_running(tmp_path) >= at_once)
    if count > at_once:
        assert miniray.wait(refs, timeout=0.3)[0] == []
    assert count_running(tmp_path) == at_once
    (tmp_path / "go").touch()
    miniray.get(refs, timeout=30)
    assert count_running(tmp_path) == count


def test_an_accelerator_type_is_a_demand_for_nodes_that_have_it(nodes: Cluster) -> None:
    far = nodes.worker_nodes[0].node_id
    wanted = task.options(num_gpus=1, accelerator_type="A100")
    assert {place.node for place in miniray.get([wanted.remote() for _ in range(4)])} == {far}


# --- waiting gives the CPU back --------------------------------------------------------------


def free(resource: str) -> float:
    return miniray.available_resources().get(resource, 0.0)


@miniray.remote
def wait_inside(inner: list[Any], resumed: Path, go: Path) -> None:
    miniray.get(inner[0])
    resumed.touch()
    wait_for_file(go)


@miniray.remote(num_cpus=1)
class Waiter:
    def wait(self, inner: list[Any], resumed: Path, go: Path) -> None:
        miniray.get(inner[0])
        resumed.touch()
        wait_for_file(go)


@pytest.mark.parametrize("kind", ["task", "method"])
def test_who_waits_gives_the_cpu_back_and_not_the_gpu(kind: str, tmp_path: Path) -> None:
    first, resumed, last = tmp_path / "first", tmp_path / "resumed", tmp_path / "last"
    inner = miniray.remote(wait_for_file).options(num_cpus=0).remote(first)
    if kind == "task":
        done = wait_inside.options(num_gpus=1).remote([inner], resumed, last)
    else:
        waiter = Waiter.options(num_gpus=1).remote()
        done = waiter.wait.remote([inner], resumed, last)
    wait_until(lambda: free("GPU") == 2 * GPUS - 1)
    wait_until(lambda: free("CPU") == 8)
    first.touch()
    wait_for_file(resumed)
    wait_until(lambda: free("CPU") == 7)
    assert free("GPU") == 2 * GPUS - 1
    last.touch()
    miniray.get(done, timeout=30)


# --- where work goes -------------------------------------------------------------------------


def test_spread_uses_all_nodes(nodes: Cluster) -> None:
    spread = task.options(scheduling_strategy="SPREAD")
    places = miniray.get([spread.remote() for _ in range(8)])
    assert {place.node for place in places} == {node.node_id for node in nodes.list_all_nodes()}
    # Leases of the tasks stay for a moment, and would count for where the actors go.
    wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())
    holders = [Holder.options(num_gpus=1, scheduling_strategy="SPREAD").remote() for _ in range(8)]
    found = collections.Counter(
        place.node for place in miniray.get([holder.place.remote() for holder in holders])
    )
    assert sorted(found.values()) == [4, 4]


def test_affinity_to_a_node_places_there(nodes: Cluster) -> None:
    for node in nodes.list_all_nodes():
        for soft in (False, True):
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=soft)
            place = miniray.get(task.options(scheduling_strategy=strategy).remote())
            assert place.node == node.node_id


def test_affinity_to_a_node_that_is_gone(nodes: Cluster, tmp_path: Path) -> None:
    node = nodes.add_node(num_cpus=1)
    hard = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    soft = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
    hold = miniray.remote(wait_for_file).options(scheduling_strategy=hard, max_retries=0)
    running = hold.remote(tmp_path / "never")
    waiting = task.options(scheduling_strategy=hard).remote()
    wait_until(lambda: free("CPU") == 8)
    nodes.remove_node(node, allow_graceful=False)
    with pytest.raises(TaskUnschedulableError, match=node.node_id[:8]):
        miniray.get(waiting, timeout=30)
    with pytest.raises(miniray.exceptions.RayError):
        miniray.get(running, timeout=30)
    with pytest.raises(TaskUnschedulableError, match=node.node_id[:8]):
        miniray.get(task.options(scheduling_strategy=hard).remote(), timeout=30)
    holder = Holder.options(scheduling_strategy=hard).remote()
    with pytest.raises(ActorUnschedulableError, match=node.node_id[:8]):
        miniray.get(holder.place.remote(), timeout=30)
    place = miniray.get(task.options(scheduling_strategy=soft).remote(), timeout=30)
    assert place.node != node.node_id


# --- no leak ---------------------------------------------------------------------------------


def test_everything_is_free_again_after_many_random_steps() -> None:
    """300 steps; the fixture waits until what is available is all there is."""
    random_ = random.Random(11)
    holders: list[Any] = []
    refs: list[Any] = []
    for _ in range(300):
        step = random_.random()
        if step < 0.25 and len(holders) < 12:
            options = random_.choice(
                [{"num_gpus": 0.3}, {"num_gpus": 1}, {"num_cpus": 0.5}, {"memory": 10 * MIB}]
            )
            holders.append(Holder.options(**options).remote())
        elif step < 0.4 and holders:
            holder = holders.pop(random_.randrange(len(holders)))
            if step < 0.3:
                holder.crash.remote()
            elif step < 0.37:
                miniray.kill(holder)
            del holder
        elif step < 0.7 and holders:
            refs.append(random_.choice(holders).place.remote())
        elif step < 0.75:
            refs.append(task.options(num_gpus=0.5).remote())
        else:
            refs.append(task.options(num_cpus=random_.choice([0.5, 1, 2])).remote())
        if len(refs) > 20:
            miniray.wait(refs, num_returns=10, timeout=30)
            del refs[: random_.randrange(20)]  # some are dropped while they run
    _ready, pending = miniray.wait(refs, num_returns=len(refs), timeout=30)
    assert not pending
