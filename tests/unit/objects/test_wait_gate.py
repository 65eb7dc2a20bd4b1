from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from process_doubles import Caller, packed

from miniray.messages.value import error_value
from miniray.objects.waiting import Waits

if TYPE_CHECKING:
    from typing import Any

    from miniray.objects.objects import Entry


def plain(wait: object, timeout: float | None) -> bool:
    return wait(timeout)  # type: ignore[operator, no-any-return]


def waits(me: Caller, block: Any = plain) -> Waits:
    return Waits(me.loop, me.table, me.borrowing, block)


def pending(me: Caller, count: int) -> list[Entry]:
    refs = [me.table.create(me.table.new_id()) for _ in range(count)]
    me.results.update({ref.binary(): ref for ref in refs})
    return [entry for ref in refs if (entry := me.table.entry(ref.binary())) is not None]


def test_a_wait_ends_when_enough_has_come() -> None:
    me = Caller()
    entries = pending(me, 3)

    def arrive() -> None:
        for entry in entries[:2]:
            me.table.set_value(entry.id, packed(1))

    thread = threading.Thread(target=arrive)
    thread.start()
    assert waits(me).for_values(entries, 2, 10.0)
    thread.join()


def test_a_wait_that_times_out_leaves_no_waiter() -> None:
    me = Caller()
    entries = pending(me, 2)
    me.table.set_value(entries[0].id, packed(1))
    assert not waits(me).for_values(entries, 2, 0.01)
    assert not entries[1].waiters


def test_a_timeout_of_zero_looks_once() -> None:
    me = Caller()
    (entry,) = pending(me, 1)
    began = time.monotonic()
    assert not waits(me).for_values([entry], 1, 0)
    assert not waits(me).for_values([entry], 1, -1)
    assert time.monotonic() - began < 1
    me.table.set_value(entry.id, packed(1))
    assert waits(me).for_values([entry], 1, 0)


@pytest.mark.parametrize("count", [3, 30], ids=["few", "many"])
def test_a_wait_that_stops_at_a_failure_ends_with_the_first_one(count: int) -> None:
    me = Caller()
    entries = pending(me, count)
    failure = error_value(KeyError("missing"))
    threading.Timer(0.01, me.table.set_value, (entries[1].id, failure)).start()
    failed: list[Entry] = []
    assert waits(me).for_values(entries, count, 10.0, failed=failed)
    assert failed == [entries[1]]
    assert not any(entry.waiters for entry in entries)


def test_the_same_object_may_be_waited_for_twice_at_once() -> None:
    me = Caller()
    (entry,) = pending(me, 1)
    threading.Timer(0.01, me.table.set_value, (entry.id, packed(1))).start()
    assert waits(me).for_values([entry, entry], 2, 10.0)


def test_a_wait_that_is_interrupted_leaves_no_waiter() -> None:
    me = Caller()
    (entry,) = pending(me, 1)

    def interrupted(_wait: object, _timeout: float | None) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waits(me, interrupted).for_values([entry], 1, None)
    assert not entry.waiters
