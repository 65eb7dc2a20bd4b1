"""What has happened in a cluster is remembered in bounds, and over restarts of the head."""

from __future__ import annotations

import pytest

from miniray.head.directories.events import KEPT, EventLog


class Disk:
    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def keep(self, number: int, record: bytes | None) -> None:
        if record is None:
            del self.records[number]
        else:
            self.records[number] = record


def test_many_events_of_one_kind_push_out_no_other_ones() -> None:
    disk = Disk()
    log = EventLog(disk.keep)
    log.add("NODE", "joined", "Node a has joined.")
    log.add("NODE", "lost", "Node a is lost.", "ERROR", node_id="a")
    for number in range(2 * KEPT):
        log.add("ACTOR", "placed", f"actor {number}")
    told = log.after(0)
    assert len(told) == len(disk.records) == KEPT + 2
    assert [event["event_type"] for event in told[:2]] == ["joined", "lost"]
    assert told[1]["custom_fields"] == {"node_id": "a"}
    assert [event["event_id"] for event in told] == sorted(disk.records)


def test_the_next_head_goes_on_where_the_last_one_ended() -> None:
    disk = Disk()
    EventLog(disk.keep).add("JOB", "started", "first")
    log = EventLog(disk.keep)
    log.restore(disk.records.values())
    log.add("JOB", "ended", "second")
    assert [event["message"] for event in log.after(0)] == ["first", "second"]
    assert [event["message"] for event in log.after(1)] == ["second"]


def test_what_happens_all_the_time_is_told_once_for_a_node() -> None:
    log = EventLog(Disk().keep)
    for node in ("a", "b"):
        for size in range(3):
            log.add_seldom("OBJECT", "spilled", f"{size} on disk", "WARNING", node)
    assert [event["custom_fields"]["node_id"] for event in log.after(0)] == ["a", "b"]


def test_a_daemon_tells_under_the_id_of_its_node() -> None:
    log = EventLog(Disk().keep)
    log.told(b"node", "WORKER", "crashed", "Worker 7 crashed.", "WARNING")
    [event] = log.after(0)
    assert event["custom_fields"] == {"node_id": b"node".hex()}
    with pytest.raises(ValueError, match="not 'WORKER' and 'BAD'"):
        log.told(b"node", "WORKER", "crashed", "", "BAD")
