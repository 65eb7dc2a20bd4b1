"""What this process reports of its calls when somebody asks: lists of tasks, and `miniray why`.

Nothing is recorded for it: open calls are in the call table, and what each waits for is read from
the frames of threads and coroutines when the question comes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Any

from miniray.calls.actor_client import ActorClient
from miniray.calls.task_groups import TaskGroup
from miniray.common.names import short_name
from miniray.common.object_ref import call_id
from miniray.common.series import COUNTED, SECONDS, Series, how_many
from miniray.objects.waiting import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.client.actor_clients import ActorClients
    from miniray.common.series import Row, Tags
    from miniray.objects.objects import ObjectTable

#: Frames of a stack, ids of a wait, and threads and coroutines that are told, at most.
_MAX_FRAMES, _MAX_IDS, _MAX_THREADS = 100, 1000, 2000
#: What waits for values, by its code: the local variable that has them.
_WAITS = {
    getattr(function, "__wrapped__", function).__code__: local
    for function, local in ((Waits.for_values, "pending"), (Waits.for_value, "entry"))
}


@dataclasses.dataclass(eq=False, repr=False)
class CallReports:
    """Answers the daemon."""

    #: Objects and calls of this process.
    table: ObjectTable
    calls: CallTable
    #: Those that this process made or has called.
    actors: ActorClients
    #: As ``ProcessHooks.works``.
    works: Callable[[], Iterable[tuple[bytes, str, float | None]]]

    def told(self, limit: int, detail: bool) -> Callable[[], dict[str, Any]]:
        """Return what makes the report, for a thread: there may be a million calls.

        Args:
            limit: How many calls are told one by one: the oldest.
            detail: Whether to tell what threads and coroutines do.
        """
        open_calls = [*list(self.calls.open.values()), *self.actors.creations()]
        works = list(self.works())
        threads = list(_threads()) if detail else []
        return lambda: self._report(open_calls, works, threads, limit)

    def metrics(self) -> list[Row]:
        """Return how many calls have ended and how long they took, as rows (common/series.py).

        Includes all other counts of this process.
        """
        found = Series()
        found.add(COUNTED.rows())
        for kind, ended in self.calls.ended.by_kind.items():
            for outcome, by_name in zip(("finished", "failed"), ended, strict=True):
                for name, times in [*by_name.items()]:
                    ends, lasts, tags = _ended_metrics(kind, short_name(name))
                    found.count(ends, (*tags, ("outcome", outcome)), how_many(times))
                    if kind == "ACTOR_TASK":
                        found.count("actor_busy_seconds_total", tags[:1], times[-1])
                    if outcome == "finished":
                        found.add([("histogram", lasts, "", SECONDS, tags, times)])
        return found.rows()

    def _report(
        self,
        open_calls: list[Call],
        works: list[tuple[bytes, str, float | None]],
        threads: list[dict[str, Any]],
        limit: int,
    ) -> dict[str, Any]:
        states: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for call in open_calls:
            states[_kind(call), call.name, call.status] += 1
        works.sort(key=lambda work: work[2] is None)  # those that run first
        by_name: dict[str, tuple[int, float]] = {}
        for _, name, seconds in works:
            if seconds is not None:
                count, longest = by_name.get(name, (0, 0.0))
                by_name[name] = count + 1, max(longest, seconds)
        return {
            "calls": [self._row(call) for call in open_calls[:limit]],
            "states": [(*key, count) for key, count in states.items()],
            "ended": self.calls.ended.told(),
            #: Id, name, and for how many seconds it runs; None: it is queued.
            "works": works[:limit],
            #: By name, how many run, and for how long the longest of them.
            "running_by_name": by_name,
            "num_queued": sum(seconds is None for *_, seconds in works),
            "threads": threads,
            "datasets": _datasets(),
        }

    def _row(self, call: Call) -> dict[str, Any]:
        peer, channel = call.peer, call.channel
        own = call_id(self.table.process_id, call.number)
        return {
            "task_id": call.return_ids[0] if call.return_ids else own,
            "makes": call.cancel_ids,
            "name": call.name,
            "type": _kind(call),
            "state": call.status,
            "actor_id": channel.actor_id if isinstance(channel, ActorClient) else b"",
            "node": peer.node_id if peer is not None else b"",
            "process": peer.process_id if peer is not None else b"",
            "needs": self._missing(call),
            "attempt": call.tries - 1,
        }

    def _missing(self, call: Call) -> list[bytes]:
        """Return the ids of a call's refs that have no value yet."""
        ids = [id for _, id, _, value in call.refs if value is None]
        entries = ((id, self.table.entry(id)) for id in ids[:_MAX_IDS])
        return [id for id, entry in entries if entry is not None and entry.value is None]


def _datasets() -> list[dict[str, Any]]:
    """Return what the datasets do that this process executes, if it has any."""
    stats = sys.modules.get("miniray.data.stats")
    return stats.running() if stats is not None else []


def _ended_metrics(kind: str, name: str) -> tuple[str, str, Tags]:
    """Return the metrics of how many calls of a name have ended and how long, and their tags."""
    if kind == "NORMAL_TASK":
        return "tasks_finished_total", "task_seconds", (("function", name),)
    of, _, method = name.rpartition(".")
    return "actor_calls_total", "actor_call_seconds", (("class", of), ("method", method))


def _kind(call: Call) -> str:
    if isinstance(call.channel, ActorClient):
        return "ACTOR_TASK"
    return "NORMAL_TASK" if isinstance(call.options, TaskGroup) else "ACTOR_CREATION_TASK"


# --- threads and coroutines --------------------------------------------------------------


def _threads() -> Iterator[dict[str, Any]]:
    """Yield what threads and coroutines of user code do: call, what is waited for, stack."""
    from miniray.profiling.stacks import chains, execution_of

    for chain in itertools.islice(chains(), _MAX_THREADS):
        waits: list[bytes] = []
        needed = 0
        for frame in reversed(chain.frames):
            local = _WAITS.get(frame.f_code)
            if local is not None:
                waits = _ids_of(frame.f_locals.get(local, ()))
                needed = min(int(frame.f_locals.get("needed", 1)), len(waits))
        stack, execution = chain.stack(), chain.execution or execution_of(chain.frames)
        if stack or waits:
            yield {
                "thread": chain.who,
                "task_id": execution.task_id if execution is not None else b"",
                "waits_for": waits,
                #: How many of these it needs.
                "needed": needed,
                "stack": stack[-_MAX_FRAMES:],
            }


def _ids_of(found: Any) -> list[bytes]:
    """Return the ids of the entries that a wait still lacks."""
    entries = found if isinstance(found, (list, tuple)) else [found]
    return [entry.id for entry in entries if entry.value is None][:_MAX_IDS]
