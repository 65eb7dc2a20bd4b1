"""Placement groups, as those who ask for them see it."""

from __future__ import annotations

from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, report

from miniray.common.specs import BundleAffinity
from miniray.exceptions import PlacementGroupRemovedError


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 4})


def create(
    daemon: FakeDaemon,
    creator: bytes,
    bundles: list[dict[str, float]],
    strategy: str = "PACK",
    name: str = "",
    detached: bool = False,
) -> bytes:
    id = creator + new_id()
    daemon.notice(
        creator, "create_placement_group", id, bundles, strategy, name, "tests", detached, None
    )
    return id


def wait(daemon: FakeDaemon, who: bytes, id: bytes) -> int:
    return daemon.begin(who, "await_placement_group", id)


def test_a_group_that_fits_is_ready_at_once(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 1}, {"CPU": 2}])
    assert daemon.answer(driver, wait(daemon, driver, id)) == [True]
    assert daemon.ask(driver, "available_resources") == {"CPU": 1.0}
    assert daemon.ask(driver, "remove_placement_group", id) is None
    assert daemon.ask(driver, "available_resources") == {"CPU": 4.0}


def test_a_group_that_the_head_cannot_read_fails_with_its_words(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": b"half"}])  # type: ignore[dict-item]
    number = wait(daemon, driver, id)
    with pytest.raises(ValueError, match=r"cannot be made: the head refused it \(ValueError: "):
        daemon.answer(driver, number)


def test_a_group_that_waits_is_ready_when_there_is_room(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 4}, {"CPU": 4}])
    numbers = [wait(daemon, driver, id) for _ in range(2)]
    assert daemon.answer(driver, numbers[0]) == []
    assert daemon.ask(driver, "placement_group_table", id)["state"] == "PENDING"
    other = cluster.node({"CPU": 4})
    assert [daemon.answer(driver, number) for number in numbers] == [[True], [True]]
    table = daemon.ask(driver, "placement_group_table", id)
    assert set(table["bundles_to_node_id"].values()) == {daemon.node_id.hex(), other.node_id.hex()}


def test_a_removed_group_refuses_those_who_wait(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 8}])
    number = wait(daemon, driver, id)
    daemon.ask(driver, "remove_placement_group", id)
    with pytest.raises(PlacementGroupRemovedError):
        daemon.answer(driver, number)
    with pytest.raises(PlacementGroupRemovedError):
        daemon.answer(driver, wait(daemon, driver, id))
    assert daemon.ask(driver, "placement_group_table", id)["state"] == "REMOVED"


def test_a_handle_may_be_quicker_than_the_news_of_its_group(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver, other = daemon.driver(), daemon.driver()
    id = driver + new_id()
    number = wait(daemon, other, id)
    arguments: tuple[Any, ...] = (id, [{"CPU": 1}], "PACK", "", "tests", False, None)
    daemon.notice(driver, "create_placement_group", *arguments)
    assert daemon.answer(other, number) == [True]
    number = wait(daemon, other, driver + new_id())
    assert daemon.answer(other, number) == []
    cluster.timers.pass_time(11)
    with pytest.raises(PlacementGroupRemovedError):
        daemon.answer(other, number)


def test_groups_are_removed_with_their_creator_unless_detached(daemon: FakeDaemon) -> None:
    driver, other = daemon.driver(), daemon.driver()
    mine = create(daemon, driver, [{"CPU": 1}])
    kept = create(daemon, driver, [{"CPU": 2}], name="kept", detached=True)
    daemon.end_process(driver, None)
    assert daemon.ask(other, "placement_group_table", mine)["state"] == "REMOVED"
    assert daemon.ask(other, "find_placement_group", "kept", "tests") == kept
    assert daemon.ask(other, "available_resources") == {"CPU": 2.0}


def test_no_group_of_a_creator_that_ended_gets_the_room_of_another_one_of_it(
    daemon: FakeDaemon,
) -> None:
    driver, other = daemon.driver(), daemon.driver()
    _, *waiting = [create(daemon, driver, [{"CPU": 4}]) for _ in range(3)]
    numbers = [wait(daemon, other, id) for id in waiting]
    daemon.end_process(driver, None)
    for number in numbers:
        with pytest.raises(PlacementGroupRemovedError):
            daemon.answer(other, number)
    assert daemon.ask(other, "available_resources") == {"CPU": 4.0}


def test_a_name_serves_one_group_of_a_namespace(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    first = create(daemon, driver, [{"CPU": 1}], name="one")
    second = (driver + new_id(), [{"CPU": 1}], "PACK", "one", "tests", False, None)
    with pytest.raises(ValueError, match="taken"):
        daemon.ask(driver, "create_placement_group", *second)
    assert daemon.ask(driver, "placement_group_table", None).keys() == {first.hex()}
    assert daemon.ask(driver, "find_placement_group", "one", "tests") == first
    assert daemon.ask(driver, "find_placement_group", "one", "elsewhere") is None
    daemon.ask(driver, "remove_placement_group", second[0])
    assert daemon.ask(driver, "find_placement_group", "one", "tests") == first
    daemon.ask(driver, "remove_placement_group", first)
    assert daemon.ask(driver, "find_placement_group", "one", "tests") is None


def test_the_table_of_a_group_says_whether_it_will_ever_fit(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = daemon.driver()

    def progress(id: bytes) -> str:
        stats = daemon.ask(driver, "placement_group_table", id)["stats"]
        return str(stats["scheduling_state"])

    held = create(daemon, driver, [{"CPU": 3}])
    waits, never = create(daemon, driver, [{"CPU": 2}]), create(daemon, driver, [{"CPU": 5}])
    assert [progress(id) for id in (held, waits, never)] == [
        "FINISHED",
        "NO_RESOURCES",
        "INFEASIBLE",
    ]
    every = daemon.ask(driver, "placement_group_table", None)
    for id in (held, waits, never):
        assert every[id.hex()] == daemon.ask(driver, "placement_group_table", id)
    monkeypatch.setattr("miniray.head.directories.placement_groups._LOOKS", 1)
    every = daemon.ask(driver, "placement_group_table", None)
    assert every[never.hex()]["stats"]["scheduling_state"] == "QUEUED"
    daemon.ask(driver, "remove_placement_group", held)
    daemon.answer(driver, wait(daemon, driver, waits))
    assert [progress(id) for id in (held, waits)] == ["REMOVED", "FINISHED"]


def test_what_is_wrong_with_a_group_is_told_to_who_waits(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"GPU": 1.5}])
    with pytest.raises(ValueError, match=r"1\.5"):
        daemon.answer(driver, wait(daemon, driver, id))


def test_actors_of_a_removed_group_die_with_it(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 1}])
    for index in range(2):
        actor = driver + new_id()
        spec = actor_spec(
            resources={"CPU": 1},
            placement_resources={"CPU": 1},
            placement=BundleAffinity(id, -1),
            class_name=f"Thing{index}",
        )
        daemon.notice(driver, "create_actor", actor, spec, False)
        daemon.notice(driver, "start_actor", actor, (0, b"", ()), [], None)
    begun = daemon.one("start_actor")
    daemon.ask(driver, "remove_placement_group", id)
    told = {body[5][1]: body[5][0] for body in daemon.pushes(driver, "actor")}
    assert told == {"Thing0": "GROUP_REMOVED", "Thing1": "GROUP_REMOVED"}
    assert daemon.one("end_lease").lease == begun.number
    assert daemon.ask(driver, "available_resources") == {"CPU": 3.0}
    daemon.lease_ended(begun.number)
    assert daemon.ask(driver, "available_resources") == {"CPU": 4.0}


def test_the_table_has_all_groups(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    ids = [create(daemon, driver, [{"CPU": 1}]), create(daemon, driver, [{"CPU": 9}])]
    table = daemon.ask(driver, "placement_group_table", None)
    assert {key: group["state"] for key, group in table.items()} == {
        ids[0].hex(): "CREATED",
        ids[1].hex(): "PENDING",
    }
    assert daemon.ask(driver, "placement_group_table", new_id() * 2) == {}


def test_a_group_that_lost_a_node_is_placed_again(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    away = cluster.node({"CPU": 4})
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 3}, {"CPU": 3}])
    assert away.node is not None
    cluster.head.lose(away.node, "gone")
    assert daemon.ask(driver, "placement_group_table", id)["state"] == "RESCHEDULING"
    number = wait(daemon, driver, id)
    assert daemon.answer(driver, number) == []
    cluster.node({"CPU": 4})
    assert daemon.answer(driver, number) == [True]


def test_a_node_whose_session_broke_comes_back_with_what_runs_in_bundles(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    away = cluster.node({"CPU": 4}, {"GPU": ["0", "1"]})
    driver = daemon.driver()
    id = create(daemon, driver, [{"GPU": 1, "CPU": 1}])
    actor = driver + new_id()
    spec = actor_spec(
        resources={"GPU": 0.5},
        placement_resources={"GPU": 0.5},
        placement=BundleAffinity(id, -1),
    )
    daemon.notice(driver, "create_actor", actor, spec, False)
    daemon.notice(driver, "start_actor", actor, (0, b"", ()), [], None)
    start = away.one("start_actor")
    assert away.node is not None
    cluster.head.lose(away.node, "it was silent")
    back = cluster.node(
        {"CPU": 4}, {"GPU": ["0", "1"]}, node_id=away.node_id, leases=[report(start)]
    )
    assert back.node is not None
    ended = back.one("end_lease")
    assert (ended.lease, ended.kill) == (start.number, True)
    # The group has the other device at once, the first is free when its process has ended.
    assert daemon.ask(driver, "placement_group_table", id)["state"] == "CREATED"
    assert daemon.ask(driver, "available_resources")["GPU"] == 0.5
    back.lease_ended(start.number)
    assert daemon.ask(driver, "available_resources")["GPU"] == 1.0


def test_a_node_whose_report_cannot_be_true_is_stopped_and_told_why(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    other = FakeCluster().node({"CPU": 4}, {"GPU": ["7"]})
    driver = other.driver()
    actor = driver + new_id()
    spec = actor_spec(resources={"GPU": 1}, placement_resources={"GPU": 1})
    other.notice(driver, "create_actor", actor, spec, False)
    other.notice(driver, "start_actor", actor, (0, b"", ()), [], None)
    start = other.one("start_actor")
    start.epoch = 9
    refused = cluster.node({"CPU": 4}, {"GPU": ["0"]}, leases=[report(start)])
    assert refused.node is None
    assert "reports of its leases" in refused.one("stop").reason
    assert refused.closed
    assert daemon.ask(daemon.driver(), "cluster_resources") == {"CPU": 4.0}


def test_the_driver_hears_why_a_group_waits(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    create(daemon, driver, [{"CPU": 3}], name="first")
    create(daemon, driver, [{"CPU": 2}], name="second")
    create(daemon, driver, [{"CPU": 9}])
    gone = create(daemon, driver, [{"CPU": 9}])  # removed before anybody is told of it
    daemon.ask(driver, "remove_placement_group", gone)
    cluster.timers.pass_time(60)
    node = daemon.node_id.hex()[:8]
    busy = f"needs CPU 2; node {node} has 1 of 4 free"
    too_large = f"needs CPU 9; the largest node, {node}, has 4"
    assert daemon.pushes(driver, "pending") == [(), ()]
    told = [(each["names"], each["reason"]) for each in daemon.long_waiting(driver)]
    assert told == [(["second"], busy), ([], too_large)]


def test_groups_that_wait_for_the_same_are_one(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    for _ in range(1000):
        create(daemon, driver, [{"CPU": 9}])
    [told] = daemon.long_waiting(driver)
    assert (told["count"], told["infeasible"]) == (1000, True)


def test_a_pinned_group_waits_for_a_node_with_the_value_that_it_had(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    hosts = [cluster.node({"head": 1}, labels={"slice": name}) for name in "ab"]
    driver = daemon.driver()
    id = create(daemon, driver, [{"head": 1}])
    assert daemon.ask(driver, "pin_placement_group", id, "slice") == ["a"]
    assert hosts[0].node is not None
    cluster.head.lose(hosts[0].node, "gone")
    assert daemon.ask(driver, "placement_group_table", id)["state"] == "RESCHEDULING"
    assert daemon.ask(driver, "pin_placement_group", id, "slice") == []

    back = cluster.node({"head": 1}, labels={"slice": "a"})
    table = daemon.ask(driver, "placement_group_table", id)
    assert (table["state"], table["bundles_to_node_id"]) == ("CREATED", {0: back.node_id.hex()})


def test_a_group_can_be_pinned_by_a_label_that_its_nodes_have(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    id = create(daemon, driver, [{"CPU": 1}])
    with pytest.raises(ValueError, match="no label 'slice'"):
        daemon.ask(driver, "pin_placement_group", id, "slice")
