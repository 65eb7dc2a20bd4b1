"""Logging in: it waits for nobody else's question."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from miniray.web.server import WebServer


class Link:
    """Stands for the daemon, which knows the code."""

    async def node_request_later(self, *_asked: Any) -> tuple[bool, int]:
        return True, -1

    def node_request(self, *_asked: Any) -> tuple[bool, int]:
        return True, -1


def test_a_browser_is_let_in_while_all_threads_record_profiles() -> None:
    end = threading.Event()

    async def posted(_request: Any) -> dict[str, Any]:
        return {"code": "x"}

    async def log_in() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        profile = loop.run_in_executor(None, end.wait, 20)
        server: Any = SimpleNamespace(
            _answers=SimpleNamespace(posted=posted),
            _topics=SimpleNamespace(link=Link()),
            _access=SimpleNamespace(cookie=lambda: "a=b"),
        )
        request: Any = None
        try:
            return (await asyncio.wait_for(WebServer._login(server, request), 5)).status_code
        finally:
            end.set()
            await profile

    assert asyncio.run(log_in()) == 204
