"""Values that are lost and cannot be made again, in the process that owns them."""

from __future__ import annotations

from typing import Any

import pytest
from process_doubles import NODE, Caller

from miniray.calls.recovery import ValueRecovery
from miniray.messages import protocol as p

GONE = b"node-was"


@pytest.mark.parametrize("node", [GONE, NODE], ids=["node gone", "segment gone"])
def test_a_put_value_that_is_lost_says_where_it_was_put_and_why_it_is_not_made_again(
    node: bytes,
) -> None:
    me = Caller()
    recovery = ValueRecovery(
        me.table,
        me.borrowing,
        me.calls,
        me.link,
    )
    value: Any = (p.VALUE_SHARED, (node, 7, NODE, 100), ())
    ref = me.table.create_with_value(me.table.new_id(), value, None)
    me.table.record(ref, ("program.py", 12, "main"))
    entry = me.table.entry(ref.binary())
    assert entry is not None
    reason = recovery.lost(entry, value)
    assert reason is not None
    assert entry.value is value  # others may read it
    assert node.hex() in reason
    assert "it was put at program.py:12 in main, and only results of tasks" in reason
    assert "can be made again, not values of put()" in reason
