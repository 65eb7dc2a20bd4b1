"""One actor as the head knows it, while it is not dead. State only."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.common.ids import owner_of

if TYPE_CHECKING:
    from miniray.common.specs import ActorSpec
    from miniray.head.directories.jobs import Job
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.scheduling.demands import Demand
    from miniray.head.scheduling.reasons import Told
    from miniray.messages.actor_death import Death


#: States of an actor.
PENDING = "PENDING"
ALIVE = "ALIVE"
RESTARTING = "RESTARTING"
DEAD = "DEAD"


@dataclasses.dataclass(eq=False, slots=True)
class Actor:
    """One actor that is not dead."""

    id: bytes
    spec: ActorSpec
    job_id: bytes
    job: Job | None
    #: Name of the node that is preferred, which is its creator's.
    near: str
    restarts_left: int
    state: str = PENDING
    #: How often it was restarted.
    restarts: int = 0
    #: Marshalled (arguments value, refs); None until they have values.
    arguments: bytes | None = None
    demand: Demand | None = None
    #: Number of its request or lease; 0: none.
    lease: int = 0
    #: Where its lease is; None while it waits.
    node: ClusterNode | None = None
    process_id: bytes = b""
    pid: int = 0
    exiting: bool = False
    killed: bool = False
    told: Told = 0
    #: Once it is dead: why, and since when, in seconds since the epoch.
    death: Death | None = None
    died: float = 0.0

    @property
    def owner(self) -> bytes:
        """The process that created it."""
        return owner_of(self.id)

    @property
    def class_name(self) -> str:
        """Its class."""
        return self.spec.class_name

    @property
    def name(self) -> tuple[str, str] | None:
        """(namespace, name), if it has a name."""
        name = self.spec.name
        return None if name is None else (self.spec.namespace, name)

    @property
    def location(self) -> tuple[bytes, bytes, bool, bytes]:
        """What a process needs to make a handle of it."""
        spec = self.spec
        return self.id, spec.owner_node, spec.detached, spec.info
