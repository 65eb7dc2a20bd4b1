"""What a driver prints: warnings, what waits for resources, and the output of workers."""

from __future__ import annotations

import itertools
import logging
import operator
import os
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.names import printable, short_name
from miniray.exceptions import NodeDiedError
from miniray.logs.log_printer import LogBatch
from miniray.logs.log_thread import LogThread, left_out_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

logger = logging.getLogger(__name__)

#: The first reminder comes after this many times ``pending_warning``; each later one takes twice as
#: long, up to this many seconds.
_FIRST = 6
_LONGEST = 3600.0
#: The most lines of one reminder.
_LINES = 5


class WaitingNews:
    """Tells the user what waits for resources, and reminds. Runs in the loop's thread.

    The head says so once of each. While any of the driver's job still waits, it is said again now
    and then: all that are alike in one line.
    """

    def __init__(self, loop: IOLoop, link: NodeLink, tell: Callable[[str], None]) -> None:
        self._loop = loop
        self._link = link
        self._tell: Callable[[str], None] = lambda text: tell(printable(text))
        self._delay = 0.0
        self._cancel: Callable[[], object] = lambda: None

    def on_pending(self, name: str, reason: str, infeasible: bool) -> None:
        """Tell that something waits, and why: the head says so."""
        self._tell(f"{short_name(name)} waits: {reason}.{_hint(infeasible)}")
        first = _FIRST * config().pending_warning
        if not 0 < self._delay <= first:  # nothing waited, or the next reminder is far
            self._arm(first)

    def _ask(self) -> None:
        self._link.head_request_async("waiting_of_job", (), self._remind)

    def _remind(self, error: Any, waiting: list[dict[str, Any]] | None, _fd: int) -> None:
        if error is not None or not waiting:
            self._delay = 0.0  # until the head tells of something
            return
        for each in waiting[:_LINES]:
            names = ", ".join(short_name(name) for name in each["names"] if name)
            kind = each["kind"].replace("_", " ") + "s" * (each["count"] != 1)
            who = f"{each['count']} {kind}{f' ({names})' if names else ''}"
            verb = "wait" if each["count"] != 1 else "waits"
            hint = _hint(each["infeasible"])
            self._tell(f"{who} still {verb}, {each['seconds']:.0f} s: {each['reason']}.{hint}")
        if len(waiting) > _LINES:
            self._tell(f"{len(waiting) - _LINES} more wait; `miniray status` has them all.")
        self._arm(min(2 * self._delay, _LONGEST))

    def _arm(self, delay: float) -> None:
        self._cancel()
        self._delay = delay
        self._cancel = self._loop.call_later(delay, self._ask)


def _hint(infeasible: bool) -> str:
    return " It waits until a node joins that can serve it." if infeasible else ""


class DriverOutput:
    """Prints, in a thread of its own, what the runtime of a driver is sent to print.

    Args:
        runtime: Of this process.
        wanted: Whether what workers print is.
    """

    def __init__(self, runtime: ClusterRuntime, *, wanted: bool) -> None:
        self._link = runtime.link
        self._wanted = wanted
        self._own_node = runtime.facts.node_id.hex()[:8]
        self._thread = LogThread(os.path.join(runtime.facts.session_dir, "logs"))
        news = WaitingNews(runtime.loop, runtime.link, self.warn)
        runtime.on_topic.update(
            {
                "log": self._on_log,
                "output_left_out": self._on_left_out,
                "pending": news.on_pending,
                "warning": self.warn,
            }
        )

    def warn(self, text: str) -> None:
        """Print a warning."""
        self._thread.put_note("miniray: " + "\n".join(map(printable, text.split("\n"))))

    def _on_log(
        self, pid: int, node: str, is_stderr: bool, _path: str, lines: list[tuple[str, str]]
    ) -> None:
        if not self._wanted:
            return
        shown = "" if node == self._own_node else node
        for name, group in itertools.groupby(lines, operator.itemgetter(0)):
            texts = [text for _, text in group]
            self._thread.put(LogBatch(name, pid, shown, is_stderr, texts))

    def _on_left_out(self, counts: Sequence[tuple[str, str, int]]) -> None:
        if self._wanted:
            self._thread.put_note(left_out_note(counts, self._own_node))

    def fetch(self) -> None:
        """Let everything come that workers have printed up to now."""
        if not self._wanted:
            return
        try:
            self._link.node_request("flush_output", (), config().stop_grace)
        except (NodeDiedError, TimeoutError) as error:
            logger.debug("the last output of workers may be missing: %s", error)

    def drain(self) -> None:
        """Print what is still to be printed."""
        self._thread.close()
