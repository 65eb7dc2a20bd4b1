"""``miniray.util.state``: listings of the cluster, with Ray's names and filters."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.common.runtime import current_runtime
from miniray.util import state
from miniray.util.placement_group import placement_group, remove_placement_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster(
        {"num_cpus": 4}, {"num_cpus": 2, "labels": {"zone": "b"}}, namespace="here"
    ) as cluster:
        yield cluster


@miniray.remote
class Keeper:
    def place(self) -> tuple[str, int]:
        return miniray.get_runtime_context().get_node_id(), os.getpid()


@miniray.remote
class Broken:
    def __init__(self) -> None:
        raise ValueError("no")


def test_actors_are_listed_with_what_they_are() -> None:
    keeper = Keeper.options(name="keeper", num_cpus=1).remote()
    node, pid = miniray.get(keeper.place.remote())
    [found] = state.list_actors(filters=[("name", "=", "keeper")])
    assert (found.class_name, found.state, found.node_id, found.pid) == (
        "Keeper",
        "ALIVE",
        node,
        pid,
    )
    assert found.ray_namespace == "here"
    assert found.job_id == miniray.get_runtime_context().get_job_id()
    assert found.required_resources == {"CPU": 1}
    assert (found.is_detached, found.num_restarts, found.death_cause) == (False, 0, None)
    assert state.get_actor(found.actor_id) == found
    assert found["state"] == found.get("state") == found.asdict()["state"]
    with pytest.raises(KeyError):
        found["no such field"]


def test_actors_that_died_are_listed_with_the_cause() -> None:
    broken = Broken.remote()
    killed = Keeper.options(name="the one that was killed").remote()
    miniray.get(killed.place.remote())
    miniray.kill(killed)
    died = [("state", "=", "DEAD"), ("death_kind", "!=", "OUT_OF_SCOPE")]
    wait_until(lambda: len(state.list_actors(filters=died)) == 2)
    listed = state.list_actors(filters=died)
    causes = {found.class_name: (found.death_kind, found.name) for found in listed}
    assert causes == {
        "Broken": ("CREATION_FAILED", None),
        "Keeper": ("KILLED", "the one that was killed"),
    }
    sentences = {found.class_name: str(found.death_cause) for found in listed}
    assert sentences["Keeper"].endswith("died: it was killed by miniray.kill().")
    assert "it could not be created. ValueError: " in sentences["Broken"]
    del broken


@miniray.remote(max_restarts=2)
class Mortal:
    def leave(self, code: int) -> None:
        os._exit(code)

    def pid(self) -> int:
        return os.getpid()


def test_an_actor_that_died_keeps_what_it_was() -> None:
    mortal = Mortal.options(name="mortal").remote()
    for restart in range(3):
        pid = miniray.get(mortal.pid.options(max_task_retries=-1).remote())
        [found] = state.list_actors(filters=[("name", "=", "mortal")])
        assert (found.num_restarts, found.state) == (restart, "ALIVE")
        with pytest.raises(miniray.exceptions.ActorError):
            miniray.get(mortal.leave.remote(7))
    with pytest.raises(miniray.exceptions.ActorDiedError) as died:
        miniray.get(mortal.pid.remote())
    assert "exited with code 7, after 2 restarts (max_restarts=2)." in str(died.value)
    assert (died.value.restarts, died.value.max_restarts) == (2, 2)
    [dead] = state.list_actors(filters=[("actor_id", "=", found.actor_id)])
    assert (dead.state, dead.death_kind, dead.death_cause) == ("DEAD", "EXITED", str(died.value))
    for field in ("num_restarts", "job_id", "name", "ray_namespace", "class_name", "node_id"):
        assert dead[field] == found[field], field
    assert dead.pid == pid
    told = current_runtime().head.head_call("status")
    assert told["dead_actors"][0]["reason"] == str(died.value)


def test_actors_are_counted_by_class_and_state() -> None:
    keepers = [Keeper.options(num_cpus=0).remote() for _ in range(3)]
    miniray.get([keeper.place.remote() for keeper in keepers])
    summary = state.summarize_actors()["cluster"]
    assert summary["summary_by"] == "class"
    assert summary["total_actors"] == len(state.list_actors())
    assert summary["summary"]["Keeper"]["state_counts"]["ALIVE"] == 3


def test_nodes_are_listed_lost_ones_included(nodes: Cluster) -> None:
    extra = nodes.add_node(num_cpus=1)
    nodes.remove_node(extra)
    wait_until(lambda: state.get_node(extra.node_id).state == "DEAD")  # type: ignore[union-attr]
    found = {node.node_id: node for node in state.list_nodes()}
    first, second = nodes.list_all_nodes()
    assert found[first.node_id].is_head_node
    assert not found[second.node_id].is_head_node
    assert found[second.node_id].labels["zone"] == "b"
    assert found[second.node_id].resources_total["CPU"] == 2
    assert found[second.node_id].state_message is None
    assert found[extra.node_id].state_message


def test_workers_and_the_driver_are_listed() -> None:
    keeper = Keeper.options(num_cpus=0).remote()
    node, pid = miniray.get(keeper.place.remote())
    [worker] = state.list_workers(filters=[("pid", "=", pid)])
    assert (worker.worker_type, worker.node_id, worker.is_alive) == ("WORKER", node, True)
    [driver] = state.list_workers(filters=[("worker_type", "=", "DRIVER")])
    assert driver.pid == os.getpid()
    assert state.get_worker(worker.worker_id) == worker


def test_placement_groups_are_listed_until_after_their_removal() -> None:
    group = placement_group([{"CPU": 1}, {"CPU": 0.5}], name="pair", strategy="PACK")
    miniray.get(group.ready())
    [found] = state.list_placement_groups(filters=[("name", "=", "pair")])
    assert (found.state, found.strategy) == ("CREATED", "PACK")
    assert found.bundles == [{"CPU": 1}, {"CPU": 0.5}]
    assert all(found.bundle_nodes)
    assert found.creator_job_id == miniray.get_runtime_context().get_job_id()
    remove_placement_group(group)
    after = state.get_placement_group(found.placement_group_id)
    assert after is not None
    assert after.state == "REMOVED"


def test_jobs_are_listed_also_when_they_have_ended() -> None:
    own = state.get_job(miniray.get_runtime_context().get_job_id())
    assert own is not None
    assert (own.status, own.type, own.namespace) == ("RUNNING", "DRIVER", "here")
    assert own.driver_info["pid"] == os.getpid()
    program = "import miniray; miniray.init('auto'); print(miniray.get_runtime_context().job_id)"
    other = subprocess.run(
        [sys.executable, "-c", program.replace(".job_id", ".get_job_id()")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()

    def has_ended() -> bool:
        job = state.get_job(other)
        return job is not None and job.status == "SUCCEEDED" and job.end_time is not None

    wait_until(has_ended)
    statuses = {job.job_id: job.status for job in state.list_jobs()}
    assert statuses[own.job_id] == "RUNNING"


def test_filters_and_limits_choose_what_is_returned() -> None:
    keepers = [Keeper.options(num_cpus=0, name=f"number-{n}").remote() for n in range(4)]
    miniray.get([keeper.place.remote() for keeper in keepers])
    alive = [("class_name", "=", "Keeper"), ("state", "=", "alive")]
    found = state.list_actors(filters=alive)
    assert {actor.name for actor in found} == {f"number-{n}" for n in range(4)}
    others = state.list_actors(filters=[*alive, ("name", "!=", "NUMBER-1")])
    assert len(others) == 3
    assert len(state.list_actors(filters=alive, limit=2)) == 2
    assert state.list_actors(filters=[("is_detached", "=", "True")]) == []
    assert len(state.list_actors(filters=[*alive, ("is_detached", "=", False)])) == 4


def test_rays_arguments_are_taken() -> None:
    keeper = Keeper.options(num_cpus=0).remote()
    miniray.get(keeper.place.remote())
    asked = {"timeout": 30, "raise_on_missing_output": False}
    listings = ("actors", "jobs", "nodes", "placement_groups", "pending_demands", "workers")
    for name in (*listings, "objects"):
        assert isinstance(getattr(state, f"list_{name}")(detail=True, **asked), list)
    actor = state.get_actor(keeper._actor_id.hex(), timeout=30)
    assert actor == state.list_actors(filters=[("actor_id", "=", actor.actor_id)], detail=True)[0]
    assert "Keeper" in state.summarize_actors(**asked)["cluster"]["summary"]
    assert "summary" in state.summarize_objects(**asked)["cluster"]


def test_a_number_may_be_that_of_numpy() -> None:
    assert isinstance(state.list_objects(limit=np.int64(3), timeout=np.float64(2)), list)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filters": [("colour", "=", "red")]}, "no field 'colour'"),
        ({"filters": [("state", "<", "ALIVE")]}, "'<'"),
        ({"filters": [("state", "ALIVE")]}, "not \\('state', 'ALIVE'\\)"),
        ({"limit": 0}, "limit"),
    ],
)
def test_a_malformed_question_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state.list_actors(**arguments)  # type: ignore[arg-type]


def test_listings_work_without_init(nodes: Cluster) -> None:
    program = (
        "from miniray.util.state import list_nodes, list_workers\n"
        "print(len(list_nodes(filters=[('state', '=', 'ALIVE')])))\n"
        f"print(len(list_nodes(address={nodes.address!r}, filters=[('is_head_node', '=', True)])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.split() == ["2", "1"]


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1 "):
        state.list_nodes(address="127.0.0.1:1")
