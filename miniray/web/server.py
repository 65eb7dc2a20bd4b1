"""The HTTP server: the page's files, its streams of rows, and how it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from miniray.common.config import config
from miniray.web.access import Access
from miniray.web.tables import MOST_ROWS, View

if TYPE_CHECKING:
    import socket

    from starlette.requests import Request

    from miniray.web.process import WebFacts
    from miniray.web.topics import Topics

logger = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
#: Connections and streams at a time; more are answered with 503.
_MOST_CONNECTIONS, _MOST_STREAMS = 256, 100
#: Topics of one stream; further ones are left out.
_MOST_TOPICS = 8
#: Seconds between two events of a stream, at least, and between signs of life.
_BETWEEN, _ALIVE = 0.25, 15.0
#: Seconds for which a viewer may read nothing.
_SLOW = 30.0
#: Bytes of a request to look at something.
_MOST_BYTES = 64 << 10


class WebServer:
    """Serves one cluster's page."""

    def __init__(self, facts: WebFacts, topics: Topics) -> None:
        self._topics = topics
        self._feed = topics.feed
        self._streams = 0
        #: Requests that are being answered, and when the last one was.
        self._open, self._last = 0, time.monotonic()
        app = Starlette(
            routes=[
                Route("/", lambda _: FileResponse(_STATIC / "index.html")),
                Mount("/static", StaticFiles(directory=_STATIC, check_dir=False)),
                Route("/api/login", self._login, methods=["POST"]),
                Route("/api/events", self._events),
                # An EventSource does not tell why it was refused; this answers 401 or 200.
                Route("/api/session", lambda _: JSONResponse({"cluster": facts.cluster})),
            ]
        )
        self._access = Access(app, facts)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._count,
                interface="asgi3",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )

    async def run(self, listener: socket.socket, ended: asyncio.Event) -> None:
        """Serve until the last client has left for ``dashboard_idle`` seconds, or ``ended``."""
        watch = asyncio.ensure_future(self._end_in_time(ended))
        await self._server.serve(sockets=[listener])
        watch.cancel()

    async def _end_in_time(self, ended: asyncio.Event) -> None:
        left = config().dashboard_idle
        while left > 0 and not ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), left)
            since = time.monotonic() if self._open else self._last
            left = since + config().dashboard_idle - time.monotonic()
        self._server.should_exit = True

    async def _count(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, and note that somebody is there."""
        self._open += 1
        try:
            await self._access(scope, receive, send)
        finally:
            self._open -= 1
            self._last = time.monotonic()

    # --- letting in -----------------------------------------------------------------------
    async def _login(self, request: Request) -> Response:
        code = str((await _posted(request)).get("code", ""))
        if not await self._feed.ask_node("use_page_code", code):
            text = "This code was used, or is older than a minute; `miniray dashboard` makes one."
            return JSONResponse({"error": text}, 401)
        return Response(status_code=204, headers={"set-cookie": self._access.cookie()})

    # --- streams -----------------------------------------------------------------------------
    async def _events(self, request: Request) -> Response:
        """Stream topics, separated by commas; the window is that of the first one."""
        wanted = request.query_params
        topics = wanted.get("topic", "").split(",")
        for topic in topics[:_MOST_TOPICS]:
            if not self._topics.known(topic):
                return JSONResponse({"error": f"There is no topic {topic!r:.80}."}, 404)
        if self._streams >= _MOST_STREAMS:
            text = f"{_MOST_STREAMS} views are open, and no more may be; close some."
            return JSONResponse({"error": text}, 503)
        try:
            first, size = int(wanted.get("from", 0)), int(wanted.get("size", 60))
        except ValueError:
            return JSONResponse({"error": "from and size are whole numbers."}, 400)
        window = (max(0, first), size, wanted.get("search", ""), wanted.get("sort", ""))
        return _Stream(self, topics[:_MOST_TOPICS], window)

    async def stream(self, send: Any, topics: list[str], window: tuple[int, int, str, str]) -> None:
        """Send a viewer what changes, until it is gone."""
        changed = asyncio.Event()
        self._streams += 1
        try:
            with contextlib.ExitStack() as stack:
                views = [
                    View(
                        stack.enter_context(self._topics.watched(topic, changed)),
                        topic,
                        *(window if number == 0 else (0, MOST_ROWS, "", "")),
                    )
                    for number, topic in enumerate(topics)
                ]
                while True:
                    news = [told for view in views if (told := view.news()) is not None]
                    for told in news:
                        await _send(send, b"data: %s\n\n" % json.dumps(told, default=str).encode())
                    if news:
                        await asyncio.sleep(_BETWEEN)
                    if not changed.is_set():
                        try:
                            await asyncio.wait_for(changed.wait(), _ALIVE)
                        except asyncio.TimeoutError:
                            await _send(send, b": alive\n\n")
                    changed.clear()
        finally:
            self._streams -= 1


class _Stream(Response):
    """An answer that goes on until its client leaves."""

    def __init__(
        self, server: WebServer, topics: list[str], window: tuple[int, int, str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store"}, media_type="text/event-stream")
        self._serve = server.stream
        self._what = topics, window

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send rows, and listen for the client's end beside."""
        del scope
        headers = [each for each in self.raw_headers if each[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        sending = asyncio.ensure_future(self._serve(send, *self._what))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


async def _gone(receive: Any) -> None:
    """Wait until the client of a request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Any, data: bytes) -> None:
    """Send a piece of a stream; TimeoutError if the client does not read."""
    await asyncio.wait_for(
        send({"type": "http.response.body", "body": data, "more_body": True}), _SLOW
    )


async def _posted(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; an empty one if it is none."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            return {}
    try:
        data = json.loads(body or b"{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
