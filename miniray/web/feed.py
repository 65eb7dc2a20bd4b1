"""What the web process knows of the cluster: rows that the head pushes, and whom to ask.

Everything here runs in the event loop; the link's I/O thread only passes things on.
"""

from __future__ import annotations

import asyncio
import logging
import marshal
from typing import TYPE_CHECKING, Any

from miniray.client.attach import Attachment, Introduction
from miniray.common.config import config
from miniray.common.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.web.facts import WebFacts

    #: Gets changed rows by key, and the keys of rows that are gone; None: all rows are void.
    RowsHandler = Callable[[dict[str, dict[str, Any]] | None, list[str]], None]

logger = logging.getLogger(__name__)


class Feed:
    """The attachment to the node, with subscriptions to the head's listings.

    Args:
        facts: Where the node is.
        on_lost: Called when the daemon is gone.
        on_error: Called when ``error`` has changed.
    """

    def __init__(
        self,
        facts: WebFacts,
        on_lost: Callable[[], object],
        on_error: Callable[[str], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        #: By listing: who gets its rows.
        self._handlers: dict[str, RowsHandler] = {}
        #: Why nothing comes from the head, as a sentence; empty if it does.
        self.error = ""
        self._on_error = on_error
        process_id = new_id()
        self._attachment = Attachment(
            facts.node_socket,
            facts.socket_key,
            Introduction(process_id, "command", process_id),
            timeout=config().start_timeout,
            on_shutdown=lambda attachment: attachment.close(),
            on_lost=lambda: self._soon(on_lost),
        )
        topics = self._attachment.runtime.on_topic
        topics["rows"] = lambda *message: self._soon(self._on_rows, *message)
        topics["head_lost"] = lambda: self._soon(self._on_head_lost)
        topics["head_back"] = lambda: self._soon(self._on_head_back)
        self._attachment.open()
        self.link = self._attachment.link
        #: What asks nodes and processes, for threads that may wait.
        self.source = self._attachment.runtime.head
        self.address = facts.cluster_address
        if self._attachment.welcome["head_lost"] is not None:
            self._on_head_lost()

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def subscribe(self, listing: str, handler: RowsHandler) -> None:
        """Give the handler all rows of one of the head's listings, and later what changes."""
        self._handlers[listing] = handler
        self.link.head_notice("watch", sorted(self._handlers))

    def unsubscribe(self, listing: str) -> None:
        """Undo ``subscribe``."""
        del self._handlers[listing]
        self.link.head_notice("watch", sorted(self._handlers))

    def _on_rows(self, listing: str, data: bytes) -> None:
        changed, gone = marshal.loads(data)
        handler = self._handlers.get(listing)
        if handler is not None:
            handler(changed, gone)

    def _on_head_lost(self) -> None:
        self.error = "The head of the cluster is out of reach; its node starts it again."
        self._on_error(self.error)

    def _on_head_back(self) -> None:
        self.error = ""
        self._on_error("")
        for handler in self._handlers.values():
            handler(None, [])
        self.link.head_notice("watch", sorted(self._handlers))  # the new head knows of nothing

    def close(self) -> None:
        """Leave the cluster."""
        self._attachment.runtime.shutdown()
