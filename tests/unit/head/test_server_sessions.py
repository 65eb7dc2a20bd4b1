"""Daemons that join and are lost, processes, key-values and what the head tells of it all."""

from __future__ import annotations

import json
import platform

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id, task_spec

from miniray._proto import common_pb2, head_pb2
from miniray.common.config import config
from miniray.messages import plain


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def test_a_node_is_welcomed_with_the_others(cluster: FakeCluster) -> None:
    first = cluster.node()
    second = cluster.node(address="machine|/other|")
    welcome = second.one("welcome")
    assert welcome.error_kind == ""
    assert [node.node_id for node in welcome.nodes] == [first.node_id]
    _, told = first.take("welcome")
    (joined,) = told.nodes
    assert (joined.node_id, joined.address) == (second.node_id, "machine|/other|")


@pytest.mark.parametrize(
    ("hello", "what"),
    [({"version": "0.0.1"}, "miniray 0.0.1"), ({"python": "3.5.2"}, "Python 3.5.2")],
)
def test_a_node_of_another_version_is_refused_and_logged(
    cluster: FakeCluster, hello: dict[str, str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = cluster.node(**hello)
    welcome = daemon.one("welcome")
    assert welcome.error_kind == "VersionMismatchError"
    assert what in welcome.error
    assert daemon.node is None
    [logged] = caplog.messages
    assert "was refused" in logged
    assert what in logged


def test_another_micro_version_of_python_is_welcome(cluster: FakeCluster) -> None:
    major, minor, _ = platform.python_version_tuple()
    assert cluster.node(python=f"{major}.{minor}.99").node is not None


def test_a_node_that_tells_nonsense_is_refused(cluster: FakeCluster) -> None:
    daemon = cluster.node(resources=b'{"scalars": {"CPU": -1}}')
    assert daemon.one("welcome").error_kind == "ValueError"
    assert list(cluster.head.cluster.nodes) == []
    daemon = cluster.node(resources=b"{")
    assert daemon.one("welcome").error_kind == "ValueError"


def test_a_silent_node_is_lost(cluster: FakeCluster) -> None:
    silent, lively = cluster.node(), cluster.node()
    for _ in range(16):
        cluster.timers.pass_time(1)
        lively.tell(heartbeat=head_pb2.Heartbeat())
        cluster.head.check_liveness()
    assert silent.closed
    assert not lively.closed
    died = lively.one("node_died")
    assert died.node_id == silent.node_id
    assert "silent" in died.reason


def test_a_node_that_comes_back_replaces_its_old_session(cluster: FakeCluster) -> None:
    other, old = cluster.node(), cluster.node()
    other.take("welcome")
    driver = old.driver()
    new = cluster.node(node_id=old.node_id)
    assert old.closed
    assert new.one("welcome").error_kind == ""
    assert other.one("node_died").node_id == old.node_id
    assert [[n.node_id for n in told.nodes] for told in other.take("welcome")] == [[new.node_id]]
    assert cluster.head.cluster.clients.get(driver) is None
    assert old.node is not None
    cluster.head.lose(old.node, "its stream ended")
    assert [node.id for node in cluster.head.cluster.nodes] == [other.node_id, new.node_id]


def test_processes_of_a_lost_node_are_gone(cluster: FakeCluster) -> None:
    here, away = cluster.node({"CPU": 1}), cluster.node({"CPU": 1})
    driver = away.driver()
    away.notice(driver, "want_leases", 1, task_spec(), 2)
    (begun,) = here.take("start_lease")
    assert away.node is not None
    cluster.head.lose(away.node, "gone")
    assert here.one("end_lease").lease == begun.number
    watcher = here.driver()
    (job,) = [j for j in here.ask(watcher, "state", "jobs") if j["job_id"] == driver.hex()]
    assert job["state"] == "ENDED"


def test_messages_of_a_replaced_session_change_nothing(cluster: FakeCluster) -> None:
    old = cluster.node()
    cluster.node(node_id=old.node_id)
    old.driver()
    assert cluster.head.cluster.clients.all() == []


def test_messages_that_waited_together_arrive_in_order(cluster: FakeCluster) -> None:
    daemon = cluster.node()
    driver = daemon.driver()
    id = driver + new_id()
    number = 5
    daemon.tell(
        batch=head_pb2.FromNodeBatch(
            messages=[
                head_pb2.FromNode(
                    request=common_pb2.ClientRequest(
                        process_id=driver, request=request, method=method, body=body
                    )
                )
                for request, method, body in (
                    (0, "put_code", _args(driver, id, b"code")),
                    (number, "get_code", _args(id)),
                )
            ]
        )
    )
    assert daemon.answer(driver, number) == [b"code"]


def _args(*args: object) -> bytes:
    return plain.dumps(args)


def test_a_daemon_asks_under_its_nodes_id(cluster: FakeCluster) -> None:
    daemon = cluster.node()
    daemon.notice(daemon.node_id, "put_code", daemon.driver(), b"key", b"code")
    assert daemon.ask(daemon.node_id, "get_code", b"key") == b"code"
    assert daemon.ask(daemon.node_id, "get_code", b"other") is None


def test_key_values(cluster: FakeCluster) -> None:
    daemon = cluster.node()
    driver = daemon.driver()
    assert daemon.ask(driver, "kv_put", "space", "a1", b"1", True)
    assert not daemon.ask(driver, "kv_put", "space", "a1", b"2", False)
    assert daemon.ask(driver, "kv_put", "space", "b1", b"3", False)
    assert daemon.ask(driver, "kv_get", "space", "a1") == b"1"
    assert daemon.ask(driver, "kv_get", "other", "a1") is None
    assert daemon.ask(driver, "kv_keys", "space", "a") == ["a1"]
    assert daemon.ask(driver, "kv_exists", "space", "a1")
    assert daemon.ask(driver, "kv_del", "space", "a1")
    assert not daemon.ask(driver, "kv_exists", "space", "a1")


def test_an_unknown_request_is_refused_by_name(cluster: FakeCluster) -> None:
    daemon = cluster.node()
    with pytest.raises(ValueError, match="make_coffee"):
        daemon.ask(daemon.driver(), "make_coffee")
    with pytest.raises(ValueError, match="teapots"):
        daemon.ask(daemon.driver(), "state", "teapots")
    with pytest.raises(ValueError, match="there are 2: id, no_restart"):
        daemon.ask(daemon.driver(), "kill_actor")


def test_the_nodes_are_listed_as_ray_does(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 4, "none": 0, "node:10.0.0.1": 1}, {"GPU": ["a", "b"]})
    driver = daemon.driver()
    (node,) = daemon.ask(driver, "nodes")
    assert (node["NodeID"], node["Alive"]) == (daemon.node_id.hex(), True)
    assert (node["NodeManagerAddress"], node["NodeManagerPort"]) == ("10.0.0.1", 7000)
    assert node["Resources"] == {"CPU": 4.0, "node:10.0.0.1": 1.0, "GPU": 2.0}
    assert daemon.ask(driver, "cluster_resources") == node["Resources"]


def test_lost_nodes_stay_listed(cluster: FakeCluster) -> None:
    daemon, lost = cluster.node(), cluster.node()
    assert lost.node is not None
    cluster.head.lose(lost.node, "it burnt")
    alive, dead = daemon.ask(daemon.driver(), "nodes")
    assert (alive["Alive"], dead["Alive"], dead["DeathReasonMessage"]) == (True, False, "it burnt")


def seconds_until_lost(cluster: FakeCluster, every: float) -> float:
    """How long the head, which looks so often, keeps a node of which it hears nothing."""
    since = cluster.timers.now
    while list(cluster.head.cluster.nodes):
        assert cluster.timers.now < since + 1000
        cluster.timers.pass_time(every)
        cluster.head.check_liveness()
    return cluster.timers.now - since


def test_a_node_that_is_silent_for_the_node_timeout_is_lost(cluster: FakeCluster) -> None:
    daemon, lost = cluster.node(), cluster.node()
    for _ in range(20):
        cluster.timers.pass_time(config().heartbeat_interval)
        daemon.tell(heartbeat=head_pb2.Heartbeat())
        cluster.head.check_liveness()
    assert [node.id for node in cluster.head.cluster.nodes] == [daemon.node_id]
    assert daemon.one("node_died").node_id == lost.node_id


def test_a_head_that_stood_still_does_not_take_that_for_the_silence_of_its_nodes(
    cluster: FakeCluster,
) -> None:
    cluster.node()
    every = config().heartbeat_interval
    cluster.timers.pass_time(every)
    cluster.head.check_liveness()
    cluster.timers.pass_time(100)
    cluster.head.check_liveness()  # before it reads what came meanwhile
    assert len(list(cluster.head.cluster.nodes)) == 1
    assert seconds_until_lost(cluster, every) == pytest.approx(config().node_timeout, abs=3 * every)


def pass_quietly(cluster: FakeCluster, seconds: int, *lively: FakeDaemon) -> None:
    """Time goes by, and only these nodes are heard."""
    for _ in range(seconds):
        cluster.timers.pass_time(1)
        for daemon in lively:
            daemon.tell(heartbeat=head_pb2.Heartbeat())
        cluster.head.check_liveness()


def test_a_head_that_heard_nobody_blames_itself_and_gives_no_node_up(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = cluster.node(is_head_node=True), cluster.node()
    pass_quietly(cluster, 20)
    assert not own.closed
    assert not other.closed
    assert (
        caplog.text.count("no node was heard for 15 s, not even the one on the head's machine") == 1
    )
    pass_quietly(cluster, 20, own)  # from here on it is the other one that is silent
    assert not own.closed
    assert other.closed


def test_a_head_does_not_give_up_its_own_node_for_its_silence(cluster: FakeCluster) -> None:
    own, other = cluster.node(is_head_node=True), cluster.node()
    pass_quietly(cluster, 60, other)
    assert not own.closed
    assert not other.closed


def test_the_status_tells_who_waits_and_why(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 2}, {"GPU": ["0"]})
    driver = daemon.driver()
    daemon.notice(driver, "want_leases", 1, task_spec(name="train", resources={"GPU": 1}), 3)
    id = driver + new_id()
    spec = actor_spec(resources={"TPU": 1}, placement_resources={"TPU": 1, "CPU": 1}, name="one")
    daemon.notice(driver, "create_actor", id, spec, False)
    daemon.notice(driver, "start_actor", id, (0, b"", ()), [], None)
    group = (driver + new_id(), [{"CPU": 9}], "PACK", "big", "tests", False, None)
    daemon.notice(driver, "create_placement_group", *group)
    status = daemon.ask(driver, "status")
    assert status["total"] == {"CPU": 2.0, "GPU": 1.0}
    assert status["used"] == {"GPU": 1.0}
    assert [node["state"] for node in status["nodes"]] == ["ALIVE"]
    assert [(actor["name"], actor["state"]) for actor in status["actors"]] == [("one", "PENDING")]
    waiting = {demand["kind"]: demand for demand in status["pending"]}
    assert waiting["task"]["count"] == 2
    assert waiting["task"]["names"] == ["train"]
    assert "GPU" in waiting["task"]["reason"]
    assert waiting["actor"]["infeasible"]
    assert waiting["placement_group"]["shape"] == [{"CPU": 9}]
    assert [group["state"] for group in status["placement_groups"]] == ["PENDING"]
    json.dumps(status)


@pytest.mark.parametrize(
    "what", ["nodes", "actors", "leases", "pending", "placement_groups", "jobs", "workers"]
)
def test_every_listing_is_plain_data(cluster: FakeCluster, what: str) -> None:
    daemon = cluster.node()
    driver = daemon.driver()
    daemon.notice(driver, "want_leases", 1, task_spec(), 9)
    id = driver + new_id()
    daemon.notice(driver, "create_actor", id, actor_spec(), False)
    group = (driver + new_id(), [{"CPU": 9}], "PACK", "", "tests", False, None)
    daemon.notice(driver, "create_placement_group", *group)
    listing = daemon.ask(driver, "state", what)
    assert listing
    json.dumps(listing)


def test_daemons_are_told_when_the_cluster_stops(cluster: FakeCluster) -> None:
    daemons = [cluster.node(), cluster.node()]
    cluster.head.stop("enough")
    assert [daemon.one("stop").reason for daemon in daemons] == ["enough", "enough"]


def test_all_nodes_hear_that_a_driver_is_gone(cluster: FakeCluster) -> None:
    first, second = cluster.node(), cluster.node()
    driver, other = first.driver(), first.driver()
    worker = first.worker(driver)
    first.end_process(driver)
    told = [node.one("job_ended") for node in (first, second)]
    assert [(each.job_id, each.over) for each in told] == [(driver, False)] * 2
    # And that nothing is left of its job.
    first.end_process(worker)
    told = [node.one("job_ended") for node in (first, second)]
    assert [(each.job_id, each.over) for each in told] == [(driver, True)] * 2
    # Who was not there asks when it is back: for a job that nobody remembers too.
    forgotten = new_id()
    second.notice(second.node_id, "ended_jobs", [driver, other, forgotten])
    assert [told.job_id for told in second.take("job_ended")] == [driver, forgotten]
    assert not first.take("job_ended")
