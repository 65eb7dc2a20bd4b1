"""Capacity that must not be granted: drained nodes, devices in quarantine."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray._proto import head_pb2
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.events import EventLog
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.jobs import JobDirectory, KeyValues
    from miniray.head.directories.leases import TaskLeases
    from miniray.head.directories.nodes import ClusterNode, NodeDirectory


_NAMESPACE = "_draining"

#: A request that waits: (process id, number of the request).
Waiter = tuple[bytes, int]


@dataclasses.dataclass(eq=False, repr=False)
class Drains:
    """Drained nodes, and the requests that wait until they are empty."""

    grants: GrantTable
    leases: TaskLeases
    nodes: NodeDirectory
    clients: ClientDirectory
    kv: KeyValues

    def __post_init__(self) -> None:
        self._waiting: dict[str, list[Waiter]] = {}
        self.grants.on_released.append(self._look)

    def drain(self, prefix: str) -> str:
        """Stop placing work on the node whose id begins with this; return its id.

        Raises:
            ValueError: no living node, or more than one, has such an id.
        """
        node = self._find(prefix)
        self.kv.put(_NAMESPACE, node.name, b"1")
        self._set(node, draining=True)
        self.leases.recall_from(node.id)
        return node.name

    def undo(self, prefix: str) -> str:
        """Grant on a drained node again; as ``drain``."""
        node = self._find(prefix)
        self.kv.delete(_NAMESPACE, node.name)
        self._set(node, draining=False)
        self._look()
        return node.name

    def wait(self, waiter: Waiter, node_id: str) -> None:
        """Answer a request once a draining node is empty; False if it is not drained."""
        self._waiting.setdefault(node_id, []).append(waiter)
        self._look()

    def joins(self, node: ClusterNode) -> None:
        """Drain a node that joins if it was drained before. Call it before work is placed there."""
        if self.kv.exists(_NAMESPACE, node.name):
            node.draining = node.pool.closed = True

    def left(self) -> None:
        self._look()

    def _set(self, node: ClusterNode, *, draining: bool) -> None:
        node.draining = draining
        self.grants.decide(self.grants.scheduler.drain_node, node.name, draining=draining)

    def _find(self, prefix: str) -> ClusterNode:
        found = [
            node
            for node in self.nodes
            if node.name.startswith(prefix.lower()) and not node.drivers_only
        ]
        if prefix and len(found) == 1:
            return found[0]
        names = sorted(node.name for node in self.nodes if not node.drivers_only)
        which = "Several nodes have" if prefix and found else "No living node has"
        raise ValueError(
            f"{which} an id that begins with {prefix!r}; the nodes are {', '.join(names)}."
        )

    def _look(self) -> None:
        """Answer the requests for nodes that are empty, gone or in service again."""
        for node_id in list(self._waiting):
            node = next((node for node in self.nodes if node.name == node_id), None)
            if node is not None and node.draining and self.grants.scheduler.leases_on(node_id):
                continue
            for who, number in self._waiting.pop(node_id):
                self.clients.answer(who, number, node is None or node.draining)


logger = logging.getLogger(__name__)

#: Processes left of one worker that are named.
_MAX_NAMED = 3


def why_quarantined(quarantine: head_pb2.Quarantine) -> str:
    processes = quarantine.processes
    named = [f"pid {process.pid} ({process.name})" for process in processes[:_MAX_NAMED]]
    more = len(processes) - len(named)
    who = ", ".join(named) or "a process"
    return f"{who}{f' and {more} more' if more else ''} could not be killed"


@dataclasses.dataclass(eq=False, repr=False)
class Quarantines:
    """Devices that no lease gets because a process that had them could not be killed."""

    grants: GrantTable
    clients: ClientDirectory
    jobs: JobDirectory
    events: EventLog

    def joins(self, node: ClusterNode, told: head_pb2.Quarantines) -> None:
        """Count what a joining node has in quarantine. Call it before work is placed there."""
        node.quarantines = list(told.all)
        for (resource, device), why in _reasons(node.quarantines).items():
            node.pool.set_in_service(resource, device, False, why)
            self._report(node, resource, device, why)

    def told(self, node: ClusterNode, told: head_pb2.Quarantines) -> None:
        """Compare a node's quarantine with its last one, and report the changes."""
        before = {each.process_id for each in node.quarantines}
        out = _reasons(node.quarantines)
        node.quarantines = list(told.all)
        out_now = _reasons(node.quarantines)
        for device in {**out, **out_now}:
            why = out_now.get(device, "")
            if why != out.get(device):
                self._report(node, *device, why)
                change = self.grants.scheduler.set_device_in_service
                self.grants.decide(change, node.name, *device, in_service=not why, why=why)
        for quarantine in node.quarantines:
            if quarantine.process_id not in before:
                self._warn(node, quarantine)

    def _report(self, node: ClusterNode, resource: str, device: str, why: str) -> None:
        what = f"{resource} {device} of node {node.name}"
        if why:
            logger.error("%s is out of service: %s", what, why)
            text, severity, event = f"{what} is out of service: {why}.", "ERROR", "quarantined"
        else:
            logger.warning("%s is back in service", what)
            text, severity, event = f"{what} is back in service.", "INFO", "released"
        self.events.add("DEVICE", event, text, severity, node_id=node.name)

    def _warn(self, node: ClusterNode, quarantine: head_pb2.Quarantine) -> None:
        job = self.jobs.get(quarantine.job_id)
        if job is None:
            return
        text = f"On node {node.name[:8]}, {why_quarantined(quarantine)}. "
        held = "; ".join(f"{group.resource} {', '.join(group.ids)}" for group in quarantine.devices)
        if held:
            text += f"{held} will not be handed out before it is gone."
        else:
            text += "It held no device; what it held of other resources is free again."
        self.clients.push(job.driver, "warning", text)


def _reasons(quarantines: Iterable[head_pb2.Quarantine]) -> dict[tuple[str, str], str]:
    """Return why each device, by (resource, id), is out of service."""
    return {
        (group.resource, id): why_quarantined(quarantine)
        for quarantine in quarantines
        for group in quarantine.devices
        for id in group.ids
    }
