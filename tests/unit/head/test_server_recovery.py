"""A head that starts again goes on with what was kept and what its daemons report."""

from __future__ import annotations

from typing import Any

import pytest
from head_harness import FakeCluster, actor_spec, new_id, task_spec
from restart_harness import ARGUMENTS, GPU, Restarts, Running, attach, make_actor

from miniray.common.specs import BundleAffinity, NodeAffinity
from miniray.exceptions import PlacementGroupRemovedError
from miniray.head.cluster import latest_return


def test_each_start_has_an_epoch_of_its_own_and_the_clusters_id(restarts: Restarts) -> None:
    seen = []
    for _ in range(3):
        restarts.run(lambda _: None)
        seen.append((restarts.saved.cluster_id, restarts.saved.epoch))
    assert seen == [("first", 1), ("first", 2), ("first", 3)]


def test_key_values_and_the_code_of_jobs_survive(restarts: Restarts) -> None:
    kept: list[bytes] = []

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept.append(daemon.driver())
        daemon.notice(daemon.node_id, "put_code", kept[0], b"key", b"\0code")
        daemon.notice(daemon.node_id, "put_code", ended := daemon.driver(), b"other", b"\0code")
        daemon.end_process(ended)
        daemon.ask(daemon.node_id, "kv_put", "space", "text", b"1", True)
        daemon.ask(daemon.node_id, "kv_put", "space", "gone", b"1", True)
        daemon.ask(daemon.node_id, "kv_del", "space", "gone")

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        assert daemon.ask(daemon.node_id, "get_code", b"key") == b"\0code"
        assert daemon.ask(daemon.node_id, "get_code", b"other") is None
        assert cluster.head.cluster.code.used == len(b"\0code")
        attach(daemon, kept[0])
        daemon.end_process(kept[0])
        cluster.timers.pass_time(latest_return() + 1)
        assert daemon.ask(daemon.node_id, "get_code", b"key") is None
        assert daemon.ask(daemon.node_id, "kv_keys", "space", "") == ["text"]

    restarts.run(before)
    restarts.run(after)


def test_a_living_actor_is_taken_over_with_what_it_holds(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node({"CPU": 1}, {"GPU": ["0", "1"]})
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["id"], kept["running"] = make_actor(
            daemon, kept["owner"], name="one", detached=True, max_restarts=1, **GPU
        )

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(
            {"CPU": 1},
            {"GPU": ["0", "1"]},
            node_id=kept["node"],
            leases=[kept["running"].report],
        )
        driver = daemon.driver()
        assert daemon.ask(driver, "get_actor", "one", "tests")[0] == kept["id"]
        assert daemon.ask(driver, "available_resources")["GPU"] == 1.0
        daemon.notice(driver, "subscribe_actor", kept["id"])
        ((_, state, _, process_id, *_),) = daemon.pushes(driver, "actor")
        assert (state, process_id) == ("ALIVE", kept["running"].report.process_id)
        daemon.end_process(process_id, -9)
        daemon.lease_ended(kept["running"].report.lease)
        assert daemon.one("start_actor").restarts == 1

    restarts.run(before)
    restarts.run(after)


def test_an_actor_that_its_node_does_not_report_has_ended(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["dead"], _ = make_actor(daemon, owner, detached=True)
        kept["again"], _ = make_actor(daemon, owner, detached=True, max_restarts=1)

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(node_id=kept["node"])
        start = daemon.one("start_actor")
        assert (start.actor_id, start.restarts, start.epoch) == (kept["again"], 1, 2)
        driver = daemon.driver()
        daemon.notice(driver, "subscribe_actor", kept["dead"])
        ((_, state, *_, death),) = daemon.pushes(driver, "actor")
        assert (state, death[0]) == ("DEAD", "EXITED")

    restarts.run(before)
    restarts.run(after)


def test_nothing_is_granted_twice_before_a_node_has_reported(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node({"CPU": 1}, {"GPU": ["0"]})
        kept["node"], owner = daemon.node_id, daemon.driver()
        _, kept["running"] = make_actor(daemon, owner, detached=True, **GPU)
        id = owner + new_id()
        daemon.notice(owner, "create_actor", id, actor_spec(detached=True, **GPU), False)
        daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
        assert daemon.take("start_actor") == []
        kept["waiting"] = id

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(
            {"CPU": 1}, {"GPU": ["0"]}, node_id=kept["node"], leases=[kept["running"].report]
        )
        assert daemon.take("start_actor") == []
        daemon.end_process(kept["running"].report.process_id, 0)
        daemon.lease_ended(kept["running"].report.lease)
        assert daemon.one("start_actor").actor_id == kept["waiting"]

    restarts.run(before)
    restarts.run(after)


def test_dead_actors_and_removed_groups_are_forgotten(restarts: Restarts) -> None:
    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        owner = daemon.driver()
        actor, _ = make_actor(daemon, owner)
        daemon.ask(owner, "kill_actor", actor, True)
        group = owner + new_id()
        daemon.notice(
            owner, "create_placement_group", group, [{"CPU": 1}], "PACK", "", "", False, None
        )
        daemon.ask(owner, "remove_placement_group", group)

    def after(_cluster: FakeCluster) -> None:
        assert (restarts.saved.actors, restarts.saved.groups) == ([], [])

    restarts.run(before)
    restarts.run(after)


def test_a_node_that_never_comes_back_loses_its_actors_and_bundles(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        owner = daemon.driver()
        kept["actor"], _ = make_actor(daemon, owner, detached=True, max_restarts=1)
        kept["group"] = owner + new_id()
        arguments = (kept["group"], [{"CPU": 2}], "PACK", "kept", "tests", True, None)
        daemon.notice(owner, "create_placement_group", *arguments)

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        driver = daemon.driver()
        number = daemon.begin(driver, "await_placement_group", kept["group"])
        cluster.timers.pass_time(14)
        assert daemon.take("start_actor") == []
        assert daemon.answer(driver, number) == []
        cluster.timers.pass_time(2)
        assert daemon.one("start_actor").actor_id == kept["actor"]
        assert daemon.answer(driver, number) == [True]

    restarts.run(before)
    restarts.run(after)


def test_a_placement_group_keeps_its_devices(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node({"CPU": 2}, {"GPU": ["0", "1"]})
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["group"] = kept["owner"] + new_id()
        arguments = (kept["group"], [{"GPU": 1, "CPU": 1}], "PACK", "mine", "tests", False, None)
        daemon.notice(kept["owner"], "create_placement_group", *arguments)
        inside = {**GPU, "placement": BundleAffinity(kept["group"], 0)}
        _, kept["running"] = make_actor(daemon, kept["owner"], detached=True, **inside)

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(
            {"CPU": 2},
            {"GPU": ["0", "1"]},
            node_id=kept["node"],
            leases=[kept["running"].report],
        )
        attach(daemon, kept["owner"])
        owner = kept["owner"]
        assert daemon.ask(owner, "find_placement_group", "mine", "tests") == kept["group"]
        assert daemon.ask(owner, "placement_group_table", kept["group"])["state"] == "CREATED"
        assert daemon.ask(owner, "available_resources") == {"CPU": 1.0, "GPU": 1.0}
        cluster.timers.pass_time(20)
        daemon.ask(owner, "remove_placement_group", kept["group"])
        assert daemon.one("end_lease").lease == kept["running"].report.lease
        daemon.lease_ended(kept["running"].report.lease)
        assert daemon.ask(owner, "available_resources") == {"CPU": 2.0, "GPU": 2.0}

    restarts.run(before)
    restarts.run(after)


def test_what_belongs_to_a_driver_that_does_not_come_back_ends(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["stays"] = daemon.driver()
        _, gone = make_actor(daemon, kept["owner"])
        _, stays = make_actor(daemon, kept["stays"])
        daemon.notice(kept["owner"], "want_leases", 1, task_spec(), 1)
        task = Running(daemon.one("start_lease"), new_id())
        kept["gone"] = {gone.report.lease, task.report.lease}
        kept["leases"] = [gone.report, stays.report, task.report]

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(node_id=kept["node"], leases=kept["leases"])
        attach(daemon, kept["stays"])
        cluster.timers.pass_time(14)
        assert daemon.take("end_lease") == []
        cluster.timers.pass_time(2)
        ended = daemon.take("end_lease")
        assert {end.lease for end in ended} == kept["gone"]

    restarts.run(before)
    restarts.run(after)


def test_what_belongs_to_a_driver_that_is_lost_with_its_node_is_not_begun_elsewhere(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        owner = daemon.driver()
        kept["actor"], _ = make_actor(daemon, owner, max_restarts=1)
        kept["group"] = owner + new_id()
        arguments = (kept["group"], [{"CPU": 2}], "PACK", "mine", "tests", False, None)
        daemon.notice(owner, "create_placement_group", *arguments)

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        driver = daemon.driver()
        daemon.notice(driver, "subscribe_actor", kept["actor"])
        number = daemon.begin(driver, "await_placement_group", kept["group"])
        cluster.timers.pass_time(16)
        assert daemon.take("start_actor") == []
        ((_, state, *_, death),) = daemon.pushes(driver, "actor")
        assert (state, death[0]) == ("DEAD", "OWNER_DIED")
        with pytest.raises(PlacementGroupRemovedError):
            daemon.answer(driver, number)

    restarts.run(before)
    restarts.run(after)


def test_actors_of_nodes_that_never_come_back_start_again_in_the_order_of_their_nodes(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {"actors": []}

    def before(cluster: FakeCluster) -> None:
        for _ in range(8):
            daemon = cluster.node({"CPU": 1})
            kept["actors"].append(
                make_actor(daemon, daemon.driver(), detached=True, max_restarts=1)[0]
            )

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node({"CPU": 8})
        cluster.timers.pass_time(16)
        assert [start.actor_id for start in daemon.take("start_actor")] == kept["actors"]

    restarts.run(before)
    restarts.run(after)


def test_a_task_lease_can_be_given_back_to_a_new_head(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        daemon.notice(kept["owner"], "want_leases", 1, task_spec(), 1)
        kept["running"] = Running(daemon.one("start_lease"), new_id())

    def after(cluster: FakeCluster) -> None:
        number = kept["running"].report.lease
        daemon = cluster.node(node_id=kept["node"], leases=[kept["running"].report])
        attach(daemon, kept["owner"])
        assert daemon.ask(kept["owner"], "available_resources") == {"CPU": 3.0}
        daemon.notice(kept["owner"], "return_lease", number)
        assert daemon.one("end_lease").lease == number
        daemon.lease_ended(number)
        assert daemon.ask(kept["owner"], "available_resources") == {"CPU": 4.0}

    restarts.run(before)
    restarts.run(after)


def test_what_ran_in_a_session_that_broke_is_ended_when_the_daemon_is_back() -> None:
    cluster = FakeCluster()
    daemon, home = cluster.node(), cluster.node()
    driver = home.driver()
    there = NodeAffinity(daemon.node_id.hex(), soft=True)
    home.notice(driver, "want_leases", 1, task_spec(placement=there), 1)
    running = Running(daemon.one("start_lease"), new_id())
    assert daemon.node is not None
    cluster.head.lose(daemon.node, "its session broke")
    back = cluster.node(node_id=daemon.node_id, leases=[running.report])
    end = back.one("end_lease")
    assert (end.lease, end.kill) == (running.report.lease, True)
    back.lease_ended(running.report.lease)
    assert home.one("start_lease").owner == driver  # nobody had heard of the first one
    assert home.ask(driver, "available_resources") == {"CPU": 7.0}


def test_leases_that_their_client_does_not_hold_go_back(restarts: Restarts) -> None:
    """What was granted, or given back, in the last moments of a head, its client may not know."""
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        daemon.notice(kept["owner"], "want_leases", 1, task_spec(), 2)
        starts = daemon.take("start_lease")
        kept["running"] = [Running(start, new_id()).report for start in starts]

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(node_id=kept["node"], leases=kept["running"])
        attach(daemon, kept["owner"])
        known, unknown = kept["running"]
        daemon.notice(kept["owner"], "hold_leases", [known.lease])
        assert daemon.one("end_lease").lease == unknown.lease

    restarts.run(before)
    restarts.run(after)


def test_a_client_may_come_back_before_the_nodes_of_its_leases(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon, other = cluster.node(), cluster.node()
        kept["other"], kept["owner"] = other.node_id, daemon.driver()
        there = NodeAffinity(other.node_id.hex(), soft=True)
        daemon.notice(kept["owner"], "want_leases", 1, task_spec(placement=there), 3)
        kept["running"] = [Running(start, new_id()).report for start in other.take("start_lease")]

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        attach(daemon, kept["owner"])
        held, given_back, unknown = kept["running"]
        daemon.notice(kept["owner"], "hold_leases", [held.lease, given_back.lease])
        daemon.notice(kept["owner"], "return_lease", given_back.lease)
        other = cluster.node(node_id=kept["other"], leases=kept["running"])
        ended = {end.lease for end in other.take("end_lease")}
        assert ended == {given_back.lease, unknown.lease}

    restarts.run(before)
    restarts.run(after)


def test_an_actors_place_is_told_once_its_node_has_reported(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["id"], kept["running"] = make_actor(daemon, owner, detached=True)

    def after(cluster: FakeCluster) -> None:
        first = cluster.node()
        driver = first.driver()
        first.notice(driver, "subscribe_actor", kept["id"])
        assert first.pushes(driver, "actor") == []
        cluster.node(node_id=kept["node"], leases=[kept["running"].report])
        ((_, state, node, process_id, *_),) = first.pushes(driver, "actor")
        assert (state, node) == ("ALIVE", kept["node"])
        assert process_id == kept["running"].report.process_id

    restarts.run(before)
    restarts.run(after)


def test_what_a_daemon_repeats_makes_no_second_actor() -> None:
    cluster = FakeCluster()
    daemon = cluster.node()
    owner = daemon.driver()
    id = owner + new_id()
    for _ in range(2):
        assert daemon.ask(owner, "create_actor", id, actor_spec(name="one"), False) is None
        daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    assert daemon.one("start_actor").actor_id == id
    daemon.ask(owner, "kill_actor", id, True)
    assert daemon.ask(owner, "create_actor", id, actor_spec(name="one"), False) is None
    assert daemon.take("start_actor") == []
