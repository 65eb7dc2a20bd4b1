from __future__ import annotations

from typing import Any

import pytest

from miniray.calls.task_groups import (
    FULL_FOR,
    LONGEST,
    LOOK,
    RATE,
    SHORTEST,
    Wishes,
    preferred,
)
from miniray.messages import protocol as p

HERE, THERE, ELSEWHERE = b"here", b"there", b"elsewhere"
MIB = 1 << 20


class Task:
    """All that is asked of a call."""

    def __init__(self, number: int) -> None:
        self.number = number


def tasks(*wishes: tuple[bytes, int] | None) -> tuple[Wishes, Any]:
    """Queued tasks, by the node that each wishes for and the bytes that saves."""
    all_wishes = Wishes()
    queue: Any = [Task(number) for number in range(len(wishes))]
    for task, wish in zip(queue, wishes, strict=True):
        if wish is not None:
            all_wishes.add(task, *wish, 0.0)
    return all_wishes, queue


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([(HERE, MIB)], (HERE, MIB)),
        ([(HERE, MIB - 1)], None),
        ([(HERE, 4 * MIB), (THERE, 3 * MIB)], (HERE, MIB)),
        ([(HERE, 4 * MIB), (THERE, 3 * MIB), (THERE, 3 * MIB)], (THERE, 2 * MIB)),
        ([(HERE, 4 * MIB), (THERE, 4 * MIB)], None),
    ],
)
def test_the_node_with_most_of_what_is_read_is_preferred(values: Any, expected: Any) -> None:
    stored = [(p.VALUE_SHARED, (node, 1, node, size), ()) for node, size in values]
    assert preferred(stored) == expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([], None),
        ([(HERE, 4 * MIB)], (HERE, 4 * MIB)),  # of what is there
        ([(b"third", 4 * MIB)], None),
        ([(b"third", 4 * MIB), (b"third", 4 * MIB)], (b"third", 4 * MIB)),
    ],
)
def test_copies_count_for_where_a_task_should_run(copies: Any, expected: Any) -> None:
    stored = [(p.VALUE_SHARED, (node, 1, node, 4 * MIB), ()) for node in (HERE, THERE)]
    assert preferred(stored, copies) == expected


def test_a_lease_runs_the_first_task_that_wishes_for_its_node() -> None:
    wishes, queue = tasks((THERE, MIB), (HERE, MIB), None, (HERE, MIB))
    assert wishes.best(queue, HERE, 0.0) == 1
    assert wishes.best(queue, THERE, 0.0) == 0


def test_a_task_without_a_wish_is_passed_by_none() -> None:
    wishes, queue = tasks((THERE, 100 * MIB), None, (HERE, MIB))
    assert wishes.best(queue, HERE, 0.0) == 1


def test_a_task_that_waited_long_enough_runs_anywhere_unless_another_is_at_home_there() -> None:
    wishes, queue = tasks((THERE, MIB), (HERE, 1 << 40))
    assert wishes.best(queue, ELSEWHERE, SHORTEST / 2) is None
    assert wishes.best(queue, ELSEWHERE, SHORTEST) == 0
    assert wishes.best(queue, HERE, SHORTEST) == 1


def test_a_task_is_passed_for_a_while_only() -> None:
    wishes, queue = tasks((THERE, MIB), (HERE, 100 * MIB))
    assert wishes.best(queue, HERE, FULL_FOR + 1) == 0


@pytest.mark.parametrize(
    ("size", "patience"), [(MIB, SHORTEST), (RATE // 2, 0.5), (1 << 40, LONGEST)]
)
def test_a_task_waits_as_long_as_its_data_would_move_within_limits(
    size: int, patience: float
) -> None:
    wishes, queue = tasks((THERE, size))
    assert wishes.until(queue, 0.0) == patience
    assert wishes.until(queue, patience) is None


def test_a_node_that_was_waited_for_in_vain_is_not_for_a_while() -> None:
    wishes, queue = tasks((THERE, 100 * MIB), (THERE, 1 << 40))
    now = wishes.until(queue, 0.0) or 0.0
    wishes.give_up(queue, now)
    assert wishes.best(queue[1:], HERE, now) == 0
    later = Task(7)
    wishes.add(later, THERE, 100 * MIB, now + FULL_FOR / 2)  # type: ignore[arg-type]
    assert wishes.best([later], HERE, now + FULL_FOR / 2) == 0  # type: ignore[list-item]
    wishes.room(THERE)
    assert wishes.best([later], HERE, now + FULL_FOR / 2) is None  # type: ignore[list-item]
    wishes.give_up(queue, now)
    last = Task(8)
    wishes.add(last, THERE, 100 * MIB, now + FULL_FOR)  # type: ignore[arg-type]
    assert wishes.best([last], HERE, now + FULL_FOR) is None  # type: ignore[list-item]


def test_only_the_first_tasks_are_looked_at() -> None:
    wishes, queue = tasks(*[(THERE, 1 << 40)] * LOOK, (HERE, 1 << 40))
    assert wishes.best(queue, HERE, 0.0) is None
    assert wishes.hint(queue) == THERE
    assert wishes.hint([]) == b""
