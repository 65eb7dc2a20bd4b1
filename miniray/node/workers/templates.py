"""What forks a node's workers, and which of them wait for the next lease of their kind.

Responsible for choosing a template, for the workers of one that died, for finding idle workers and
for deciding when there are too many. The protocol of templates is in ``template_client.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.node.base.template_client import TemplateClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.node.workers.worker import Worker


def surplus(workers: Iterable[Worker], soft_limit: int) -> int:
    """Return how many workers a node has above its soft limit, without those asked to end."""
    return sum(worker.exiting is None for worker in workers) - soft_limit


class IdleWorkers:
    """The idle workers of a node, by kind.

    ``surplus`` returns how many workers the node has above its soft limit; ``end`` gets one that
    was idle for long meanwhile.
    """

    def __init__(self, surplus: Callable[[], int], end: Callable[[Worker], None]) -> None:
        self._surplus = surplus
        self._end = end
        self._by_key: dict[tuple[Any, ...], list[Worker]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, key: tuple[Any, ...]) -> Worker | None:
        """Take the worker of a kind that became idle last; None if there is none."""
        idle = self._by_key.get(key)
        worker = idle.pop() if idle else None
        if idle == []:
            del self._by_key[key]
        return worker

    def add(self, worker: Worker) -> None:
        worker.idle_since = time.monotonic()
        self._by_key.setdefault(worker.pool_key, []).append(worker)
        if self._timer is None:
            self._set_timer()

    def remove(self, worker: Worker) -> None:
        idle = self._by_key.get(worker.pool_key, [])
        if worker in idle:
            idle.remove(worker)
            if not idle:
                del self._by_key[worker.pool_key]

    def all(self) -> list[Worker]:
        return [worker for workers in self._by_key.values() for worker in workers]

    def end_job(self, job_id: bytes) -> list[Worker]:
        """Remove and return the workers of a job whose driver is gone."""
        found = [worker for worker in self.all() if worker.job_id == job_id]
        for worker in found:
            self.remove(worker)
        return found

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(config().worker_idle, self._end_some)

    def _end_some(self) -> None:
        """End workers that were idle for a while: above the soft limit, the oldest first."""
        self._timer = None
        now = time.monotonic()
        idle = sorted(self.all(), key=lambda worker: worker.idle_since)
        for worker in idle[: max(0, self._surplus())]:
            if now - worker.idle_since >= config().worker_idle:
                self.remove(worker)
                self._end(worker)
        if self._by_key and self._surplus() > 0:
            self._set_timer()


logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False)
class Templates:
    """All templates of a node; ``on_exited`` and ``on_lingers`` are as for ``TemplateClient``."""

    first: TemplateClient
    workers: Callable[[], Iterable[Worker]]
    on_exited: Callable[[int, int], None]
    on_lingers: Callable[[int, list[int]], None]

    def __post_init__(self) -> None:
        #: Templates that were forked from another one: by that one, and the modules added to it.
        self._larger: dict[tuple[TemplateClient, tuple[str, ...]], TemplateClient] = {}

    def get(self, modules: tuple[str, ...], later: tuple[str, ...] = ()) -> TemplateClient:
        """Return a template that has imported these modules too; make it on first use.

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
        template = self._larger.get((parent, modules)) or next(
            (
                other
                for (below, names), other in self._larger.items()
                if below is parent and other.ready and set(modules) <= set(names)
            ),
            None,
        )
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

        Its workers, and templates that were forked from it, fall to that one, which kills them at
        the same moment. If it could not load modules that workers can do without, there is no
        second try.
        """
        logger.warning("the template with %s ended", ", ".join(modules))
        gone = self._larger[parent, modules]
        if gone.pid or not beside:
            del self._larger[parent, modules]
            for worker in list(self.workers()):
                if worker.template is gone:
                    self.on_exited(worker.pid, signal.SIGKILL)

    def is_first(self, template: TemplateClient | None) -> bool:
        """Return whether the node ends with this template; None: another could not be made."""
        return template is None or template is self.first

    def close(self) -> None:
        for template in (self.first, *self._larger.values()):
            template.close()
