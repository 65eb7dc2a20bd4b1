"""Templates with more modules: which of them forks a worker, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from template_node import SLEEP, Node, alive, until, with_node, worker_spec

from miniray.node.workers.lifecycle import Templates
from miniray.node.workers.worker import Worker
from miniray.worker import stdio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.node.base.template_client import TemplateClient

QUICK = ("colorsys",)
SLOW = ("slow_to_load",)
#: What is slow: it is loaded when a test says so.
MODULE = """
import os, threading
open(os.path.join(os.path.dirname(__file__), "gate")).close()
priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
"""
LOADED = "import sys; print(f\"{'colorsys' in sys.modules} {'slow_to_load' in sys.modules}\")"


class Pool:
    """The templates of a node, and the workers that a test has them fork."""

    def __init__(self, node: Node, module: str = MODULE) -> None:
        self.node = node
        self.workers: dict[int, Worker] = {}
        self.exits: dict[int, int] = {}
        self.templates = Templates(
            node.client,
            self._living,
            self.exits.__setitem__,
            lambda _pid, _left: None,
        )
        (node.cleanup / "slow_to_load.py").write_text(module)
        os.mkfifo(node.cleanup / "gate")

    def _living(self) -> Iterator[Worker]:
        return (worker for pid, worker in self.workers.items() if pid not in self.exits)

    async def fork(self, code: str) -> tuple[Worker, str]:
        """Have a template start a worker; returns it, and the first line that it prints."""
        read, write = os.pipe2(os.O_CLOEXEC)
        self.node.outputs.append(read)
        template = self.templates.get(QUICK, SLOW)
        worker = Worker(os.urandom(8), (), template=template)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        worker.pid = await template.fork(stdio.make(worker_spec(code)), write, nowhere)
        self.workers[worker.pid] = worker
        return worker, await self.node.line(read)

    async def load(self) -> None:
        """Let the slow module be loaded, and wait until workers have it."""
        gate = await asyncio.to_thread(os.open, self.node.cleanup / "gate", os.O_WRONLY)
        os.close(gate)
        await until(lambda: self.larger is not self.smaller)

    @property
    def smaller(self) -> TemplateClient:
        """The template without the slow module."""
        return self.templates.get(QUICK)

    @property
    def larger(self) -> TemplateClient:
        """The one that forks workers which want it."""
        return self.templates.get(QUICK, SLOW)


@with_node
async def test_workers_do_not_wait_for_what_is_loaded_later_and_have_it_then(node: Node) -> None:
    pool = Pool(node)
    assert (await pool.fork(LOADED))[1] == "True False"
    await pool.load()
    assert (await pool.fork(LOADED))[1] == "True True"
    pool.templates.close()


@with_node
async def test_what_is_loaded_later_leaves_the_processors_to_others(node: Node) -> None:
    pool = Pool(node)
    await pool.fork(LOADED)
    await pool.load()
    code = "import os, slow_to_load; own = os.getpriority(os.PRIO_PROCESS, 0)"
    code += "; print(f'{slow_to_load.priority} {own}')"
    loading, running = map(int, (await pool.fork(code))[1].split())
    assert running == os.getpriority(os.PRIO_PROCESS, 0)
    assert loading > running or running == 19
    pool.templates.close()


@with_node
async def test_what_cannot_be_loaded_later_is_done_without(node: Node) -> None:
    pool = Pool(node, "raise OSError('no such library')")
    await pool.fork(LOADED)
    await until(lambda: pool.larger is not pool.smaller)
    assert (await pool.fork(LOADED))[1] == "True False"
    pool.templates.close()


@with_node
async def test_workers_of_a_larger_template_that_is_killed_are_ended_and_no_others(
    node: Node,
) -> None:
    pool = Pool(node)
    without, _ = await pool.fork(SLEEP)
    await pool.load()
    with_it, _ = await pool.fork(SLEEP)
    os.kill(pool.larger.pid, signal.SIGKILL)
    await until(lambda: pool.exits)
    assert pool.exits == {with_it.pid: signal.SIGKILL}
    await until(lambda: not alive(with_it.pid))
    assert alive(without.pid)
    assert (await pool.fork(LOADED))[1] == "True False"
    await pool.load()  # another one takes its place
    assert (await pool.fork(LOADED))[1] == "True True"
    pool.templates.close()


@with_node
async def test_a_template_takes_the_larger_one_with_it_and_all_workers_of_both(node: Node) -> None:
    pool = Pool(node)
    without, _ = await pool.fork(SLEEP)
    await pool.load()
    with_it, _ = await pool.fork(SLEEP)
    os.kill(pool.smaller.pid, signal.SIGKILL)
    await until(lambda: len(pool.exits) == 2)
    assert pool.exits == dict.fromkeys((without.pid, with_it.pid), signal.SIGKILL)
    await until(lambda: not alive(without.pid) and not alive(with_it.pid))
    assert await node.run("print('fine')") == (0, "fine\n")
    pool.templates.close()


@with_node
async def test_closing_ends_a_template_that_still_loads(node: Node) -> None:
    pool = Pool(node)
    await pool.fork(LOADED)
    pool.templates.close()
    await until(lambda: node.process.poll() is not None)  # it ends when all that it began has
