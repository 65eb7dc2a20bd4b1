"""The commands of submitted jobs: their variables, and the way of what they print to the head.

A command is a worker to the pool: a child of the template with a lease, an environment and
devices. It speaks to no daemon; the drivers in it do, as any other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from miniray.client.init_options import ADDRESS_VARIABLE, JOB_CONFIG_VARIABLE, JOB_ID_VARIABLE
from miniray.exceptions import JobError

if TYPE_CHECKING:
    from miniray.common.specs import CommandSpec
    from miniray.node.base.head_client import HeadClient
    from miniray.runtime_env.install import WorkerEnvironment

logger = logging.getLogger(__name__)

#: Bytes that a command has in flight to the head; then its pipe fills, and its ``print`` waits.
_PIECE = 64 * 1024
#: Seconds until output is sent again that the head could not write.
_AGAIN_AFTER = 1.0


def command_variables(
    command: CommandSpec, environment: WorkerEnvironment | None, address: str
) -> dict[str, str]:
    """Return the variables by which a command finds its tools, and its drivers their cluster.

    Args:
        command: Of a submitted job.
        environment: Its runtime environment, whose variables go before these.
        address: Of the cluster.
    """
    own = environment.env_vars if environment is not None else {}
    paths = environment.sys_path if environment is not None else ()
    config = {
        "metadata": {**command.metadata, "job_submission_id": command.name},
        "runtime_env": json.loads(command.runtime_env or "{}"),
    }
    tools = os.path.dirname(sys.executable)  # `python` is the one that runs the node
    path = own.get("PATH", f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    variables = {"PYTHONUNBUFFERED": "1", **own, "PATH": path}
    if paths:
        further = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        variables["PYTHONPATH"] = os.pathsep.join([*paths, *([further] if further else [])])
    return {
        **variables,
        ADDRESS_VARIABLE: address,
        JOB_ID_VARIABLE: command.name,
        JOB_CONFIG_VARIABLE: json.dumps(config),
    }


class CommandOutput:
    """What one command prints, both streams in one, on its way to the head, which keeps it.

    One piece is in flight at a time. A head that starts again is sent the piece again, with the
    same offset, so that each byte is kept once.

    Args:
        lease: Of the command.
        head: The way to the head.
    """

    def __init__(self, lease: int, head: HeadClient) -> None:
        self._lease = lease
        self._head = head
        self._read, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self._offset = 0
        #: The command is gone, with all that it had started.
        self._over = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begin to read, as the command runs."""
        self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def finish(self) -> None:
        """Wait until the head has all that a command that is gone has printed."""
        self._over.set()
        if self._sending is not None:
            await self._sending

    async def _send_all(self) -> None:
        wanted = True
        try:
            while data := await self._next():
                if wanted:
                    wanted = await self._send(data)
                self._offset += len(data)
        finally:
            self.close()

    async def _send(self, data: bytes) -> bool:
        """Have the head keep a piece; return whether it takes more."""
        while True:
            try:
                await self._head.ask("job_output", self._lease, self._offset, data)
                return True
            except JobError:
                return False  # the job is given up
            except Exception as error:  # noqa: BLE001 - as of a full disk
                logger.warning("the output of a job could not be kept: %s", error)
            await asyncio.sleep(_AGAIN_AFTER)

    async def _next(self) -> bytes:
        """Return what the command has printed since; nothing if no more will come."""
        loop = asyncio.get_running_loop()
        while True:
            over = self._over.is_set()
            try:
                return os.read(self._read, _PIECE)
            except BlockingIOError:
                if over:  # what still holds the pipe is no part of the job
                    return b""
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._read, _set, readable)
            ended = loop.create_task(self._over.wait())
            try:
                await asyncio.wait((readable, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                loop.remove_reader(self._read)
                ended.cancel()

    def close(self) -> None:
        """Stop reading."""
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
