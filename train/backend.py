"""``Backend``: how a framework connects the processes of a worker group.

A backend's hooks run in the process of each rank. Which processes there are,
and what runs in them, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from miniray.train.ranks import Ranks, WorkerInfo


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
        environment: Variables that the backend's ``environments`` made for it.
    """

    ranks: Ranks
    master_address: str
    master_port: int
    listener: socket.socket | None
    resources: Mapping[str, float]
    node_devices: Mapping[str, list[str]]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Backend:
    """Base of backends; by itself it connects nothing."""

    #: Modules that the process of a rank needs, so that it can begin with them loaded.
    preload: ClassVar[tuple[str, ...]] = ()

    def environments(
        self,
        workers: Sequence[WorkerInfo],
        resources: Mapping[str, float],
    ) -> list[dict[str, str]]:
        """What each worker is told of the others in variables; called in the controller.

        Args:
            workers: All workers, in order of rank.
            resources: What each of them holds, by resource name.

        Returns:
            Variables for ``Member.environment``, in order of rank.

        Raises:
            ValueError: These workers can't train together.
        """
        return [{} for _ in workers]

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
