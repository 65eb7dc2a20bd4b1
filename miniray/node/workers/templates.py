"""The templates of a node: the first one, and those that have imported more.

Responsible for which template forks a worker, and for the workers of a template that died. The
protocol is in ``template_client.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from typing import TYPE_CHECKING

from miniray.node.base.template_client import TemplateClient, TemplateGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.base.template_client import Helper
    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Templates:
    """All templates of a node; ``on_exited`` and ``on_lingers`` are as for ``TemplateClient``."""

    first: TemplateClient
    workers: Callable[[], Iterable[Worker]]
    on_exited: Callable[[int, int], None]
    on_lingers: Callable[[int, list[int]], None]
    on_killed: Callable[[Worker], object]

    def __post_init__(self) -> None:
        #: Templates that were forked from another one: by that one, and the modules added to it.
        self._larger: dict[tuple[TemplateClient, tuple[str, ...]], TemplateClient] = {}
        #: Templates that died, until all their workers are gone.
        self._dead: dict[TemplateClient, asyncio.Task[None]] = {}

    def get(self, modules: tuple[str, ...], later: tuple[str, ...] = ()) -> TemplateClient:
        """Return the template that has imported these modules too; make it on first use.

        It has the ``later`` modules as well if a template has them by now. The first call has one
        load them, beside whatever is forked meanwhile. Raises TemplateGoneError if the first one is
        gone.
        """
        template = self._with(self.first, modules, beside=False)
        larger = self._with(template, later, beside=True)
        return larger if larger.ready else template

    def _with(
        self, parent: TemplateClient, modules: tuple[str, ...], *, beside: bool
    ) -> TemplateClient:
        if not modules:
            return parent
        template = self._larger.get((parent, modules))
        if template is None:
            template = self._larger[parent, modules] = TemplateClient(
                parent.fork_template(list(modules), beside=beside),
                0,
                self.on_exited,
                lambda: self._lost(parent, modules, beside=beside),
                self.on_lingers,
            )
        return template

    def _lost(self, parent: TemplateClient, modules: tuple[str, ...], *, beside: bool) -> None:
        """Handle the death of a template that another has forked.

        Its workers, and templates that were forked from it, fall to that one, which kills them. If
        it could not load modules that workers can do without, there is no second try.
        """
        logger.warning("the template with %s ended", ", ".join(modules))
        gone = self._larger[parent, modules]
        if gone.pid or not beside:
            del self._larger[parent, modules]
            self._end_workers(gone, parent)

    def _end_workers(self, gone: TemplateClient, parent: TemplateClient) -> None:
        task = asyncio.get_running_loop().create_task(self._await_ends(gone, parent))
        self._dead[gone] = task
        task.add_done_callback(lambda _: self._dead.pop(gone))

    async def _await_ends(self, gone: TemplateClient, parent: TemplateClient) -> None:
        mine = [worker for worker in self.workers() if worker.template is gone]
        for worker in mine:
            self.on_killed(worker)
        with contextlib.suppress(TemplateGoneError):  # the node stops then
            try:
                await parent.settled(gone.pid)
            except TemplateGoneError:
                await self.first.settled(parent.pid)  # what was the parent's falls to that one
            for worker in mine:
                self.on_exited(worker.pid, signal.SIGKILL)

    def fork_helper(self, module: str) -> Helper:
        return self.first.fork_helper(module)

    def is_first(self, template: TemplateClient | None) -> bool:
        """Return whether the node ends with this template; None: another could not be made."""
        return template is None or template is self.first

    async def settled(self, template: TemplateClient | None) -> None:
        """Wait until nothing is left of a template that died; return at once if it lives."""
        task = None if template is None else self._dead.get(template)
        if task is not None:
            await asyncio.wait((task,))

    def close(self) -> None:
        for template in (self.first, *self._larger.values()):
            template.close()
