"""``Backend``: how a framework connects the processes of a worker group.

A backend's hooks run in the process of each rank. Which processes there are,
and what runs in them, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from miniray.train.ranks import Ranks


@dataclasses.dataclass(frozen=True)
class Member:
    """What a process knows of its group when the backend connects it.

    Attributes:
        ranks: Its place in the group.
        master_address: Address of the node of rank 0.
        master_port: A port on which rank 0 listens already.
        listener: The listening socket, on rank 0; None on the others.
        resources: What each worker holds, by resource name.
        node_devices: Ids of the devices of all workers of its node, by resource name.
    """

    ranks: Ranks
    master_address: str
    master_port: int
    listener: socket.socket | None
    resources: Mapping[str, float]
    node_devices: Mapping[str, list[str]]


class Backend:
    """Base of backends; by itself it connects nothing."""

    #: Modules that the process of a rank needs, so that it can begin with them loaded.
    preload: ClassVar[tuple[str, ...]] = ()

    def prepare(self) -> None:
        """Called first in each process, while others still start: load what takes time."""

    def on_start(self, member: Member) -> None:
        """Called in each process before any train loop begins: connect it to the others."""

    def on_shutdown(self) -> None:
        """Called in each process after its train loop has returned."""


@dataclasses.dataclass
class BackendConfig:
    """Base of backend configurations; names the backend to use."""

    def make_backend(self) -> Backend:
        """The backend that this configures."""
        return Backend()
