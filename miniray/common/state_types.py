"""The shape of what the head tells about its cluster, as plain data.

The head fills it, ``miniray status`` renders it. Every value is JSON-compatible; times
are seconds since the epoch, amounts are units (memory: bytes), ids are hex.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class QuarantineStatus(TypedDict):
    """A worker that was killed and is not gone: its devices are out of service until it is."""

    #: What is left of it: itself, or what it had started.
    pids: list[int]
    #: Names of these processes.
    names: list[str]
    #: Ids of its devices by resource; empty if it had none.
    devices: dict[str, list[str]]
    #: When it was given up.
    since: float
    #: The same in words.
    reason: str


class NodeStatus(TypedDict):
    """One node of the cluster."""

    node_id: str
    #: ``host`` or ``host:port`` that names the machine to a person.
    address: str
    hostname: str
    is_head: bool
    state: Literal["ALIVE", "DRAINING", "DEAD"]
    #: Totals and what is granted of them, by resource name.
    total: dict[str, float]
    used: dict[str, float]
    labels: dict[str, str]
    #: Bytes of shared memory that objects take, as of the last heartbeat, and may take at most.
    object_store_used: int
    object_store_capacity: int
    #: Bytes of disk that objects take for which there was no memory.
    object_store_spilled: int
    #: Workers that could not be killed.
    quarantined: list[QuarantineStatus]
    #: Seconds for which a living node was not heard of, if several heartbeats are missing; else 0.
    silent: float
    #: Why it is not ALIVE, or "".
    reason: str


class AwaitedNode(TypedDict):
    """A node that was there before the head started again, and has not come back yet."""

    node_id: str
    address: str
    hostname: str


class ActorStatus(TypedDict):
    """One actor that has not ended."""

    actor_id: str
    class_name: str
    #: "" for an actor without a name.
    name: str
    namespace: str
    state: Literal["PENDING", "STARTING", "ALIVE", "RESTARTING", "DEAD"]
    #: "" while it is not placed.
    node_id: str
    pid: int
    restarts: int
    #: What it holds while it lives.
    resources: dict[str, float]


class DeadActorStatus(TypedDict):
    """One actor that died otherwise than by exit_actor, with its last handle or with its owner."""

    actor_id: str
    class_name: str
    #: "" for an actor without a name.
    name: str
    died: float
    #: A sentence.
    reason: str


class Why(TypedDict):
    """Why a demand waits."""

    #: A sentence: which resource, on which node, how much is missing.
    reason: str
    #: No node of the cluster could ever serve it.
    infeasible: bool
    #: The node where least is missing, and of which resource; "" if there is no such node.
    node_id: str
    resource: str
    #: What is needed of it, and what is free there: on its freest device, or in whole devices.
    needed: float
    available: float


class PendingDemand(Why):
    """Requests of one shape that wait for resources."""

    kind: Literal["task", "actor", "placement_group"]
    #: What each of them asks for; of a placement group, one entry per bundle.
    shape: list[dict[str, float]]
    #: How many wait.
    count: int
    #: Names of the functions, classes or groups that wait, without repeats.
    names: list[str]
    #: The jobs whose they are.
    job_ids: list[str]
    #: Since when the oldest waits.
    since: float


class PlacementGroupStatus(TypedDict):
    """One placement group that is not removed."""

    placement_group_id: str
    name: str
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
    state: Literal["PENDING", "CREATED", "RESCHEDULING", "REMOVED"]
    bundles: list[dict[str, float]]
    #: Node of each bundle, "" where it is not placed.
    bundle_nodes: list[str]


class ClusterStatus(TypedDict):
    """Everything that ``miniray status`` shows."""

    #: ``HOST:PORT`` of the head.
    address: str
    version: str
    #: When the cluster was started, and its head: later, if it was lost and started again.
    started: float
    head_started: float
    #: When this was taken.
    time: float
    nodes: list[NodeStatus]
    #: Nodes that a head which started again waits for.
    awaited: list[AwaitedNode]
    #: Sums over the living nodes.
    total: dict[str, float]
    used: dict[str, float]
    actors: list[ActorStatus]
    #: The latest first, so many as are told.
    dead_actors: list[DeadActorStatus]
    pending: list[PendingDemand]
    placement_groups: list[PlacementGroupStatus]
