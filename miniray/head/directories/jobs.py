"""The jobs of the cluster: one per driver, with what its workers need to know of it."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from miniray.common.specs import JobSpec, field_names

if TYPE_CHECKING:
    from collections.abc import Callable

#: So many jobs that are over are remembered, for listings.
_REMEMBERED = 1024


@dataclasses.dataclass(eq=False)
class Job:
    """A driver's program and all that runs for it."""

    id: bytes
    #: Process id of the driver, which hears warnings.
    driver: bytes
    pid: int
    entrypoint: str
    spec: JobSpec
    #: Strings of the user's.
    metadata: dict[str, str]
    #: Seconds since the epoch.
    started: float
    ended: float | None = None


class JobDirectory:
    """Jobs by id.

    A job *ends* with its driver, and is *over* when nothing holds it any more either: a process of
    it that still runs, or a detached actor that does or may start again.

    Args:
        on_over: Called with the id of a job that is over.
        on_forgotten: Called with the id of one that is not remembered any more.
    """

    def __init__(
        self, on_over: Callable[[bytes], None], on_forgotten: Callable[[bytes], None]
    ) -> None:
        self._on_over = on_over
        self._on_forgotten = on_forgotten
        self._jobs: dict[bytes, Job] = {}
        self._by_driver: dict[bytes, Job] = {}
        #: Those that are over, the latest last.
        self._over: dict[bytes, None] = {}
        #: What holds each, and the job of each holder.
        self._holders: dict[bytes, set[bytes]] = {}
        self._held: dict[bytes, bytes] = {}

    def started(self, job_id: bytes, driver: bytes, node_id: bytes, pid: int, details: str) -> Job:
        """A driver attached.

        Args:
            job_id: its id.
            driver: the driver's process id.
            node_id: node where the driver runs.
            pid: its pid there.
            details: JSON with entrypoint, metadata, and what of ``JobSpec`` the driver knows.
        """
        told: dict[str, Any] = json.loads(details or "{}")
        known = {name: told[name] for name in field_names(JobSpec) if name in told}
        job = Job(
            id=job_id,
            driver=driver,
            pid=pid,
            entrypoint=told.get("entrypoint", ""),
            metadata=told.get("metadata", {}),
            spec=JobSpec(**known | {"driver_node": node_id}),
            started=time.time(),
        )
        self._jobs[job_id] = self._by_driver[driver] = job
        self._over.pop(job_id, None)  # of a driver whose node was given up, and came back
        return job

    def restore(self, job: Job) -> None:
        """Enter a job of before a restart of the head."""
        self._jobs[job.id] = job
        if job.ended is None:
            self._by_driver[job.driver] = job

    def get(self, job_id: bytes) -> Job | None:
        """A job that runs or is remembered."""
        return self._jobs.get(job_id)

    def all(self) -> list[Job]:
        """Every job that runs or is remembered."""
        return list(self._jobs.values())

    def driver_ended(self, process_id: bytes) -> Job | None:
        """A process ended; its job, if it was a driver, ends with it."""
        job = self._by_driver.pop(process_id, None)
        if job is not None:
            job.ended = time.time()
            self._may_be_over(job.id)
        return job

    def hold(self, holder: bytes, job_id: bytes) -> None:
        """A process, or a detached actor, of a job is there: the job is not over before it ends."""
        self._held[holder] = job_id
        self._holders.setdefault(job_id, set()).add(holder)

    def release(self, holder: bytes) -> None:
        """A process, or an actor, is gone; one that holds nothing changes nothing."""
        job_id = self._held.pop(holder, None)
        if job_id is None:
            return
        self._holders[job_id].discard(holder)
        if not self._holders[job_id]:
            del self._holders[job_id]
            self._may_be_over(job_id)

    def is_over(self, job_id: bytes) -> bool:
        """Whether nothing of a job runs or will; true of one that nobody remembers."""
        job = self._jobs.get(job_id)
        return job is None or (job.ended is not None and job_id not in self._holders)

    def _may_be_over(self, job_id: bytes) -> None:
        if job_id not in self._jobs or not self.is_over(job_id):
            return
        self._over[job_id] = None
        if len(self._over) > _REMEMBERED:
            oldest = next(iter(self._over))
            del self._over[oldest], self._jobs[oldest]
            self._on_forgotten(oldest)
        self._on_over(job_id)
