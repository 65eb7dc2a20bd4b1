"""Rows about the page: what it costs while nobody looks, and while somebody does."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _actors import Echo
from _common import CPUS, MIB, Engine, Figure, at_once, row
from _processes import cluster_processes, pss, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Measurements with the page open and closed, in turns, and thousands of calls in each.
_TURNS, _CALLS = 6, 2
#: Rows that the page shows at a time.
_WINDOW = 60


def _start(engine: Engine) -> Any:
    engine.api.init(address="local", num_cpus=CPUS, include_dashboard=True, dashboard_port=0)
    return engine.api


def page_address() -> str:
    """The address of the page of this process's cluster, with a code."""
    from miniray.client.command_connection import connect_for_cli
    from miniray.common.runtime import current_runtime

    address = current_runtime().context().gcs_address
    with contextlib.closing(connect_for_cli(address, "address=", None)) as cluster:
        return cluster.page().url


class _Viewer:
    """A browser's part of the page: a cookie, and streams."""

    def __init__(self) -> None:
        place, _, code = page_address().partition("/#k=")
        self._place = place.partition("://")[2]
        connection = http.client.HTTPConnection(self._place)
        connection.request("POST", "/api/login", json.dumps({"code": code}))
        answer = connection.getresponse()
        self._cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        connection.close()

    @contextlib.contextmanager
    def events(self, query: str) -> Iterator[Iterator[Any]]:
        """The events of a stream."""
        connection = http.client.HTTPConnection(self._place)
        try:
            connection.request("GET", f"/api/events?{query}", headers={"Cookie": self._cookie})
            lines = (line for line in connection.getresponse() if line.startswith(b"data: "))
            yield (json.loads(line[6:]) for line in lines)
        finally:
            if connection.sock is not None:  # ends the wait of a thread that reads
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def fill(self, count: int) -> float:
        """Milliseconds from asking for the table until its window is full and all rows counted."""
        began = time.perf_counter()
        query = f"topic=actors&size={_WINDOW}&sort=-actor_id"
        with self.events(query) as events:
            next(each for each in events if each["total"] == count and each["order"])
        return 1000 * (time.perf_counter() - began)


@row(
    "page_closed",
    Figure("idle cluster that listens for browsers", "MiB", 120),
    Figure("its processes", "", 5),
)
def page_closed(engine: Engine) -> tuple[float, int]:
    _start(engine)
    pids = settled()
    return pss(pids) / MIB, len(pids)


def _filled(engine: Engine, count: int) -> tuple[float, float, float]:
    """Milliseconds to fill the table, first and again, and memory of the web process."""
    ray = _start(engine)
    waiting = ray.remote(num_cpus=10 * CPUS)(Echo)  # rows as any other, without a process each
    actors = [waiting.remote() for _ in range(count)]
    before = cluster_processes()
    viewer = _Viewer()
    while len(engine.module("util.state").list_actors(limit=count)) < count:
        time.sleep(0.05)
    first = viewer.fill(count)
    again = statistics.median(viewer.fill(count) for _ in range(5))
    web = set(cluster_processes()) - set(before)
    memory = pss(web) / MIB
    del actors
    return first, again, memory


_AGAIN = "the same, of a viewer that scrolls or searches"
_MEMORY = "web process meanwhile"


@row(
    "fill_1000",
    Figure("table of 1,000 actors filled", "ms", 300),
    Figure(_AGAIN, "ms", 300),
    Figure(_MEMORY, "MiB", 45),
    limit=120,
)
def fill_1000(engine: Engine) -> tuple[float, float, float]:
    return _filled(engine, 1000)


@row(
    "fill_10000",
    Figure("table of 10,000 actors filled", "ms", 1000),
    Figure(_AGAIN, "ms", 1000),
    Figure(_MEMORY, "MiB"),
    limit=240,
)
def fill_10000(engine: Engine) -> tuple[float, float, float]:
    return _filled(engine, 10_000)


@row(
    "page_in_browser",
    Figure("first paint in a browser", "ms", 150),
    Figure("until the table of 1,000 actors is there", "ms", 300),
    limit=120,
)
def page_in_browser(engine: Engine) -> tuple[float, float]:
    from playwright.sync_api import sync_playwright

    ray = _start(engine)
    waiting = ray.remote(num_cpus=10 * CPUS)(Echo)
    actors = [waiting.remote() for _ in range(1000)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium-headless-shell", args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(page_address())
        page.get_by_role("link", name="Actors").click()
        page.get_by_text("1,000").first.wait_for()
        paints, tables = [], []
        for _ in range(9):
            page.reload()
            page.get_by_role("row").nth(20).wait_for()
            times = page.evaluate(
                "['first-contentful-paint', 'rows'].map(n => performance.getEntriesByName(n)[0])"
                ".map(entry => entry.startTime)"
            )
            paints.append(times[0])
            tables.append(times[1])
        browser.close()
    del actors
    return statistics.median(paints), statistics.median(tables)


@row(
    "page_open",
    Figure("processor time of 1,000 actor calls, page closed", "ms"),
    Figure("of that, more while it is open", "%", 1),
    Figure("processor time for the page while it is open", "%", 1),
    limit=120,
)
def page_open(engine: Engine) -> tuple[float, float, float]:
    """Processor time, as rates are only as steady as the machine: of the calls, and beside them."""
    ray = _start(engine)
    actor = ray.remote(Echo).remote()
    work = at_once(ray, actor.echo.remote)
    work()
    theirs = _theirs()
    viewer = _Viewer()
    closed: list[tuple[float, float]] = []
    opened: list[tuple[float, float]] = []
    for _ in range(_TURNS):
        closed.append(_turn(work, theirs))
        with (
            viewer.events("topic=nodes,devices,waiting") as nodes,
            viewer.events("topic=actors") as actors,
        ):
            for events in (nodes, actors):
                next(events)
                threading.Thread(target=_read, args=(events,), daemon=True).start()
            opened.append(_turn(work, theirs))
    (quiet, before), (busy, taken) = (
        [statistics.median(each) for each in zip(*turns, strict=True)] for turns in (closed, opened)
    )
    return 1000 * quiet, 100 * (busy / quiet - 1), 100 * (taken - before) / (os.cpu_count() or 1)


def _theirs() -> set[int]:
    """The processes that do the calls: this one and the actor's."""
    from miniray.util.state import list_actors

    return {os.getpid(), *(actor.pid for actor in list_actors())}


def _turn(work: Callable[[], Any], theirs: set[int]) -> tuple[float, float]:
    """Seconds of a processor for 1,000 calls, and how many processors all else of it used."""
    others = cluster_processes() - theirs
    began, calls, used = time.perf_counter(), _running(theirs), _running(others)
    for _ in range(_CALLS):
        work()
    calls, used = _running(theirs) - calls, _running(others) - used
    return calls / _CALLS, used / (time.perf_counter() - began)


def _running(pids: set[int]) -> float:
    """Seconds for which the threads of these processes have run: finer than clock ticks."""
    ran = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                ran += int(task.read_text().split()[0])
    return ran / 1e9


def _read(events: Iterator[Any]) -> None:
    with contextlib.suppress(Exception):  # the stream is closed under it
        for _ in events:
            pass
