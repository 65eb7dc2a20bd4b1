"""Actors: from registration to death, as daemons and callers see it."""

from __future__ import annotations

import marshal
import pickle
from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id

from miniray._proto import head_pb2
from miniray.common.specs import GrantedLease, NodeAffinity
from miniray.exceptions import ActorAlreadyExistsError, ActorUnschedulableError
from miniray.head.directories import clients

ARGUMENTS = (0, b"args", ())


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 2})


def create(daemon: FakeDaemon, owner: bytes, **spec: Any) -> bytes:
    id = owner + new_id()
    daemon.notice(owner, "create_actor", id, actor_spec(**spec), False)
    return id


def begin(daemon: FakeDaemon, owner: bytes, **spec: Any) -> tuple[bytes, GrantedLease]:
    """An actor that its daemon is told to start."""
    id = create(daemon, owner, **spec)
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    return id, daemon.one("start_actor")


def ready(daemon: FakeDaemon, start: GrantedLease) -> bytes:
    """Its constructor is done; the process it lives in."""
    process_id = daemon.worker(start.job_id)
    daemon.tell(
        actor=head_pb2.ActorReported(
            actor_id=start.actor_id, lease=start.number, process_id=process_id, pid=200
        )
    )
    return process_id


def states(daemon: FakeDaemon, process_id: bytes) -> list[tuple[Any, ...]]:
    return [(body[1], *body[2:5]) for body in daemon.pushes(process_id, "actor")]


def deaths(daemon: FakeDaemon, process_id: bytes) -> list[str]:
    return [body[5][0] for body in daemon.pushes(process_id, "actor") if body[1] == "DEAD"]


def test_an_actor_is_placed_once_its_arguments_have_values(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, max_concurrency=3)
    assert daemon.take("start_actor") == []
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [(0, b"x", b"y", None)], None)
    start = daemon.one("start_actor")
    assert (start.actor_id, start.owner, start.job_id, start.epoch) == (id, owner, owner, 1)
    assert marshal.loads(start.arguments) == (ARGUMENTS, [(0, b"x", b"y", None)])
    assert (start.actor.class_key, start.actor.max_concurrency) == (b"k" * 16, 3)
    assert start.job.driver_node == daemon.node_id


@pytest.mark.parametrize("wrong", [{"resources": {"CPU": b"half"}}, {"owner_node": None}])
def test_an_actor_that_the_head_cannot_read_is_dead_with_its_words(
    daemon: FakeDaemon, wrong: dict[str, Any]
) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, **wrong)
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    daemon.notice(owner, "subscribe_actor", id)  # whoever asks later hears the same
    told = daemon.pushes(owner, "actor")
    assert [body[1] for body in told] == ["DEAD", "DEAD"]
    for *_, death in told:
        with pytest.raises(ActorUnschedulableError, match=f"{id.hex()}.* refused it .*Error: "):
            raise pickle.loads(death[6])


def test_its_owner_hears_where_it_lives(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner)
    process_id = ready(daemon, start)
    assert states(daemon, owner) == [("ALIVE", daemon.node_id, process_id, 0)]


def test_a_subscriber_hears_the_present_state_at_once(daemon: FakeDaemon) -> None:
    owner, other = daemon.driver(), daemon.driver()
    id, start = begin(daemon, owner)
    daemon.notice(other, "subscribe_actor", id)
    assert states(daemon, other) == [("PENDING", daemon.node_id, b"", 0)]
    process_id = ready(daemon, start)
    assert states(daemon, other) == [("ALIVE", daemon.node_id, process_id, 0)]


def test_a_handle_may_be_quicker_than_the_news_of_its_actor(daemon: FakeDaemon) -> None:
    owner, other = daemon.driver(), daemon.driver()
    id = owner + new_id()
    daemon.notice(other, "subscribe_actor", id)
    daemon.notice(owner, "create_actor", id, actor_spec(), False)
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    process_id = ready(daemon, daemon.one("start_actor"))
    assert states(daemon, other)[-1] == ("ALIVE", daemon.node_id, process_id, 0)


def test_an_actor_that_never_comes_is_dead_for_its_subscriber(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    owner, other = daemon.driver(), daemon.driver()
    daemon.notice(other, "subscribe_actor", owner + new_id())
    assert deaths(daemon, other) == []
    cluster.timers.pass_time(11)
    assert deaths(daemon, other) == ["UNKNOWN"]
    daemon.notice(other, "subscribe_actor", new_id() + new_id())
    assert deaths(daemon, other) == ["UNKNOWN"]


def test_an_actor_needs_a_cpu_to_be_placed_and_none_to_live(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    for _ in range(5):
        ready(daemon, begin(daemon, owner)[1])
    assert daemon.ask(owner, "available_resources") == {"CPU": 2.0}


def test_devices_of_an_actor_are_held_until_its_lease_is_over(cluster: FakeCluster) -> None:
    daemon = cluster.node({"CPU": 2}, {"GPU": ["0", "1"]})
    owner = daemon.driver()
    gpu = {"resources": {"GPU": 1}, "placement_resources": {"GPU": 1, "CPU": 1}}
    id, start = begin(daemon, owner, **gpu)
    assert start.devices == {"GPU": ["0"]}
    ready(daemon, start)
    daemon.ask(owner, "kill_actor", id, True)
    assert daemon.one("end_lease").kill
    assert daemon.ask(owner, "available_resources")["GPU"] == 1.0
    daemon.lease_ended(start.number)
    assert daemon.ask(owner, "available_resources")["GPU"] == 2.0


def test_a_failed_constructor_kills_the_actor_with_its_error(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner, max_restarts=5)
    daemon.tell(
        actor=head_pb2.ActorReported(actor_id=start.actor_id, lease=start.number, error=b"why")
    )
    (body,) = daemon.pushes(owner, "actor")
    assert body[1] == "DEAD"
    assert (body[5][0], body[5][1], body[5][6]) == ("CREATION_FAILED", "Thing", b"why")
    assert daemon.take("end_lease") == []


def test_an_argument_that_failed_kills_the_actor_unplaced(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = create(daemon, owner)
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], (3, b"error", ()))
    (body,) = daemon.pushes(owner, "actor")
    assert (body[5][0], body[5][6]) == ("CREATION_FAILED", b"error")
    assert daemon.take("start_actor") == []


def test_a_process_that_ends_takes_the_actor_with_it(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner)
    process_id = ready(daemon, start)
    daemon.pushes(owner, "actor")
    daemon.end_process(process_id, -9, pid=200)
    (body,) = daemon.pushes(owner, "actor")
    node = daemon.node_id.hex()
    assert body[5] == ("EXITED", "Thing", -9, 200, node, "", None, 0, 0)


def test_an_actor_with_restarts_left_starts_again(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner, max_restarts=1)
    process_id = ready(daemon, start)
    daemon.pushes(owner, "actor")
    daemon.end_process(process_id, -9)
    daemon.lease_ended(start.number)
    again = daemon.one("start_actor")
    assert again.number != start.number
    assert (again.restarts, again.arguments) == (1, start.arguments)
    second = ready(daemon, again)
    assert states(daemon, owner) == [
        ("RESTARTING", b"", b"", 1),
        ("ALIVE", daemon.node_id, second, 1),
    ]
    daemon.end_process(second, 1)
    assert deaths(daemon, owner) == ["EXITED"]


def test_a_process_that_ends_in_the_constructor_is_known_by_its_lease(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner)
    daemon.end_process(new_id(), 3, lease=start.number)
    (body,) = daemon.pushes(owner, "actor")
    assert body[5][:3] == ("EXITED", "Thing", 3)


def test_a_lease_that_is_over_ends_an_actor_that_was_not_heard_to_end(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner)
    daemon.lease_ended(start.number)
    assert deaths(daemon, owner) == ["EXITED"]


def test_exit_actor_is_not_followed_by_a_restart(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner, max_restarts=-1)
    process_id = ready(daemon, start)
    daemon.tell(
        actor=head_pb2.ActorReported(actor_id=start.actor_id, lease=start.number, exiting=True)
    )
    daemon.end_process(process_id, 0, planned=True)
    assert deaths(daemon, owner) == ["EXIT_ACTOR"]
    assert daemon.take("start_actor") == []


def test_a_kill_that_allows_restarts_restarts(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id, start = begin(daemon, owner, max_restarts=1)
    process_id = ready(daemon, start)
    daemon.ask(owner, "kill_actor", id, False)
    end = daemon.one("end_lease")
    assert (end.kill, end.lease) == (True, start.number)
    daemon.end_process(process_id, -9)
    again = ready(daemon, daemon.one("start_actor"))
    daemon.pushes(owner, "actor")
    daemon.ask(owner, "kill_actor", id, False)
    assert deaths(daemon, owner) == ["KILLED"]
    daemon.end_process(again, -9)
    assert daemon.take("start_actor") == []


def test_a_waiting_actor_that_is_killed_is_never_started(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, resources={"CPU": 3}, placement_resources={"CPU": 3})
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    daemon.ask(owner, "kill_actor", id, True)
    assert deaths(daemon, owner) == ["KILLED"]
    daemon.cluster.node({"CPU": 8})
    assert daemon.take("end_lease") == []
    assert daemon.ask(owner, "state", "pending") == []


def test_an_actor_ends_gently_when_its_last_handle_goes(daemon: FakeDaemon) -> None:
    owner, other = daemon.driver(), daemon.driver()
    id, start = begin(daemon, owner)
    ready(daemon, start)
    daemon.notice(other, "actor_out_of_scope", id)
    assert daemon.take("end_lease") == []
    daemon.notice(owner, "actor_out_of_scope", id)
    assert not daemon.one("end_lease").kill
    daemon.notice(other, "subscribe_actor", id)
    assert deaths(daemon, other) == ["OUT_OF_SCOPE"]


def test_actors_end_with_their_owner_unless_they_are_detached(daemon: FakeDaemon) -> None:
    owner, other = daemon.driver(), daemon.driver()
    mine, first = begin(daemon, owner)
    kept, second = begin(daemon, owner, detached=True, name="kept")
    for start in (first, second):
        ready(daemon, start)
    for id in (mine, kept):
        daemon.notice(other, "subscribe_actor", id)
    daemon.end_process(owner, None, planned=True)
    assert deaths(daemon, other) == ["OWNER_DIED"]
    assert daemon.one("end_lease").lease == first.number
    assert daemon.ask(other, "get_actor", "kept", "tests") == (kept, b"n" * 8, True, b"info")


def test_a_name_is_taken_until_its_actor_is_dead(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = owner + new_id()
    spec = actor_spec(name="one")
    assert daemon.ask(owner, "create_actor", id, spec, False) is None
    with pytest.raises(ActorAlreadyExistsError, match="one"):
        daemon.ask(owner, "create_actor", owner + new_id(), spec, False)
    found = daemon.ask(owner, "create_actor", owner + new_id(), spec, True)
    assert found == (id, b"n" * 8, False, b"info")
    assert daemon.ask(owner, "list_named_actors", None) == [{"name": "one", "namespace": "tests"}]
    assert daemon.ask(owner, "list_named_actors", "elsewhere") == []
    daemon.ask(owner, "kill_actor", id, True)
    with pytest.raises(ValueError, match="one"):
        daemon.ask(owner, "get_actor", "one", "tests")
    assert daemon.ask(owner, "create_actor", owner + new_id(), spec, False) is None


def test_an_actor_of_a_lost_node_starts_on_another(cluster: FakeCluster) -> None:
    home = cluster.node({"CPU": 1})
    away = cluster.node({"CPU": 1})
    owner = home.driver()
    placed: list[tuple[bytes, bytes]] = []
    for restarts in (1, 0):
        there = NodeAffinity(away.node_id.hex(), soft=True)
        id = create(home, owner, max_restarts=restarts, placement=there)
        home.notice(owner, "start_actor", id, ARGUMENTS, [], None)
        placed.append((id, ready(away, away.one("start_actor"))))
    home.pushes(owner, "actor")
    assert away.node is not None
    cluster.head.lose(away.node, "it burnt")
    bodies = {body[0]: body for body in home.pushes(owner, "actor")}
    assert bodies[placed[0][0]][1] == "RESTARTING"
    assert bodies[placed[1][0]][5][0] == "NODE_LOST"
    assert bodies[placed[1][0]][5][5] == "It burnt."
    assert home.one("start_actor").actor_id == placed[0][0]
    assert home.one("node_died").node_id == away.node_id


def test_an_actor_whose_owner_was_on_a_lost_node_dies_with_that_reason(
    cluster: FakeCluster,
) -> None:
    home, away = cluster.node({"CPU": 1}), cluster.node({"CPU": 1})
    owner, other = away.driver(), home.driver()
    id = create(away, owner, placement=NodeAffinity(home.node_id.hex(), soft=True))
    away.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    ready(home, home.one("start_actor"))
    home.notice(other, "subscribe_actor", id)
    home.pushes(other, "actor")
    assert away.node is not None
    cluster.head.lose(away.node, "it was silent")
    ((_, state, *_, death),) = home.pushes(other, "actor")
    assert (state, death[0]) == ("DEAD", "OWNER_DIED")
    assert death[5] == f"Node {away.node.name} is gone: it was silent."


def test_an_actor_bound_to_a_missing_node_is_unschedulable(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, placement=NodeAffinity((b"gone" * 2).hex(), soft=False))
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    (body,) = daemon.pushes(owner, "actor")
    assert body[5][0] == "CREATION_FAILED"
    error = pickle.loads(body[5][6])
    assert isinstance(error, ActorUnschedulableError)
    assert "not in the cluster" in str(error)


def test_an_environment_that_cannot_be_made_kills_the_actor(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(
        daemon, owner, resources={"CPU": 2}, placement_resources={"CPU": 2}, max_restarts=3
    )
    daemon.tell(lease_failed=head_pb2.LeaseFailed(lease=start.number, error=b"no pip"))
    (body,) = daemon.pushes(owner, "actor")
    assert (body[5][0], body[5][6]) == ("CREATION_FAILED", b"no pip")
    assert daemon.ask(owner, "available_resources") == {"CPU": 2.0}


def test_an_actor_whose_place_was_no_good_is_placed_again(daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    _, start = begin(daemon, owner, resources={"CPU": 2}, placement_resources={"CPU": 2})
    daemon.tell(lease_failed=head_pb2.LeaseFailed(lease=start.number, error=b"kept", tries=20))
    again = daemon.one("start_actor")
    assert (again.actor_id, again.restarts) == (start.actor_id, 0)
    assert again.number != start.number
    assert not daemon.pushes(owner, "actor")
    assert daemon.ask(owner, "available_resources") == {}


def test_a_driver_hears_once_why_its_actor_waits(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    ready(daemon, begin(daemon, owner, resources={"CPU": 2}, placement_resources={"CPU": 2})[1])
    for _ in range(2):
        id = create(daemon, owner, resources={"CPU": 1})
        daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    cluster.timers.pass_time(4.9)
    assert daemon.pushes(owner, "pending") == []
    cluster.timers.pass_time(30)
    assert daemon.pushes(owner, "pending") == [()]
    [told] = daemon.long_waiting(owner)
    assert (told["names"], told["count"], told["infeasible"]) == (["Thing"], 2, False)
    assert "CPU" in told["reason"]


def test_a_driver_hears_the_more_seldom_the_more_waits(
    cluster: FakeCluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_EACH", 1e-3)
    owner = daemon.driver()

    def make(count: int) -> None:
        for _ in range(count):
            id = create(daemon, owner, resources={"GPU": 1}, placement_resources={"GPU": 1})
            daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)

    make(1000)
    cluster.timers.pass_time(0.6)
    assert daemon.pushes(owner, "pending") == [()]
    make(10)
    cluster.timers.pass_time(0.6)
    assert daemon.pushes(owner, "pending") == []
    cluster.timers.pass_time(0.6)
    assert daemon.pushes(owner, "pending") == [()]
    [told] = daemon.long_waiting(owner)
    assert (told["names"], told["count"]) == (["Thing"], 1010)


def test_what_does_not_wait_any_more_is_not_told(cluster: FakeCluster, daemon: FakeDaemon) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, resources={"GPU": 1}, placement_resources={"GPU": 1})
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    assert daemon.long_waiting(owner)
    daemon.notice(owner, "kill_actor", id, True)
    assert daemon.long_waiting(owner) == []


def test_a_driver_hears_soon_what_no_node_could_ever_serve(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    owner = daemon.driver()
    id = create(daemon, owner, resources={"GPU": 1}, placement_resources={"GPU": 1})
    daemon.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    cluster.timers.pass_time(1)
    assert daemon.pushes(owner, "pending") == [()]
    [told] = daemon.long_waiting(owner)
    assert told["infeasible"]


def test_an_actor_that_was_killed_does_not_die_again_with_its_node(cluster: FakeCluster) -> None:
    here, there = cluster.node({"CPU": 2}), cluster.node({"far": 1})
    owner = here.driver()
    id = create(here, owner, max_restarts=-1, placement_resources={"far": 1})
    here.notice(owner, "start_actor", id, ARGUMENTS, [], None)
    ready(there, there.one("start_actor"))
    here.ask(owner, "kill_actor", id, True)
    assert deaths(here, owner) == ["KILLED"]
    assert there.node is not None
    # Its process is still on its way out, so its lease is still known.
    cluster.head.lose(there.node, "it was silent")
    assert deaths(here, owner) == []
    cluster.node({"far": 1})
    assert cluster.head.cluster.actors.all() == []
