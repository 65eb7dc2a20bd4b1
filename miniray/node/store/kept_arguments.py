"""For whom the daemon keeps what a detached actor starts with, for reports.

Pure: plain records. What is kept, and until when, is in ``adopted.py``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.common.ids import short_id

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class KeptArguments:
    """What is known of a detached actor whose constructor's arguments are kept."""

    actor_id: bytes
    #: Of the constructor: ``Keeper.__init__``.
    call: str
    #: Of the actor; empty if it has none.
    name: str
    #: ``FILE:LINE in FUNCTION`` of the call that made the actor.
    made: str
    #: Whether the constructor may run again.
    may_restart: bool
    #: Objects that the arguments refer to.
    inside: frozenset[bytes]

    @property
    def holder(self) -> str:
        """Whose argument it is and what for, to be put into ``argument of ... in PROCESS``."""
        name = f"{self.name!r} " if self.name else ""
        actor = f"the detached actor {name}({short_id(self.actor_id.hex())})"
        until = ", which may be restarted with it," if self.may_restart else " as long as it lives,"
        return f"{self.call}, kept for {actor}{until}"

    @property
    def call_site(self) -> str:
        """As which the arguments are listed."""
        return f"arguments of {self.call} at {self.made}"


def id_of_arguments(node_id: bytes, actor_id: bytes) -> bytes:
    """Under which id a node's daemon keeps the arguments of an actor: they are no object."""
    return node_id + actor_id


def keepers_by_object(
    node_id: bytes, kept: Iterable[KeptArguments]
) -> dict[bytes, list[KeptArguments]]:
    """For which actors each object of a daemon is kept, their arguments themselves included."""
    found: dict[bytes, list[KeptArguments]] = {}
    for each in kept:
        for id in (id_of_arguments(node_id, each.actor_id), *each.inside):
            found.setdefault(id, []).append(each)
    return found
