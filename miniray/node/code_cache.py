"""Functions and classes of jobs, by name: cached by each daemon, fetched from the head on demand.

Code comes to the daemon and the head by one path, and workers get its name by another. So a name
may be requested before it is known: such a request waits a while.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.exceptions import RuntimeEnvSetupError
from miniray.messages import protocol
from miniray.node.process_setup import trim

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miniray.node.base.clients import Answer, Client, ClientServer
    from miniray.node.base.head_client import HeadClient

#: Seconds before the first retry of a name that the head does not have, and how many retries.
_FIRST_PAUSE = 0.01
_PAUSES = 10
#: Bytes of freed code from which on the C library, which would keep most, is trimmed.
_MUCH = 16 * 1024 * 1024


class CodeCache:
    """The code that this node has used recently: at most ``limit`` bytes.

    ``ask_head`` returns the code of a name; None if the head does not have it.
    """

    def __init__(self, ask_head: Callable[[bytes], Awaitable[bytes | None]], limit: int) -> None:
        self._ask_head = ask_head
        self._limit = limit
        self.used = 0
        self._code: collections.OrderedDict[bytes, bytes] = collections.OrderedDict()
        #: The names that each job has used or registered here.
        self._names: dict[bytes, set[bytes]] = {}

    def put(self, job_id: bytes, name: bytes, content: bytes) -> bool:
        """Keep code of a job; return False if the job has used it here, so that the head has it."""
        names = self._names.setdefault(job_id, set())
        is_new = name not in names
        names.add(name)
        self._keep(name, content)
        return is_new

    def known(self, job_id: bytes, name: bytes) -> bytes | None:
        content = self._code.get(name)
        if content is not None:
            self._code.move_to_end(name)
            self._names.setdefault(job_id, set()).add(name)
        return content

    async def get(self, job_id: bytes, name: bytes) -> bytes | None:
        """Return the code, from the head if need be; None if none came within some seconds."""
        pause = _FIRST_PAUSE
        for _ in range(_PAUSES):
            content = await self._ask_head(name)
            if content is not None:
                self.put(job_id, name, content)
            if (content := self.known(job_id, name)) is not None:  # or a process has brought it
                return content
            await asyncio.sleep(pause)
            pause *= 2
        return None

    def jobs(self) -> set[bytes]:
        return set(self._names)

    def end_job(self, job_id: bytes) -> None:
        """Drop the code of a job that is over, but for what other jobs have used."""
        names = self._names.pop(job_id, set())
        before = self.used
        for name in names.difference(*self._names.values()):
            self.used -= len(self._code.pop(name, b""))
        if before - self.used > _MUCH:
            trim()

    def _keep(self, name: bytes, content: bytes) -> None:
        self.used += len(content) - len(self._code.pop(name, b""))
        self._code[name] = content
        while self.used > self._limit and len(self._code) > 1:
            _, oldest = self._code.popitem(last=False)
            self.used -= len(oldest)


class CodeRequests:
    """Answers requests for code and packages from the cache, else from the head."""

    def __init__(self, clients: ClientServer, head: HeadClient) -> None:
        self._head = head
        self.cache = CodeCache(lambda name: head.ask("get_code", name), config().code_cache)
        clients.requests["get_code"] = self._get_code
        clients.notices["put_code"] = self._put_code

    def _get_code(self, client: Client, name: bytes) -> Answer | Awaitable[Answer]:
        content = self.cache.known(client.job_id, name)
        return self._fetch_code(client, name) if content is None else (content, -1)

    async def _fetch_code(self, client: Client, name: bytes) -> Answer:
        return await self.cache.get(client.job_id, name), -1

    def _put_code(self, client: Client, name: bytes, content: bytes) -> None:
        if self.cache.put(client.job_id, name, content):
            self._head.notify("put_code", client.job_id, name, content)

    async def package(self, uri: str) -> bytes:
        """Fetch a package of a runtime environment; RuntimeEnvSetupError if there is none."""
        name = uri.encode()
        part = await self._head.ask("get_code", name)
        if part is None:
            raise RuntimeEnvSetupError(
                f"The package {uri} is not known to the cluster: the job that brought it is over."
            )
        names = protocol.pieces(name, part)
        if not names:
            return protocol.whole(part)
        return b"".join([await self._head.ask("get_code", each) for each in names])
