"""A client of the page, as a browser is one: it has a cookie, and reads streams."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any

from miniray.client.command_connection import connect_for_cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class PageClient:
    """Talks to the page at ``HOST:PORT``; ``let_in`` gets its cookie."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.headers: dict[str, str] = {}

    @classmethod
    def let_in(cls, cluster_address: str | None = None) -> PageClient:
        """A client with a cookie."""
        with contextlib.closing(connect_for_cli(cluster_address, "address=", None)) as cluster:
            place, _, code = cluster.page().url.partition("/#k=")
        client = cls(place.partition("://")[2])
        status, headers, _ = client.ask("POST", "/api/login", {"code": code})
        assert status == 204
        client.headers["Cookie"] = headers["set-cookie"].partition(";")[0]
        return client

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and JSON (or bytes) of an answer."""
        connection = http.client.HTTPConnection(self.address, timeout=20)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**self.headers, **headers})
            answer = connection.getresponse()
            content = answer.read()
        with contextlib.suppress(ValueError):
            content = json.loads(content)
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def put(self, path: str, data: bytes) -> int:
        """The status of an upload."""
        connection = http.client.HTTPConnection(self.address, timeout=20)
        with contextlib.closing(connection):
            connection.request("PUT", path, data, self.headers)
            return connection.getresponse().status

    @contextlib.contextmanager
    def events(self, topic: str, seconds: float = 20, **wanted: Any) -> Iterator[Events]:
        """The events of a topic, each at most so many seconds after the one before."""
        query = "".join(f"&{name.rstrip('_')}={value}" for name, value in wanted.items())
        connection = http.client.HTTPConnection(self.address, timeout=seconds)
        with contextlib.closing(connection):
            connection.request("GET", f"/api/events?topic={topic}{query}", headers=self.headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield Events(answer)


class Events:
    """The events of a stream, and the rows that they leave a viewer with."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = (line for line in lines if line.startswith(b"data: "))
        #: Of the first topic that comes.
        self.rows: dict[str, Any] = {}
        self._topic = ""

    def __iter__(self) -> Events:
        return self

    def __next__(self) -> Any:
        event = json.loads(next(self._lines)[6:])
        self._topic = self._topic or event["topic"]
        if "error" not in event and event["topic"] == self._topic:
            known = {**self.rows, **event["changed"]}
            self.rows = {key: known[key] for key in event["order"]}
        return event


def rows_until(events: Events, fits: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The rows of a stream by key, once they fit: now, or after an event."""
    while not (events.rows and fits(events.rows)):
        next(events)
    return events.rows
