"""Which waits are a deadlock, of what processes tell at one moment."""

from __future__ import annotations

from typing import Any

from miniray.util.why import why

ACTOR, PROCESS, NODE = b"a" * 16, b"p" * 8, b"n" * 8
ASK, ANSWER = PROCESS + bytes(8), PROCESS + bytes(7) + b"\1"


class Cluster:
    """An actor with two threads, of which one has just called the actor itself."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def listing(self, what: str) -> list[dict[str, Any]]:
        actor = {"actor_id": ACTOR.hex(), "name": "pair", "class_name": "Door", "pid": 7}
        actor |= {"state": "ALIVE", "since": 0.0, "why_waits": "", "resources": {}}
        worker = {"worker_id": PROCESS.hex(), "actor_id": ACTOR.hex()}
        return {"actors": [actor], "workers": [worker]}.get(what, [])

    def ask_nodes(self, *_asked: Any) -> list[tuple[bytes, Any, str]]:
        call = {"task_id": ANSWER, "makes": [ANSWER], "name": "Door.answer", "needs": []}
        call |= {"state": "SUBMITTED_TO_WORKER", "type": "ACTOR_TASK", "actor_id": ACTOR}
        call |= {"node": NODE, "process": PROCESS}
        thread = {"thread": "x", "task_id": ASK, "waits_for": [ANSWER], "needed": 1, "stack": []}
        asking = call | {"task_id": ASK, "makes": [ASK], "name": "Door.ask"}
        told = {"calls": [asking, call], "works": self.works, "threads": [thread]}
        return [(NODE, [(PROCESS, 7, "worker", b"j", told, "")], "")]


def deadlock(works: list[Any]) -> bool:
    cluster: Any = Cluster(works)
    found: bool = why(cluster, "pair")["deadlock"]
    return found


def test_a_call_on_its_way_to_an_actor_is_part_of_no_deadlock() -> None:
    assert not deadlock([(ASK, "Door.ask", 1.0)])


def test_a_call_queued_behind_the_one_that_waits_for_it_is() -> None:
    assert deadlock([(ASK, "Door.ask", 1.0), (ANSWER, "Door.answer", None)])


def holders(*, infeasible: bool) -> str:
    demand = {"kind": "actor", "reason": "full", "resource": "CPU", "node_id": "", "job_ids": []}

    class Full(Cluster):
        def listing(self, what: str) -> list[dict[str, Any]]:
            if what == "pending":
                return [{**demand, "infeasible": infeasible}]
            if what == "leases":
                return [{"name": "f", "node_id": "", "resources": {"CPU": 2.0}}]
            found = super().listing(what)
            return [{**each, "why_waits": "full", "state": "PENDING"} for each in found]

    cluster: Any = Full([])
    return " ".join(each["text"] for each in why(cluster, "pair")["chain"])


def test_who_has_what_is_missing_is_named_if_that_could_ever_be_enough() -> None:
    assert "Of the CPU the task f has 2." in holders(infeasible=False)
    assert "has 2" not in holders(infeasible=True)
