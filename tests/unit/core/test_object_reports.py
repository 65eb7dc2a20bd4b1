from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
from core_doubles import NODE, Caller, packed

from miniray.client.object_reports import ObjectReports
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from miniray.common.memory_types import ObjectsHeld

FOREIGN = b"foreign0"


class Actors:
    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.made: list[Any] = []

    def knows(self, id: bytes) -> bool:
        return id in self.known

    def creations(self) -> list[Any]:
        return self.made


class Channel:
    def submit(self, _call: Any) -> None:
        pass


class Process(Caller):
    """What of a runtime a report looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.actors = Actors()

    def put(self, size: int) -> Any:
        shared = (p.VALUE_SHARED, (NODE, size, size), ())
        return self.table.create_with_value(self.ids.new(), shared, None)

    def report(self, limit: int = 100, *, detail: bool = False, **how: Any) -> ObjectsHeld:
        reports = ObjectReports(self, **how)  # type: ignore[arg-type]
        for answer in reports.steps(limit, detail):
            if answer is not None:
                return answer
        raise AssertionError("there was no answer")


@pytest.fixture
def own() -> Process:
    return Process()


def test_objects_in_shared_memory_are_told_one_by_one_and_small_ones_counted(own: Process) -> None:
    refs = [own.put(300_000), own.put(200_000)]
    small = own.table.create_with_value(own.ids.new(), packed("small"), None)
    coming = own.table.create(own.ids.new())
    report = own.report()
    assert [row["id"] for row in report["objects"]] == [ref.binary() for ref in refs]
    assert [row["segment"] for row in report["objects"]] == [300_000, 200_000]
    assert report["totals"] == {
        "shared": 2,
        "shared_bytes": 500_000,
        "inline": 1,
        "inline_bytes": len(packed("small")[1]),
        "pending": 1,
        "borrowed": 0,
    }
    detailed = {row["id"] for row in own.report(detail=True)["objects"]}
    assert detailed == {ref.binary() for ref in [*refs, small, coming]}


class Loop:
    """Runs what is to be called later when it is told to."""

    def __init__(self) -> None:
        self.later: list[Any] = []

    def call_later(self, _seconds: float, step: Any) -> None:
        self.later.append(step)


@pytest.mark.parametrize("seconds", [60, 0], ids=["answered", "too late"])
def test_a_look_at_what_is_held_does_not_hold_it(own: Process, seconds: float) -> None:
    held = [own.put(300_000)]
    id = held[0].binary()
    own.loop = loop = Loop()  # type: ignore[assignment]
    reports = ObjectReports(own, lambda: [("a call", [*held])])  # type: ignore[arg-type]
    gc.disable()  # a cycle may stay for as long as the process has nothing to do
    try:
        reports.on_asked(1, 100, False, time.monotonic() + seconds)
        while loop.later:
            loop.later.pop()()
        held.clear()
        own.drain()
        assert own.table.entry(id) is None
    finally:
        gc.enable()


def test_no_more_than_the_limit_are_told(own: Process) -> None:
    refs = [own.put(1000 + number) for number in range(5000)]
    report = own.report(3)
    assert [row["size"] for row in report["objects"]] == [5999, 5998, 5997]
    assert report["totals"]["shared"] == len(refs)


def test_the_work_is_done_in_slices(own: Process) -> None:
    refs = [own.put(1000) for _ in range(5000)]
    steps = list(ObjectReports(own).steps(1, False))  # type: ignore[arg-type]
    assert steps[-1] is not None
    assert steps[:-1] == [None] * 4  # three over the values, one over what they contain
    del refs


def test_borrowers_are_named(own: Process) -> None:
    ref = own.put(200_000)
    own.table.borrow(ref.binary(), b"borrower")
    own.table.unborrow(ref.binary(), b"released")  # it overtook the borrow
    [row] = own.report()["objects"]
    assert row["borrowers"] == [b"borrower"]


def test_what_was_borrowed_and_not_read_is_told_too(own: Process) -> None:
    ref, _entry = own.table.adopt(FOREIGN + bytes(8), NODE)
    report = own.report()
    [row] = report["objects"]
    assert (row["owner"], row["process"], row["size"]) == (FOREIGN, own.process_id, 0)
    assert report["totals"]["borrowed"] == 1
    del ref


def test_pending_results_are_told_with_their_call(own: Process) -> None:
    call = own.call(Channel(), own.put(200_000))
    own.calls.open_call(call)
    rows = {row["id"]: row for row in own.report(detail=True)["objects"]}
    result = rows[call.return_ids[0]]
    assert (result["call_site"], result["status"]) == ("Test.method", "PENDING_NODE_ASSIGNMENT")
    [argument] = [row for row in rows.values() if row["segment"]]
    assert argument["holds"] == [
        {"kind": "USED_BY_PENDING_TASK", "count": 1, "names": ["Test.method"]}
    ]


def test_large_arguments_are_told_and_what_constructors_hold(own: Process) -> None:
    call = own.call(Channel(), bytes(200_000))
    own.actors.made.append(call)  # as that of an actor that lives
    report = own.report()
    [row] = report["objects"]
    assert (row["id"], row["call_site"]) == (b"", "arguments of Test.method")
    assert row["owner"] == own.process_id
    assert report["totals"]["shared_bytes"] == row["size"] > 200_000


def test_handles_of_actors_are_no_objects(own: Process) -> None:
    handle = own.table.create_actor(own.ids.new())
    found, _ = own.table.adopt(FOREIGN + bytes(8), NODE)
    own.actors.known.add(found.binary())
    assert own.report()["objects"] == []
    kinds = [row["holds"][0]["kind"] for row in own.report(detail=True)["objects"]]
    assert kinds == ["ACTOR_HANDLE", "ACTOR_HANDLE"]
    del handle


def test_a_worker_tells_what_its_running_calls_hold(own: Process) -> None:
    held = [own.put(200_000)]
    [row] = own.report(executing=lambda: [("square", held)])["objects"]
    assert row["holds"] == [{"kind": "USED_BY_PENDING_TASK", "count": 1, "names": ["square"]}]


def test_a_question_that_nobody_waits_for_any_more_is_not_answered(own: Process) -> None:
    ref = own.put(200_000)
    reports = ObjectReports(own)  # type: ignore[arg-type]
    reports.on_asked(1, 10, False, time.monotonic() - 1)
    reports.on_asked(2, 10, False, time.monotonic() + 60)
    while own.loop.timers:
        own.loop.fire()
    [(number, answer)] = own.link.noticed("objects_held")
    assert number == 2
    assert [row["id"] for row in answer["objects"]] == [ref.binary()]
