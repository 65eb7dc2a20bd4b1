"""Listings that a process watches: what is pushed, how often, and when nothing is."""

from __future__ import annotations

from typing import Any

import pytest
from head_harness import FakeCluster, FakeDaemon, actor_spec, new_id

from miniray.messages import plain


class Watcher:
    """A process that watches, and what it was told."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.id = new_id()
        daemon.tell(
            attached={"process_id": self.id, "pid": 300, "job_id": self.id}  # a command
        )

    def watch(self, *listings: str) -> None:
        self.daemon.ask(self.id, "watch", list(listings))

    def told(self, listing: str) -> list[tuple[dict[str, Any], list[str]]]:
        """The changed rows and the keys that are gone of each push since the last time."""
        pushes = self.daemon.pushes(self.id, "rows")
        return [plain.loads(data) for name, data in pushes if name == listing]


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeCluster().node()


def add_actor(daemon: FakeDaemon, owner: bytes, number: int) -> bytes:
    id = owner + number.to_bytes(8, "big")
    daemon.notice(owner, "create_actor", id, actor_spec(), False)
    return id


def test_a_watcher_gets_all_rows_first_and_then_those_that_change(daemon: FakeDaemon) -> None:
    driver, watcher = daemon.driver(), Watcher(daemon)
    first = add_actor(daemon, driver, 1)
    watcher.watch("actors", "jobs")
    daemon.cluster.timers.pass_time(1)
    ((rows, gone),) = watcher.told("actors")
    assert (list(rows), gone) == ([first.hex()], [])
    second = add_actor(daemon, driver, 2)
    daemon.cluster.timers.pass_time(1)
    ((rows, gone),) = watcher.told("actors")
    assert list(rows) == [second.hex()]
    daemon.notice(driver, "kill_actor", first, True)
    daemon.cluster.timers.pass_time(1)
    ((rows, gone),) = watcher.told("actors")
    assert rows[first.hex()]["state"] == "DEAD"


def test_changes_of_a_quarter_of_a_second_are_one_push(daemon: FakeDaemon) -> None:
    driver, watcher = daemon.driver(), Watcher(daemon)
    watcher.watch("actors")
    daemon.cluster.timers.pass_time(1)
    watcher.told("actors")
    for number in range(1, 11):
        add_actor(daemon, driver, number)
        daemon.cluster.timers.pass_time(0.01)
    daemon.cluster.timers.pass_time(1)
    pushes = watcher.told("actors")
    assert len(pushes) == 1
    assert len(pushes[0][0]) == 10


def test_many_actors_are_described_piece_by_piece(daemon: FakeDaemon) -> None:
    driver, watcher = daemon.driver(), Watcher(daemon)
    ids = [add_actor(daemon, driver, number) for number in range(1, 1202)]
    watcher.watch("actors")
    daemon.cluster.timers.pass_time(1)
    pushes = watcher.told("actors")
    assert len(pushes) == 3
    assert {key for rows, _ in pushes for key in rows} == {id.hex() for id in ids}


def test_other_listings_are_not_made_again_for_each_piece_of_actors(
    daemon: FakeDaemon,
) -> None:
    driver, watcher = daemon.driver(), Watcher(daemon)
    watcher.watch("actors", "jobs")
    daemon.cluster.timers.pass_time(1)
    watcher.told("actors")
    listings, made = daemon.cluster.head.state.listings, []
    jobs = listings["jobs"]
    listings["jobs"] = lambda: (made.append("jobs"), jobs())[1]
    for number in range(1, 2502):
        add_actor(daemon, driver, number)
    daemon.cluster.timers.pass_time(1)
    assert sum(len(rows) for rows, _ in watcher.told("actors")) == 2501
    assert 1 <= len(made) <= 2


def test_what_did_not_change_is_not_pushed(daemon: FakeDaemon) -> None:
    watcher = Watcher(daemon)
    watcher.watch("node_states", "jobs", "actors")
    daemon.cluster.timers.pass_time(1)
    assert len(watcher.told("node_states")) == 1
    for _ in range(3):
        daemon.tell(heartbeat={})
        daemon.cluster.timers.pass_time(1)
    assert watcher.daemon.pushes(watcher.id, "rows") == []


def test_a_second_watcher_gets_all_rows_and_the_first_one_nothing(daemon: FakeDaemon) -> None:
    driver, one, other = daemon.driver(), Watcher(daemon), Watcher(daemon)
    add_actor(daemon, driver, 1)
    one.watch("actors", "jobs")
    daemon.cluster.timers.pass_time(1)
    one.daemon.pushes(one.id, "rows")
    other.watch("actors", "jobs")
    daemon.cluster.timers.pass_time(1)
    assert one.daemon.pushes(one.id, "rows") == []
    pushes = other.daemon.pushes(other.id, "rows")
    assert sorted(name for name, _ in pushes) == ["actors", "jobs"]


def test_one_that_has_ended_is_pushed_nothing(daemon: FakeDaemon) -> None:
    driver, watcher = daemon.driver(), Watcher(daemon)
    watcher.watch("actors")
    daemon.cluster.timers.pass_time(1)
    watcher.told("actors")
    daemon.end_process(watcher.id)
    add_actor(daemon, driver, 1)
    daemon.cluster.timers.pass_time(1)
    assert watcher.told("actors") == []
    assert daemon.cluster.head.cluster.actors.changes.take() == []


def test_a_listing_that_is_none_and_too_many_watchers_are_refused(daemon: FakeDaemon) -> None:
    with pytest.raises(ValueError, match="no listing of 'nonsense'"):
        Watcher(daemon).watch("nonsense")
    for _ in range(16):
        Watcher(daemon).watch("jobs")
    with pytest.raises(ValueError, match="16 processes watch"):
        Watcher(daemon).watch("jobs")
