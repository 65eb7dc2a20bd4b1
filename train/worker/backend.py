"""``Backend``: how a framework connects the processes of a worker group.

A backend's hooks run in the process of each rank. Other code decides which processes there are, and
what runs in them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.train.base.ranks import Ranks

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from miniray.train.base.ranks import WorkerInfo
    from miniray.train.config import ScalingConfig
    from miniray.train.worker.controller_client import RankCalls
    from miniray.train.worker.local_link import LinkClient, LinkServer


@dataclasses.dataclass(frozen=True)
class GroupMember:
    """The place of a process in its group, with which the backend connects it.

    Attributes:
        ranks: Its place in the group.
        address: Address of its own node.
        master_address: Address of the node of rank 0.
        master_port: A port that rank 0 has bound, for frameworks that meet at one.
        listener: The socket that has bound it, on rank 0; None on the others.
        resources: What each worker holds, by resource name.
        node_devices: Ids of the devices of all workers of its node, by resource name.
        shares_devices: Whether two workers of the group hold parts of the same device.
        controller: The run's controller, which keeps keys for the group; None in tests.
        environment: Variables that the backend's ``environments`` made for it.
    """

    ranks: Ranks
    address: str
    master_address: str
    master_port: int
    listener: socket.socket | None
    resources: Mapping[str, float]
    node_devices: Mapping[str, list[str]]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shares_devices: bool = False
    controller: RankCalls | None = None


@dataclasses.dataclass(frozen=True)
class LocalPlace:
    """The place of the driver's process in a run in local mode.

    Attributes:
        ranks: Its ranks.
        link: The way to the other processes, which ``LinkServer`` is on rank 0 and ``LinkClient``
            on the others; None when there are none. The caller of ``join_local`` closes it.
    """

    ranks: Ranks
    link: LinkServer | LinkClient | None


class Backend:
    """Base of backends; by itself it makes no connections."""

    def preload(self, resources: Mapping[str, float]) -> tuple[str, ...]:
        """Return modules that a rank needs, so that its process begins with them loaded.

        Loaded once per node, in the process that forks those of the ranks; so they may start
        no threads, and nothing else that a fork breaks. Called in the controller.
        """
        del resources
        return ()

    def preload_later(self, resources: Mapping[str, float]) -> tuple[str, ...]:
        """Return modules that most train loops need sooner or later, and that load slowly.

        Loaded once per node, beside the first ranks, which may have to load them for themselves:
        those that start later begin with them. The same rules hold as for ``preload``.
        """
        del resources
        return ()

    def environments(
        self,
        workers: Sequence[WorkerInfo],
        resources: Mapping[str, float],
    ) -> list[dict[str, str]]:
        """Return the variables that connect each worker to the others; called in the controller.

        Returns:
            Variables for ``GroupMember.environment``, in order of rank.

        Raises:
            ValueError: These workers can't train together.
        """
        return [{} for _ in workers]

    def prepare(self) -> None:
        """Called first in each process, while others still start: load what takes time."""

    def on_start(self, member: GroupMember) -> None:
        """Called in each process before any train loop begins: connect it to the others."""

    def on_shutdown(self) -> None:
        """Called in each process after its train loop has returned."""

    def join_local(self, config: ScalingConfig) -> LocalPlace:
        """Called in the driver's process before it runs a train loop itself.

        Returns:
            Its place among the processes that run this loop; by default it is the only one.
        """
        del config
        return LocalPlace(Ranks(0, 1, 0, 1, 0), None)

    def leave_local(self) -> None:
        """Called when such a run is over: undo what ``join_local`` did, also if it failed."""


#: Members of Ray's backend configurations that are not used here, with what to write instead.
_OF_RAY = {
    "backend_cls": "Define make_backend(), which returns the backend. Its hooks run in the process "
    "of each rank: on_start(member) and on_shutdown()",
    "train_func_context": "Prepare the process in on_start() of the backend, or in the train loop",
}


@dataclasses.dataclass
class BackendConfig:
    """Base of backend configurations; names the backend to use.

    Raises:
        TypeError: A subclass names its backend as Ray's do, so that it would never be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, instead in _OF_RAY.items():
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__qualname__}.{name} is how Ray's trainers find a backend, and is not "
                    f"used here. {instead}."
                )

    def make_backend(self) -> Backend:
        """Return the backend that this configures."""
        return Backend()
