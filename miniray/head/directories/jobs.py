"""The jobs of the cluster, their code, and the key-values of libraries.

Code and packages are kept until the last job that brought them is over. Their content is never
interpreted here, except for the list of pieces of a package.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from miniray.common.names import format_bytes
from miniray.common.specs import JobSpec, field_names
from miniray.exceptions import CodeStoreFullError
from miniray.messages import plain, protocol

if TYPE_CHECKING:
    from collections.abc import Callable


Key = str | bytes


class KeyValues:
    """Values by namespace and key; ``on_change`` gets each new value, or None for a removed one."""

    def __init__(self, on_change: Callable[[str, Key, bytes | None], None]) -> None:
        self._values: dict[str, dict[Key, bytes]] = {}
        self._on_change = on_change

    def restore(self, namespace: str, key: Key, value: bytes) -> None:
        self._values.setdefault(namespace, {})[key] = value

    def put(self, namespace: str, key: Key, value: bytes, overwrite: bool = True) -> bool:
        """Set a value, but keep an existing one unless ``overwrite``; return whether it was set."""
        values = self._values.setdefault(namespace, {})
        if not overwrite and key in values:
            return False
        values[key] = value
        self._on_change(namespace, key, value)
        return True

    def get(self, namespace: str, key: Key) -> bytes | None:
        return self._values.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: Key) -> bool:
        if self._values.get(namespace, {}).pop(key, None) is None:
            return False
        self._on_change(namespace, key, None)
        return True

    def keys(self, namespace: str, prefix: Key) -> list[Key]:
        """Return the keys that begin with a prefix of their own type, sorted."""
        found = [
            key
            for key in self._values.get(namespace, {})
            if type(key) is type(prefix) and key[: len(prefix)] == prefix
        ]
        return sorted(found)

    def exists(self, namespace: str, key: Key) -> bool:
        return key in self._values.get(namespace, {})


#: Jobs that are over and remembered, for listings.
_REMEMBERED = 1024


@dataclasses.dataclass(eq=False, repr=False)
class Job:
    """A driver's program and all that runs for it."""

    id: bytes
    #: Process id of the driver, which shows warnings.
    driver: bytes
    pid: int
    entrypoint: str
    spec: JobSpec
    #: The user's strings.
    metadata: dict[str, str]
    #: Seconds since the epoch.
    started: float
    ended: float | None = None


class JobDirectory:
    """Jobs by id.

    A job *ends* with its driver, and is *over* when it has no holders either: processes of
    it that still run, and detached actors that do or may start again.
    """

    def __init__(
        self, on_over: Callable[[bytes], None], on_forgotten: Callable[[bytes], None]
    ) -> None:
        self._on_over = on_over
        self._on_forgotten = on_forgotten
        self._jobs: dict[bytes, Job] = {}
        self._by_driver: dict[bytes, Job] = {}
        #: Jobs that are over, the latest last.
        self._over: dict[bytes, None] = {}
        #: What holds each, and the job of each holder.
        self._holders: dict[bytes, set[bytes]] = {}
        self._held: dict[bytes, bytes] = {}

    def started(
        self, job_id: bytes, driver: bytes, node_id: bytes, pid: int, details: bytes
    ) -> Job:
        """Enter the job of a driver that attached.

        ``details`` are marshalled: entrypoint, metadata, and the driver's fields of ``JobSpec``.
        """
        told: dict[str, Any] = plain.loads(details) if details else {}
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
        self._jobs[job.id] = job
        if job.ended is None:
            self._by_driver[job.driver] = job

    def get(self, job_id: bytes) -> Job | None:
        return self._jobs.get(job_id)

    def all(self) -> list[Job]:
        return list(self._jobs.values())

    def driver_ended(self, process_id: bytes) -> Job | None:
        """End the job of a process and return it; None if the process was no driver."""
        job = self._by_driver.pop(process_id, None)
        if job is not None:
            job.ended = time.time()
            self._may_be_over(job.id)
        return job

    def hold(self, holder: bytes, job_id: bytes) -> None:
        """Keep a job from being over until ``release``: a process of it, or a detached actor."""
        self._held[holder] = job_id
        self._holders.setdefault(job_id, set()).add(holder)

    def release(self, holder: bytes) -> None:
        """Undo ``hold``; an unknown holder has no effect."""
        job_id = self._held.pop(holder, None)
        if job_id is None:
            return
        self._holders[job_id].discard(holder)
        if not self._holders[job_id]:
            del self._holders[job_id]
            self._may_be_over(job_id)

    def is_over(self, job_id: bytes) -> bool:
        """Return whether no process of a job runs or will; true of a forgotten job."""
        job = self._jobs.get(job_id)
        return job_id not in self._holders and (job is None or job.ended is not None)

    def _may_be_over(self, job_id: bytes) -> None:
        if not self.is_over(job_id):
            return
        if job_id in self._jobs:  # else it is what a submitted job has brought
            self._over[job_id] = None
        if len(self._over) > _REMEMBERED:
            oldest = next(iter(self._over))
            del self._over[oldest], self._jobs[oldest]
            self._on_forgotten(oldest)
        self._on_over(job_id)


#: Namespaces of what is kept, by name, and of which job uses it: the job's id and the name.
_CODE, _USERS = "code", "code users"
_JOB_ID = 8
#: Names that did not fit and are remembered, so that a request for one gets the reason.
_REFUSED = 1000


@dataclasses.dataclass(eq=False, repr=False)
class JobCode:
    """The code and packages that jobs have brought, by the names of ``code_pieces``."""

    _kv: KeyValues
    _jobs: JobDirectory
    #: Bytes of it at most.
    _limit: int

    def __post_init__(self) -> None:
        self.used = 0
        #: What each job uses.
        self._names: dict[bytes, set[bytes]] = {}
        self._refused: dict[bytes, None] = {}

    def put(self, job_id: bytes, name: bytes, content: bytes) -> None:
        """Keep a content for a job; CodeStoreFullError if it does not fit."""
        if self._jobs.is_over(job_id):
            return  # a process that is ending sent it; it will not be requested
        if not self._kv.exists(_CODE, name):
            if self.used + len(content) > self._limit:
                self._refuse(name)
                raise self._full(f"{format_bytes(len(content))} more do not fit.")
            self._refused.pop(name, None)
            self._kv.put(_CODE, name, content)
            self.used += len(content)
        self._use(job_id, name)

    def use(self, job_id: bytes, name: bytes) -> bool:
        """Keep a content for one more job; return whether it is here."""
        part = self._kv.get(_CODE, name)
        if part is None:
            return False
        for each in (name, *protocol.pieces(name, part)):
            self._use(job_id, each)
        return True

    def get(self, name: bytes) -> bytes | None:
        """Return a content, or None; CodeStoreFullError if it was brought and did not fit."""
        content = self._kv.get(_CODE, name)
        if content is None and name in self._refused:
            raise self._full("The requested code or package did not fit.")
        return content

    def job_over(self, job_id: bytes) -> None:
        """Drop what only this job used."""
        names = self._names.pop(job_id, set())
        for name in names:
            self._kv.delete(_USERS, job_id + name)
        for name in names.difference(*self._names.values()):
            self.used -= len(self._kv.get(_CODE, name) or b"")
            self._kv.delete(_CODE, name)

    def restored(self) -> None:
        for key in self._kv.keys(_USERS, b""):
            assert isinstance(key, bytes)
            job_id, name = key[:_JOB_ID], key[_JOB_ID:]
            self._names.setdefault(job_id, set()).add(name)
        used = set().union(*self._names.values())
        self.used = sum(len(self._kv.get(_CODE, name) or b"") for name in used)
        for job_id in list(self._names):
            if self._jobs.is_over(job_id):
                self.job_over(job_id)

    def _use(self, job_id: bytes, name: bytes) -> None:
        names = self._names.setdefault(job_id, set())
        if name not in names:
            names.add(name)
            self._kv.put(_USERS, job_id + name, b"")

    def _refuse(self, name: bytes) -> None:
        self._refused[name] = None
        if len(self._refused) > _REFUSED:
            del self._refused[next(iter(self._refused))]

    def _full(self, why: str) -> CodeStoreFullError:
        return CodeStoreFullError(
            f"The head keeps {format_bytes(self.used)} of functions, classes and packages "
            f"(working_dir, py_modules) for the jobs that run, and may keep "
            f"{format_bytes(self._limit)}. {why} It goes with the jobs that use it. Pass large "
            f"values through miniray.put(), leave out files with runtime_env['excludes'], or start "
            f"the head with a larger MINIRAY_JOB_CODE_LIMIT (bytes)."
        )
