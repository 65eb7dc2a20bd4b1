"""The jobs of the cluster: one per driver, with what its workers need to know of it."""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from typing import Any

#: So many ended jobs are remembered, for listings.
_REMEMBERED = 1024


@dataclasses.dataclass(eq=False)
class Job:
    """A driver's program and all that runs for it."""

    id: bytes
    #: Process id of the driver, which hears warnings.
    driver: bytes
    driver_node: bytes
    pid: int
    namespace: str
    entrypoint: str
    #: What its workers are told: machine, sys_path, cwd, driver_node.
    environment: dict[str, Any]
    #: Seconds since the epoch.
    started: float
    ended: float | None = None


class JobDirectory:
    """Jobs by id."""

    def __init__(self) -> None:
        self._jobs: dict[bytes, Job] = {}
        self._by_driver: dict[bytes, Job] = {}
        self._ended: collections.deque[bytes] = collections.deque()
        #: How many detached actors each has: what those start, needs to know of it.
        self._holders: collections.Counter[bytes] = collections.Counter()
        #: Jobs that ended long ago and have detached actors.
        self._kept: set[bytes] = set()

    def started(self, job_id: bytes, driver: bytes, node_id: bytes, pid: int, details: str) -> Job:
        """A driver attached.

        Args:
            job_id: its id.
            driver: the driver's process id.
            node_id: node where the driver runs.
            pid: its pid there.
            details: JSON with namespace, entrypoint, machine, sys_path and cwd.
        """
        told: dict[str, Any] = json.loads(details or "{}")
        job = Job(
            id=job_id,
            driver=driver,
            driver_node=node_id,
            pid=pid,
            namespace=told.get("namespace", ""),
            entrypoint=told.get("entrypoint", ""),
            environment={
                "machine": told.get("machine", ""),
                "sys_path": told.get("sys_path", []),
                "cwd": told.get("cwd", ""),
                "driver_node": node_id.hex(),
            },
            started=time.time(),
        )
        self._jobs[job_id] = self._by_driver[driver] = job
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
            self._enter_ended(job.id)
        return job

    def hold(self, job_id: bytes) -> None:
        """A detached actor of a job was made: the job is remembered until that is dead."""
        self._holders[job_id] += 1

    def release(self, job_id: bytes) -> None:
        """A detached actor of a job is dead."""
        self._holders[job_id] -= 1
        if self._holders[job_id] == 0:
            del self._holders[job_id]
            if job_id in self._kept:
                self._kept.discard(job_id)
                self._enter_ended(job_id)

    def _enter_ended(self, job_id: bytes) -> None:
        self._ended.append(job_id)
        if len(self._ended) > _REMEMBERED:
            oldest = self._ended.popleft()
            if oldest in self._holders:
                self._kept.add(oldest)
            else:
                self._jobs.pop(oldest, None)
