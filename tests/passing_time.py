"""Time that passes at once, for tests of what is to happen later, or never."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


async def time_passes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Put the running event loop's clock forward; return when what is due has had its turns."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)
    for _ in range(10):
        await asyncio.sleep(0)
