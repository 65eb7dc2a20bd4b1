"""Watches over a piece of a test that must start no process."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import platform
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
#: What Python itself runs when a library, such as PyTorch for CUDA, asks where another one is.
_OF_PYTHON = "/sbin/ldconfig"

#: What each piece that is watched now has started; the innermost hears of it.
_watched: list[list[str]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and _watched and arguments[:1] != (_OF_PYTHON,):
        stack = traceback.format_stack(sys._getframe(1), limit=8)
        _watched[-1].append(f"{event}{arguments[:2]}\n{''.join(stack)}")


_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def _spawn_heard(path: Any, arguments: Any, descriptors: Any) -> Any:
    sys.audit("subprocess.Popen", path, arguments, None, None)
    return _spawn(path, arguments, descriptors)


# Python runs `uname` when a library asks for this, and keeps the answer: not in a test that happens
# to be the first to load such a library.
platform.processor()

# For good: an audit hook cannot be removed. What multiprocessing spawns raises no event.
sys.addaudithook(_hear)
multiprocessing.util.spawnv_passfds = _spawn_heard  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_processes() -> Iterator[None]:
    """Fail with what was started, and where, if anything was."""
    started: list[str] = []
    _watched.append(started)
    try:
        yield
    finally:
        _watched.pop()
    if started:
        pytest.fail(
            "A test of tests/unit starts no process; tests/cluster is the place of those that "
            f"do. This one did:\n{started[0]}",
            pytrace=False,
        )
