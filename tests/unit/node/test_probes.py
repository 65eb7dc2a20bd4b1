"""Profiles where py-spy may not look, and clocks, between doubles of clients and questions."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from miniray.node.probes import Probes
from miniray.node.relay.questions import Told
from miniray.profiling import outside

NODE = SimpleNamespace(node_id=b"node", machine="this machine")
WORKER = SimpleNamespace(process_id=b"worker", pid=7, is_driver=False, is_command=False)
#: Processes of other nodes are among those that are meant.
IDS = [WORKER.process_id, b"another"]


class Questions:
    """Processes that answer as the test says."""

    def __init__(self, told: dict[str, Any], missing: str = "") -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.seconds = 0.0
        self._told, self._missing = told, missing

    async def ask_processes(
        self, clients: Any, what: str, arguments: tuple[Any, ...], seconds: float
    ) -> list[Told]:
        self.asked.append((what, *arguments))
        self.seconds = max(seconds, self.seconds)
        answer = self._told.get(arguments[0])
        return [Told(WORKER.process_id, answer, self._missing) for _ in clients]


def profiled(questions: Questions) -> dict[str, Any]:
    clients = SimpleNamespace(clients={WORKER.process_id: WORKER})
    Probes(clients, questions, SimpleNamespace(work_of=lambda _: "Works"), NODE)  # type: ignore[arg-type]
    [found] = asyncio.run(questions.answers["profile"](1.0, IDS, "cpu", 1.0, False))
    return found  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _denied(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cpu(_pid: int, _seconds: float) -> tuple[list[Any], str]:
        return [], "py-spy failed: Permission Denied."

    monkeypatch.setattr(outside, "cpu", cpu)


def test_where_py_spy_may_not_look_the_process_samples_itself() -> None:
    questions = Questions({"rank": 3, "cpu": [(["f (a.py:1)"], 0.5)]})
    found = profiled(questions)
    assert sorted(questions.asked) == [("probe", "cpu", 1.0), ("probe", "rank")]
    assert (found["way"], found["rank"], found["note"]) == ("the process itself", 3, "")
    assert found["samples"] == [(["f (a.py:1)"], 0.5)]


def test_a_process_that_nothing_sees_is_said_to_hold_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outside, "stat_of", lambda _pid: ["R"])
    found = profiled(Questions({}, "it did not answer in time"))
    assert (found["way"], found["samples"]) == ("", [])
    assert "native code holds Python's lock" in found["note"]
    assert "Permission Denied" in found["note"]


def test_a_silent_process_leaves_the_time_to_look_at_it_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that answers later than it may shows none of its processes."""

    async def stacks(_pid: int) -> tuple[str, list[Any], str]:
        return "py-spy", [], "It did not answer."

    monkeypatch.setattr(outside, "stacks", stacks)
    questions = Questions({}, "it did not answer in time")
    clients = SimpleNamespace(clients={WORKER.process_id: WORKER})
    Probes(clients, questions, SimpleNamespace(work_of=lambda _: "Works"), NODE)  # type: ignore[arg-type]
    limit = 8.0
    [found] = asyncio.run(questions.answers["stack"](limit, IDS))
    assert found["way"] == "py-spy"
    assert questions.seconds + 2 * outside._PATIENCE <= limit


def test_of_many_silent_processes_a_few_at_a_time_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, most = 0, 0

    async def stacks(_pid: int) -> tuple[str, list[Any], str]:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        await asyncio.sleep(0)
        looking -= 1
        return "py-spy", [], ""

    monkeypatch.setattr(outside, "stacks", stacks)
    questions = Questions({}, "it did not answer in time")
    workers = [SimpleNamespace(**{**vars(WORKER), "process_id": bytes([n])}) for n in range(50)]
    clients = SimpleNamespace(clients={each.process_id: each for each in workers})
    Probes(clients, questions, SimpleNamespace(work_of=lambda _: "Works"), NODE)  # type: ignore[arg-type]
    found = asyncio.run(questions.answers["stack"](8.0, [each.process_id for each in workers]))
    assert len(found) == 50
    assert 1 < most <= 8


def test_who_asks_for_the_last_calls_takes_nothing_of_a_recording_that_goes_on() -> None:
    """A worker that begins during a recording is that recording's."""
    told = {"spans": [], "left_out": 0, "ahead": 0.0, "note": ""}
    questions = Questions({"timeline": told})
    clients = SimpleNamespace(clients={})
    probes = Probes(clients, questions, SimpleNamespace(work_of=lambda _: "Works"), NODE)  # type: ignore[arg-type]

    async def both() -> tuple[list[Any], list[Any]]:
        recording = asyncio.ensure_future(questions.answers["timeline"](1.0, 0.2))
        await asyncio.sleep(0)
        probes.joined(WORKER)  # type: ignore[arg-type]
        lately = await questions.answers["timeline"](1.0, 0.0)
        return lately, await recording

    lately, recorded = asyncio.run(both())
    assert [each["name"] for each in lately] == ["daemon"]
    assert [each["name"] for each in recorded] == ["daemon", "Works"]


BESIDE, FAR, SILENT = b"beside", b"far", b"silent"
#: Seconds that other clocks are ahead.
AHEAD = 5.0


class Nodes:
    """Nodes whose clocks are ahead, over ways that take longer or shorter."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.delays = iter((0.2, 0.001, 0.2, 0.2, 0.2))

    async def ask_nodes(self, _what: str, _: Any, _seconds: float, nodes: Any) -> list[Told]:
        [node] = nodes
        if node == SILENT:
            return [Told(node, None, "it is gone")]
        if node == BESIDE:
            return [Told(node, ("this machine", time.time() + AHEAD), "")]
        await asyncio.sleep(next(self.delays))  # all of it on the way there
        return [Told(node, ("another machine", time.time() + AHEAD), "")]


def test_of_some_round_trips_the_quickest_tells_the_clock_of_another_machine() -> None:
    questions: Any = Nodes()
    clients: Any = SimpleNamespace(clients={})
    Probes(clients, questions, SimpleNamespace(), NODE)  # type: ignore[arg-type]
    told = asyncio.run(questions.answers["clocks"](1.0, [BESIDE, FAR, SILENT]))
    assert told[BESIDE] == (0.0, 0.0)
    assert told[SILENT] is None
    ahead, within = told[FAR]
    assert within < 0.1
    assert ahead == pytest.approx(AHEAD, abs=within + 0.001)


def test_a_profile_that_cannot_be_read_leaves_the_other_processes_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(clients: Any, _what: str, asked: tuple[Any, ...], _seconds: float) -> list[Told]:
        answer: Any = 0 if asked == ("rank",) else ("memray", [])
        return [Told(each.process_id, answer, "") for each in clients]

    left = [ValueError("it is torn"), [(["f"], 1.0)]]

    async def read(_path: str, _leaks: bool) -> Any:
        found = left.pop(0)
        if isinstance(found, ValueError):
            raise found
        return found

    monkeypatch.setattr(outside, "read_memray", read)
    processes = {
        id: SimpleNamespace(process_id=id, pid=pid, is_command=False, is_driver=True)
        for pid, id in enumerate((b"a", b"b"))
    }
    questions = SimpleNamespace(answers={}, ask_processes=ask)
    parts: Any = SimpleNamespace(clients=processes), questions, None, None
    Probes(*parts)
    asked: Any = questions.answers["profile"]
    first, second = asyncio.run(asked(0.0, [b"a", b"b"], "memory", 0.0, False))
    assert (first["samples"], first["note"]) == ([], "It could not be looked at: it is torn.")
    assert (second["samples"], second["note"]) == ([(["f"], 1.0)], "")
