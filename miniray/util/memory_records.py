"""One list of objects, put together from what nodes and processes tell of them.

Pure. A piece of shared memory is known to its node's daemon (how large it is, who has it
mapped), the object in it to its owner and its borrowers (what it is, and why it is held).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from miniray.common.ids import short_id
from miniray.common.memory_types import PICKLED, order
from miniray.util.state_records import ClusterMemoryState, HolderState, NodeMemoryState, ObjectState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from miniray.common.memory_types import (
        Hold,
        NodeMemory,
        ObjectRow,
        ProcessRow,
        ReferenceType,
        SegmentRow,
    )

#: Which reason is told first; in Ray's order.
_ORDER: tuple[ReferenceType, ...] = (
    "USED_BY_PENDING_TASK",
    "LOCAL_REFERENCE",
    "CAPTURED_IN_OBJECT",
    "ACTOR_HANDLE",
    "PINNED_IN_MEMORY",
    "UNKNOWN_STATUS",
)
#: Beginnings of the states of tasks that have not ended.
_UNDER_WAY = ("PENDING", "SUBMITTED")
#: Reasons that are told in words.
_MAX_REASONS = 6
#: Digits of ids in texts.
_SHORT = 8


@dataclasses.dataclass(frozen=True)
class _Process:
    """A process and where it is."""

    row: ProcessRow
    node: bytes

    def __str__(self) -> str:
        row = self.row
        if row["type"] == "NODE":
            return f"the daemon of node {self.node.hex()[:_SHORT]}"
        name = "driver" if row["type"] == "DRIVER" else row["name"] or "worker"
        return f"{name} (pid {row['pid']})"


@dataclasses.dataclass
class _Object:
    """What is told of one object by those who hold it."""

    rows: list[ObjectRow] = dataclasses.field(default_factory=list)

    @property
    def first(self) -> ObjectRow:
        """The owner's word, or else anybody's."""
        for row in self.rows:
            if row["process"] == row["owner"]:
                return row
        return next((row for row in self.rows if row["call_site"]), self.rows[0])


def cluster_memory(
    reports: Sequence[NodeMemory],
    nodes: Iterable[Mapping[str, Any]],
    limit: int,
    *,
    detail: bool = False,
) -> ClusterMemoryState:
    """What the nodes tell, as records.

    Args:
        reports: One of each node.
        nodes: The head's listing of them.
        limit: How many objects there are to be at most: as many as each node was asked for.
        detail: Whether what is not in shared memory is wanted too.
    """
    records = MemoryRecords(reports, {node["node_id"]: node["address"] for node in nodes})
    return ClusterMemoryState(records.nodes(), records.objects(detail=detail)[:limit])


class MemoryRecords:
    """Turns reports of nodes into records.

    Args:
        reports: One of each node.
        addresses: Of nodes, by hex id.
    """

    def __init__(self, reports: Sequence[NodeMemory], addresses: Mapping[str, str]) -> None:
        self._reports = reports
        self._addresses = addresses
        self._processes = {
            row["process"]: _Process(row, report["node"])
            for report in reports
            for row in report["processes"]
        }
        self._silent = {report["node"] for report in reports if report["reason"]}
        #: By id, or where there is none by place.
        self._objects: dict[bytes | tuple[bytes, int], _Object] = {}
        self._at: dict[tuple[bytes, int], _Object] = {}
        for report in reports:
            for row in report["objects"]:
                place = (row["node"], row["segment"])
                found = self._objects.setdefault(row["id"] or place, _Object())
                found.rows.append(row)
                if row["segment"]:
                    self._at[place] = found

    def nodes(self) -> list[NodeMemoryState]:
        """What each node has and uses."""
        found = []
        for report in self._reports:
            totals = report["totals"]
            freed_by = sorted(totals["freed_by"].items(), key=lambda item: -item[1])
            node_id = report["node"].hex()
            found.append(
                NodeMemoryState(
                    node_id=node_id,
                    node_ip=self._addresses.get(node_id, ""),
                    state_message=report["reason"] or None,
                    capacity=totals["capacity"],
                    used=totals["used"],
                    pooled=totals["pooled"],
                    freed=totals["freed"],
                    writing=totals["writing"],
                    spilled=totals["spilled"],
                    num_segments=totals["segments"],
                    freed_by={self._name(process): size for process, size in freed_by},
                    num_inline=self._sum(report, "inline"),
                    inline_bytes=self._sum(report, "inline_bytes"),
                    no_answer=[
                        self._name(row["process"])
                        for row in report["processes"]
                        if row["totals"] is None
                    ],
                )
            )
        return found

    def objects(self, *, detail: bool) -> list[ObjectState]:
        """The objects, the largest first; a copy on another node is a record of its own."""
        found: list[tuple[tuple[int, int, bytes], ObjectState]] = []
        placed = set()
        for report in self._reports:
            for segment in report["segments"]:
                place = (segment["source_node"] or report["node"], segment["source"])
                place = place if segment["source"] else (report["node"], segment["number"])
                known = self._at.get(place)
                placed.add(id(known))
                where = order(segment["size"], place[1], place[0])
                found.append((where, self._in_memory(report["node"], segment, known)))
        rest = [
            known
            for known in self._objects.values()
            if id(known) not in placed and (detail or any(row["segment"] for row in known.rows))
        ]
        for known in rest:
            row = known.first
            where = order(row["size"], row["segment"], row["node"] or row["id"])
            found.append((where, self._elsewhere(known)))
        found.sort(key=operator.itemgetter(0))
        return [record for _, record in found]

    # --- one record ----------------------------------------------------------------
    def _in_memory(self, node: bytes, segment: SegmentRow, known: _Object | None) -> ObjectState:
        """An object in a node's shared memory, whether or not anybody told of it."""
        holders = self._holders(known)
        if not segment["source"] and segment["state"] != "FREED" and known is None:
            holders.append(self._holder(segment["owner"], _unknown()))
        for process in segment["mappers"]:
            holders.append(self._holder(process, _hold("PINNED_IN_MEMORY")))
        owner = known.first["owner"] if known is not None else segment["owner"]
        if known is None and segment["source"]:
            owner = b""  # the node that it is a copy from
        why = self._why(holders)
        if segment["state"] == "FREED":
            why = f"freed, but still {why}" if why else "freed"
        elif segment["state"] == "WRITING":
            why = f"being written by {self._name(segment['writer'])}"
        elif known is None and not segment["source"]:
            why = "; ".join(filter(None, (self._silence(segment["owner"]), self._mapped(holders))))
        return self._record(
            known.first if known is not None else None,
            owner=owner,
            node=node,
            size=segment["size"],
            state=segment["state"],
            holders=holders,
            why=why,
            allocated=segment["allocated"],
            is_copy=bool(segment["source"]),
            is_spilled=segment["spilled"],
            call_site=segment["call_site"],
        )

    def _elsewhere(self, known: _Object) -> ObjectState:
        """An object in its owner's memory, still to come, or on a node that told nothing."""
        row = known.first
        holders = self._holders(known)
        holding = self._processes.get(row["process"])
        return self._record(
            row,
            owner=row["owner"],
            node=row["node"] or (holding.node if holding is not None else b""),
            size=row["size"],
            state="PENDING" if row["status"].startswith(_UNDER_WAY) else "HELD",
            holders=holders,
            why=self._why(holders),
        )

    def _record(
        self,
        row: ObjectRow | None,
        *,
        owner: bytes,
        node: bytes,
        size: int,
        state: str,
        holders: list[HolderState],
        why: str,
        allocated: int = 0,
        is_copy: bool = False,
        is_spilled: bool = False,
        call_site: str = "",
    ) -> ObjectState:
        process = self._processes.get(owner)
        kinds = {holder.reference_type for holder in holders}
        return ObjectState(
            object_id=row["id"].hex() if row is not None else "",
            object_size=size,
            task_status=row["status"] if row is not None else "NIL",
            reference_type=next((kind for kind in _ORDER if kind in kinds), "UNKNOWN_STATUS"),
            call_site=(row["call_site"] if row is not None else "") or call_site,
            type=process.row["type"] if process is not None else "",
            pid=process.row["pid"] if process is not None else 0,
            ip=self._addresses.get(process.node.hex(), "") if process is not None else "",
            owner_id=owner.hex(),
            owner=self._owner_name(owner, row),
            node_id=node.hex(),
            state=state,
            allocated=allocated,
            is_copy=is_copy,
            is_spilled=is_spilled,
            holders=holders,
            why=why,
        )

    def _owner_name(self, owner: bytes, row: ObjectRow | None) -> str:
        teller = self._processes.get(row["process"]) if row is not None else None
        if teller is not None and teller.row["type"] == "NODE":
            # A daemon owns nothing but what it keeps for detached actors.
            ended = owner != teller.row["process"]
            return f"{teller}, for a {'process that has ended' if ended else 'detached actor'}"
        return self._name(owner) if owner else ""

    # --- why -----------------------------------------------------------------------
    def _holders(self, known: _Object | None) -> list[HolderState]:
        """Each process that holds an object, with each of its reasons."""
        if known is None:
            return []
        told = {row["process"] for row in known.rows}
        found = [self._holder(row["process"], hold) for row in known.rows for hold in row["holds"]]
        borrowers = {who for row in known.rows for who in row["borrowers"]} - told
        found += [self._holder(who, _unknown()) for who in sorted(borrowers)]
        return found

    def _holder(self, process: bytes, hold: Hold) -> HolderState:
        found = self._processes.get(process)
        return HolderState(
            reference_type=hold["kind"],
            count=hold["count"],
            names=hold["names"],
            process=self._name(process),
            worker_id=process.hex(),
            pid=found.row["pid"] if found is not None else 0,
            node_id=found.node.hex() if found is not None else "",
        )

    @staticmethod
    def _why(holders: Iterable[HolderState]) -> str:
        ordered = sorted(holders, key=lambda holder: _ORDER.index(holder.reference_type))
        texts = list(dict.fromkeys(map(_reason, ordered)))
        more = len(texts) - _MAX_REASONS
        if more > 0:
            texts[_MAX_REASONS:] = [f"and {more} more"]
        return "; ".join(texts)

    def _mapped(self, holders: Iterable[HolderState]) -> str:
        return self._why(each for each in holders if each.reference_type == "PINNED_IN_MEMORY")

    def _silence(self, owner: bytes) -> str:
        """Why an owner does not say why it holds a value."""
        process = self._processes.get(owner)
        if process is None:
            if self._silent:
                return "its owner is on a node that did not answer, or has ended"
            return "its owner has ended"
        if process.row["totals"] is None:
            return f"its owner, {process}, did not answer in time"
        return f"{process} has not heard of it yet, or has just freed it"

    def _name(self, process: bytes) -> str:
        found = self._processes.get(process)
        if found is not None:
            return str(found)
        return f"process {process.hex()[:_SHORT]}, which has ended or did not answer"

    @staticmethod
    def _sum(report: NodeMemory, what: str) -> int:
        return sum(row["totals"][what] for row in report["processes"] if row["totals"] is not None)  # type: ignore[literal-required]


def _hold(kind: ReferenceType) -> Hold:
    return {"kind": kind, "count": 1, "names": []}


def _unknown() -> Hold:
    return _hold("UNKNOWN_STATUS")


def _reason(holder: HolderState) -> str:
    """One reason of one process in words."""
    kind, count, names, who = (
        holder.reference_type,
        holder.count,
        holder.names,
        holder.process,
    )
    if kind == "LOCAL_REFERENCE":
        if names == [PICKLED]:
            return f"pickled by {who}, which keeps it to its end"
        return f"{count} ref{'' if count == 1 else 's'} in {who}"
    if kind == "USED_BY_PENDING_TASK":
        calls = "" if count == 1 else f" ({count} calls)"
        return f"argument of {', '.join(names)}{calls} in {who}"
    if kind == "CAPTURED_IN_OBJECT":
        return f"inside {', '.join(map(short_id, names)) or 'another object'} in {who}"
    if kind == "ACTOR_HANDLE":
        return f"handle of an actor in {who}"
    return f"{'mapped' if kind == 'PINNED_IN_MEMORY' else 'borrowed'} by {who}"
