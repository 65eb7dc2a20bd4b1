"""Several nodes on one machine: placement, values between nodes, nodes that go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.exceptions import RayActorError, RayError
from miniray.util.placement_group import placement_group, remove_placement_group
from miniray.util.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def two_nodes(session_root: Path) -> Iterator[Cluster]:
    """A head node without, and a second node with the resource ``far``."""
    with running_cluster(
        {"num_cpus": 2},
        {
            "num_cpus": 2,
            "resources": {"far": 4, "accelerator_type:A100": 1},
            "labels": {"zone": "east", "disk": "ssd"},
        },
    ) as cluster:
        yield cluster


pytestmark = pytest.mark.usefixtures("two_nodes")


@miniray.remote(num_cpus=1)
def node() -> str:
    return miniray.get_runtime_context().get_node_id()


@miniray.remote
class Holder:
    def node(self) -> str:
        return miniray.get_runtime_context().get_node_id()


@miniray.remote(resources={"far": 1})
class Far:
    def node(self) -> str:
        return miniray.get_runtime_context().get_node_id()

    def echo(self, value: Any) -> Any:
        return value

    def total(self, array: Any) -> int:
        return int(array.sum())

    def make(self, size: int) -> Any:
        return np.ones(size, dtype=np.uint8)

    def fail(self) -> None:
        raise ValueError("far away")

    def fail_largely(self, size: int) -> None:
        error = ValueError("far away")
        error.data = bytes(size)  # type: ignore[attr-defined]
        raise error


def here() -> str:
    return miniray.get_runtime_context().get_node_id()


def there() -> str:
    [other] = [n["NodeID"] for n in miniray.nodes() if n["Alive"] and n["NodeID"] != here()]
    return other


def test_both_nodes_are_listed_with_their_resources() -> None:
    assert len([n for n in miniray.nodes() if n["Alive"]]) == 2
    assert miniray.cluster_resources()["CPU"] == 4
    assert miniray.cluster_resources()["far"] == 4
    assert miniray.util.get_node_ip_address() in {n["NodeManagerAddress"] for n in miniray.nodes()}


def test_a_resource_says_where_work_runs() -> None:
    assert miniray.get(node.options(resources={"far": 0.1}).remote()) == there()
    assert miniray.get(Far.remote().node.remote()) == there()


def test_the_modules_of_a_runtime_env_reach_another_node(tmp_path: Path) -> None:
    package = tmp_path / "carried_along"
    package.mkdir()
    (package / "__init__.py").write_text("ANSWER = 42\n")

    @miniray.remote(resources={"far": 1}, runtime_env={"py_modules": [str(package)]})
    def answer() -> tuple[int, str]:
        import carried_along

        return carried_along.ANSWER, miniray.get_runtime_context().get_node_id()

    assert miniray.get(answer.remote(), timeout=30) == (42, there())


def test_an_affinity_says_where_work_runs() -> None:
    for wanted in (here(), there()):
        strategy = NodeAffinitySchedulingStrategy(wanted, soft=False)
        assert miniray.get(node.options(scheduling_strategy=strategy).remote()) == wanted


def test_calls_of_an_actor_on_another_node_run_in_order() -> None:
    far = Far.remote()
    assert miniray.get([far.echo.remote(n) for n in range(300)]) == list(range(300))


def test_all_replies_of_an_actor_that_ends_itself_come_from_another_node() -> None:
    """Word of its end takes another way, through the head, and is sooner there."""
    for _ in range(5):
        actor = Far.remote()
        refs = [actor.echo.remote(bytes(90_000)) for _ in range(50)]
        actor.__ray_terminate__.remote()
        assert miniray.get(refs) == [bytes(90_000)] * 50


def test_an_error_comes_from_another_node_with_its_traceback() -> None:
    with pytest.raises(ValueError, match="far away") as info:
        miniray.get(Far.remote().fail.remote())
    assert "Far.fail" in str(info.value)


@pytest.mark.timeout(300)  # much memory to move, on a machine that may be busy
def test_an_error_that_carries_much_comes_from_another_node_and_calls_go_on() -> None:
    actor = Far.remote()
    failed = actor.fail_largely.remote(65 * MIB)
    after = actor.echo.remote("after")
    with pytest.raises(ValueError, match="far away") as caught:
        miniray.get(failed, timeout=200)
    assert len(caught.value.cause.data) == 65 * MIB
    assert miniray.get(after, timeout=30) == "after"


def test_what_is_too_large_for_the_head_is_refused_and_the_cluster_goes_on() -> None:
    payload = bytes(96 * MIB)

    @miniray.remote
    def function() -> int:
        return len(payload)

    with pytest.raises(ValueError, match=r"function is 96\.\d MiB .*payload"):
        function.remote()

    @miniray.remote
    class Collects:
        def __init__(self, *values: bytes) -> None:
            self.count = len(values)

        def counted(self) -> int:
            return self.count

    value = miniray.put(bytes(100_000))
    with pytest.raises(RayActorError, match=r"Collects\.__init__ take \d+ bytes together"):
        miniray.get(Collects.remote(*[value] * 700).counted.remote(), timeout=30)
    assert miniray.get(Collects.remote(*[value] * 10).counted.remote(), timeout=30) == 10


def test_large_values_move_both_ways() -> None:
    far = Far.remote()
    ref = miniray.put(np.full(20 * MIB, 2, dtype=np.uint8))
    assert miniray.get(far.total.remote(ref)) == 40 * MIB
    assert miniray.get(far.make.remote(20 * MIB)).sum() == 20 * MIB
    assert miniray.get(far.total.remote(far.make.remote(MIB))) == MIB


def test_a_ref_can_be_passed_on_to_another_node_inside_a_value() -> None:
    far = Far.remote()
    inner = miniray.put(np.ones(MIB, dtype=np.uint8))
    [back] = miniray.get(far.echo.remote([inner]))
    assert back == inner
    assert miniray.get(back).sum() == MIB


def test_tasks_of_a_task_elsewhere_can_use_the_values_of_the_driver() -> None:
    ref = miniray.put(np.ones(MIB, dtype=np.uint8))

    @miniray.remote(resources={"far": 0.1})
    def relay(refs: list[Any]) -> int:
        return int(miniray.get(refs[0]).sum())

    assert miniray.get(relay.remote([ref])) == MIB


def test_spread_uses_both_nodes() -> None:
    strict = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    assert strict.wait(30)
    remove_placement_group(strict)
    spread = node.options(scheduling_strategy="SPREAD", num_cpus=1)
    wait_until(lambda: len(set(miniray.get([spread.remote() for _ in range(4)]))) == 2)


def test_strict_pack_needs_one_node_with_room_for_all() -> None:
    group = placement_group([{"CPU": 1}] * 3, strategy="STRICT_PACK")
    assert not group.wait(0.3)
    remove_placement_group(group)


@pytest.mark.parametrize(
    ("condition", "far"),
    [
        (In("east", "west"), True),
        (Exists(), True),
        (NotIn("east"), False),
        (DoesNotExist(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_strategy_by_label_says_where_work_runs(condition: Any, far: bool) -> None:
    strategy = NodeLabelSchedulingStrategy(hard={"zone": condition})
    found = miniray.get(node.options(scheduling_strategy=strategy).remote())
    assert found == (there() if far else here())


def test_a_label_selector_says_where_work_runs() -> None:
    east = node.options(label_selector={"zone": "east", "disk": "in(ssd, nvme)"})
    assert miniray.get(east.remote()) == there()
    other = node.options(label_selector={"zone": "!east"})
    assert miniray.get(other.remote()) == here()


def test_a_wish_for_labels_is_met_while_there_is_room() -> None:
    wish = NodeLabelSchedulingStrategy(None, soft={"zone": In("east")})
    strict = {"label_selector": {"zone": "east"}}
    falls_back = {**strict, "fallback_strategy": [{"label_selector": {"zone": "!east"}}]}
    for options in ({"scheduling_strategy": wish}, falls_back):
        # Those of tasks before stay for a moment too.
        wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())
        assert miniray.get(node.options(**options).remote()) == there()
        # The lease of the task stays for a moment.
        wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())
        actors = [Holder.options(num_cpus=1, **options).remote() for _ in range(3)]
        found = miniray.get([actor.node.remote() for actor in actors], timeout=30)
        assert found == [there(), there(), here()]
        del actors
        wait_until(lambda: miniray.available_resources() == miniray.cluster_resources())


def test_an_accelerator_type_says_where_work_runs() -> None:
    assert miniray.get(node.options(accelerator_type="A100").remote()) == there()


def test_a_node_can_join_and_go(two_nodes: Cluster) -> None:
    added = two_nodes.add_node(num_cpus=1, resources={"extra": 1})
    wait_until(lambda: miniray.cluster_resources().get("extra") == 1)
    actor = Far.options(resources={"extra": 1}, num_cpus=0).remote()
    assert miniray.get(actor.echo.remote(1)) == 1
    two_nodes.remove_node(added)
    wait_until(lambda: "extra" not in miniray.cluster_resources())
    with pytest.raises(RayActorError):
        miniray.get(actor.echo.remote(2), timeout=50)


def test_an_actor_restarts_on_another_node_when_its_node_goes(two_nodes: Cluster) -> None:
    added = two_nodes.add_node(num_cpus=1, resources={"spare": 1}, labels={"kind": "spare"})
    wait_until(lambda: miniray.cluster_resources().get("spare") == 1)
    [spare] = [n["NodeID"] for n in miniray.nodes() if n["Resources"].get("spare")]
    strategy = NodeAffinitySchedulingStrategy(spare, soft=True)
    actor = Far.options(
        resources={}, max_restarts=1, max_task_retries=-1, scheduling_strategy=strategy
    ).remote()
    assert miniray.get(actor.node.remote()) == spare
    two_nodes.remove_node(added)
    assert miniray.get(actor.node.remote(), timeout=50) in (here(), there())


def test_a_result_on_a_lost_node_is_made_again(two_nodes: Cluster) -> None:
    added = two_nodes.add_node(num_cpus=1, resources={"brief": 1})
    wait_until(lambda: miniray.cluster_resources().get("brief") == 1)
    [brief] = [n["NodeID"] for n in miniray.nodes() if n["Resources"].get("brief")]

    @miniray.remote(
        scheduling_strategy=NodeAffinitySchedulingStrategy(brief, soft=True), max_retries=2
    )
    def make() -> Any:
        return np.ones(MIB, dtype=np.uint8)

    ref = make.remote()
    miniray.wait([ref], fetch_local=False)
    two_nodes.remove_node(added)
    assert miniray.get(ref, timeout=50).sum() == MIB


def test_work_for_a_node_that_went_fails_with_a_reason(two_nodes: Cluster) -> None:
    added = two_nodes.add_node(num_cpus=1, resources={"gone": 1})
    wait_until(lambda: miniray.cluster_resources().get("gone") == 1)
    [gone] = [n["NodeID"] for n in miniray.nodes() if n["Resources"].get("gone")]
    two_nodes.remove_node(added)
    wait_until(lambda: "gone" not in miniray.cluster_resources())
    strategy = NodeAffinitySchedulingStrategy(gone, soft=False)
    with pytest.raises(RayError):
        miniray.get(node.options(scheduling_strategy=strategy).remote(), timeout=50)
