"""Plain data about a cluster, for `miniray status` and `miniray memory`.

The head fills a ``ClusterStatus``: JSON-compatible, ids are hex. Processes and daemons fill a
``NodeMemory``: ids are bytes. Times are seconds since the epoch, amounts are units (memory: bytes).
"""

from __future__ import annotations

from typing import Literal, TypedDict

#: States of an actor: to its callers, and in the head's directory.
PENDING, ALIVE, RESTARTING, DEAD = "PENDING", "ALIVE", "RESTARTING", "DEAD"

#: Where the head's key-values have the train runs of a cluster, each as JSON.
TRAIN_RUNS = "train_runs"


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
    #: A sentence about it.
    reason: str


class NodeStatus(TypedDict):
    """One node of the cluster."""

    node_id: str
    #: ``host`` or ``host:port`` that names the machine to a person.
    address: str
    hostname: str
    #: Folder of its session on that machine; its logs are in ``logs``.
    session_dir: str
    is_head: bool
    state: Literal["ALIVE", "DRAINING", "DEAD"]
    #: Totals and granted amounts, by resource name.
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
    #: Seconds since the last message of a living node, if several heartbeats are missing; else 0.
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
    #: Since when it is in this state.
    since: float
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
    #: The reason in a word, one of ``ReasonKind`` (head/scheduling/reasons.py).
    cause: str
    #: No node of the cluster could ever serve it.
    infeasible: bool
    #: The node where least is missing, and the resource; "" if there is no such node.
    node_id: str
    resource: str
    #: Needed and free amounts there: on its freest device, or in whole devices.
    needed: float
    available: float


class PendingDemand(Why):
    """Requests of one shape that wait for resources."""

    kind: Literal["task", "actor", "job", "placement_group"]
    #: What each of them requests; of a placement group, one entry per bundle.
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
    #: The latest first, a bounded number.
    dead_actors: list[DeadActorStatus]
    pending: list[PendingDemand]
    placement_groups: list[PlacementGroupStatus]


#: Ray's names for why an object is held. PINNED_IN_MEMORY: a process has it mapped;
#: UNKNOWN_STATUS: the process that records it did not answer.
ReferenceType = Literal[
    "USED_BY_PENDING_TASK",
    "LOCAL_REFERENCE",
    "CAPTURED_IN_OBJECT",
    "ACTOR_HANDLE",
    "PINNED_IN_MEMORY",
    "UNKNOWN_STATUS",
]

#: How many objects a report has at most: as in Ray, and few enough for one message.
MAX_OBJECTS = 10_000
#: The name of a local reference that cannot be dropped: a copy was pickled by the user, or
#: captured by the code of a function.
PICKLED = "pickled"

ProcessType = Literal["DRIVER", "WORKER", "NODE"]

#: HELD: its owner has not freed it. WRITING: it is not complete yet. FREED: its owner has no
#: use for it, and it counts until the last process has unmapped it.
SegmentState = Literal["HELD", "WRITING", "FREED"]


def order(size: int, segment: int, name: bytes) -> tuple[int, int, bytes]:
    """Return what the largest come first by.

    Each daemon and process chooses by itself which records it reports. For the reports to fit
    together, a piece of memory has the same place in the order of all of them.

    Args:
        size: Of the value.
        segment: That it was written to; 0: none.
        name: Id of that segment's node, or of the object if there is no segment.
    """
    return (-size, segment, name)


class Hold(TypedDict):
    """One reason why a process holds an object."""

    kind: ReferenceType
    #: How many refs, calls or objects.
    count: int
    #: Some of the calls' names, or of the outer objects' ids in hex.
    names: list[str]


class ObjectRow(TypedDict):
    """One process's record of an object."""

    #: Empty for the arguments of a call, which are no object of their own.
    id: bytes
    owner: bytes
    #: The reporter: the owner, a borrower, or the daemon in place of an owner that has ended.
    process: bytes
    size: int
    #: Where in shared memory it is; empty and 0 for a small value, or one that is still to come.
    node: bytes
    segment: int
    #: Ray's: NIL for values of ``put``, or the state of the task that makes it.
    status: str
    #: Where it was put, or what made it; empty if that is not recorded.
    call_site: str
    holds: list[Hold]
    #: Owner's side: processes that have borrowed it.
    borrowers: list[bytes]


class ProcessRow(TypedDict):
    """A process of a node."""

    process: bytes
    pid: int
    type: ProcessType
    #: The class of its actor, or its task; empty if it is idle.
    name: str
    #: Whether it answered in time: its user code may keep it busy.
    answered: bool
    #: Small values that it owns, in its own memory, and their bytes.
    inline: int
    inline_bytes: int


class ObjectsHeld(TypedDict):
    """What a process answers its daemon."""

    #: As in ``ProcessRow``.
    inline: int
    inline_bytes: int
    #: The largest.
    objects: list[ObjectRow]


class SegmentRow(TypedDict):
    """A piece of a node's shared memory that a value is in."""

    number: int
    #: Of the value, and of the memory that it takes.
    size: int
    allocated: int
    owner: bytes
    writer: bytes
    state: SegmentState
    #: As ``ObjectRow.call_site``.
    call_site: str
    #: Processes that have it mapped.
    mappers: list[bytes]
    #: Node and segment that it is a copy of; empty and 0 if it is the first.
    source_node: bytes
    source: int
    spilled: bool


class StoreTotals(TypedDict):
    """All shared memory of a node in numbers; but for ``segments`` all are bytes."""

    capacity: int
    #: What values are in, those that are freed and still mapped included.
    used: int
    #: What waits, warm, for the next value.
    pooled: int
    #: Of ``used``: memory that is freed and still mapped, and memory that is being written.
    freed: int
    writing: int
    #: On disk.
    spilled: int
    segments: int
    #: Bytes that are freed and still mapped, by process.
    freed_by: dict[bytes, int]


class NodeMemory(TypedDict):
    """The report of a node's daemon."""

    node: bytes
    #: Why it gave no report, or "".
    reason: str
    totals: StoreTotals
    processes: list[ProcessRow]
    #: The largest of each.
    segments: list[SegmentRow]
    objects: list[ObjectRow]


class OwnMemory(TypedDict):
    """What a node's daemon keeps by itself."""

    pid: int
    #: The largest of each: all of them, unless there are more than ``MAX_OBJECTS``.
    segments: list[SegmentRow]
    #: Those whose owners have exited as planned.
    adopted: list[ObjectRow]
    #: How many entries each other table has.
    tables: dict[str, int]
