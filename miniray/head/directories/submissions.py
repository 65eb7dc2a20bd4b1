"""The submitted jobs: from the submission to the end of their commands, with their output.

A job's lease is that of its command, which the daemon of its node starts. The daemons know which
command runs where and how it ended: there is no supervisor process.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
import time
from typing import TYPE_CHECKING, Protocol

from miniray._proto import head_pb2
from miniray.common.names import printable
from miniray.common.specs import CommandSpec, GrantedLease, JobSpec
from miniray.exceptions import (
    JobAlreadyExistsError,
    JobError,
    JobNotFoundError,
    JobRunningError,
    RuntimeEnvSetupError,
    describe_exit,
)
from miniray.head.directories.grants import RequestSummary
from miniray.head.directories.submitted_job import (
    FAILED,
    PENDING,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    SubmittedJob,
    difference,
)
from miniray.system.log_file import StreamLog

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from pathlib import Path

    from miniray.common.specs import Allocation
    from miniray.head.directories.clients import ClientDirectory, ProcessExit, Waiter
    from miniray.head.directories.grants import GrantTable
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.nodes import ClusterNode, NodeDirectory
    from miniray.head.scheduling.demands import Demand
    from miniray.head.scheduling.reasons import Reason

logger = logging.getLogger(__name__)

#: Jobs that have ended and are kept, and for how many seconds.
_KEPT, _KEPT_FOR = 1000, 30 * 24 * 3600.0
#: Seconds that a command has to end that has run for too long.
_GRACE = 30.0
#: Bytes of a log that one answer has.
_PIECE = 512 * 1024
#: Ids of submissions: log files have them in their names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class JobKeeper(Protocol):
    """Keeps submitted jobs for the next head."""

    #: The folder of their logs; None: the cluster ends with its head, and takes no jobs.
    job_logs: Path | None

    def submitted_job(self, job: SubmittedJob) -> None:
        """Keep a job that was submitted or has changed."""

    def submitted_job_forgotten(self, name: str) -> None:
        """Forget a job."""

    def when_written(self, then: Callable[[], object]) -> None:
        """Call back when all changes up to now are kept, or cannot be."""


@dataclasses.dataclass(eq=False, repr=False)
class SubmittedJobs:
    """The jobs by id and by lease. Implements ``grants.Requester`` for them."""

    _grants: GrantTable
    _nodes: NodeDirectory
    _clients: ClientDirectory
    _jobs: JobDirectory
    _keeper: JobKeeper

    def __post_init__(self) -> None:
        self._by_name: dict[str, SubmittedJob] = {}
        self._by_lease: dict[int, SubmittedJob] = {}
        self._logs: dict[str, StreamLog] = {}
        #: Requests that wait for more of a log, with the offset from which on.
        self._followers: dict[str, list[tuple[Waiter, int]]] = collections.defaultdict(list)

    # --- requests of clients ---------------------------------------------------------
    def submit(self, waiter: Waiter, job_id: bytes, spec: CommandSpec) -> None:
        """Take in a job, and answer with its id once it is kept.

        Raises:
            JobAlreadyExistsError: Another job has its id; an equal submission is the same job.
            JobError: This cluster takes no jobs.
            ValueError: An amount or a label is malformed.
        """
        if not _NAME.fullmatch(spec.name):
            raise ValueError(
                f"A submission_id has 1 to 128 letters, digits and any of _ . -, and begins with a "
                f"letter or a digit; not {spec.name!r:.200}."
            )
        if self._keeper.job_logs is None:
            raise JobError(
                "This cluster belongs to a program, whose init() or `miniray run` has started it, "
                "and ends with it, so it takes no jobs. Start one with `miniray start --head`."
            )
        known = self._by_name.get(spec.name)
        if known is not None and known.spec != spec:
            raise JobAlreadyExistsError(difference(known.spec, spec))
        job = known or SubmittedJob(job_id, spec, time.time())
        demand = job.demand()
        if known is None:
            self._by_name[job.name] = job
            self._audit(waiter[0], "submits", job)
            self._jobs.hold(_holder(job), job.id)
            self._keeper.submitted_job(job)
            # Granted only then: the next head has a record of what starts.
            self._keeper.when_written(lambda: self._submit(job, demand))
            self._forget_old()
        self._keeper.when_written(lambda: self._clients.answer(*waiter, job.name))

    def stop(self, waiter: Waiter, name: str, grace: float) -> None:
        """End a job: SIGTERM to its command, and SIGKILL to all of it after ``grace`` seconds.

        Answers with whether it waited or ran, once the decision to end it is kept.
        """
        job = self.get(name)
        has_ended = job.is_over
        if not has_ended:
            self._audit(waiter[0], "stops", job)
            job.stop_grace = grace
            if not job.node:
                self._grants.withdraw(job.lease)
                self._end(job, STOPPED, "It was stopped before it began.")
            else:
                self._keeper.submitted_job(job)
                self._stop_command(job)
        self._keeper.when_written(lambda: self._clients.answer(*waiter, not has_ended))

    def delete(self, who: bytes, name: str) -> None:
        """Forget a job that has ended, and remove its log.

        Raises:
            JobRunningError: It has not ended.
        """
        job = self.get(name)
        if not job.is_over:
            raise JobRunningError(
                f"The job {name!r} is {job.state}, and can be deleted once it has ended. Stop it "
                f"first: miniray job stop {name}"
            )
        self._audit(who, "deletes", job)
        self._forget(job)

    def get(self, name: str) -> SubmittedJob:
        """Return a job.

        Raises:
            JobNotFoundError: There is none.
        """
        job = self._by_name.get(name)
        if job is None:
            raise JobNotFoundError(
                f"There is no submitted job {name!r}; `miniray job list --all` shows those that "
                f"there are."
            )
        return job

    def all(self) -> list[SubmittedJob]:
        """Return all jobs, in the order of their submission."""
        return list(self._by_name.values())

    def read_log(self, waiter: Waiter, name: str, offset: int, wait: bool = True) -> None:
        """Answer with what a job has printed from an offset on.

        The answer is (bytes, offset to go on at, whether that is all). With ``wait`` it comes when
        there is something, or when the job has ended.
        """
        job = self.get(name)
        log = self._log(job)
        if wait and offset >= log.size and not job.is_over:
            self._followers[name].append((waiter, offset))
            return
        data, end = log.read(max(0, offset), _PIECE)
        self._clients.answer(*waiter, (data, end, job.is_over and end >= log.size))

    def log_offset(self, name: str, seconds: float) -> int:
        """Return where a job's output of the last seconds begins; for 0, where its log ends."""
        log = self._log(self.get(name))
        return log.offset_at(time.time() - seconds) if seconds else log.size

    # --- reports of daemons ------------------------------------------------------------
    def output(self, lease: int, offset: int, data: bytes) -> None:
        """Keep what a command has printed, from an offset of its output on.

        Raises:
            JobError: It is not kept: its job has ended, or is being stopped on a full disk.
            OSError: It cannot be written now; the command waits, and the job says why.
        """
        job = self._by_lease.get(lease)
        if job is None:
            raise JobNotFoundError(f"No job has the lease {lease} any more.")
        try:
            self._log(job).write(job.log_start + offset, data)
        except OSError as error:
            if job.stop_grace is not None:
                raise JobError(f"The output of {job.name} cannot be kept: {error}") from error
            job.message = f"It waits until its output can be kept ({error}); `job stop` ends it."
            raise
        job.message = ""
        self._notify_followers(job)

    def command_started(self, lease: int) -> None:
        """Record that the command of a job runs."""
        job = self._by_lease.get(lease)
        if job is not None and job.state == PENDING:
            job.state, job.started = RUNNING, time.time()
            self._keeper.submitted_job(job)
            self._limit_time(job)

    def _limit_time(self, job: SubmittedJob) -> None:
        """End the command of a job when it has run for as long as it may."""
        if job.spec.max_time and job.started is not None:
            left = job.started + job.spec.max_time - time.time()
            lease = job.lease
            self._grants.timers.call_later(max(0.0, left), lambda: self._expire(job, lease))

    def _expire(self, job: SubmittedJob, lease: int) -> None:
        if job.lease == lease and job.state == RUNNING and job.stop_grace is None:
            job.stop_grace, job.expired = _GRACE, True
            self._keeper.submitted_job(job)
            self._stop_command(job)

    def command_ended(self, lease: int, how: ProcessExit) -> None:
        """End the job whose command is gone, with all that it had started."""
        job = self._by_lease.get(lease)
        if job is None:
            return
        job.command_ended(how.code)
        if job.expired:
            self._end(job, FAILED, f"It was ended after {job.spec.max_time:g} s (max_time).")
        elif job.stop_grace is not None:
            self._end(job, STOPPED, "It was stopped.")
        elif how.code == 0:
            self._end(job, SUCCEEDED, "")
        else:
            text = f"Its command {describe_exit(how.code)}. {how.detail}".strip()
            if job.may_run_again(lost=False):
                self._try_again(job, text)
            else:
                self._end(job, FAILED, text, "JOB_ENTRYPOINT_COMMAND_ERROR")

    def start_failed(self, lease: int, error: BaseException) -> None:
        """End the job with a lease, as its command could not be started."""
        environment = isinstance(error, RuntimeEnvSetupError)
        kind = "RUNTIME_ENV_SETUP_FAILURE" if environment else "JOB_ENTRYPOINT_COMMAND_START_ERROR"
        text = f"Its command could not be started: {error}"
        self._end(self._by_lease[lease], FAILED, text, kind)

    def lease_over(self, lease: int) -> None:
        """End a job that was stopped before its command was started."""
        job = self._by_lease.get(lease)
        if job is not None:
            state = STOPPED if job.stop_grace is not None else FAILED
            self._end(job, state, "It ended before its command was started.")

    def has_lease(self, lease: int) -> bool:
        """Return whether a lease belongs to a job that has not ended."""
        return lease in self._by_lease

    # --- decisions of the scheduler ----------------------------------------------------
    def granted(self, token: SubmittedJob, number: int, allocation: Allocation) -> None:
        """Have the node's daemon start the command, once it is kept where that runs."""
        token.node, token.log_start = allocation.node_id, self._log(token).size
        self._by_lease[number] = token
        self._keeper.submitted_job(token)
        self._keeper.when_written(lambda: self._start(token, number, allocation))

    def _start(self, job: SubmittedJob, number: int, allocation: Allocation) -> None:
        node = self._node_of(job)
        if job.lease != number or job.is_over or node is None:
            return  # the node was lost meanwhile
        node.start(
            GrantedLease(
                number=number,
                epoch=self._grants.epoch,
                owner=b"",
                job_id=job.id,
                job=JobSpec(),
                spec=job.spec,
                allocation=allocation,
            )
        )
        if job.stop_grace is not None:
            self._stop_command(job)

    def refused(self, token: SubmittedJob, number: int, reason: Reason) -> None:
        """Fail a job that can never be placed."""
        self._end(token, FAILED, f"It cannot be scheduled: {reason.sentence()}.")

    def lost(self, token: SubmittedJob, number: int) -> None:
        """Fail a job whose node is gone."""
        if token.lease == number and not token.is_over:
            gone = {node.name: node.reason for node in self._nodes.lost()}
            why = gone.get(token.node, "")
            text = f"Node {token.node} was lost{f': {why}' if why else ''}."
            if token.may_run_again(lost=True):
                self._try_again(token, text)
            else:
                self._end(token, FAILED, text)

    def must_end(self, token: SubmittedJob, number: int) -> None:
        """End a job whose placement group was removed."""
        self._stop_command(token)

    def describe(self, token: SubmittedJob) -> RequestSummary:
        return RequestSummary("job", token.name, token.id, b"")

    def _submit(self, job: SubmittedJob, demand: Demand) -> None:
        if job.is_over:
            return  # it was stopped meanwhile
        job.waits_as(self._grants.reserve_number())
        self._grants.submit(job.lease, self, job, demand, None)

    # --- restarts of the head ------------------------------------------------------------
    def restore(self, job: SubmittedJob) -> None:
        """Enter a job that an earlier head has kept; its node reports whether it runs."""
        self._by_name[job.name] = job
        if job.is_over:
            return
        self._jobs.hold(_holder(job), job.id)
        if job.node:
            self._by_lease[job.lease] = job
        else:
            self._submit(job, job.demand())

    def node_reports(self, node: ClusterNode, running: Container[int]) -> None:
        """Take over the commands that a node reports; start those that never reached it."""
        for number, job in self._awaited(node.name):
            if number in running:
                self._grants.restore(number, self, job, job.demand())
                if job.stop_grace is not None:
                    self._stop_command(job)
                elif job.state == RUNNING:
                    self._limit_time(job)
            elif job.stop_grace is not None:
                self._end(job, STOPPED, "It was stopped before it began.")
            else:
                # How one ended is reported first, so the order to start this one was lost.
                del self._by_lease[number]
                job.waits_as(0)
                self._submit(job, job.demand())

    def node_never_came(self, name: str) -> None:
        """Fail the jobs of a node that did not report."""
        for number, job in self._awaited(name):
            self.lost(job, number)

    def _awaited(self, node: str) -> list[tuple[int, SubmittedJob]]:
        """Return the jobs that an earlier head has given to a node, which is to report them."""
        is_of_before = self._grants.is_of_before
        jobs = self._by_lease.items()
        return [(number, job) for number, job in jobs if job.node == node and is_of_before(number)]

    # --- the end -------------------------------------------------------------------------
    def _stop_command(self, job: SubmittedJob) -> None:
        node = self._node_of(job)
        if node is not None:
            end = head_pb2.EndLease(lease=job.lease, kill=False, grace=job.stop_grace or 0.0)
            node.send(end_lease=end)

    def _try_again(self, job: SubmittedJob, why: str) -> None:
        """Have the command of a job run once more; its log goes on after a line that says why."""
        self._by_lease.pop(job.lease, None)
        log = self._log(job)
        try:
            log.write(log.size, f"[miniray: {why} The job starts again.]\n".encode())
        except OSError as error:
            logger.warning("job %s: its log lacks why it starts again: %s", job.name, error)
        job.waits_as(0)
        self._keeper.submitted_job(job)
        self._keeper.when_written(lambda: self._submit(job, job.demand()))
        self._notify_followers(job)

    def _end(self, job: SubmittedJob, state: str, message: str, error_type: str = "") -> None:
        job.state, job.message, job.error_type = state, message, error_type
        job.ended = time.time()
        self._by_lease.pop(job.lease, None)
        self._keeper.submitted_job(job)
        self._notify_followers(job)
        self._jobs.release(_holder(job))
        logger.info("job %s: %s %s", job.name, state, message)

    def _forget_old(self) -> None:
        ended = [job for job in self._by_name.values() if job.ended is not None]
        ended.sort(key=lambda job: job.ended or 0.0)
        limit = time.time() - _KEPT_FOR
        for place, job in enumerate(ended):
            if place < len(ended) - _KEPT or (job.ended or 0.0) < limit:
                self._forget(job)

    def _forget(self, job: SubmittedJob) -> None:
        del self._by_name[job.name]
        self._log(job).remove()
        self._logs.pop(job.name, None)
        self._keeper.submitted_job_forgotten(job.name)

    def _audit(self, who: bytes, what: str, job: SubmittedJob) -> None:
        """Log which process does something with a job."""
        client = self._clients.get(who)
        by = f"process {who.hex()}"
        if client is not None:
            by = f"process {client.pid} on node {client.node.name} ({client.node.hostname})"
        logger.info("%s %s job %s: %s", by, what, job.name, printable(job.entrypoint))

    # --- parts ---------------------------------------------------------------------------
    def _node_of(self, job: SubmittedJob) -> ClusterNode | None:
        return self._nodes.get(bytes.fromhex(job.node))

    def _log(self, job: SubmittedJob) -> StreamLog:
        log = self._logs.get(job.name)
        if log is None:
            folder = self._keeper.job_logs
            assert folder is not None  # else there is no job
            folder.mkdir(exist_ok=True)
            log = self._logs[job.name] = StreamLog(folder / f"{job.name}.log")
        return log

    def _notify_followers(self, job: SubmittedJob) -> None:
        for waiter, offset in self._followers.pop(job.name, ()):
            self.read_log(waiter, job.name, offset)

    def message(self, job: SubmittedJob) -> str:
        """Return why a job waits, or how it ended, in sentences."""
        if job.state != PENDING:
            return job.message
        if job.node:
            return f"Its environment is being set up on node {job.node}."
        reason = self._grants.scheduler.explain(job.lease) if job.lease else None
        return f"It waits: {reason.sentence()}." if reason is not None else ""


def _holder(job: SubmittedJob) -> bytes:
    """Return the holder under which the packages of an open job are kept."""
    return b"submitted" + job.id
