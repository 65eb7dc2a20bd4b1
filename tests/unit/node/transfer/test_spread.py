"""Who copies a segment from whom."""

from __future__ import annotations

import collections
import random

import pytest

from miniray.node.transfer.directory import SpreadTree

SOURCE = b"source"


def place(spread: SpreadTree, node: bytes, *tried: bytes) -> bytes:
    for other in tried:
        spread.failed(other)
    return spread.place(node, tried, serves=True)


def names(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_nodes_that_ask_at_once_make_a_tree_in_which_nobody_serves_more_than_two() -> None:
    spread = SpreadTree(SOURCE)
    parents = {node: place(spread, node) for node in names(100)}
    served = collections.Counter(parents.values())
    assert served[SOURCE] == 2
    assert max(served.values()) == 2

    def depth(node: bytes) -> int:
        return 0 if node == SOURCE else 1 + depth(parents[node])

    assert max(map(depth, parents)) <= 6


def test_who_has_a_copy_serves_when_the_source_is_busy() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    spread.has_copy(b"a", serves=True)
    parents = [place(spread, node) for node in names(4)]
    assert sorted(parents) == [b"a", b"a", SOURCE, SOURCE]


def test_who_gave_up_is_named_until_it_has_refused_somebody() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    place(spread, b"b")
    assert place(spread, b"c") == b"a"
    place(spread, b"c", b"a")
    parents = [place(spread, node) for node in names(6)]
    assert b"a" not in parents


def test_nobody_is_sent_again_to_who_did_not_serve() -> None:
    spread = SpreadTree(SOURCE)
    a, b, c = (place(spread, node) for node in (b"a", b"b", b"c"))
    assert (a, b) == (SOURCE, SOURCE)
    again = place(spread, b"c", c)
    assert again not in (c, SOURCE)
    # Only the source is left, though it serves two.
    assert spread.place(b"c", (b"a", b"b"), serves=True) == SOURCE


def test_nobody_copies_from_who_copies_from_it() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    place(spread, b"b")
    assert place(spread, b"c") == b"a"
    assert place(spread, b"a") in (SOURCE, b"b")
    spread.node_died(b"b")
    assert place(spread, b"a", b"b") == SOURCE


def test_who_dropped_its_copy_and_wants_another_is_no_source_for_whom_it_waits() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    spread.has_copy(b"a", serves=True)
    place(spread, b"b")
    place(spread, b"c")
    above = place(spread, b"a")
    assert above != SOURCE
    assert spread.place(above, (), serves=True) != b"a"


def test_who_cannot_be_reached_is_not_named() -> None:
    spread = SpreadTree(SOURCE)
    for node in names(5):
        assert spread.place(node, (), serves=False) == SOURCE


def test_a_node_that_died_is_not_named_and_its_place_is_free() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    place(spread, b"b")
    spread.node_died(b"a")
    parents = [place(spread, node) for node in (b"c", b"d", b"e")]
    assert SOURCE in parents
    assert b"a" not in parents
    assert b"a" not in spread.nodes


def test_the_last_copy_is_named_though_it_was_out_of_reach_for_somebody() -> None:
    spread = SpreadTree(SOURCE)
    spread.has_copy(b"a", serves=True)
    spread.node_died(SOURCE)
    assert place(spread, b"b") == b"a"
    with pytest.raises(LookupError):
        place(spread, b"b", b"a")
    assert place(spread, b"c") == b"a"


def test_who_cannot_be_reached_by_all_is_named_when_nobody_else_has_it() -> None:
    spread = SpreadTree(SOURCE)
    spread.has_copy(b"a", serves=False)
    assert place(spread, b"b") == SOURCE
    spread.node_died(SOURCE)
    spread.node_died(b"b")
    assert place(spread, b"c") == b"a"


def test_what_no_living_node_has_is_lost_for_whoever_asks() -> None:
    spread = SpreadTree(SOURCE)
    place(spread, b"a")
    spread.node_died(SOURCE)
    assert spread.is_lost
    for node in (b"a", b"b"):  # the former was getting it
        with pytest.raises(LookupError):
            place(spread, node)
        with pytest.raises(LookupError):
            spread.holder(node, ())
    spread.has_copy(SOURCE, serves=True)  # it is back
    assert place(spread, b"b") == SOURCE


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_tree_has_no_circle_and_all_get_a_copy(seed: int) -> None:
    rng = random.Random(seed)
    spread = SpreadTree(SOURCE)
    waiting, dead = set(names(30)), set()
    copying: dict[bytes, bytes] = {}
    whole = {SOURCE}
    for _ in range(3000):
        step = rng.random()
        if step < 0.5 and waiting:
            node = rng.choice(sorted(waiting))
            found = spread.place(node, (), serves=True)
            waiting.discard(node)
            copying[node] = found
            assert found not in dead
            assert found in whole or found in copying
        elif step < 0.8 and copying:
            ready = [n for n, p in copying.items() if p in whole]
            node = rng.choice(sorted(ready))  # there is one, or they wait for each other
            del copying[node]
            spread.has_copy(node, serves=True)
            whole.add(node)
        elif step < 0.85 and len(dead) < 10:
            node = rng.choice(names(30))
            dead.add(node)
            waiting.discard(node)
            whole.discard(node)
            copying.pop(node, None)
            spread.node_died(node)
            for child in [n for n, p in copying.items() if p == node]:
                copying[child] = spread.place(child, [node], serves=True)
    assert whole == {SOURCE, *names(30)} - dead
    assert not copying
