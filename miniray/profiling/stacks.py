"""The stacks of this process: of its threads, and of the coroutines of its event loops.

Needs no rights, and shows what no debugger from outside sees: which call a coroutine belongs to.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from miniray.calls.context import Execution
from miniray.calls.context import execution as running

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType


#: Function, file and line.
Frame = tuple[str, str, int]


class Stack(TypedDict):
    """What one thread or coroutine does."""

    #: Its name; "MainThread" is where tasks and methods of plain actors run.
    who: str
    #: The outermost frame first, as "function (file:line)"; empty: it waits for work.
    stack: list[str]


#: What stands for an empty stack.
WAITS = "waits for work"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
#: Modules of Python through which threads and event loops reach what they run.
_THROUGH = "asyncio concurrent contextlib multiprocessing runpy selectors socketserver threading"
#: Where files are whose frames are not user code's: miniray's, and those of these modules.
_OURS = (_PACKAGE, "<frozen ", *(_LIBRARY + name for name in _THROUGH.split()))
_WORKER = "miniray.worker."
_BOOT = str(Path(_PACKAGE, "node", "boot.py"))


class Chain(NamedTuple):
    """The frames of one thread or coroutine, the outermost first."""

    who: str
    frames: list[FrameType]
    #: Of a coroutine, the call for which it was started.
    execution: Execution | None = None

    def stack(self) -> list[str]:
        """Name the frames; of miniray's own only those that user code calls."""
        return trimmed(frame_of(each.f_code, each.f_lineno) for each in self.frames)


def stacks() -> list[Stack]:
    """Return the stacks of all threads that run user code, the main thread first, then coroutines.

    Of miniray's own frames only the one remains that user code has called. The calling thread is
    one of them: a main thread that waits serves the sockets meanwhile.
    """
    found: list[Stack] = []
    for chain in chains():
        stack = chain.stack()
        if stack or not found:  # the main thread is named also if it has nothing to do
            found.append({"who": chain.who, "stack": stack})
    return found


def chains() -> Iterator[Chain]:
    """Yield the frames of all threads, the main thread first, then those of coroutines."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    loops: list[asyncio.AbstractEventLoop] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        inward = list(outward(frame))[::-1]
        loops += [loop for each in inward if (loop := _loop_of(each)) is not None]
        yield Chain(names.get(ident, str(ident)), inward)
    for loop in loops:
        for task in asyncio.all_tasks(loop):
            execution = _execution_in(task)
            name = execution.name if execution is not None else task.get_name()
            yield Chain(f"{name} (coroutine)", list(_awaiting(task.get_coro())), execution)


def as_text(found: Iterable[Stack]) -> str:
    """Return stacks as text for a person, each under its name."""
    lines = []
    for each in found:
        lines += [f"{each['who']}:", *(f"  {frame}" for frame in each["stack"] or [WAITS]), ""]
    return "\n".join(lines)


def trimmed(frames: Iterable[Frame]) -> list[str]:
    """Name frames, the outermost first; of miniray's own only those that user code calls."""
    known = list(frames)
    if [path for _, path, _ in known[1:2]] == [_BOOT]:  # what is above that is `python -c`
        del known[0]
    named = []
    outer_is_ours = True
    for function, path, line in known:
        is_ours = path.startswith(_OURS)
        if not (is_ours and outer_is_ours):
            named.append(f"{function} ({short_path(path)}:{line})")
        outer_is_ours = is_ours
    return named


def frame_of(code: CodeType, line: int) -> Frame:
    """Return what a frame is called, and where it is."""
    return getattr(code, "co_qualname", code.co_name), code.co_filename, line


@functools.cache
def short_path(path: str) -> str:
    """Return a file's path from the folder on ``sys.path`` that it was imported from."""
    folders = [each for each in sys.path if each and path.startswith(each.rstrip("/") + "/")]
    longest = max((len(each.rstrip("/")) for each in folders), default=-1)
    return path[longest + 1 :]


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _loop_of(frame: FrameType) -> asyncio.AbstractEventLoop | None:
    """Return the event loop that a frame runs."""
    if frame.f_code.co_name != "run_forever":
        return None
    loop = frame.f_locals.get("self")
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def execution_of(frames: list[FrameType]) -> Execution | None:
    """Return the call that a thread of a worker runs.

    Reads the variables of miniray's frames, the innermost first; a frame keeps what is read of it
    until it ends, so this is for questions about calls.
    """
    for frame in reversed(frames):
        if frame.f_globals.get("__name__", "").startswith(_WORKER):
            local = frame.f_locals
            found = getattr(local.get("work"), "execution", None) or local.get("execution")
            if isinstance(found, Execution):
                return found
    return None


def _execution_in(task: asyncio.Task[Any]) -> Execution | None:
    """Return the call for which a coroutine runs: tasks that it starts inherit that."""
    found = (each for each in gc.get_referents(task) if isinstance(each, contextvars.Context))
    return next((each.get(running) for each in found), None)


def _awaiting(waiting: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of what it awaits."""
    while waiting is not None:
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(waiting, f"{prefix}_frame", None)
            if frame is not None:
                yield frame
                waiting = getattr(waiting, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await")
                if type(waiting).__name__ == "coroutine_wrapper":  # what `await ref` waits in
                    waiting = next(iter(gc.get_referents(waiting)), None)
                break
        else:
            return
