"""What nodes and processes tell, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.util.memory_records import cluster_memory

if TYPE_CHECKING:
    from miniray.common.state_types import Hold, NodeMemory, ObjectRow, ProcessRow, SegmentRow
    from miniray.util.state_records import ClusterMemoryState, ObjectState

NODE, FAR = b"node-one", b"node-two"
DRIVER, KEEPER, GONE = b"driver00", b"keeper00", b"gone0000"
ID = DRIVER + bytes(7) + b"\x05"
ADDRESSES = [
    {"node_id": NODE.hex(), "address": "10.0.0.1"},
    {"node_id": FAR.hex(), "address": "10.0.0.2"},
]


def process(id: bytes, pid: int, kind: Any, name: str = "", *, told: bool = True) -> ProcessRow:
    return {
        "process": id,
        "pid": pid,
        "type": kind,
        "name": name,
        "answered": told,
        "inline": 2 if told else 0,
        "inline_bytes": 30 if told else 0,
    }


def hold(kind: Any, *names: str, count: int = 1) -> Hold:
    return {"kind": kind, "count": count, "names": list(names)}


def row(*holds: Hold, **changes: Any) -> ObjectRow:
    made: ObjectRow = {
        "id": ID,
        "owner": DRIVER,
        "process": DRIVER,
        "size": 1000,
        "node": NODE,
        "segment": 3,
        "status": "NIL",
        "call_site": "a.py:1 in main",
        "holds": list(holds),
        "borrowers": [],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def segment(**changes: Any) -> SegmentRow:
    made: SegmentRow = {
        "number": 3,
        "size": 1000,
        "allocated": 4096,
        "owner": DRIVER,
        "writer": DRIVER,
        "state": "HELD",
        "call_site": "a.py:1 in main",
        "mappers": [],
        "source_node": b"",
        "source": 0,
        "spilled": False,
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


def node(
    segments: list[SegmentRow],
    objects: list[ObjectRow],
    processes: list[ProcessRow] | None = None,
    id: bytes = NODE,
    reason: str = "",
) -> NodeMemory:
    if processes is None:
        processes = [
            process(NODE, 1, "NODE"),
            process(DRIVER, 10, "DRIVER"),
            process(KEEPER, 11, "WORKER", "Keeper"),
        ]
    return {
        "node": id,
        "reason": reason,
        "totals": {
            "capacity": 1 << 20,
            "used": 8192,
            "pooled": 4096,
            "freed": 4096,
            "writing": 0,
            "spilled": 0,
            "segments": len(segments),
            "freed_by": {KEEPER: 4096},
        },
        "processes": processes,
        "segments": segments,
        "objects": objects,
    }


def memory(*nodes: NodeMemory, limit: int = 100, detail: bool = False) -> ClusterMemoryState:
    return cluster_memory(nodes, ADDRESSES, limit, detail=detail)


def only(*nodes: NodeMemory, detail: bool = False) -> ObjectState:
    [found] = memory(*nodes, detail=detail).objects
    return found


def test_each_reason_is_told_in_words() -> None:
    inner = (KEEPER + bytes(7) + b"\x09").hex()
    found = only(
        node(
            [segment()],
            [
                row(
                    hold("CAPTURED_IN_OBJECT", inner),
                    hold("LOCAL_REFERENCE", "pickled"),
                    hold("USED_BY_PENDING_TASK", "f", "g", count=5),
                )
            ],
        )
    )
    assert found.reference_type == "USED_BY_PENDING_TASK"
    assert found.why == (
        "argument of f, g (5 calls) in driver (pid 10); "
        "pickled by driver (pid 10), which keeps it to its end; "
        f"inside {KEEPER.hex()[:8]}-9 in driver (pid 10)"
    )


def test_borrowers_say_why_and_those_that_did_not_are_named() -> None:
    borrowed = row(hold("LOCAL_REFERENCE"), process=KEEPER, call_site="", borrowers=[])
    found = only(node([segment()], [row(borrowers=[KEEPER, GONE]), borrowed]))
    assert found.call_site == "a.py:1 in main"
    ended = f"process {GONE.hex()[:8]}, which has ended or did not answer"
    assert found.why == f"1 ref in Keeper (pid 11); borrowed by {ended}"


def test_many_holders_are_not_all_told_in_words() -> None:
    processes = [process(b"worker%02d" % n, n, "WORKER", "W") for n in range(10, 30)]
    rows = [row(hold("LOCAL_REFERENCE"), process=each["process"]) for each in processes]
    found = only(node([segment()], rows, processes))
    assert found.why.endswith("; and 14 more")
    assert len(found.holders) == 20


def test_what_is_being_written_says_by_whom() -> None:
    found = only(node([segment(state="WRITING", writer=KEEPER)], []))
    assert found.why == "being written by Keeper (pid 11)"


def test_why_an_owner_says_nothing_is_told() -> None:
    def told(owner: bytes) -> str:
        processes = [
            process(KEEPER, 11, "WORKER", "Keeper", told=False),
            process(DRIVER, 10, "DRIVER"),
        ]
        found = only(node([segment(owner=owner)], [], processes))
        assert found.reference_type == "UNKNOWN_STATUS"
        return found.why

    assert told(KEEPER) == "its owner, Keeper (pid 11), did not answer in time"
    assert told(DRIVER) == (
        "its owner, driver (pid 10), has not registered it yet, or has just freed it"
    )
    assert told(GONE) == "its owner has ended, or is on a node that did not answer"


def test_an_object_on_a_node_that_is_silent_is_listed_by_its_owner() -> None:
    found = only(
        node([], [row(hold("LOCAL_REFERENCE"), node=FAR)]), node([], [], [], FAR, "it is gone")
    )
    assert (found.node_id, found.allocated, found.state) == (FAR.hex(), 0, "HELD")


def test_nodes_are_told_with_who_did_not_answer() -> None:
    processes = [process(DRIVER, 10, "DRIVER"), process(KEEPER, 11, "WORKER", told=False)]
    first, second = memory(
        node([segment()], [], processes), node([], [], [], FAR, "it is gone")
    ).nodes
    assert (first.node_ip, first.state_message) == ("10.0.0.1", None)
    assert (first.used, first.freed, first.pooled, first.num_segments) == (8192, 4096, 4096, 1)
    assert first.freed_by == {"worker (pid 11)": 4096}
    assert first.no_answer == ["worker (pid 11)"]
    assert (first.num_inline, first.inline_bytes) == (2, 30)
    assert second.state_message == "it is gone"
