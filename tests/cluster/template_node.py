"""A template of its own in a subprocess, whose workers run what a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.node.base.control_socket import control_pair
from miniray.node.base.template_client import TemplateClient
from miniray.node.workers.template import WORKER_VARIABLE
from miniray.worker import stdio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

#: Stands in for the worker's main module: a worker runs the code in its spec.
TEMPLATE = """
import os, socket, sys, types

stub = types.ModuleType("miniray.worker.main")

def run_worker(spec):
    code = 1
    try:
        exec(spec["code"], {"spec": spec})
        code = 0
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdout.flush()
        os._exit(code)

stub.run_worker = run_worker
sys.modules["miniray.worker.main"] = stub
import random, shutil
from miniray.node.workers.template import run_template
sys.path.append(sys.argv[2])  # a test may put modules there
run_template(socket.socket(fileno=int(sys.argv[1])), [], lambda: shutil.rmtree(sys.argv[2]))
"""
SLEEP = "import time; print('sleeping', flush=True); time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


class Node:
    """The daemon's side: a client, and what it heard."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = control_pair()
        self.cleanup = folder / "sockets"
        self.cleanup.mkdir()
        os.set_inheritable(theirs.fileno(), True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", TEMPLATE, str(theirs.fileno()), str(self.cleanup)],
            pass_fds=[theirs.fileno()],
            stderr=(folder / "stderr").open("wb"),
        )
        theirs.close()
        self.exits: dict[int, int] = {}
        self.gone = 0
        self.lingering: dict[int, list[int]] = {}
        self.client = TemplateClient(
            ours, self.process.pid, self._exited, self._gone, self.lingering.__setitem__
        )
        self.outputs: list[int] = []

    def _exited(self, pid: int, status: int) -> None:
        self.exits[pid] = os.waitstatus_to_exitcode(status)

    def _gone(self) -> None:
        self.gone += 1

    async def fork(self, code: str, **spec: Any) -> tuple[int, int]:
        """Start a worker; returns its pid and the read end of its stdout."""
        read, write = os.pipe2(os.O_CLOEXEC)
        self.outputs.append(read)
        pid = await self.client.fork(
            stdio.make(worker_spec(code, **spec)), write, os.open(os.devnull, os.O_WRONLY)
        )
        return pid, read

    async def run(self, code: str, **spec: Any) -> tuple[int, str]:
        """Run a worker to its end; returns its exit code and what it printed."""
        pid, read = await self.fork(code, **spec)
        await until(lambda: pid in self.exits)
        return self.exits.pop(pid), os.read(read, 1 << 16).decode()

    async def line(self, read: int) -> str:
        """What a worker prints next."""
        loop = asyncio.get_running_loop()
        data = await asyncio.wait_for(loop.run_in_executor(None, os.read, read, 1 << 16), 10)
        return data.decode().strip()


def worker_spec(code: str, **more: Any) -> dict[str, Any]:
    id = os.urandom(8)
    environment = {WORKER_VARIABLE: id.hex(), **more.pop("environment", {})}
    return {"process_id": id, "environment": environment, "python": None, "code": code, **more}


async def until(condition: Callable[[], Any], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    try:
        yield node
    finally:
        node.client.close()
        loop = asyncio.get_running_loop()
        await asyncio.wait_for(loop.run_in_executor(None, node.process.wait), 20)
        for fd in node.outputs:
            os.close(fd)


def with_node(
    test: Callable[[Node], Coroutine[Any, Any, None]],
) -> Callable[[Path], None]:
    """A test that gets a running template."""

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            async with node(tmp_path) as running:
                await test(running)

        asyncio.run(main())

    run.__name__ = test.__name__
    return run
