"""Workers that were killed and are not gone, and the devices that they keep.

Responsible for what the head is told of them; when a worker counts as one is decided in
``worker_ends.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from miniray._proto import head_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """One such worker."""

    process_id: bytes
    job_id: bytes
    #: What is left of it, as (pid, name): itself, or what it had started.
    processes: tuple[tuple[int, str], ...]
    #: Ids of the devices that are out of service meanwhile, by resource.
    devices: Mapping[str, tuple[str, ...]]
    #: When it was given up, in seconds since the epoch.
    since: float

    def to_proto(self) -> head_pb2.Quarantine:
        """As the head is told."""
        return head_pb2.Quarantine(
            process_id=self.process_id,
            job_id=self.job_id,
            processes=[head_pb2.Process(pid=pid, name=name) for pid, name in self.processes],
            devices=[
                head_pb2.DeviceSet(resource=resource, ids=ids)
                for resource, ids in self.devices.items()
            ],
            since=self.since,
        )


def names_of(pids: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Processes with the names that the kernel has for them; those that are gone are left out.

    No more is read of a process: its command line is in its memory, which the kernel may have
    locked for as long as the process hangs, and then the reader hangs too.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            found.append((pid, file.read().strip()))
    return tuple(found)
