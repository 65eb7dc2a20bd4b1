"""The topics of the page: where the rows of each come from. One lives while somebody looks."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.exceptions import MinirayError
from miniray.job_submission import job_details
from miniray.util.state_records import (
    ActorState,
    ClusterEventState,
    JobState,
    NodeState,
    PlacementGroupState,
    WorkerState,
)
from miniray.version import VERSION
from miniray.web import asked
from miniray.web.feed import Feed
from miniray.web.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.web.asked import Asked
    from miniray.web.facts import WebFacts

    Row = dict[str, Any]
    #: Makes a row of what the head tells.
    Adapt = Callable[[Row], Row]

logger = logging.getLogger(__name__)


def _actor(data: Row) -> Row:
    row = vars(ActorState.of(data))
    return {**row, "state": "STARTING"} if row["is_starting"] else row


def _node(data: Row) -> Row:
    row = vars(NodeState.of(data))
    used = data["used"]
    return {
        **row,
        "resources_used": used,
        "resources_available": {
            name: amount - used.get(name, 0.0) for name, amount in row["resources_total"].items()
        },
        "store_used": data["object_store_used"],
        "store_capacity": data["object_store_capacity"],
        "store_spilled": data["object_store_spilled"],
        "heartbeat_age": data["silent"],
    }


def _waiting(data: Row) -> Row:
    return {**data, "names": [short_name(name) for name in data["names"]]}


def _submitted(data: Row) -> Row:
    """Make a row of a submitted job, as those of drivers are."""
    return {**vars(job_details(data)), "driver_info": None}


def _run(data: Row) -> Row:
    from miniray.train.run.page import run_row  # the train layer, only if somebody looks at it

    return run_row(data)


def _event(data: Row) -> Row:
    row = vars(ClusterEventState.of(data))
    return {**row, **row["custom_fields"], "severity": row["severity"].lower()}


#: Seconds for which a table stays after its last viewer: each search begins a new stream.
_LINGER = 5.0
#: Seconds between two questions, at least; and how many times longer than one takes.
_BETWEEN, _SHARE = 2.0, 10
#: Seconds between an answer that came at news and the next question.
_SOON = 0.5
#: Topics that are listings of the head, and how their rows are made.
_LISTINGS: dict[str, dict[str, Adapt]] = {
    "nodes": {"node_states": _node},
    "actors": {"actors": _actor},
    "waiting": {"pending": _waiting},
    "jobs": {"jobs": lambda data: vars(JobState.of(data)), "submissions": _submitted},
    "devices": {"devices": dict},
    "runs": {"runs": _run},
    "events": {"events": _event},
    "groups": {"placement_groups": lambda data: vars(PlacementGroupState.of(data))},
    "workers": {"workers": lambda data: vars(WorkerState.of(data))},
}


def source_of(topic: str) -> Callable[[Feed], Asked] | None:
    """Return what asks for the rows of a topic; None if they are pushed, or there is none."""
    if topic.startswith("run") or topic == "datasets":
        from miniray.web import runs  # the train layer, only if somebody looks at it

        return runs.source_of(topic)
    return asked.source_of(topic)


class Topics:
    """The tables that are looked at, by topic."""

    def __init__(self, facts: WebFacts, on_lost: Callable[[], object]) -> None:
        self._tables: dict[str, Table] = {}
        self._facts = facts
        #: What asks for the rows of topics that are not pushed.
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.feed = Feed(facts, on_lost, self._tell_error)

    def known(self, topic: str) -> bool:
        return topic in _LISTINGS or source_of(topic) is not None

    @contextlib.contextmanager
    def watched(self, topic: str, viewer: asyncio.Event) -> Iterator[Table]:
        """Yield a topic's table; the event is set whenever it changes."""
        table = self._tables.get(topic)
        if table is None:
            table = self._tables[topic] = Table(error=self.feed.error)
            self._begin(topic, table)
        table.viewers.add(viewer)
        try:
            yield table
        finally:
            table.viewers.discard(viewer)
            if not table.viewers:
                loop = asyncio.get_running_loop()
                loop.call_later(_LINGER, self._end_unless_watched, topic, table)

    def _begin(self, topic: str, table: Table) -> None:
        source = source_of(topic)
        if source is not None:
            asking = self._follow if topic.startswith("run:") else self._ask
            self._asking[topic] = asyncio.ensure_future(asking(source, table))
            return
        if topic == "nodes":
            table.facts = functools.partial(_cluster, self._facts, table)
            self._asking[topic] = asyncio.ensure_future(self._ask_usage(table))
        for listing, adapt in _LISTINGS[topic].items():
            self.feed.subscribe(listing, functools.partial(_take, table, adapt))

    async def _ask(self, source: Callable[[Feed], Asked], table: Table) -> None:
        """Ask for the rows of a table, as long as somebody looks at it."""
        while True:
            began = time.monotonic()
            await self._ask_once(source, table)
            await asyncio.sleep(max(_BETWEEN, _SHARE * (time.monotonic() - began)))

    async def _follow(self, source: Callable[[Feed], Asked], table: Table) -> None:
        """Ask for the rows of a table where an answer comes at news."""
        thread = concurrent.futures.ThreadPoolExecutor(1)  # it waits most of the time
        try:
            while True:
                facts = await self._ask_once(source, table, thread)
                goes_on = facts is not None and facts["run"].get("ended") is None
                await asyncio.sleep(_SOON if goes_on else _BETWEEN)
        finally:
            thread.shutdown(wait=False)

    async def _ask_once(
        self,
        source: Callable[[Feed], Asked],
        table: Table,
        thread: concurrent.futures.Executor | None = None,
    ) -> Row | None:
        loop = asyncio.get_running_loop()
        try:
            rows, facts = await loop.run_in_executor(thread, source, self.feed)
        except (ValueError, OSError, TimeoutError, MinirayError) as error:
            table.fail(str(error))
            return None
        before, table.facts = table.facts(), functools.partial(dict, facts)
        table.replace(rows)
        if facts != before:
            table.update({})  # the rows may be as they were
        return facts

    async def _ask_usage(self, table: Table) -> None:
        """Add to the rows of nodes what these use."""
        usage = asked.NodeUsage()
        while True:
            with contextlib.suppress(OSError, TimeoutError, MinirayError):
                table.overlay(await asyncio.to_thread(usage, self.feed))
            await asyncio.sleep(_BETWEEN)

    def _end_unless_watched(self, topic: str, table: Table) -> None:
        if not table.viewers and self._tables.get(topic) is table:
            del self._tables[topic]
            self._end(topic)

    def _end(self, topic: str) -> None:
        asking = self._asking.pop(topic, None)
        if asking is not None:
            asking.cancel()
        for listing in _LISTINGS.get(topic, ()):
            self.feed.unsubscribe(listing)

    def _tell_error(self, error: str) -> None:
        for table in self._tables.values():
            table.fail(error)


def _cluster(facts: WebFacts, table: Table) -> Row:
    """Return what the summary of the nodes says of the cluster as a whole."""
    total: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    for row in table.rows.values():
        if row["state"] != "DEAD":
            total.update(row["resources_total"])
            used.update(row["resources_used"])
    return {
        "cluster": {
            "name": facts.cluster,
            "address": facts.cluster_address,
            "version": VERSION,
            "since": facts.since,
            "logs": facts.logs,
            "total": total,
            "used": used,
        }
    }


def _take(table: Table, adapt: Adapt, changed: dict[str, Row] | None, gone: list[str]) -> None:
    """Enter what the head has pushed."""
    if changed is None:
        table.forget()
    else:
        table.update({key: adapt(row) for key, row in changed.items()}, gone)
