"""``asyncio.run`` with an event loop whose selector is ours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], make_loop: Callable[[], asyncio.AbstractEventLoop]) -> T:
    """Run a coroutine in a loop made by ``make_loop``; with Python 3.10 in asyncio's own."""
    make_runner: Any = getattr(asyncio, "Runner", None)
    if make_runner is None:
        return asyncio.run(main)
    with make_runner(loop_factory=make_loop) as runner:
        return runner.run(main)  # type: ignore[no-any-return]
