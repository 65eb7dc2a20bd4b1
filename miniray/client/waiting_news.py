"""What the user is told of tasks, actors and groups that wait for resources.

The head says so once of each. While any of the driver's job still waits, it is said again now and
then: all that are alike in one line. The error of a ``get`` that ran out of time says it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.calls.actor_client import ActorClient
from miniray.calls.lease_groups import LeaseGroup
from miniray.common.config import config
from miniray.common.ids import short_id
from miniray.common.names import printable, short_name
from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.calls.call import Call
    from miniray.client.runtime_parts import RuntimeParts
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink

#: The first reminder comes after so many times ``pending_warning``; each later one takes twice as
#: long, up to so many seconds.
_FIRST = 6
_LONGEST = 3600.0
#: Seconds that the head may take to say why; who waits for less is not kept waiting for that.
TO_HEAR_WHY = 0.5
#: So many calls of a chain, each the argument of the next, are looked through.
_DEEP = 10
#: So many lines at most are told at once.
_LINES = 5


class WaitingNews:
    """Tells the user, and reminds. Runs in the loop's thread."""

    def __init__(self, loop: IOLoop, link: NodeLink, tell: Callable[[str], None]) -> None:
        self._loop = loop
        self._link = link
        self._tell: Callable[[str], None] = lambda text: tell(printable(text))
        self._delay = 0.0
        self._cancel: Callable[[], object] = lambda: None

    def on_pending(self, name: str, reason: str, infeasible: bool) -> None:
        """The head says that something waits, and why."""
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


def why_missing(runtime: RuntimeParts, id: bytes) -> str:
    """A sentence on what has no resources yet and is to make a value; empty if not known."""
    call = runtime.calls.find(id)
    for _ in range(_DEEP):  # what makes an argument has to run first
        before = call and _maker_of_argument(runtime, call)
        if before is None:
            break
        call = before
    what: Any = None
    if call is None:
        kind, what = "placement_group", runtime.awaited_groups.get(id)
        name = f"The placement group {short_id(what.hex())}" if what is not None else ""
    elif call.peer is None and isinstance(call.options, LeaseGroup):
        kind, what, name = "task", call.options.id, call.name
    elif call.peer is None and isinstance(call.channel, ActorClient):
        kind, what, name = "actor", call.channel.actor_id, call.channel.name
    if what is None:
        return ""  # it runs, or another process knows
    try:
        reason = runtime.link.head_request("why_waits", kind, what, timeout=TO_HEAR_WHY)
    except (TimeoutError, MinirayError):
        return ""  # the head is busy, or gone
    return f" {short_name(name)} waits: {reason}." if reason else ""


def _maker_of_argument(runtime: RuntimeParts, call: Call) -> Call | None:
    """An open call that is to make an argument of another one."""
    made = (runtime.calls.find(id) for _, id, _, value in call.refs if value is None)
    return next((found for found in made if found is not None), None)
