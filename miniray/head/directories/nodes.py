"""The nodes of the cluster, living and lost, and their last reports.

Responsible for the directory and for judging liveness; other parts handle the
loss of a node.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any, Protocol

from miniray._proto import head_pb2
from miniray.head.scheduling.resources import node_pool
from miniray.messages import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.common.specs import GrantedLease
    from miniray.head.scheduling.resources import ResourcePool

logger = logging.getLogger(__name__)

#: Lost nodes that are remembered, for listings.
_REMEMBERED = 128


class NodeOutbox(Protocol):
    """Takes messages for one daemon."""

    def put(self, message: head_pb2.ToNode) -> None:
        """Queue a message; never blocks."""

    def close(self) -> None:
        """End the session after what is queued."""


@dataclasses.dataclass(eq=False, repr=False)
class ClusterNode:
    """A node, as its daemon reported it, and the outbox of its session."""

    id: bytes
    #: Its id in hex, which is its name in the scheduler.
    name: str
    host: str
    hostname: str
    #: Where other daemons dial it.
    address: str
    socket_path: str
    #: Of its session, where its logs are.
    session_dir: str
    is_head_node: bool
    #: No work is placed there.
    drivers_only: bool
    #: Amounts per resource, devices included, in units.
    totals: dict[str, float]
    labels: dict[str, str]
    outbox: NodeOutbox
    pool: ResourcePool
    #: When its last message came, in seconds of the loop's clock.
    heard: float
    alive: bool = True
    #: It gets no new work.
    draining: bool = False
    #: Workers there that could not be killed.
    quarantines: list[head_pb2.Quarantine] = dataclasses.field(default_factory=list)
    #: Why it is not alive.
    reason: str = ""
    #: Bytes of shared memory that objects take there, and that they may take at most.
    object_store_used: int = 0
    object_store_capacity: int = 0
    #: Bytes of disk that values take.
    object_store_spilled: int = 0

    @classmethod
    def of(cls, hello: head_pb2.NodeHello, outbox: NodeOutbox, now: float) -> ClusterNode:
        """Make a node from its daemon's hello; ValueError if that is malformed."""
        told: dict[str, Any] = plain.loads(hello.resources) if hello.resources else {}
        scalars: dict[str, float] = told.get("scalars", {})
        devices: dict[str, list[str]] = told.get("devices", {})
        labels: dict[str, str] = told.get("labels", {})
        divisible: dict[str, bool] = told.get("fractional", {})
        whole = {device for device in devices if not divisible.get(device, True)}
        name = hello.node_id.hex()
        counts = {device: float(len(ids)) for device, ids in devices.items()}
        return cls(
            id=hello.node_id,
            name=name,
            host=hello.host,
            hostname=hello.hostname,
            address=hello.address,
            socket_path=hello.socket_path,
            session_dir=hello.session_dir,
            is_head_node=hello.is_head_node,
            drivers_only=hello.drivers_only,
            totals={**scalars, **counts},
            labels=labels,
            outbox=outbox,
            pool=node_pool(name, scalars, devices, labels, whole),
            heard=now,
        )

    def beat(self, heartbeat: head_pb2.Heartbeat) -> None:
        self.object_store_used = heartbeat.object_store_used
        self.object_store_capacity = heartbeat.object_store_capacity
        self.object_store_spilled = heartbeat.object_store_spilled

    def send(self, **kind: Any) -> None:
        """Queue a message for its daemon; the argument names its kind."""
        if self.alive:
            self.outbox.put(head_pb2.ToNode(**kind))

    def start(self, lease: GrantedLease) -> None:
        self.send(start_lease=head_pb2.StartLease(granted=plain.dumps(lease.to_wire())))


class NodeDirectory:
    """All nodes by id."""

    def __init__(self) -> None:
        self._living: dict[bytes, ClusterNode] = {}
        self._lost: collections.OrderedDict[bytes, ClusterNode] = collections.OrderedDict()
        #: CPUs of the living nodes.
        self.cpus = 0.0
        #: When ``silent`` was last called.
        self._asked = math.inf

    def __iter__(self) -> Iterator[ClusterNode]:
        """Iterate over the living nodes, in order of arrival."""
        return iter(tuple(self._living.values()))

    def get(self, node_id: bytes) -> ClusterNode | None:
        return self._living.get(node_id)

    def is_known(self, node_id: bytes) -> bool:
        """Return whether a node lives, or is remembered as lost."""
        return node_id in self._living or node_id in self._lost

    def lost(self) -> list[ClusterNode]:
        """Return the remembered lost nodes, the latest last."""
        return list(self._lost.values())

    def add(self, node: ClusterNode) -> None:
        self._lost.pop(node.id, None)
        for other in self._living.values():
            other.send(welcome=head_pb2.Welcome(nodes=[self.introduction(node)]))
        self._living[node.id] = node
        self._count_cpus()

    def remove(self, node: ClusterNode, reason: str) -> None:
        if self._living.get(node.id) is not node:
            return
        del self._living[node.id]
        self._count_cpus()
        node.alive = False
        node.reason = reason
        if not node.drivers_only:
            self._lost[node.id] = node
        if len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)
        for other in self._living.values():
            other.send(node_died=head_pb2.NodeDied(node_id=node.id, reason=reason))

    def _count_cpus(self) -> None:
        self.cpus = sum(node.totals.get("CPU", 0.0) for node in self._living.values())

    def tell_all(self) -> None:
        """Send all nodes the list of living ones: an earlier head may have lost one silently."""
        told = head_pb2.Welcome(nodes=map(self.introduction, self), nodes_are_all=True)
        for node in self:
            node.send(welcome=told)

    def silent(self, now: float, timeout: float, every: float) -> list[ClusterNode]:
        """Return the nodes that were silent for ``timeout`` seconds while others were not.

        The head's own node is not judged by its messages: the head ends with that process. If no
        node sent any, not even that one over a Unix socket, the head is at fault.
        A call much later than ``every`` seconds after the last one shows that the head stood still,
        and what nodes have sent since is not read yet.
        """
        late = now - self._asked - every
        self._asked = now
        living = self._living.values()
        if late > every:
            logger.warning("the head did not run for %.1f s", late)
            for node in living:
                node.heard = min(now, node.heard + late)
        silent = [node for node in living if now - node.heard > timeout]
        if len(silent) == len(living) and any(node.is_head_node for node in silent):
            logger.warning(
                "no node was heard for %g s, not even the one on the head's machine: the head "
                "takes that for a fault of its own, and declares no node lost",
                timeout,
            )
            for node in living:
                node.heard = now
            return []
        return [node for node in silent if not node.is_head_node]

    @staticmethod
    def introduction(node: ClusterNode) -> head_pb2.NodeJoined:
        return head_pb2.NodeJoined(node_id=node.id, address=node.address)
