"""The HTTP server: the page's files, its streams of rows, and how it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from miniray.common.config import config
from miniray.security.certificates import (
    identity_files,
    load_head_identity,
    make_head_identity,
    save_head_identity,
)
from miniray.version import VERSION
from miniray.web.access import HEADERS, Access
from miniray.web.answers import JsonAnswers, as_json, refusal, refused
from miniray.web.jobs import JobRoutes
from miniray.web.log_socket import LogSocket
from miniray.web.looks import look_routes
from miniray.web.tables import View, Window

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Iterator

    from starlette.requests import Request

    from miniray.web.facts import WebFacts
    from miniray.web.topics import Topics

_STATIC = Path(__file__).parent / "static"
#: Connections and streams at a time; more are answered with 503.
_MOST_CONNECTIONS, _MOST_STREAMS = 256, 100
_FULL = f"{_MOST_STREAMS} views of this page are open, and no more may be: close some."
#: Of the connections, those whose clients were not let in; a new one takes the oldest one's place.
_MOST_STRANGERS = 128
#: Topics of a stream, and rows of a window.
_MOST_TOPICS, _MOST_ROWS = 12, 2000
#: Seconds between two events of a stream, at least, and between signs of life.
_BETWEEN, _ALIVE = 0.25, 15.0
#: Seconds for which the viewer of a stream may pause reading; a page begins a new stream then.
_SLOW = 30.0
#: Seconds that the daemon may take to say whether a code is good.
_PATIENCE = 5.0


class WebServer:
    """Serves one cluster's page."""

    def __init__(self, facts: WebFacts, topics: Topics) -> None:
        self._topics = topics
        self._facts = facts
        self._streams = 0
        self._answers = JsonAnswers()
        #: Requests that are being answered, and when the last one was.
        self._open, self._last = 0, time.monotonic()
        app = Starlette(
            routes=[
                Route("/", lambda _: FileResponse(_STATIC / "index.html")),
                Mount("/static", StaticFiles(directory=_STATIC, check_dir=False)),
                Route("/api/login", self._login, methods=["POST"]),
                Route("/api/session", self._session),
                Route("/api/events", self._events),
                *look_routes(topics.source, self._answers),
                *JobRoutes(facts, self._answers).routes,
            ],
            exception_handlers={HTTPException: refused},
        )
        #: Connections whose clients were not let in, the oldest first.
        strangers: dict[Any, asyncio.Transport] = {}
        self._access = Access(app, facts, lambda client: strangers.pop(client, None))
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._count,
                interface="asgi3",
                http=functools.partial(_Connection, strangers),  # type: ignore[arg-type]
                ws=functools.partial(  # type: ignore[arg-type]
                    LogSocket, topics.link, self._access.refusal, self._viewer, self._full
                ),
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=HEADERS,
                limit_concurrency=_MOST_CONNECTIONS,
                timeout_graceful_shutdown=1,
                **_tls(facts),
            )
        )
        self._server.config.load()  # errors of a certificate show before the first request

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
        """Serve a request, and count it as a sign of a client."""
        with self._somebody():
            await self._access(scope, receive, send)

    @contextlib.contextmanager
    def _somebody(self) -> Iterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._last = time.monotonic()

    def _full(self) -> str:
        """Return why no more views may be opened; empty if some may."""
        return _FULL if self._streams >= _MOST_STREAMS else ""

    @contextlib.contextmanager
    def _viewer(self) -> Iterator[None]:
        self._streams += 1
        try:
            with self._somebody():
                yield
        finally:
            self._streams -= 1

    # --- letting in -----------------------------------------------------------------------
    async def _login(self, request: Request) -> Response:
        code = str((await self._answers.posted(request)).get("code", ""))
        asking = self._topics.link.node_request_later("use_page_code", (code,))
        is_good, _ = await asyncio.wait_for(asking, _PATIENCE)
        if not is_good:
            text = "This code was used, or is older than a minute; `miniray dashboard` makes one."
            return refusal(401, text)
        return Response(status_code=204, headers={"set-cookie": self._access.cookie()})

    async def _session(self, _request: Request) -> Response:
        about = {"cluster": self._facts.cluster, "version": VERSION, "full": self._full()}
        return JSONResponse(about)

    # --- streams -----------------------------------------------------------------------------
    async def _events(self, request: Request) -> Response:
        wanted = request.query_params
        topics = wanted.get("topic", "").split(",")
        for topic in topics[:_MOST_TOPICS]:
            if not self._topics.known(topic):
                return refusal(404, f"There is no topic {topic!r:.80}.")
        if len(topics) > _MOST_TOPICS:
            return refusal(400, f"A stream has at most {_MOST_TOPICS} topics.")
        if full := self._full():
            return refusal(503, full)
        try:
            first, size = int(wanted.get("from", 0)), int(wanted.get("size", 60))
        except ValueError:
            return refusal(400, "from and size are whole numbers.")
        window = Window(
            max(0, first),
            min(max(1, size), _MOST_ROWS),
            wanted.get("search", ""),
            wanted.get("sort", ""),
        )
        headers = {"cache-control": "no-store"}
        return _Stream(self._changes(topics, window), headers=headers)

    async def _changes(self, topics: list[str], window: Window) -> AsyncGenerator[bytes, None]:
        """Yield what changes for a viewer; the window is that of the first topic."""
        changed = asyncio.Event()
        with self._viewer(), contextlib.ExitStack() as stack:
            views: list[View] = []
            for topic in topics:
                table = stack.enter_context(self._topics.watched(topic, changed))
                views.append(View(table, topic, Window(0, _MOST_ROWS) if views else window))
            while True:
                news = [each for each in (view.news() for view in views) if each is not None]
                if news:
                    yield b"".join(b"data: %s\n\n" % as_json(event) for event in news)
                    await asyncio.sleep(_BETWEEN)
                if not changed.is_set():
                    try:
                        await asyncio.wait_for(changed.wait(), _ALIVE)
                    except asyncio.TimeoutError:
                        yield b": alive\n\n"
                changed.clear()


class _Connection(H11Protocol):
    """A connection, whose client is a stranger until ``Access`` lets it in."""

    def __init__(self, strangers: dict[Any, asyncio.Transport], **settings: Any) -> None:
        super().__init__(**settings)
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the oldest connection that has not proved itself, if there are too many."""
        super().connection_made(transport)
        self._strangers[self.client] = transport
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers))).abort()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Leave the connection to ``LogSocket``, which lets in or closes it at once."""
        self._strangers.pop(self.client, None)
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._strangers.pop(self.client, None)
        super().connection_lost(exc)


class _Stream(StreamingResponse):
    """An answer that goes on until its client leaves, or does not read any more."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Any) -> None:
        """Send what there is; end if it is not read."""
        changes: Any = self.body_iterator

        async def send_in_time(message: Any) -> None:
            await asyncio.wait_for(send(message), _SLOW)

        async with contextlib.aclosing(changes):
            with contextlib.suppress(asyncio.TimeoutError):
                await super().stream_response(send_in_time)


def _tls(facts: WebFacts) -> dict[str, Any]:
    """Return the certificate to show, where the page is reached over the network."""
    if not facts.certificate:
        return {}
    folder = Path(facts.certificate)
    try:
        load_head_identity(folder)
    except OSError:  # the cluster has no network of its own
        save_head_identity(make_head_identity(), folder)
    certificate, key = identity_files(folder)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
