from __future__ import annotations

from miniray.node.traffic import Watches

HERE, THERE, ELSEWHERE = b"node0000", b"node0001", b"node0002"


def test_watchers_of_a_process_are_told_once() -> None:
    watches = Watches()
    watches.add_here(b"watched0", HERE, b"one")
    watches.add_here(b"watched0", HERE, b"one")
    watches.add_here(b"watched0", THERE, b"two")
    assert watches.ended_here(b"watched0") == {(HERE, b"one"), (THERE, b"two")}
    assert watches.ended_here(b"watched0") == set()


def test_a_process_of_another_node_that_ends_is_told_to_those_who_watch_it_here() -> None:
    watches = Watches()
    watches.add_there(THERE, b"watched0", b"one")
    watches.add_there(THERE, b"watched1", b"two")
    watches.add_there(ELSEWHERE, b"watched0", b"three")
    assert watches.ended_there(THERE, b"watched0") == {b"one"}
    assert watches.ended_there(THERE, b"watched0") == set()
    assert watches.ended_there(b"unknown0", b"watched0") == set()


def test_a_node_that_is_gone_ends_all_its_watched_processes() -> None:
    watches = Watches()
    watches.add_there(THERE, b"watched0", b"one")
    watches.add_there(THERE, b"watched1", b"two")
    watches.add_there(ELSEWHERE, b"watched2", b"one")
    assert watches.node_ended(THERE) == {b"watched0": {b"one"}, b"watched1": {b"two"}}
    assert watches.node_ended(THERE) == {}
    assert watches.ended_there(ELSEWHERE, b"watched2") == {b"one"}


def test_watchers_on_a_node_that_is_gone_are_not_told_any_more() -> None:
    watches = Watches()
    watches.add_here(b"watched0", HERE, b"one")
    watches.add_here(b"watched0", THERE, b"two")
    watches.node_ended(THERE)
    assert watches.ended_here(b"watched0") == {(HERE, b"one")}


def test_a_node_out_of_reach_keeps_its_own_watchers_here() -> None:
    watches = Watches()
    watches.add_there(THERE, b"watched0", b"one")
    watches.add_here(b"watched1", THERE, b"two")
    assert watches.out_of_reach(THERE) == {b"watched0": {b"one"}}
    assert watches.ended_here(b"watched1") == {(THERE, b"two")}
