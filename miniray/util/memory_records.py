"""One list of objects, put together from what nodes and processes tell of them.

Pure. A piece of shared memory is known to its node's daemon (how large it is, who has it
mapped), the object in it to its owner and its borrowers (what it is, and why it is held).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from miniray.common.ids import short_id
from miniray.common.state_types import PICKLED, order
from miniray.util.state_records import ClusterMemoryState, HolderState, NodeMemoryState, ObjectState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from miniray.common.state_types import (
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
                    num_inline=sum(row["inline"] for row in report["processes"]),
                    inline_bytes=sum(row["inline_bytes"] for row in report["processes"]),
                    no_answer=[
                        self._name(row["process"])
                        for row in report["processes"]
                        if not row["answered"]
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
            record = self._record(known, row["owner"], row["size"], self._holders(known))
            found.append((where, record))
        found.sort(key=operator.itemgetter(0))
        return [record for _, record in found]

    # --- one record ----------------------------------------------------------------
    def _in_memory(self, node: bytes, segment: SegmentRow, known: _Object | None) -> ObjectState:
        """An object in a node's shared memory, whether or not anybody told of it."""
        holders = self._holders(known)
        is_copy = bool(segment["source"])
        if known is None and not is_copy and segment["state"] != "FREED":
            holders.append(self._holder(segment["owner"], _hold("UNKNOWN_STATUS")))
        mapped = [self._holder(who, _hold("PINNED_IN_MEMORY")) for who in segment["mappers"]]
        if segment["state"] == "WRITING":
            why = f"being written by {self._name(segment['writer'])}"
        elif known is None and not is_copy and segment["state"] == "HELD":
            why = "; ".join(filter(None, (self._silence(segment["owner"]), _why(mapped))))
        else:
            why = _why(holders + mapped)
        if segment["state"] == "FREED":
            why = f"freed, but still {why}" if why else "freed"
        # Of a copy only the node that it is a copy from is known here.
        owner = b"" if is_copy else segment["owner"]
        record = self._record(known, owner, segment["size"], holders + mapped)
        return dataclasses.replace(
            record,
            node_id=node.hex(),
            call_site=record.call_site or segment["call_site"],
            state=segment["state"],
            allocated=segment["allocated"],
            is_copy=is_copy,
            is_spilled=segment["spilled"],
            why=why,
        )

    def _record(
        self, known: _Object | None, owner: bytes, size: int, holders: list[HolderState]
    ) -> ObjectState:
        """An object as those tell who hold it: in its owner's memory, still to come, or far away.

        Args:
            known: What they tell.
            owner: Whose it is, if nobody tells.
            size: Of the value.
            holders: Who holds it and why.
        """
        row = known.first if known is not None else None
        owner = row["owner"] if row is not None else owner
        process = self._processes.get(owner)
        kinds = {holder.reference_type for holder in holders}
        node = b""
        if row is not None:
            teller = self._processes.get(row["process"])
            node = row["node"] or (teller.node if teller is not None else b"")
        status = row["status"] if row is not None else "NIL"
        return ObjectState(
            object_id=row["id"].hex() if row is not None else "",
            object_size=size,
            task_status=status,
            reference_type=next((kind for kind in _ORDER if kind in kinds), "UNKNOWN_STATUS"),
            call_site=row["call_site"] if row is not None else "",
            type=process.row["type"] if process is not None else "",
            pid=process.row["pid"] if process is not None else 0,
            ip=self._addresses.get(process.node.hex(), "") if process is not None else "",
            owner_id=owner.hex(),
            owner=self._owner_name(owner, row),
            node_id=node.hex(),
            state="PENDING" if status.startswith(_UNDER_WAY) else "HELD",
            allocated=0,
            is_copy=False,
            is_spilled=False,
            holders=holders,
            why=_why(holders),
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
        found += [self._holder(who, _hold("UNKNOWN_STATUS")) for who in sorted(borrowers)]
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

    def _silence(self, owner: bytes) -> str:
        """Why an owner does not say why it holds a value."""
        process = self._processes.get(owner)
        if process is None:
            if self._silent:
                return "its owner is on a node that did not answer, or has ended"
            return "its owner has ended"
        if not process.row["answered"]:
            return f"its owner, {process}, did not answer in time"
        return f"{process} has not heard of it yet, or has just freed it"

    def _name(self, process: bytes) -> str:
        found = self._processes.get(process)
        if found is not None:
            return str(found)
        return f"process {process.hex()[:_SHORT]}, which has ended or did not answer"


def _hold(kind: ReferenceType) -> Hold:
    return {"kind": kind, "count": 1, "names": []}


def _why(holders: Iterable[HolderState]) -> str:
    """The reasons of all holders in words."""
    ordered = sorted(holders, key=lambda holder: _ORDER.index(holder.reference_type))
    texts = list(dict.fromkeys(map(_reason, ordered)))
    more = len(texts) - _MAX_REASONS
    if more > 0:
        texts[_MAX_REASONS:] = [f"and {more} more"]
    return "; ".join(texts)


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
