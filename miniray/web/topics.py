"""The topics of the page: the sources of their rows. A topic lives while it has a viewer.

The head pushes its listings; data of nodes and processes are polled (``asked.py``).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import marshal
import time
from typing import TYPE_CHECKING, Any

from miniray.client.attach import Attachment, Introduction
from miniray.common.config import config
from miniray.common.object_ref import new_id
from miniray.exceptions import MinirayError
from miniray.job_submission import job_details
from miniray.messages.value import rebuild_error
from miniray.util.state import KINDS
from miniray.util.state_records import ActorState, NodeState
from miniray.version import VERSION
from miniray.web.asked import source_of
from miniray.web.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.common.runtime import RuntimeHead
    from miniray.util.state_records import State
    from miniray.web.facts import WebFacts
    from miniray.web.tables import Asked

    Row = dict[str, Any]
    #: Makes a row of the head's data.
    Adapt = Callable[[Row], Row]


logger = logging.getLogger(__name__)


def _record(kind: type[State]) -> Adapt:
    return lambda data: vars(kind.of(data))


def _actor(data: Row) -> Row:
    row = vars(ActorState.of(data))
    return {**row, "state": "STARTING"} if row["is_starting"] else row


def _run(data: Row) -> Row:
    from miniray.train.run.page import run_row  # the train layer, only if there is a viewer

    return run_row(data)


#: Seconds for which a table stays after its last viewer: each search begins a new stream.
_LINGER = 5.0
#: Seconds between two questions, at least; and how many times longer than one takes.
_BETWEEN, _SHARE = 2.0, 10
#: The topic of each listing that the head pushes, and how its rows are made.
_LISTINGS: dict[str, tuple[str, Adapt]] = {
    **{listing: (thing, _record(kind)) for thing, (listing, kind) in KINDS.items() if listing},
    "node_states": ("nodes", lambda data: {**data, **vars(NodeState.of(data))}),
    "actors": ("actors", _actor),
    "submissions": ("jobs", lambda data: vars(job_details(data))),
    "devices": ("devices", dict),
    "runs": ("runs", _run),
}
_PUSHED = frozenset(topic for topic, _ in _LISTINGS.values())
_NO_HEAD = "The head of the cluster is out of reach; its node starts it again."


class Topics:
    """The attachment to the node, and the tables that are looked at, by topic.

    Not thread-safe, used by the event loop only; the I/O thread of ``link`` only passes things on.

    Args:
        facts: Where the node is.
        on_lost: Called when the daemon is gone.
    """

    def __init__(self, facts: WebFacts, on_lost: Callable[[], object]) -> None:
        self._tables: dict[str, Table] = {}
        self._facts = facts
        #: Functions that poll the rows of topics that are not pushed.
        self._asking: dict[str, asyncio.Task[None]] = {}
        #: Why no data come from the head, as a sentence; empty if it does.
        self._error = ""
        process_id = new_id()
        self._attachment = Attachment(
            facts.node_socket,
            facts.socket_key,
            Introduction(process_id, "command", process_id),
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: attachment.close(),
            on_lost=self._soon(on_lost),
        )
        pushes = self._attachment.runtime.on_topic
        pushes["rows"] = self._soon(self._on_rows)
        pushes["head_lost"] = self._soon(lambda: self._tell_error(_NO_HEAD))
        pushes["head_back"] = self._soon(self._on_head_back)
        self._attachment.open()
        self.link = self._attachment.link
        #: Requests to head, nodes and processes, for threads that may wait.
        self.source = self._attachment.runtime.head
        if self._attachment.welcome["head_lost"] is not None:
            self._tell_error(_NO_HEAD)

    def close(self) -> None:
        """Leave the cluster."""
        self._attachment.runtime.shutdown()

    @staticmethod
    def _soon(function: Callable[..., object]) -> Callable[..., None]:
        """Return what has the event loop call a function."""
        loop = asyncio.get_running_loop()

        def pass_on(*told: Any) -> None:
            loop.call_soon_threadsafe(function, *told)

        return pass_on

    def known(self, topic: str) -> bool:
        return topic in _PUSHED or source_of(topic) is not None

    @contextlib.contextmanager
    def watched(self, topic: str, viewer: asyncio.Event) -> Iterator[Table]:
        """Yield a topic's table; the event is set whenever it changes."""
        table = self._tables.get(topic)
        if table is None:
            table = self._tables[topic] = Table(error=self._error)
            if (source := source_of(topic)) is None:
                self._watch()
            else:
                self._asking[topic] = asyncio.ensure_future(self._ask(source, table))
        table.viewers.add(viewer)
        try:
            yield table
        finally:
            table.viewers.discard(viewer)
            if not table.viewers:
                loop = asyncio.get_running_loop()
                loop.call_later(_LINGER, self._end_unless_watched, topic, table)

    def _watch(self) -> None:
        """Make the head push the listings of the tables that there are."""
        listings = [each for each, (topic, _) in _LISTINGS.items() if topic in self._tables]
        self.link.head_request_async("watch", (listings,), self._soon(self._on_watch))

    def _on_watch(self, error: BaseException | bytes | None, *_: object) -> None:
        """Tell viewers that the head refuses to push, or does so again."""
        if error is not None or self._error:
            self._tell_error("" if error is None else str(rebuild_error(error)))

    def _on_rows(self, listing: str, data: bytes) -> None:
        """Enter what the head has pushed."""
        changed, gone = marshal.loads(data)
        topic, adapt = _LISTINGS[listing]
        if (table := self._tables.get(topic)) is not None:
            table.update({key: adapt(row) for key, row in changed.items()}, gone)
            if topic == "nodes":
                table.facts = _cluster(self._facts, table.rows)

    def _on_head_back(self) -> None:
        """Watch again: the new head has no record of pushes and watchers."""
        self._tell_error("")
        for topic, table in self._tables.items():
            if topic in _PUSHED:
                table.forget()
        self._watch()

    async def _ask(self, source: Callable[[RuntimeHead], Asked], table: Table) -> None:
        """Poll the rows of a table, as long as it has a viewer."""
        while True:
            began = time.monotonic()
            try:
                rows, facts = await asyncio.to_thread(source, self.source)
            except (ValueError, OSError, TimeoutError, MinirayError) as error:
                table.fail(str(error))
            except Exception as error:  # the page must not wait for ever
                logger.exception("The rows of a topic cannot be made.")
                table.fail(f"This cannot be shown, and `miniray logs web` says why: {error!r}")
            else:
                table.replace(rows, facts)
            await asyncio.sleep(max(_BETWEEN, _SHARE * (time.monotonic() - began)))

    def _end_unless_watched(self, topic: str, table: Table) -> None:
        if table.viewers or self._tables.get(topic) is not table:
            return
        del self._tables[topic]
        if topic in _PUSHED:
            self._watch()
        else:
            self._asking.pop(topic).cancel()

    def _tell_error(self, error: str) -> None:
        self._error = error
        for table in self._tables.values():
            table.fail(error)


def _cluster(facts: WebFacts, nodes: dict[str, Row]) -> Row:
    """Return what the summary of the nodes says of the cluster as a whole."""
    total: collections.Counter[str] = collections.Counter()
    used: collections.Counter[str] = collections.Counter()
    for row in nodes.values():
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
