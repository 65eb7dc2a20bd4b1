"""Programs that are submitted to a cluster and run there by themselves, with Ray's names.

``JobSubmissionClient`` submits and looks at them, as the command ``miniray job`` does. The head and
the daemons decide which processes run them, and what is kept of them.
"""

from __future__ import annotations

import codecs
import dataclasses
import enum
import json
import weakref
from typing import TYPE_CHECKING, Any

from miniray.client.cluster_choice import cluster_of_page
from miniray.client.command_connection import JobConnection
from miniray.common.object_ref import new_id
from miniray.common.specs import CommandSpec
from miniray.job_config import JobConfig
from miniray.system import option_checks as check

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from miniray.client.command_connection import CommandConnection

__all__ = [
    "DriverInfo",
    "JobDetails",
    "JobErrorType",
    "JobInfo",
    "JobStatus",
    "JobSubmissionClient",
    "JobType",
]

#: Seconds that the command of a job has to end after SIGTERM, before all of the job is killed.
STOP_GRACE = 30.0


class JobStatus(str, enum.Enum):
    """How far a submitted job is; the last three are final."""

    #: It waits for resources, or its environment is set up; ``message`` says which.
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    #: It was ended by ``stop_job``.
    STOPPED = "STOPPED"
    #: Its command has exited with 0.
    SUCCEEDED = "SUCCEEDED"
    #: Its command has exited with another code, could not be started, or was lost with its node.
    FAILED = "FAILED"

    def __str__(self) -> str:
        return self.value

    def is_terminal(self) -> bool:
        """Return whether it stays so."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


class JobErrorType(str, enum.Enum):
    """What failed."""

    RUNTIME_ENV_SETUP_FAILURE = "RUNTIME_ENV_SETUP_FAILURE"
    JOB_ENTRYPOINT_COMMAND_START_ERROR = "JOB_ENTRYPOINT_COMMAND_START_ERROR"
    JOB_ENTRYPOINT_COMMAND_ERROR = "JOB_ENTRYPOINT_COMMAND_ERROR"


class JobType(str, enum.Enum):
    """How a job was started."""

    #: It was submitted.
    SUBMISSION = "SUBMISSION"
    #: A program that has called ``init()`` by itself.
    DRIVER = "DRIVER"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverInfo:
    """A program that has called ``init()``."""

    #: Its job id, in hex.
    id: str
    node_ip_address: str
    pid: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What is known of a job."""

    status: JobStatus
    #: The command.
    entrypoint: str
    #: Why it waits, or how it ended, in sentences.
    message: str | None = None
    error_type: JobErrorType | None = None
    #: When its command began and ended, in milliseconds since the epoch.
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    entrypoint_num_cpus: float | None = None
    entrypoint_num_gpus: float | None = None
    #: In bytes.
    entrypoint_memory: int | None = None
    entrypoint_resources: dict[str, float] | None = None
    #: None: there are no agents.
    driver_agent_http_address: str | None = None
    #: Node of its command, in hex.
    driver_node_id: str | None = None
    #: Exit code of its command, negative for a signal.
    driver_exit_code: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobDetails(JobInfo):
    """What is known of a job, and of the driver in it."""

    type: JobType
    #: Hex id of the last driver in it.
    job_id: str | None = None
    submission_id: str | None = None
    #: The last driver in it.
    driver_info: DriverInfo | None = None


class JobSubmissionClient:
    """Submits jobs to a cluster.

    Args:
        address: ``HOST:PORT`` of its head, or the ``http://`` address of its page if that is on
            this machine; None or "auto": that of ``MINIRAY_ADDRESS``, else the
            one of this user that runs on this machine. One that has no node of this user here
            needs its token in ``MINIRAY_TOKEN``.
        create_cluster_if_needed: Refused: start one with ``miniray start --head``.
        cookies: Without effect, as this client does not use HTTP.
        metadata: Added to the metadata of all jobs.
        headers: Without effect.
        verify: Without effect: the token pins the cluster's certificate.

    Raises:
        ConnectionError: There is no such cluster, or it is out of reach.
        TypeError, ValueError: An argument cannot be used.
    """

    def __init__(
        self,
        address: str | None = None,
        create_cluster_if_needed: bool = False,
        cookies: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        headers: Mapping[str, Any] | None = None,
        verify: str | bool | None = True,
    ) -> None:
        del cookies, headers, verify
        if create_cluster_if_needed:
            raise ValueError(
                "create_cluster_if_needed is not supported: start a cluster with `miniray start "
                "--head`, and it outlives this program."
            )
        if address is not None:
            check.text("address", address)
        if address is not None and "://" in address:
            address = cluster_of_page(address)
        self._metadata = JobConfig(metadata=metadata).metadata

        def connect() -> CommandConnection:
            from miniray.client.command_connection import connect_for_cli

            return connect_for_cli(address, "address", None)

        self._jobs = JobConnection(connect)
        # A cluster elsewhere is reached through a node of this process's own.
        self._finalizer = weakref.finalize(self, self._jobs.close)

    @classmethod
    def over(cls, jobs: JobConnection) -> JobSubmissionClient:
        """Return a client of a cluster that is connected to already."""
        client = cls.__new__(cls)
        client._jobs, client._metadata = jobs, {}
        return client

    def get_address(self) -> str:
        """Return ``HOST:PORT`` of the cluster's head."""
        return self._jobs.address

    def submit_job(
        self,
        *,
        entrypoint: str | Sequence[str],
        job_id: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        submission_id: str | None = None,
        entrypoint_num_cpus: float | None = None,
        entrypoint_num_gpus: float | None = None,
        entrypoint_memory: int | None = None,
        entrypoint_resources: Mapping[str, float] | None = None,
        entrypoint_label_selector: Mapping[str, str] | None = None,
        max_retries: int = 0,
        max_time: float = 0.0,
        secrets: Sequence[str] = (),
    ) -> str:
        """Submit a job, and return its id as soon as the cluster keeps it.

        Args:
            entrypoint: The command: a text for ``/bin/sh``, or a list of the program and its
                arguments, which is run as it is.
            job_id: Ray's earlier name of ``submission_id``.
            runtime_env: Of the command, and of the drivers in it.
            metadata: Strings by name, shown with the job.
            submission_id: Its id; None: one is made. An equal request for this id is the same job.
            entrypoint_num_cpus: What the command holds; if none, it runs on the head's node.
            entrypoint_num_gpus: GPUs that it holds, and sees.
            entrypoint_memory: Bytes.
            entrypoint_resources: Custom resources.
            entrypoint_label_selector: Conditions on the labels of its node.
            max_retries: Runs after an exit code that is not 0, and as many after its node was lost.
            max_time: Seconds that the command may run; 0: no limit.
            secrets: Names of ``env_vars`` in ``runtime_env`` whose values listings do not show.

        Raises:
            JobAlreadyExistsError: Another job has the id.
            TypeError, ValueError: An argument cannot be used.
            RuntimeEnvSetupError: Files of the environment are too large or cannot be read.

        Examples:
            >>> JobSubmissionClient().submit_job(entrypoint="python train.py")  # doctest: +SKIP
            'job-6f1c04d2a9b83e57'
        """
        spec = CommandSpec(
            name=_wanted_id(submission_id, job_id),
            command=_command(entrypoint),
            metadata={**self._metadata, **JobConfig(metadata=metadata).metadata},
            resources=_resources(
                entrypoint_resources, entrypoint_num_cpus, entrypoint_num_gpus, entrypoint_memory
            ),
            label_selector=check.label_selector(
                "entrypoint_label_selector", entrypoint_label_selector or {}
            ),
            max_retries=check.whole(0)("max_retries", max_retries),
            max_time=float(check.amount("max_time", max_time)),
            secrets=[check.text("secrets", name) for name in secrets],
        )
        self._jobs.submit(spec, runtime_env)
        return spec.name

    def stop_job(self, job_id: str, grace: float = STOP_GRACE) -> bool:
        """Begin to end a job: SIGTERM to its command, and later SIGKILL to all of it.

        Detached actors that its drivers have made go on.

        Args:
            job_id: Of the job.
            grace: Seconds between the two.

        Returns:
            Whether it waited or ran.

        Raises:
            JobNotFoundError: There is no such job.
        """
        return bool(self._jobs.ask("stop_job", job_id, check.amount("grace", grace)))

    def delete_job(self, job_id: str) -> bool:
        """Forget a job that has ended, and remove its log; return True.

        Raises:
            JobNotFoundError: There is no such job.
            JobRunningError: It has not ended.
        """
        self._jobs.ask("delete_job", job_id)
        return True

    def get_job_status(self, job_id: str) -> JobStatus:
        """Return how far a job is.

        Raises:
            JobNotFoundError: There is no such job.
        """
        return self.get_job_info(job_id).status

    def get_job_info(self, job_id: str) -> JobDetails:
        """Return what is known of a job.

        Raises:
            JobNotFoundError: There is no such job.
        """
        return job_details(self._jobs.ask("job_info", job_id))

    def list_jobs(self) -> list[JobDetails]:
        """Return the submitted jobs, then the other programs that are or were attached."""
        submitted = [job_details(each) for each in self._jobs.ask("state", "submissions")]
        listed = self._jobs.ask("state", "jobs")
        others = [each for each in listed if "job_submission_id" not in each["metadata"]]
        return [*submitted, *map(_driver_details, others)]

    def get_job_logs(self, job_id: str) -> str:
        """Return what a job has printed up to now.

        Raises:
            JobNotFoundError: There is no such job.
        """
        return b"".join(self._jobs.log(job_id)).decode(errors="replace")

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield what a job prints, from its beginning on, until it has ended.

        It goes on without repetition after a cut connection or a restart of the head.

        Raises:
            JobNotFoundError: There is no such job.
            ConnectionError: The cluster is out of reach for longer than ``node_timeout``.
        """
        import asyncio

        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        log = self._jobs.follow(job_id)
        while (data := await asyncio.to_thread(next, log, None)) is not None:
            text = decode(data)
            if text:
                yield text


def _command(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the program and its arguments."""
    if isinstance(entrypoint, str):
        if not entrypoint.strip():
            raise ValueError("entrypoint is empty; give the command, as 'python train.py'.")
        return ["/bin/sh", "-c", entrypoint]
    words = list(entrypoint) if isinstance(entrypoint, list | tuple) else []
    if not words or not all(isinstance(word, str) for word in words):
        raise check.wrong_type("entrypoint", entrypoint, "a command, as text or as list of texts")
    return words


def _wanted_id(submission_id: str | None, job_id: str | None) -> str:
    """Return the id that the user has chosen, under either name, else a new one."""
    if job_id is not None and submission_id is not None:
        raise ValueError("Give submission_id alone; job_id is its earlier name.")
    wanted = job_id if submission_id is None else submission_id
    if wanted is None:
        return f"job-{new_id().hex()}"
    if not isinstance(wanted, str):
        raise check.wrong_type("submission_id", wanted, "a string")
    return wanted


def _resources(
    custom: Mapping[str, float] | None, cpus: float | None, gpus: float | None, memory: int | None
) -> dict[str, float]:
    """Return what the command holds, by the names of resources."""
    found = dict(check.resources("entrypoint_resources", custom or {}))
    for name, resource, value in (
        ("entrypoint_num_cpus", "CPU", cpus),
        ("entrypoint_num_gpus", "GPU", gpus),
        ("entrypoint_memory", "memory", memory),
    ):
        if value is not None:
            found[resource] = check.amount(name, value, resource)
    return found


def job_details(told: Mapping[str, Any]) -> JobDetails:
    """Make the record of a submitted job from the head's description."""
    resources = dict(told["resources"])
    cpus, gpus, memory = (resources.pop(name, None) for name in ("CPU", "GPU", "memory"))
    driver = DriverInfo(**told["driver_info"]) if told["driver_info"] else None
    return JobDetails(
        type=JobType.SUBMISSION,
        job_id=driver.id if driver is not None else None,
        submission_id=told["submission_id"],
        driver_info=driver,
        status=JobStatus(told["status"]),
        entrypoint=told["entrypoint"],
        message=told["message"] or None,
        error_type=JobErrorType(told["error_type"]) if told["error_type"] else None,
        start_time=_milliseconds(told["start_time"]),
        end_time=_milliseconds(told["end_time"]),
        metadata=dict(told["metadata"]),
        runtime_env=json.loads(told["runtime_env"] or "{}"),
        entrypoint_num_cpus=cpus,
        entrypoint_num_gpus=gpus,
        entrypoint_memory=int(memory) if memory is not None else None,
        entrypoint_resources=resources or None,
        driver_node_id=told["driver_node_id"] or None,
        driver_exit_code=told["driver_exit_code"],
    )


def _driver_details(told: Mapping[str, Any]) -> JobDetails:
    """Make the record of a program that was not submitted; how it ended is not known."""
    return JobDetails(
        type=JobType.DRIVER,
        job_id=told["job_id"],
        driver_info=DriverInfo(id=told["job_id"], node_ip_address="", pid=str(told["driver_pid"])),
        status=JobStatus.RUNNING if told["end_time"] is None else JobStatus.SUCCEEDED,
        entrypoint=told["entrypoint"],
        start_time=_milliseconds(told["start_time"]),
        end_time=_milliseconds(told["end_time"]),
        metadata=dict(told["metadata"]),
        driver_node_id=told["driver_node_id"],
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(1000 * seconds)
