"""The state of one cluster: its directories and its scheduler, put together."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from miniray._proto import head_pb2
from miniray.common.config import config
from miniray.head.directories.actors import ActorRegistry
from miniray.head.directories.clients import (
    ClientDirectory,
    DriverNews,
    ProcessEnds,
    ProcessExit,
)
from miniray.head.directories.contention import Revocations
from miniray.head.directories.events import EventLog
from miniray.head.directories.grants import GrantTable
from miniray.head.directories.jobs import JobCode, JobDirectory, KeyValues
from miniray.head.directories.leases import TaskLeases
from miniray.head.directories.nodes import ClusterNode, NodeDirectory
from miniray.head.directories.out_of_service import Drains, Quarantines
from miniray.head.directories.placement_groups import PlacementGroups
from miniray.head.directories.submissions import SubmittedJobs
from miniray.head.scheduling.scheduler import ClusterScheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from miniray.head.directories.grants import Timers
    from miniray.head.directories.jobs import Job
    from miniray.head.storage import Storage


def latest_return() -> float:
    """Return the seconds after which a node whose session broke does not come back."""
    return config().node_timeout + config().head_grace


@dataclasses.dataclass(eq=False, repr=False)
class HeadIdentity:
    """Identifies one start of a cluster's head."""

    cluster_id: str
    #: Counts the starts of the cluster's head.
    epoch: int
    #: What drivers and other machines know it by.
    address: str = ""
    #: When the first head of the cluster was started, in seconds since the epoch.
    cluster_started: float = dataclasses.field(default_factory=time.time)


class ClusterDirectories:
    """The directories of one head, and the effects on them of the end of a process or a job."""

    def __init__(self, identity: HeadIdentity, timers: Timers, storage: Storage) -> None:
        self.identity = identity
        #: When this head was started.
        self.started = time.time()
        self._timers = timers
        self._storage = storage
        tunables = config()
        patience = tunables.reserve_after
        self.scheduler = ClusterScheduler(patience)
        self.events = events = EventLog(storage.event)
        self.nodes = NodeDirectory()
        self.clients = clients = ClientDirectory(self.nodes)
        self.ends = ProcessEnds(clients, timers)
        self.jobs = jobs = JobDirectory(self._job_over, storage.job_forgotten)
        self.kv = KeyValues(storage.key_value)
        self.code = JobCode(self.kv, jobs, tunables.job_code_limit)
        news = DriverNews(clients, jobs, timers)
        self.grants = grants = GrantTable(
            self.scheduler, timers, identity.epoch, tunables.pending_warning, news.tell
        )
        self.leases = TaskLeases(grants, self.nodes, clients, jobs, self.ends)
        self.actors = ActorRegistry(grants, self.nodes, clients, jobs, storage.actor, events)
        self.submissions = SubmittedJobs(grants, self.nodes, clients, jobs, storage)
        self.placement_groups = PlacementGroups(grants, clients, storage.placement_group)
        clients.on_ended.append(self._client_ended)
        self.revocations = Revocations(grants, self.leases, reserve_after=patience)
        self.drains = Drains(grants, self.leases, self.nodes, clients, self.kv)
        self.quarantines = Quarantines(grants, clients, jobs, events)

    def silence_of(self, node: ClusterNode) -> float:
        return self._timers.time() - node.heard

    def job_started(self, job: Job) -> None:
        """Keep the job of a driver that attached."""
        self._storage.job(job)
        message = f"{_called(job)} has started (pid {job.pid})."
        self.events.add("JOB", "started", message, job_id=job.id.hex())

    def driver_ended(self, process_id: bytes) -> None:
        """End the job of a process that is gone, if it was a driver."""
        job = self.jobs.driver_ended(process_id)
        if job is not None:
            self._storage.job(job)
            message = f"{_called(job)} has ended: its driver (pid {job.pid}) is gone."
            self.events.add("JOB", "ended", message, job_id=job.id.hex())
            if not self.jobs.is_over(job.id):
                self._notify_job_ended(job.id)

    def _client_ended(self, process_id: bytes, how: ProcessExit) -> None:
        if not how.with_node:
            self.jobs.release(process_id)
        self.driver_ended(process_id)
        if how.with_node:  # it may live, and be back before its daemon gives up
            self._timers.call_later(latest_return(), lambda: self._release_job(process_id))

    def _release_job(self, process_id: bytes) -> None:
        if self.clients.get(process_id) is None:
            self.jobs.release(process_id)

    def _job_over(self, job_id: bytes) -> None:
        """Drop what was kept for a job that is over."""
        self.code.job_over(job_id)
        self._notify_job_ended(job_id)

    def _notify_job_ended(self, job_id: bytes) -> None:
        over = self.jobs.is_over(job_id)
        for node in self.nodes:
            node.send(job_ended=head_pb2.JobEnded(job_id=job_id, over=over))

    def tell_ended_jobs(self, node_id: bytes, job_ids: Iterable[bytes]) -> None:
        """Notify a node which of these jobs ended: it may have missed the notice."""
        node = self.nodes.get(node_id)
        for job_id in job_ids:
            job = self.jobs.get(job_id)
            if node is not None and (job is None or job.ended is not None):
                over = self.jobs.is_over(job_id)
                node.send(job_ended=head_pb2.JobEnded(job_id=job_id, over=over))


def _called(job: Job) -> str:
    return f"Job {job.id.hex()}{f' ({job.entrypoint})' if job.entrypoint else ''}"
