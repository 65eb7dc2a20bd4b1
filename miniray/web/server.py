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
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from miniray.common.config import config
from miniray.exceptions import MinirayError
from miniray.version import VERSION
from miniray.web.access import Access
from miniray.web.tables import View, Window

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from starlette.requests import Request

    from miniray.web.process import WebFacts
    from miniray.web.topics import Topics

logger = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
#: Connections and streams at a time; more are answered with 503.
_MOST_CONNECTIONS, _MOST_STREAMS = 256, 100
#: Topics of a stream, and rows of a window.
_MOST_TOPICS, _MOST_ROWS = 8, 2000
#: Seconds between two events of a stream, at least, and between signs of life.
_BETWEEN, _ALIVE = 0.25, 15.0
#: Questions to processes that are open at a time.
_MOST_QUESTIONS = 8
#: Seconds for which a viewer may read nothing.
_SLOW = 30.0
#: Bytes of a request to look at something.
_MOST_BYTES = 64 << 10


class WebServer:
    """Serves one cluster's page."""

    def __init__(self, facts: WebFacts, topics: Topics) -> None:
        self._topics = topics
        self._feed = topics.feed
        self._facts = facts
        self._streams = self._asked = 0
        #: Requests that are being answered, and when the last one was.
        self._open, self._last = 0, time.monotonic()
        app = Starlette(
            routes=[
                Route("/", lambda _: FileResponse(_STATIC / "index.html")),
                Mount("/static", StaticFiles(directory=_STATIC, check_dir=False)),
                Route("/api/login", self._login, methods=["POST"]),
                Route("/api/session", self._session),
                Route("/api/events", self._events),
                Route("/api/stack", self._stack, methods=["POST"]),
            ],
            exception_handlers={HTTPException: _refused},
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

    async def _session(self, _request: Request) -> Response:
        return JSONResponse({"cluster": self._facts.cluster, "version": VERSION})

    # --- questions to processes ----------------------------------------------------------------
    async def _stack(self, request: Request) -> Response:
        from miniray.profiling.looks import look

        of = _named((await _posted(request)).get("of"))
        return await self._answer(look, self._feed.source, *of)

    async def _answer(self, function: Callable[..., Any], *arguments: Any) -> Response:
        """Answer with what a function returns, which a thread runs; or with its error."""
        if self._asked >= _MOST_QUESTIONS:
            text = f"{_MOST_QUESTIONS} questions are being answered; ask again in a moment."
            return JSONResponse({"error": text}, 503)
        self._asked += 1
        try:
            found = await asyncio.to_thread(function, *arguments)
        except (ValueError, OSError, TimeoutError, MinirayError) as error:
            return JSONResponse({"error": str(error)}, 400)
        finally:
            self._asked -= 1
        return Response(_json(found), media_type="application/json")

    # --- streams -----------------------------------------------------------------------------
    async def _events(self, request: Request) -> Response:
        wanted = request.query_params
        topics = wanted.get("topic", "").split(",")
        for topic in topics[:_MOST_TOPICS]:
            if not self._topics.known(topic):
                return JSONResponse({"error": f"There is no topic {topic!r:.80}."}, 404)
        if len(topics) > _MOST_TOPICS:
            return JSONResponse({"error": f"A stream has at most {_MOST_TOPICS} topics."}, 400)
        if self._streams >= _MOST_STREAMS:
            text = f"{_MOST_STREAMS} views are open, and no more may be; close some."
            return JSONResponse({"error": text}, 503)
        try:
            first, size = int(wanted.get("from", 0)), int(wanted.get("size", 60))
        except ValueError:
            return JSONResponse({"error": "from and size are whole numbers."}, 400)
        window = Window(
            max(0, first),
            min(max(1, size), _MOST_ROWS),
            wanted.get("search", ""),
            wanted.get("sort", ""),
        )
        return _Stream(self, topics, window)

    async def stream(self, send: Any, topics: list[str], window: Window) -> None:
        """Send a viewer what changes, until it is gone; the window is that of the first topic."""
        changed = asyncio.Event()
        self._streams += 1
        try:
            with contextlib.ExitStack() as stack:
                views: list[View] = []
                for topic in topics:
                    table = stack.enter_context(self._topics.watched(topic, changed))
                    views.append(View(table, topic, Window(0, _MOST_ROWS) if views else window))
                while True:
                    news = [each for each in (view.news() for view in views) if each is not None]
                    if news:
                        events = [b"data: %s\n\n" % _json(event) for event in news]
                        await _send(send, b"".join(events))
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

    def __init__(self, server: WebServer, topics: list[str], window: Window) -> None:
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


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


def _json(data: Any) -> bytes:
    return json.dumps(data, default=str, separators=(",", ":")).encode()


async def _gone(receive: Any) -> None:
    """Wait until the client of a request has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _named(of: Any) -> tuple[str, int | None]:
    """Return what is meant, as commands name it, and the rank of a run that is meant alone.

    Raises:
        HTTPException: It is no description of an actor, a process or a run.
    """
    match of:
        case {"actor": str(actor)}:
            return actor, None
        case {"node": str(node), "pid": int(pid)}:
            return f"{node}:{pid}", None
        case {"run": str(run), **rest}:
            rank = rest.get("rank")
            return run, rank if isinstance(rank, int) else None
    raise HTTPException(400, f"of names an actor, a node and a pid, or a run, not {of!r:.80}.")


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
