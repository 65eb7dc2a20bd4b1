"""What nodes and processes report of their objects, joined into records.

All except the requests is pure. A node's daemon records the segments of its shared memory: their
sizes, and which processes map them. An object's owner and borrowers record what it is, and why they
hold it.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import short_id
from miniray.common.state_types import MAX_OBJECTS, PICKLED, order
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
    from miniray.profiling.targets import ClusterSource

#: Node and segment.
_Place = tuple[bytes, int]

#: The order in which reasons are named; it is Ray's.
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
#: Reasons that are put into words.
_MAX_REASONS = 6
#: Digits of ids in texts.
_SHORT = 8


@dataclasses.dataclass(frozen=True)
class _Process:
    """A process and its node."""

    row: ProcessRow
    node: bytes

    def __str__(self) -> str:
        row = self.row
        if row["type"] == "NODE":
            return f"the daemon of node {self.node.hex()[:_SHORT]}"
        name = "driver" if row["type"] == "DRIVER" else row["name"] or "worker"
        return f"{name} (pid {row['pid']})"


def ask_memory(
    source: ClusterSource, limit: int, seconds: float, *, detail: bool
) -> ClusterMemoryState:
    """Ask every node and its processes within ``seconds``; return as ``cluster_memory``."""
    told = source.ask_nodes("memory", (min(limit, MAX_OBJECTS), detail), seconds)
    reports = [_silent(node, why) if why else report for node, report, why in told]
    return cluster_memory(reports, source.listing("node_states"), limit, detail=detail)


def _silent(node_id: bytes, reason: str) -> NodeMemory:
    sizes = ("capacity", "used", "pooled", "freed", "writing", "spilled", "segments")
    nothing: Any = {**dict.fromkeys(sizes, 0), "freed_by": {}}
    return {
        "node": node_id,
        "reason": reason,
        "totals": nothing,
        "processes": [],
        "segments": [],
        "objects": [],
    }


def cluster_memory(
    reports: Sequence[NodeMemory],
    nodes: Iterable[Mapping[str, Any]],
    limit: int,
    *,
    detail: bool = False,
) -> ClusterMemoryState:
    """Join the reports of all nodes.

    Args:
        reports: One per node.
        nodes: The head's listing of the nodes.
        limit: The most objects to list; each node returned that many at most.
        detail: Whether to list objects that are not in shared memory too.
    """
    records = _Records(reports, {node["node_id"]: node["address"] for node in nodes})
    return ClusterMemoryState(
        [records.node(report) for report in reports], records.objects(detail=detail)[:limit]
    )


class _Records:
    """Makes records of the reports.

    Args:
        reports: One per node.
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
        #: The rows of each object, the owner's first; by id, or by place where there is none.
        self._rows: dict[bytes | _Place, list[ObjectRow]] = {}
        for report in reports:
            for row in report["objects"]:
                self._rows.setdefault(row["id"] or (row["node"], row["segment"]), []).append(row)
        for rows in self._rows.values():
            rows.sort(key=lambda row: (row["process"] != row["owner"], not row["call_site"]))
        self._at: dict[_Place, bytes | _Place] = {
            (row["node"], row["segment"]): key
            for key, rows in self._rows.items()
            for row in rows
            if row["segment"]
        }

    def node(self, report: NodeMemory) -> NodeMemoryState:
        """Return the record of a node's store."""
        totals, processes = report["totals"], report["processes"]
        node_id = report["node"].hex()
        freed_by = sorted(totals["freed_by"].items(), key=lambda item: -item[1])
        return NodeMemoryState(
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
            num_inline=sum(row["inline"] for row in processes),
            inline_bytes=sum(row["inline_bytes"] for row in processes),
            no_answer=[self._name(row["process"]) for row in processes if not row["answered"]],
        )

    def objects(self, *, detail: bool) -> list[ObjectState]:
        """Return the objects, the largest first; a copy on another node has its own record."""
        found: list[tuple[tuple[int, int, bytes], ObjectState]] = []
        rest = dict(self._rows)
        for report in self._reports:
            for segment in report["segments"]:
                node = segment["source_node"] or report["node"]
                number = segment["source"] or segment["number"]
                key = self._at.get((node, number), b"")
                rest.pop(key, None)
                record = self._in_memory(report["node"], segment, self._rows.get(key, []))
                found.append((order(segment["size"], number, node), record))
        for rows in rest.values():
            if detail or any(row["segment"] for row in rows):
                row = rows[0]
                record = self._record(rows, row["owner"], row["size"], self._holders(rows))
                place = order(row["size"], row["segment"], row["node"] or row["id"])
                found.append((place, record))
        found.sort(key=operator.itemgetter(0))
        return [record for _, record in found]

    def _in_memory(self, node: bytes, segment: SegmentRow, rows: list[ObjectRow]) -> ObjectState:
        """Return the record of a segment; ``rows`` is empty if no process reported its object."""
        state, is_copy = segment["state"], bool(segment["source"])
        owner = b"" if is_copy else segment["owner"]  # that of a copy is its source's daemon
        unexplained = not rows and not is_copy
        holders = self._holders(rows)
        if unexplained and state != "FREED":
            holders.append(self._holder(owner, _hold("UNKNOWN_STATUS")))
        mapped = [self._holder(who, _hold("PINNED_IN_MEMORY")) for who in segment["mappers"]]
        why = _why(holders + mapped)
        if state == "WRITING":
            why = f"being written by {self._name(segment['writer'])}"
        elif state == "FREED":
            why = f"freed, but still {why}" if why else "freed"
        elif unexplained:
            why = "; ".join(filter(None, (self._silence(owner), _why(mapped))))
        record = self._record(rows, owner, segment["size"], holders + mapped)
        return dataclasses.replace(
            record,
            node_id=node.hex(),
            call_site=record.call_site or segment["call_site"],
            state=state,
            allocated=segment["allocated"],
            is_copy=is_copy,
            is_spilled=segment["spilled"],
            why=why,
        )

    def _record(
        self, rows: list[ObjectRow], owner: bytes, size: int, holders: list[HolderState]
    ) -> ObjectState:
        """Return the record of an object in its owner's memory, pending, or on a silent node.

        Args:
            rows: Of the object.
            owner: Of the object, if there are no rows.
            size: Of the value, in bytes.
            holders: Who holds it, and why.
        """
        row = rows[0] if rows else None
        owner = row["owner"] if row is not None else owner
        process = self._processes.get(owner)
        reporter = self._processes.get(row["process"]) if row is not None else None
        node = row["node"] if row is not None else b""
        if not node and reporter is not None:
            node = reporter.node
        kinds = {holder.reference_type for holder in holders}
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
            owner=self._owner_name(owner, reporter),
            node_id=node.hex(),
            state="PENDING" if status.startswith(_UNDER_WAY) else "HELD",
            allocated=0,
            is_copy=False,
            is_spilled=False,
            holders=holders,
            why=_why(holders),
        )

    # --- processes and reasons -----------------------------------------------------
    def _owner_name(self, owner: bytes, reporter: _Process | None) -> str:
        if reporter is not None and reporter.row["type"] == "NODE":
            # A daemon owns only the values that it keeps for detached actors.
            ended = owner != reporter.row["process"]
            return f"{reporter}, for a {'process that has ended' if ended else 'detached actor'}"
        return self._name(owner) if owner else ""

    def _holders(self, rows: list[ObjectRow]) -> list[HolderState]:
        """Return each process that holds an object, once per reason."""
        found = [self._holder(row["process"], hold) for row in rows for hold in row["holds"]]
        borrowers = {who for row in rows for who in row["borrowers"]}
        silent = borrowers - {row["process"] for row in rows}
        return found + [self._holder(who, _hold("UNKNOWN_STATUS")) for who in sorted(silent)]

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
        """Say why an owner gives no reason for holding a value."""
        process = self._processes.get(owner)
        if process is None:
            return "its owner has ended, or is on a node that did not answer"
        if not process.row["answered"]:
            return f"its owner, {process}, did not answer in time"
        return f"its owner, {process}, has not registered it yet, or has just freed it"

    def _name(self, process: bytes) -> str:
        found = self._processes.get(process)
        if found is not None:
            return str(found)
        return f"process {process.hex()[:_SHORT]}, which has ended or did not answer"


def _hold(kind: ReferenceType) -> Hold:
    return {"kind": kind, "count": 1, "names": []}


def _why(holders: Iterable[HolderState]) -> str:
    """Put the reasons of all holders into words."""
    ordered = sorted(holders, key=lambda holder: _ORDER.index(holder.reference_type))
    texts = list(dict.fromkeys(map(_reason, ordered)))
    more = len(texts) - _MAX_REASONS
    if more > 0:
        texts[_MAX_REASONS:] = [f"and {more} more"]
    return "; ".join(texts)


def _reason(holder: HolderState) -> str:
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
