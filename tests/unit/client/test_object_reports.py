from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE, Caller, packed

from miniray.client.ref_tracking import RefTracking
from miniray.client.reports import Answers, ObjectReports
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from miniray.common.state_types import ObjectsHeld

FOREIGN = b"foreign0"


class Actors:
    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.made: list[Any] = []

    def knows(self, id: bytes) -> bool:
        return id in self.known

    def creations(self) -> list[Any]:
        return self.made


def await_reports() -> None:
    """They are made in threads."""
    for thread in threading.enumerate():
        if thread.name == "miniray-answer":
            thread.join(30)


class Process(Caller):
    """What of a runtime a report looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.actors = Actors()
        self.refs = RefTracking(self.loop, self.table, self.shared_memory, self.borrowing)

    def answers(self, executing: Any = tuple) -> Answers:
        reports = ObjectReports(self.refs, self.calls, self.actors, executing)  # type: ignore[arg-type]
        answers = Answers(self.link)  # type: ignore[arg-type]
        answers.by_name["objects"] = reports.held
        return answers

    def put(self, size: int) -> Any:
        shared = (p.VALUE_SHARED, (NODE, size, NODE, size), ())
        return self.table.create_with_value(self.table.new_id(), shared, None)

    def report(self, limit: int = 100, *, detail: bool = False, **how: Any) -> ObjectsHeld:
        before = len(self.link.noticed("answer"))
        self.answers(**how).on_asked(1, "objects", (limit, detail), time.monotonic() + 60)
        await_reports()
        [(_number, (answer, missing))] = self.link.noticed("answer")[before:]
        assert not missing
        return answer  # type: ignore[no-any-return]


@pytest.fixture
def own() -> Process:
    return Process()


def test_objects_in_shared_memory_are_told_one_by_one_and_small_ones_counted(own: Process) -> None:
    refs = [own.put(300_000), own.put(200_000)]
    small = own.table.create_with_value(own.table.new_id(), packed("small"), None)
    coming = own.table.create(own.table.new_id())
    report = own.report()
    assert [row["id"] for row in report["objects"]] == [ref.binary() for ref in refs]
    assert [row["segment"] for row in report["objects"]] == [300_000, 200_000]
    assert (report["inline"], report["inline_bytes"]) == (1, len(packed("small")[1]))
    detailed = {row["id"] for row in own.report(detail=True)["objects"]}
    assert detailed == {ref.binary() for ref in [*refs, small, coming]}


@pytest.mark.parametrize("seconds", [60, 0], ids=["answered", "too late"])
def test_a_look_at_what_is_held_does_not_hold_it(own: Process, seconds: float) -> None:
    held = [own.put(300_000)]
    id = held[0].binary()
    answers = own.answers(lambda: [("a call", [*held])])
    gc.disable()  # a cycle may stay for as long as the process has nothing to do
    try:
        answers.on_asked(1, "objects", (100, False), time.monotonic() + seconds)
        await_reports()
        held.clear()
        own.drain()
        assert own.table.entry(id) is None
    finally:
        gc.enable()


def test_borrowers_are_named(own: Process) -> None:
    ref = own.put(200_000)
    own.table.borrow(ref.binary(), b"borrower")
    own.table.unborrow(ref.binary(), b"released")  # it overtook the borrow
    [row] = own.report()["objects"]
    assert row["borrowers"] == [b"borrower"]


def test_a_worker_tells_what_its_running_calls_hold(own: Process) -> None:
    held = [own.put(200_000)]
    [row] = own.report(executing=lambda: [("square", held)])["objects"]
    assert row["holds"] == [{"kind": "USED_BY_PENDING_TASK", "count": 1, "names": ["square"]}]


def test_a_question_that_nobody_waits_for_any_more_is_not_answered(own: Process) -> None:
    ref = own.put(200_000)
    answers = own.answers()
    answers.on_asked(1, "objects", (10, False), time.monotonic() - 1)
    answers.on_asked(2, "objects", (10, False), time.monotonic() + 60)
    await_reports()
    [(number, (answer, _))] = own.link.noticed("answer")
    assert number == 2
    assert [row["id"] for row in answer["objects"]] == [ref.binary()]
