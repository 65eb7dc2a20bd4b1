"""What waits for resources says why: in the status, in the listing, and to its driver."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import takes_less_than, wait_for_file, wait_until
from running_cluster import running_cluster
from watched_output import watch

import miniray
from miniray.client import bootstrap
from miniray.client.cluster_requests import WHY_TIMEOUT
from miniray.common.object_ref import short_id
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.state import PendingDemandState, list_actors, list_pending_demands

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from watched_output import Watched

    from miniray.cluster_utils import Cluster

#: What waits, and why, is told by miniray's head.
pytestmark = pytest.mark.engine("miniray")
#: Seconds after which the head warns, in these tests.
WARN_AFTER = 0.6


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    """A node of four CPUs, and one of two CPUs and two GPUs."""
    with running_cluster(
        {"num_cpus": 4},
        {"num_cpus": 2, "num_gpus": 2},
        variables={"MINIRAY_PENDING_WARNING": str(WARN_AFTER)},
    ) as cluster:
        yield cluster


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Any]:
    """Holds resources until the test is over; nothing waits or runs then."""
    refs = []

    def hold(count: int = 1, **options: Any) -> None:
        started = [tmp_path / f"started-{len(refs) + number}" for number in range(count)]
        remote = miniray.remote(_hold).options(**options)
        refs.extend(remote.remote(path, tmp_path / "go") for path in started)
        for path in started:
            wait_for_file(path)

    yield hold
    (tmp_path / "go").touch()
    miniray.get(refs, timeout=30)
    wait_until(lambda: not list_pending_demands())
    wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())


def _hold(started: Path, go: Path) -> None:
    started.touch()
    wait_for_file(go)


@miniray.remote
def wanted() -> str:
    return "done"


@miniray.remote
class Wanted:
    def ready(self) -> bool:
        return True


def the_demand() -> PendingDemandState:
    wait_until(list_pending_demands)
    [demand] = list_pending_demands()
    return demand


# --- what is told -----------------------------------------------------------------------------


def test_waiting_tasks_tell_who_since_when_and_what_is_missing(held: Any, nodes: Cluster) -> None:
    held(num_cpus=3)
    before = time.time()
    refs = [wanted.options(num_cpus=4).remote() for _ in range(5)]
    wait_until(lambda: the_demand().count == 5)
    demand = the_demand()
    assert nodes.head_node is not None
    first = nodes.head_node.node_id
    assert (demand.kind, demand.names) == ("task", ["wanted"])
    assert demand.job_ids == [miniray.get_runtime_context().get_job_id()]
    assert before - 0.1 <= demand.since <= time.time()
    assert demand.shape == [{"CPU": 4}]
    assert (demand.node_id, demand.resource) == (first, "CPU")
    assert (demand.needed, demand.available) == (4, 1)
    assert demand.reason == f"needs CPU 4; node {first[:8]} has 1 of 4 free"
    assert not demand.infeasible
    del refs


def test_the_status_tells_the_same(held: Any) -> None:
    held(num_cpus=3)
    ref = wanted.options(num_cpus=4).remote()
    told = the_demand().asdict()
    [pending] = miniray.common.runtime.current_runtime().head.head_call("status")["pending"]
    assert pending == told
    del ref


def test_a_fraction_of_a_gpu_that_is_missing_is_told_per_device(held: Any, nodes: Cluster) -> None:
    held(2, num_gpus=0.6, num_cpus=0)
    actor = Wanted.options(num_gpus=0.5, num_cpus=0).remote()
    demand = the_demand()
    second = nodes.worker_nodes[0].node_id
    assert (demand.kind, demand.names) == ("actor", ["Wanted"])
    assert (demand.node_id, demand.needed, demand.available) == (second, 0.5, 0.4)
    expected = f"needs GPU 0.5 on one device; the freest device of node {second[:8]} has 0.4"
    assert demand.reason == expected
    del actor


def test_a_waiting_actor_is_listed_as_pending(held: Any) -> None:
    held(num_cpus=4)
    actor = Wanted.options(num_cpus=3).remote()
    wait_until(list_pending_demands)
    [state] = list_actors(filters=[("state", "=", "PENDING_CREATION")])
    assert state.class_name == "Wanted"
    assert (state.node_id, state.pid) == (None, 0)
    assert state.required_resources == {"CPU": 3}
    del actor


def test_a_waiting_placement_group_tells_why(held: Any) -> None:
    held(2, num_gpus=1, num_cpus=0)
    group = placement_group([{"GPU": 1}, {"CPU": 1}], name="wide")
    demand = the_demand()
    assert (demand.kind, demand.names) == ("placement_group", ["wide"])
    assert demand.shape == [{"GPU": 1}, {"CPU": 1}]
    assert "GPU" in demand.reason
    remove_placement_group(group)
    wait_until(lambda: not list_pending_demands())


# --- what is not told ---------------------------------------------------------------------------


def test_what_waits_for_its_arguments_does_not_wait_for_resources(
    held: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stderr = watch(monkeypatch, "stderr")
    argument = miniray.remote(wait_for_file).options(num_cpus=0).remote(tmp_path / "argument")
    held(num_cpus=4)

    @miniray.remote
    def dependent(_: Any) -> None:
        """Too large for what is free."""

    @miniray.remote
    class Dependent:
        def __init__(self, _: Any) -> None:
            pass

    ref = dependent.options(num_cpus=4).remote(argument)
    actor = Dependent.options(num_cpus=4).remote(argument)
    late = wanted.options(num_cpus=4).remote()  # a warning of the others would come before
    wait_until(Warnings(stderr, "wanted").lines)
    assert "ependent" not in stderr.getvalue()
    assert the_demand().names == ["wanted"]
    [state] = list_actors(filters=[("class_name", "=", "Dependent")])
    assert state.state == "DEPENDENCIES_UNREADY"
    (tmp_path / "argument").touch()
    wait_until(lambda: sum(demand.count for demand in list_pending_demands()) == 3)
    del ref, actor, late


# --- warnings at the driver -----------------------------------------------------------------------


class Warnings:
    """What the driver wrote to stderr about a name."""

    def __init__(self, stderr: Watched, name: str) -> None:
        self._stderr = stderr
        self._start = f"miniray: {name} waits"

    def lines(self) -> list[str]:
        return [line for line in self._stderr.getvalue().splitlines() if self._start in line]


def test_the_driver_is_warned_once_of_what_waits_long(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = watch(monkeypatch, "stderr")
    held(num_cpus=3)
    warnings = Warnings(stderr, "wanted")
    began = time.monotonic()
    refs = [wanted.options(num_cpus=4).remote() for _ in range(3)]
    wait_until(warnings.lines)  # named after what waits, not after what ran with these needs first
    assert time.monotonic() - began > 0.9 * WARN_AFTER
    [line] = warnings.lines()
    assert "needs CPU 4" in line
    assert "has 1 of 4 free" in line
    assert miniray.wait(refs, timeout=2 * WARN_AFTER)[0] == []
    assert len(warnings.lines()) == 1


def test_what_still_waits_is_said_again_now_and_then(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_FIRST", 0.2)
    stderr = watch(monkeypatch, "stderr")
    held(num_cpus=4)
    refs = [wanted.options(num_cpus=4).remote() for _ in range(3)]
    actors = [Wanted.options(num_cpus=4).remote() for _ in range(2)]

    def reminders() -> list[str]:
        return [line for line in stderr.getvalue().splitlines() if " still wait" in line]

    wait_until(lambda: len(reminders()) >= 4)
    assert any("3 tasks (wanted) still wait, " in line for line in reminders())
    assert any("2 actors (Wanted) still wait, " in line for line in reminders())
    assert all("needs CPU 4; node" in line for line in reminders())
    for ref in refs:
        miniray.cancel(ref)
    del actors


def test_a_get_that_runs_out_of_time_says_what_waits_and_why(held: Any, tmp_path: Path) -> None:
    def timed_out(ref: Any) -> str:
        with pytest.raises(miniray.exceptions.GetTimeoutError) as error:
            miniray.get(ref, timeout=WHY_TIMEOUT)
        return str(error.value)

    def says(ref: Any, told: str) -> None:
        """Wait until it says so: a head that is too busy to answer in time is not waited for."""
        wait_until(lambda: told in timed_out(ref))

    never = wanted.options(resources={"scarce": 2}).remote()
    why = "wanted waits: needs scarce 2; no node has scarce."
    wait_until(lambda: timed_out(never).endswith(why))

    @miniray.remote(num_cpus=0)
    def after(_: Any) -> None:
        """Waits for its argument."""

    dependent = after.remote(never)
    wait_until(lambda: timed_out(dependent).endswith(why))
    actor = Wanted.options(num_gpus=3).remote()
    says(actor.ready.remote(), "Wanted waits: needs GPU 3; the largest node")
    group = placement_group([{"CPU": 8}])
    says(group.ready(), f"placement group {short_id(group.id.hex())} waits: ")
    held(num_cpus=4)
    busy = wanted.options(num_cpus=4).remote()
    says(busy, "wanted waits: needs CPU 4; node")
    running = miniray.remote(wait_for_file).options(num_cpus=0).remote(tmp_path / "go")
    assert "waits" not in timed_out(running)
    (tmp_path / "go").touch()
    miniray.get(running)
    for ref in (never, dependent, busy):
        miniray.cancel(ref)
    remove_placement_group(group)
    miniray.kill(actor)


def test_what_does_not_wait_long_is_not_warned_of(
    held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = time.monotonic() + 60
    while True:
        stderr = watch(monkeypatch, "stderr")
        began = time.monotonic()
        refs = [wanted.options(num_cpus=3).remote() for _ in range(20)]
        assert miniray.get(refs) == ["done"] * 20
        if time.monotonic() - began < WARN_AFTER:
            break  # else the machine was slow, and a worker was to be started first perhaps
        assert time.monotonic() < deadline
    held(num_cpus=4)
    refs.append(wanted.options(num_cpus=4).remote())  # a warning of the others would come before
    wait_until(lambda: "needs CPU 4" in stderr.getvalue())
    assert "needs CPU 3" not in stderr.getvalue()


def test_the_infeasible_is_told_at_once_and_placed_when_a_node_joins(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = watch(monkeypatch, "stderr")
    warnings = Warnings(stderr, "wanted")
    actor_warnings = Warnings(stderr, "Wanted")
    refs: list[Any] = []

    def ask() -> float:
        began = time.monotonic()
        refs.append(wanted.options(resources={f"rare{len(refs)}": 2}).remote())
        wait_until(lambda: len(warnings.lines()) == len(refs))
        return time.monotonic() - began

    takes_less_than(WARN_AFTER, ask)
    ref, rare = refs.pop(), f"rare{len(refs)}"
    for other in refs:
        miniray.cancel(other)
    *_, line = warnings.lines()
    assert f"needs {rare} 2; no node has {rare}" in line
    assert line.endswith("It waits until a node joins that can serve it.")
    wait_until(lambda: len(list_pending_demands()) == 1)
    demand = the_demand()
    assert demand.infeasible
    assert (demand.resource, demand.needed) == (rare, 2)

    actor = Wanted.options(num_gpus=3).remote()
    ready = actor.ready.remote()
    wait_until(actor_warnings.lines)
    [line] = actor_warnings.lines()
    assert "needs GPU 3; the largest node" in line

    node = nodes.add_node(num_cpus=1, num_gpus=3, resources={rare: 2})
    assert miniray.get(ref, timeout=30) == "done"
    assert miniray.get(ready, timeout=30) is True
    assert list_pending_demands() == []
    del actor
    nodes.remove_node(node)
