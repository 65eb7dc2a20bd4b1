"""The templates of a node: the first one, and those that have imported more.

Responsible for which template forks a worker, and for what becomes of workers whose template
died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING

from miniray.node.template_client import TemplateClient, TemplateGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.worker import Worker

logger = logging.getLogger(__name__)


class Templates:
    """All templates of a node."""

    def __init__(
        self,
        first: TemplateClient,
        workers: Callable[[], Iterable[Worker]],
        on_exited: Callable[[int, int], None],
        on_lingers: Callable[[int, list[int]], None],
        on_killed: Callable[[Worker], object],
    ) -> None:
        """Start with the first one; the other arguments are as for ``TemplateClient``.

        Args:
            first: forked by the daemon; the node ends with it.
            workers: all workers that have a process.
            on_exited: for workers of the others.
            on_lingers: the same.
            on_killed: called with workers that are killed because their template died.
        """
        self._first = first
        self._workers = workers
        self._on_exited = on_exited
        self._on_lingers = on_lingers
        self._on_killed = on_killed
        #: By the modules that they have imported beyond the runtime's.
        self._others: dict[tuple[str, ...], TemplateClient] = {}
        #: Those that died, until all their workers are gone.
        self._dead: dict[TemplateClient, asyncio.Task[None]] = {}

    def get(self, modules: tuple[str, ...]) -> TemplateClient:
        """The template that has imported these modules too; made on first use.

        Raises:
            TemplateGoneError: the first one is gone.
        """
        if not modules:
            return self._first
        template = self._others.get(modules)
        if template is None:
            control = self._first.fork_template(list(modules))
            template = self._others[modules] = TemplateClient(
                control, 0, self._on_exited, lambda: self._lost(modules), self._on_lingers
            )
        return template

    def _lost(self, modules: tuple[str, ...]) -> None:
        """One with more modules died: its workers fall to the first one, which kills them."""
        logger.warning("the template with %s ended", ", ".join(modules))
        gone = self._others.pop(modules)
        task = asyncio.get_running_loop().create_task(self._end_workers(gone))
        self._dead[gone] = task
        task.add_done_callback(lambda _: self._dead.pop(gone))

    async def _end_workers(self, gone: TemplateClient) -> None:
        mine = [worker for worker in self._workers() if worker.template is gone]
        for worker in mine:
            self._on_killed(worker)
        with contextlib.suppress(TemplateGoneError):  # the node stops then
            await self._first.settled(gone.pid)
            for worker in mine:
                self._on_exited(worker.pid, signal.SIGKILL)

    def is_first(self, template: TemplateClient | None) -> bool:
        """Whether this is the one with which the node ends; None: it could not make another one."""
        return template is None or template is self._first

    async def settled(self, template: TemplateClient | None) -> None:
        """Wait until nothing is left of a template that died; one that lives is not waited for."""
        task = None if template is None else self._dead.get(template)
        if task is not None:
            await asyncio.wait((task,))

    def close(self) -> None:
        """Hang up on all: they end their workers."""
        for template in (self._first, *self._others.values()):
            template.close()
