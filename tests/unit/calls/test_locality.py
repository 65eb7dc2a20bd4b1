from __future__ import annotations

from typing import Any

import pytest

from miniray.calls.task_groups import preferred
from miniray.messages import protocol as p

HERE, THERE = b"here", b"there"
MIB = 1 << 20


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
