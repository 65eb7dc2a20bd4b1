"""Devices out of service because a process that had them could not be killed.

Responsible for what daemons tell of it: the table is told which devices to leave alone, and
drivers are warned. A daemon tells all that it has whenever that changes, and when it joins; so a
head that starts again, or a session that broke, forgets nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray._proto import head_pb2
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.nodes import ClusterNode

logger = logging.getLogger(__name__)

#: So many of the processes that are left of one worker are named.
_MAX_NAMED = 3


def why_quarantined(quarantine: head_pb2.Quarantine) -> str:
    """Say why the devices of a quarantine are out of service."""
    processes = quarantine.processes
    named = [f"pid {process.pid} ({process.name})" for process in processes[:_MAX_NAMED]]
    more = len(processes) - len(named)
    who = ", ".join(named) or "a process"
    return f"{who}{f' and {more} more' if more else ''} could not be killed"


class Quarantines:
    """What the nodes have in quarantine; the records themselves are the nodes'."""

    def __init__(self, grants: GrantTable, clients: ClientDirectory, jobs: JobDirectory) -> None:
        self._grants = grants
        self._clients = clients
        self._jobs = jobs

    def joins(self, node: ClusterNode, told: head_pb2.Quarantines) -> None:
        """Count what a node tells when it joins; to be called before anything is placed there."""
        node.quarantines = list(told.all)
        for (resource, device), why in _reasons(node.quarantines).items():
            node.pool.set_in_service(resource, device, False, why)
            _log(node, resource, device, why)

    def told(self, node: ClusterNode, told: head_pb2.Quarantines) -> None:
        """A node tells all that it has in quarantine now."""
        before = {each.process_id for each in node.quarantines}
        out = _reasons(node.quarantines)
        node.quarantines = list(told.all)
        out_now = _reasons(node.quarantines)
        for device in {**out, **out_now}:
            why = out_now.get(device, "")
            if why != out.get(device):
                _log(node, *device, why)
                self._grants.set_in_service(node.name, *device, why)
        for quarantine in node.quarantines:
            if quarantine.process_id not in before:
                self._warn(node, quarantine)

    def _warn(self, node: ClusterNode, quarantine: head_pb2.Quarantine) -> None:
        """Tell the driver of the job whose process it was."""
        job = self._jobs.get(quarantine.job_id)
        if job is None:
            return
        text = f"On node {node.name[:8]}, {why_quarantined(quarantine)}. "
        held = "; ".join(f"{group.resource} {', '.join(group.ids)}" for group in quarantine.devices)
        if held:
            text += f"{held} will not be handed out before it is gone."
        else:
            text += "It held no device; what it held of other resources is free again."
        self._clients.push(job.driver, "warning", text)


def _reasons(quarantines: Iterable[head_pb2.Quarantine]) -> dict[tuple[str, str], str]:
    """Why each device, by resource and id, is out of service."""
    return {
        (group.resource, id): why_quarantined(quarantine)
        for quarantine in quarantines
        for group in quarantine.devices
        for id in group.ids
    }


def _log(node: ClusterNode, resource: str, device: str, why: str) -> None:
    what = f"{resource} {device} of node {node.name}"
    if why:
        logger.error("%s is out of service: %s", what, why)
    else:
        logger.warning("%s is back in service", what)
