"""Functions, classes and packages of jobs: kept until the last job that brought them is over.

Nothing of it is ever interpreted here, but for which pieces a content has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.sizes import format_bytes
from miniray.exceptions import CodeStoreFullError
from miniray.messages import code_pieces

if TYPE_CHECKING:
    from miniray.head.directories.jobs import JobDirectory
    from miniray.head.directories.kv import KeyValues

#: Namespaces of what is kept, by name, and of which job uses it: the job's id and the name.
_CODE, _USERS = "code", "code users"
_JOB_ID = 8
#: So many names that found no room are known, so that who asks for them learns why.
_REFUSED = 1000


class JobCode:
    """What jobs have brought, by the names of ``code_pieces``.

    Args:
        kv: Keeps it, over a restart of the head too.
        jobs: Which jobs there are.
        limit: Bytes that all of it may take.
    """

    def __init__(self, kv: KeyValues, jobs: JobDirectory, limit: int) -> None:
        self._kv = kv
        self._jobs = jobs
        self._limit = limit
        self.used = 0
        self._users: dict[bytes, set[bytes]] = {}
        self._names: dict[bytes, set[bytes]] = {}
        self._refused: dict[bytes, None] = {}

    def put(self, job_id: bytes, name: bytes, content: bytes) -> None:
        """Keep something for a job.

        Raises:
            CodeStoreFullError: There is no room.
        """
        if self._jobs.is_over(job_id):
            return  # the last words of a process of it; nobody will ask for that
        if name not in self._users:
            if self.used + len(content) > self._limit:
                self._refuse(name)
                raise self._full(f"{format_bytes(len(content))} more do not fit.")
            self._refused.pop(name, None)
            self._kv.put(_CODE, name, content)
            self.used += len(content)
        self._use(job_id, name)

    def use(self, job_id: bytes, name: bytes) -> bool:
        """Keep what is here already for one more job; whether it is here."""
        part = self._kv.get(_CODE, name)
        if part is None:
            return False
        for each in (name, *code_pieces.pieces(name, part)):
            self._use(job_id, each)
        return True

    def get(self, name: bytes) -> bytes | None:
        """What is kept under a name, or None.

        Raises:
            CodeStoreFullError: It was brought, and there was no room.
        """
        content = self._kv.get(_CODE, name)
        if content is None and name in self._refused:
            raise self._full("What is asked for did not fit.")
        return content

    def job_over(self, job_id: bytes) -> None:
        """Nothing of a job runs or will: what no other one uses goes."""
        for name in self._names.pop(job_id, ()):
            self._kv.delete(_USERS, job_id + name)
            users = self._users[name]
            users.discard(job_id)
            if not users:
                self._drop(name)

    def restored(self) -> None:
        """Take over what was kept before the head started again."""
        for key in self._kv.keys(_USERS, b""):
            assert isinstance(key, bytes)
            job_id, name = key[:_JOB_ID], key[_JOB_ID:]
            self._users.setdefault(name, set()).add(job_id)
            self._names.setdefault(job_id, set()).add(name)
        self.used = sum(len(self._kv.get(_CODE, name) or b"") for name in self._users)
        for job_id in list(self._names):
            if self._jobs.is_over(job_id):
                self.job_over(job_id)

    def _use(self, job_id: bytes, name: bytes) -> None:
        users = self._users.setdefault(name, set())
        if job_id not in users:
            users.add(job_id)
            self._names.setdefault(job_id, set()).add(name)
            self._kv.put(_USERS, job_id + name, b"")

    def _drop(self, name: bytes) -> None:
        del self._users[name]
        self.used -= len(self._kv.get(_CODE, name) or b"")
        self._kv.delete(_CODE, name)

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
