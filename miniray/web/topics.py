"""The topics of the page: where the rows of each come from. One lives while somebody looks."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from miniray.exceptions import MinirayError
from miniray.job_submission import job_details
from miniray.util.state import KINDS
from miniray.util.state_records import ActorState, JobState, NodeState
from miniray.version import VERSION
from miniray.web.asked import source_of
from miniray.web.feed import Feed
from miniray.web.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.util.state_records import State
    from miniray.web.facts import WebFacts
    from miniray.web.tables import Asked

    Row = dict[str, Any]
    #: Makes a row of what the head tells.
    Adapt = Callable[[Row], Row]

logger = logging.getLogger(__name__)


def _record(kind: type[State]) -> Adapt:
    return lambda data: vars(kind.of(data))


def _actor(data: Row) -> Row:
    row = vars(ActorState.of(data))
    return {**row, "state": "STARTING"} if row["is_starting"] else row


def _run(data: Row) -> Row:
    from miniray.train.run.page import run_row  # the train layer, only if somebody looks at it

    return run_row(data)


#: Seconds for which a table stays after its last viewer: each search begins a new stream.
_LINGER = 5.0
#: Seconds between two questions, at least; and how many times longer than one takes.
_BETWEEN, _SHARE = 2.0, 10
#: Topics that are listings of the head, and how their rows are made.
_LISTINGS: dict[str, dict[str, Adapt]] = {
    **{thing: {listing: _record(kind)} for thing, (listing, kind) in KINDS.items() if listing},
    "nodes": {"node_states": lambda data: {**data, **vars(NodeState.of(data))}},
    "actors": {"actors": _actor},
    "jobs": {"jobs": _record(JobState), "submissions": lambda data: vars(job_details(data))},
    "devices": {"devices": dict},
    "runs": {"runs": _run},
}


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
            self._asking[topic] = asyncio.ensure_future(self._ask(source, table))
            return
        if topic == "nodes":
            table.facts = functools.partial(_cluster, self._facts, table)
        for listing, adapt in _LISTINGS[topic].items():
            self.feed.subscribe(listing, functools.partial(_take, table, adapt))

    async def _ask(self, source: Callable[[Feed], Asked], table: Table) -> None:
        """Ask for the rows of a table, as long as somebody looks at it."""
        while True:
            began = time.monotonic()
            try:
                rows, facts = await asyncio.to_thread(source, self.feed)
            except (ValueError, OSError, TimeoutError, MinirayError) as error:
                table.fail(str(error))
            else:
                before, table.facts = table.facts(), functools.partial(dict, facts)
                table.replace(rows)
                if facts != before:
                    table.update({})  # the rows may be as they were
            await asyncio.sleep(max(_BETWEEN, _SHARE * (time.monotonic() - began)))

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
            total.update(row["total"])
            used.update(row["used"])
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
