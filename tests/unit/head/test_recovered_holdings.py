"""Nothing is held by nobody, and nothing comes back that has ended, after heads and nodes died."""

from __future__ import annotations

from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, task_spec
from restart_harness import ARGUMENTS, GPU, Restarts, Running, attach, make_actor

from miniray._proto import head_pb2
from miniray.common.specs import Allocation, BundleAffinity, NodeAffinity
from miniray.head.directories.grants import RequestSummary
from miniray.head.scheduling.demands import Demand
from miniray.messages import plain

ONE_GPU: tuple[Any, ...] = ({"CPU": 1}, {"GPU": ["0"]})


def make_group(
    daemon: FakeDaemon, owner: bytes, bundles: list[dict[str, float]], strategy: str = "PACK"
) -> bytes:
    id = owner + new_id()
    daemon.notice(owner, "create_placement_group", id, bundles, strategy, "", "tests", True, None)
    return id


def make_lease(daemon: FakeDaemon, owner: bytes, **spec: Any) -> Running:
    """A lease that was granted, and whose worker has not begun."""
    daemon.notice(owner, "want_leases", 1, task_spec(resources={"GPU": 1}, **spec), 1)
    return Running(daemon.one("start_lease"))


def free(daemon: FakeDaemon, process_id: bytes) -> float:
    return daemon.ask(process_id, "available_resources").get("GPU", 0.0)


@pytest.mark.parametrize("how", ["lease_failed", "lease_ended"])
def test_a_lease_that_ends_before_its_worker_began_is_free_under_the_next_head(
    restarts: Restarts, how: str
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["running"] = make_lease(daemon, kept["owner"])

    def after(cluster: FakeCluster) -> None:
        report = kept["running"].report
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        attach(daemon, kept["owner"])
        if how == "lease_failed":
            daemon.tell(lease_failed=head_pb2.LeaseFailed(lease=report.lease, tries=20))
        else:
            daemon.lease_ended(report.lease)
        assert free(daemon, kept["owner"]) == 1
        assert daemon.take("start_lease") == []

    restarts.run(before)
    restarts.run(after)


def test_what_a_leaving_worker_has_let_go_is_its_successors_under_the_next_head(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}
    lets_go: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        leaving = make_lease(daemon, kept["owner"])
        lease = leaving.report.lease
        lets_go["blocked"] = head_pb2.LeaseBlocked(lease=lease, blocked=True, leaving=True)
        daemon.tell(**lets_go)
        emptied = Allocation(*plain.loads(leaving.report.allocation)).emptied()
        leaving.report.allocation = plain.dumps(tuple(emptied))
        daemon.notice(
            kept["owner"], "want_leases", 2, task_spec(resources={"GPU": 1}, name="next"), 1
        )
        kept["reports"] = [leaving.report, Running(daemon.one("start_lease")).report]

    def after(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=kept["reports"])
        attach(daemon, kept["owner"])
        daemon.tell(**lets_go)
        assert daemon.take("end_lease") == []
        assert free(daemon, kept["owner"]) == 0
        for report in kept["reports"]:
            daemon.lease_ended(report.lease)
        assert free(daemon, kept["owner"]) == 1

    restarts.run(before)
    restarts.run(after)


def test_leases_of_a_session_that_broke_are_not_taken_over_by_the_same_head(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon, home = cluster.node(*ONE_GPU), cluster.node()
        kept["node"], kept["owner"] = daemon.node_id, home.driver()
        home.notice(kept["owner"], "want_leases", 1, task_spec(resources={"GPU": 1}), 1)
        kept["running"] = Running(daemon.one("start_lease"), new_id())

    def after(cluster: FakeCluster) -> None:
        report, owner = kept["running"].report, kept["owner"]
        home = cluster.node()
        attach(home, owner)
        home.notice(owner, "hold_leases", [report.lease])
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        assert daemon.take("end_lease") == []
        assert daemon.node is not None
        cluster.head.lose(daemon.node, "its session broke")
        home.notice(owner, "return_lease", report.lease, True)
        back = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        assert back.one("end_lease").lease == report.lease

    restarts.run(before)
    restarts.run(after)


def test_leases_of_clients_that_are_gone_go_back_when_their_node_comes_late(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node({"CPU": 2}, {"GPU": ["0", "1"]})
        kept["node"], kept["stays"], kept["goes"] = daemon.node_id, daemon.driver(), daemon.driver()
        kept["running"] = [make_lease(daemon, kept[who]) for who in ("stays", "goes")]

    def after(cluster: FakeCluster) -> None:
        cluster.timers.pass_time(20)
        stays, goes = [running.report for running in kept["running"]]
        daemon = cluster.node(
            {"CPU": 2}, {"GPU": ["0", "1"]}, node_id=kept["node"], leases=[stays, goes]
        )
        attach(daemon, kept["stays"])
        cluster.timers.pass_time(20)
        assert daemon.one("end_lease").lease == goes.lease

    restarts.run(before)
    restarts.run(after)


def test_bundles_that_a_head_awaits_are_awaited_by_the_next_one_too(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def first(cluster: FakeCluster) -> None:
        nodes = [cluster.node(*ONE_GPU) for _ in range(2)]
        kept["owner"] = nodes[0].driver()
        kept["group"] = make_group(nodes[0], kept["owner"], [{"GPU": 1}] * 2, "STRICT_SPREAD")
        table = nodes[0].ask(kept["owner"], "placement_group_table", kept["group"])
        kept["nodes"] = [bytes.fromhex(id) for id in table["bundles_to_node_id"].values()]

    def second(cluster: FakeCluster) -> None:
        moved = cluster.node(*ONE_GPU, node_id=kept["nodes"][1])
        assert moved.node is not None
        cluster.head.lose(moved.node, "it died")
        kept["nodes"][1] = cluster.node(*ONE_GPU).node_id

    def third(cluster: FakeCluster) -> None:
        other = cluster.node(*ONE_GPU)
        for id in reversed(kept["nodes"]):
            cluster.node(*ONE_GPU, node_id=id)
        driver = other.driver()
        table = other.ask(driver, "placement_group_table", kept["group"])
        assert table["state"] == "CREATED"
        assert [bytes.fromhex(id) for id in table["bundles_to_node_id"].values()] == kept["nodes"]

    for use in (first, second, third):
        restarts.run(use)


def test_actors_of_a_node_whose_report_is_refused_start_elsewhere(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["id"], kept["running"] = make_actor(
            daemon, owner, detached=True, max_restarts=1, **GPU
        )

    def after(cluster: FakeCluster) -> None:
        report = kept["running"].report
        again = head_pb2.RunningLease()
        again.CopyFrom(report)
        again.lease += 1
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report, again])
        assert daemon.take("stop")
        other = cluster.node(*ONE_GPU)
        assert other.one("start_actor").actor_id == kept["id"]

    restarts.run(before)
    restarts.run(after)


def test_a_group_whose_end_was_not_kept_gives_way_to_what_runs(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["group"] = make_group(daemon, kept["owner"], [{"GPU": 1}])
        elsewhere = FakeCluster().node(*ONE_GPU)
        kept["running"] = make_lease(elsewhere, elsewhere.driver())

    def after(cluster: FakeCluster) -> None:
        report, owner = kept["running"].report, kept["owner"]
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        assert daemon.take("stop") == []
        attach(daemon, owner)
        table = daemon.ask(owner, "placement_group_table", kept["group"])
        assert (table["state"], table["bundles_to_node_id"]) == ("RESCHEDULING", {0: ""})
        daemon.ask(owner, "remove_placement_group", kept["group"])
        daemon.lease_ended(report.lease)
        assert free(daemon, owner) == 1

    restarts.run(before)
    restarts.run(after)


def test_a_node_whose_bundle_was_placed_again_on_another_device_of_it_is_not_ended(
    restarts: Restarts,
) -> None:
    two = {"CPU": 4}, {"GPU": ["0", "1"]}
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*two)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["group"] = make_group(daemon, kept["owner"], [{"GPU": 1}])
        inside = {**GPU, "placement_resources": {"GPU": 1}}
        inside["placement"] = BundleAffinity(kept["group"], 0)
        _, kept["running"] = make_actor(daemon, kept["owner"], detached=True, **inside)

    def after(cluster: FakeCluster) -> None:
        report, owner = kept["running"].report, kept["owner"]
        # It began before the bundle had this place, and was not ended yet.
        node, scalars, _, bundle = plain.loads(report.allocation)
        elsewhere = (("GPU", (("1", 10_000),)),)
        report.allocation = plain.dumps((node, scalars, elsewhere, bundle))
        daemon = cluster.node(*two, node_id=kept["node"], leases=[report])
        assert daemon.take("stop") == []
        assert daemon.one("end_lease").lease == report.lease
        attach(daemon, owner)
        table = daemon.ask(owner, "placement_group_table", kept["group"])
        assert (table["state"], free(daemon, owner)) == ("CREATED", 0)
        daemon.lease_ended(report.lease)
        assert free(daemon, owner) == 1

    restarts.run(before)
    restarts.run(after)


def test_an_actor_of_a_group_that_is_removed_before_its_node_has_reported_ends(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["group"] = make_group(daemon, owner, [{"GPU": 1, "CPU": 1}])
        inside = {**GPU, "placement": BundleAffinity(kept["group"], 0)}
        kept["id"], kept["running"] = make_actor(daemon, owner, detached=True, **inside)

    def after(cluster: FakeCluster) -> None:
        other = cluster.node()
        driver = other.driver()
        other.notice(driver, "subscribe_actor", kept["id"])
        other.ask(driver, "remove_placement_group", kept["group"])
        report = kept["running"].report
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        end = daemon.one("end_lease")
        assert (end.lease, end.kill) == (report.lease, True)
        ((*_, death),) = other.pushes(driver, "actor")
        assert death[0] == "GROUP_REMOVED"
        daemon.lease_ended(report.lease)
        assert free(other, driver) == 1

    restarts.run(before)
    restarts.run(after)


def test_tasks_that_run_on_under_the_next_head_end_with_their_group(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["group"] = make_group(daemon, kept["owner"], [{"GPU": 1}])
        placement = BundleAffinity(kept["group"], 0)
        kept["running"] = make_lease(daemon, kept["owner"], placement=placement)

    def after(cluster: FakeCluster) -> None:
        report, owner = kept["running"].report, kept["owner"]
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"], leases=[report])
        attach(daemon, owner)
        daemon.notice(owner, "hold_leases", [report.lease])
        daemon.ask(owner, "remove_placement_group", kept["group"])
        end = daemon.one("end_lease")
        assert (end.lease, end.kill) == (report.lease, True)

    restarts.run(before)
    restarts.run(after)


def test_a_lease_that_went_on_is_forgotten_with_its_node(restarts: Restarts) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["running"] = make_lease(daemon, kept["owner"])

    def after(cluster: FakeCluster) -> None:
        daemon, other = (
            cluster.node(*ONE_GPU, node_id=kept["node"], leases=[kept["running"].report]),
            cluster.node(),
        )
        attach(other, kept["owner"])
        other.notice(kept["owner"], "hold_leases", [])
        assert daemon.node is not None
        cluster.head.lose(daemon.node, "it died")
        assert other.ask(kept["owner"], "state", "leases") == []

    restarts.run(before)
    restarts.run(after)


@pytest.mark.parametrize("comes", [True, False])
def test_tasks_for_a_node_wait_until_it_can_have_come_back(restarts: Restarts, comes: bool) -> None:
    there = new_id()

    def after(cluster: FakeCluster) -> None:
        home = cluster.node()
        driver = home.driver()
        placement = NodeAffinity(there.hex(), soft=False)
        home.notice(driver, "want_leases", 1, task_spec(placement=placement), 1)
        assert home.pushes(driver, "lease_failed") == []
        if comes:
            assert cluster.node(node_id=there).one("start_lease").owner == driver
        cluster.timers.pass_time(16)
        assert len(home.pushes(driver, "lease_failed")) == (not comes)

    restarts.run(lambda _: None)
    restarts.run(after)


def test_daemons_are_told_who_lives_once_all_can_have_come_back(restarts: Restarts) -> None:
    def before(cluster: FakeCluster) -> None:
        assert cluster.node().one("welcome").nodes_are_all

    def after(cluster: FakeCluster) -> None:
        nodes = [cluster.node(), cluster.node()]
        cluster.timers.pass_time(14)
        for node in nodes:
            assert not any(welcome.nodes_are_all for welcome in node.take("welcome"))
        cluster.timers.pass_time(2)
        for node in nodes:
            told = node.one("welcome")
            assert told.nodes_are_all
            assert {each.node_id for each in told.nodes} == {node.node_id for node in nodes}
        assert cluster.node().one("welcome").nodes_are_all

    restarts.run(before)
    restarts.run(after)


class Asker:
    """Asks for leases, of which one is too much for it. A ``grants.Requester``."""

    def __init__(self) -> None:
        self.got: list[str] = []

    def granted(self, token: str, _number: int, _allocation: object) -> None:
        if token == "bad":
            raise RuntimeError("it cannot be told")
        self.got.append(token)

    def describe(self, token: str) -> RequestSummary:
        return RequestSummary("task", token, b"", b"")


def test_a_grant_that_cannot_be_told_keeps_no_other_from_being_told() -> None:
    cluster = FakeCluster()
    asker: Any = Asker()
    grants = cluster.head.cluster.grants
    for token in ("first", "bad", "last"):
        grants.submit(grants.reserve_number(), asker, token, Demand.of({"CPU": 1}), None)
    cluster.node({"CPU": 3})
    assert asker.got == ["first", "last"]


def test_an_actor_that_was_placed_and_never_begun_is_begun_under_the_next_head(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["id"] = owner + new_id()
        daemon.notice(owner, "create_actor", kept["id"], actor_spec(detached=True), False)
        daemon.notice(owner, "start_actor", kept["id"], ARGUMENTS, [], None)

    def after(cluster: FakeCluster) -> None:
        start = cluster.node(node_id=kept["node"]).one("start_actor")
        assert (start.actor_id, start.restarts) == (kept["id"], 0)

    restarts.run(before)
    restarts.run(after)


def exits(id: bytes, report: head_pb2.RunningLease) -> head_pb2.FromNodeBatch:
    """What a daemon tells of an actor that has ended itself."""
    actor = head_pb2.ActorReported(
        actor_id=id, lease=report.lease, process_id=report.process_id, exiting=True
    )
    ended = head_pb2.ProcessEnded(
        process_id=report.process_id, exit_known=True, planned=True, lease=report.lease
    )
    return head_pb2.FromNodeBatch(
        messages=[head_pb2.FromNode(actor=actor), head_pb2.FromNode(ended=ended)]
    )


def test_an_actor_that_ended_itself_while_there_was_no_head_is_not_started_again(
    restarts: Restarts,
) -> None:
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node()
        kept["node"], owner = daemon.node_id, daemon.driver()
        kept["id"], kept["running"] = make_actor(daemon, owner, detached=True, max_restarts=-1)

    def after(cluster: FakeCluster) -> None:
        other = cluster.node()
        driver = other.driver()
        other.notice(driver, "subscribe_actor", kept["id"])
        lately = exits(kept["id"], kept["running"].report)
        daemon = cluster.node(node_id=kept["node"], lately=lately)
        assert daemon.take("start_actor") == other.take("start_actor") == []
        ((*_, death),) = other.pushes(driver, "actor")
        assert death[0] == "EXIT_ACTOR"

    restarts.run(before)
    restarts.run(after)


def test_what_has_ended_is_not_made_again_by_requests_that_are_repeated(
    restarts: Restarts,
) -> None:
    """The daemon of who ended it may have come back before that of its creator, or has died."""
    kept: dict[str, Any] = {}

    def before(cluster: FakeCluster) -> None:
        daemon = cluster.node(*ONE_GPU)
        kept["node"], kept["owner"] = daemon.node_id, daemon.driver()
        kept["actor"], _ = make_actor(daemon, kept["owner"], detached=True)
        kept["group"] = make_group(daemon, kept["owner"], [{"GPU": 1}])
        daemon.ask(kept["owner"], "kill_actor", kept["actor"], True)
        daemon.ask(kept["owner"], "remove_placement_group", kept["group"])

    def after(cluster: FakeCluster) -> None:
        owner = kept["owner"]
        daemon = cluster.node(*ONE_GPU, node_id=kept["node"])
        attach(daemon, owner)
        daemon.notice(owner, "create_actor", kept["actor"], actor_spec(detached=True), False)
        daemon.notice(owner, "start_actor", kept["actor"], ARGUMENTS, [], None)
        daemon.notice(
            owner, "create_placement_group", kept["group"], [{"GPU": 1}], "PACK", "", "", True, None
        )
        assert daemon.take("start_actor") == []
        ((*_, death),) = daemon.pushes(owner, "actor")
        assert death[0] == "KILLED"
        assert free(daemon, owner) == 1

    restarts.run(before)
    restarts.run(after)


def test_what_is_ended_before_the_head_hears_of_it_is_never_made() -> None:
    daemon = FakeCluster().node(*ONE_GPU)
    owner = daemon.driver()
    actor, group = owner + new_id(), owner + new_id()
    daemon.ask(owner, "kill_actor", actor, True)
    daemon.ask(owner, "remove_placement_group", group)
    daemon.notice(owner, "create_actor", actor, actor_spec(**GPU), False)
    daemon.notice(owner, "start_actor", actor, ARGUMENTS, [], None)
    daemon.notice(owner, "create_placement_group", group, [{"GPU": 1}], "PACK", "", "", False, None)
    ((*_, death),) = daemon.pushes(owner, "actor")
    assert (death[0], daemon.take("start_actor")) == ("KILLED", [])
    assert daemon.ask(owner, "placement_group_table", group)["state"] == "REMOVED"
    assert free(daemon, owner) == 1
