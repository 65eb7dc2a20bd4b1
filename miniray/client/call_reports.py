"""What this process reports of its calls when somebody asks: lists of tasks, and `miniray why`.

Nothing is recorded for it: open calls are in the call table, and who waits for what is read from
the frames of threads and coroutines when the question comes.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import gc
import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.calls.actor_client import ActorClient
from miniray.calls.task_groups import TaskGroup
from miniray.common.ids import call_id
from miniray.objects.waiting import Waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.client.actor_clients import ActorClients
    from miniray.objects.objects import ObjectTable

#: Frames of a stack, ids of a wait, and coroutines that are told, at most.
_MAX_FRAMES, _MAX_IDS, _MAX_COROUTINES = 100, 1000, 1000
#: What waits for values, by its code: the local variable that has them.
_WAITS = {
    getattr(function, "__wrapped__", function).__code__: local
    for function, local in ((Waits.for_values, "pending"), (Waits.for_value, "entry"))
}
#: Modules whose frames say nothing at the ends of a stack.
_WORKER = "miniray.worker."
_PLUMBING = frozenset({"threading", "asyncio", "concurrent", "selectors", "runpy"})


@dataclasses.dataclass(eq=False)
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

    def _report(
        self,
        open_calls: list[Call],
        works: list[tuple[bytes, str, float | None]],
        threads: list[dict[str, Any]],
        limit: int,
    ) -> dict[str, Any]:
        states: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for call in open_calls:
            states[_kind(call), call.name, _state(call)] += 1
        running = [work for work in works if work[2] is not None]
        names = collections.Counter(name for _, name, _ in running)
        return {
            "calls": [self._row(call) for call in open_calls[:limit]],
            "states": [(*key, count) for key, count in states.items()],
            "ended": self.calls.ended.told(),
            "running": running[:limit],
            "running_by_name": dict(names),
            "queued": [work[:2] for work in works if work[2] is None][:limit],
            "num_queued": len(works) - len(running),
            "threads": threads,
        }

    def _row(self, call: Call) -> dict[str, Any]:
        peer, channel = call.peer, call.channel
        own = call_id(self.table.process_id, call.number)
        return {
            "task_id": call.return_ids[0] if call.return_ids else own,
            "makes": call.cancel_ids,
            "name": call.name,
            "type": _kind(call),
            "state": _state(call),
            "actor_id": channel.actor_id if isinstance(channel, ActorClient) else b"",
            "shape": call.options.id if isinstance(call.options, TaskGroup) else 0,
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


def _kind(call: Call) -> str:
    if isinstance(call.channel, ActorClient):
        return "ACTOR_TASK"
    return "NORMAL_TASK" if isinstance(call.options, TaskGroup) else "ACTOR_CREATION_TASK"


def _state(call: Call) -> str:
    if call.waiting:
        return "PENDING_ARGS_AVAIL"
    return "PENDING_NODE_ASSIGNMENT" if call.peer is None else "SUBMITTED_TO_WORKER"


# --- threads and coroutines --------------------------------------------------------------


def _threads() -> Iterator[dict[str, Any]]:
    """Yield what threads and coroutines of user code do: name, call, what is waited for, stack."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    loops = []
    for ident, frame in sys._current_frames().items():
        frames = list(_frames(frame))
        told = _told(names.get(ident, str(ident)), frames)
        if told["stack"] or told["waits_for"]:
            yield told
        loops += [each.f_locals["self"] for each in frames if each.f_code.co_name == "run_forever"]
    for loop in loops:
        for task in list(_tasks_of(loop))[:_MAX_COROUTINES]:
            told = _told(task.get_name(), _frames_of_coroutine(task), _execution_in(task))
            if told["stack"] or told["waits_for"]:
                yield told


def _tasks_of(loop: Any) -> set[asyncio.Task[Any]]:
    try:
        return asyncio.all_tasks(loop)
    except (RuntimeError, AttributeError, TypeError):  # they change too fast; or it is no loop
        return set()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a thread's frames, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames_of_coroutine(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a coroutine that waits, the innermost first."""
    found: list[FrameType] = []
    each: Any = task.get_coro()
    while each is not None and len(found) < _MAX_FRAMES:
        frame = _first(each, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            found.insert(0, frame)
        each = _first(each, "cr_await", "gi_yieldfrom", "ag_await")
        if type(each).__name__ == "coroutine_wrapper":  # what `await ref` waits in
            each = next(iter(gc.get_referents(each)), None)
    return found


def _first(of: Any, *attributes: str) -> Any:
    return next((found for name in attributes if (found := getattr(of, name, None))), None)


def _told(
    name: str, frames: list[FrameType], execution: context.Execution | None = None
) -> dict[str, Any]:
    waits: list[bytes] = []
    for frame in frames:
        local = _WAITS.get(frame.f_code)
        if local is not None:
            found = frame.f_locals.get(local, ())
            entries = found if isinstance(found, (list, tuple)) else [found]
            waits = [entry.id for entry in entries if entry.value is None][:_MAX_IDS]
        elif execution is None and _module(frame).startswith(_WORKER):
            execution = _execution_of(frame)
    return {
        "thread": name,
        "task_id": execution.task_id if execution is not None else b"",
        "task": execution.name if execution is not None else "",
        "waits_for": waits,
        "stack": [_line(frame) for frame in _of_user(frames)[:_MAX_FRAMES]],
    }


def _of_user(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames between what waits for user code and what has called it."""
    inner = list(itertools.dropwhile(_is_plumbing, frames))
    user = list(itertools.takewhile(lambda frame: not _module(frame).startswith(_WORKER), inner))
    while user and _is_plumbing(user[-1]):
        user.pop()
    return user


def _execution_of(frame: FrameType) -> context.Execution | None:
    """Return the call that a frame of the worker's runs."""
    local = frame.f_locals
    found = getattr(local.get("work"), "execution", None) or local.get("execution")
    return found if isinstance(found, context.Execution) else None


def _execution_in(task: asyncio.Task[Any]) -> context.Execution | None:
    """Return the call for which a coroutine runs: what it starts inherits that."""
    found = (each for each in gc.get_referents(task) if isinstance(each, contextvars.Context))
    return next((each.get(context.execution) for each in found), None)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_plumbing(frame: FrameType) -> bool:
    first = _module(frame).partition(".")[0]
    return first == "miniray" or first in _PLUMBING


def _line(frame: FrameType) -> str:
    code = frame.f_code
    function = getattr(code, "co_qualname", code.co_name)
    return f"{code.co_filename}:{frame.f_lineno} in {function}"
