"""Answers "logs": lines of this node's log files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from miniray.logs.log_files import LogQuery, read_on
from miniray.logs.log_search import find

if TYPE_CHECKING:
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.relay.questions import Questions


class LogSearch:
    """Reads the log files of this node for whoever asks."""

    def __init__(self, node: NodeConfig, questions: Questions) -> None:
        self._node = node
        questions.answers["logs"] = self._logs

    async def _logs(self, seconds: float, query: dict[str, Any], ends: Any) -> dict[str, Any]:
        """Read log files, for the fields of a ``LogQuery``.

        ``ends``: by node, what was read already; None: nothing.
        """
        folder, wanted = self._node.logs, LogQuery(**query)
        if ends is None:
            return await find(folder, wanted, seconds)
        own = ends.get(self._node.node_id.hex(), {})
        return await asyncio.to_thread(read_on, folder, wanted, own)
