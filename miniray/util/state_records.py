"""What the listings of ``miniray.util.state`` consist of, with Ray's names.

Responsible for turning the head's plain data into records, and for choosing among them; sends no
requests. Ids are hex strings, amounts are units (memory: bytes), times in milliseconds are named
so.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from miniray.common.names import short_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.common.state_types import ReferenceType

#: (field, "=" or "!=", value); all of them must hold.
Filter = tuple[str, str, Any]

StateT = TypeVar("StateT", bound="State")


@dataclasses.dataclass(frozen=True)
class State:
    """A record; its fields can be read as attributes and as items."""

    #: What the head calls fields that have another name there.
    _HEAD_NAMES: ClassVar[Mapping[str, str]] = {}

    def __getitem__(self, field: str) -> Any:
        """Return a field by its name; KeyError if there is none."""
        try:
            return getattr(self, field)
        except AttributeError:
            raise KeyError(field) from None

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field by its name, or the default."""
        return getattr(self, field, default)

    def asdict(self) -> dict[str, Any]:
        """Return all fields."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls: type[StateT], data: Mapping[str, Any]) -> StateT:
        """Make a record from the head's data; a missing value is None."""
        names = {field: cls._HEAD_NAMES.get(field, field) for field in _fields(cls)}
        return cls(**{field: data.get(name) for field, name in names.items()})


@dataclasses.dataclass(frozen=True)
class ActorState(State):
    """An actor, dead ones included."""

    actor_id: str
    class_name: str
    #: DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD.
    state: str
    job_id: str
    #: None without a name.
    name: str | None
    #: None while it is not placed.
    node_id: str | None
    #: 0 while it has no process.
    pid: int
    ray_namespace: str
    required_resources: dict[str, float]
    #: Why it is dead, as a sentence; None while it is not.
    death_cause: str | None
    #: Why it is dead, as the name of a ``miniray.exceptions.DeathCause``.
    death_kind: str | None
    is_detached: bool
    placement_group_id: str | None
    num_restarts: int
    #: Its constructor runs: STARTING, which Ray calls PENDING_CREATION too.
    is_starting: bool
    #: Since when it waits, starts, lives or is dead, in seconds since the epoch.
    since: float
    #: Which resources it waits for, as a sentence; None if it does not.
    why_waits: str | None

    _HEAD_NAMES = {"ray_namespace": "namespace", "num_restarts": "restarts"}  # noqa: RUF012

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ActorState:
        """Make a record from the head's data."""
        state = data["state"]
        if state in ("PENDING", "STARTING"):
            state = "PENDING_CREATION" if data.get("started", True) else "DEPENDENCIES_UNREADY"
        return super().of(
            {
                "required_resources": {},
                **data,
                "class_name": short_name(data["class_name"]),
                "state": state,
                "is_starting": data["state"] == "STARTING",
                "why_waits": data.get("why_waits") or None,
                "name": data["name"] or None,
                "node_id": data["node_id"] or None,
            }
        )


@dataclasses.dataclass(frozen=True)
class NodeState(State):
    """A node, lost ones included."""

    node_id: str
    node_ip: str
    is_head_node: bool
    #: ALIVE, DRAINING (gets no new work) or DEAD.
    state: str
    #: Why it is not ALIVE; None otherwise.
    state_message: str | None
    node_name: str
    resources_total: dict[str, float]
    labels: dict[str, str]
    #: Workers that were killed and are not gone, each with ``pids`` and ``names`` of what is left
    #: of it, ``devices`` (ids by resource) that are out of service until it is gone, ``since``
    #: (seconds since the epoch) and ``reason`` (a sentence).
    quarantined: list[dict[str, Any]]

    _HEAD_NAMES = {  # noqa: RUF012
        "node_ip": "address",
        "is_head_node": "is_head",
        "state_message": "reason",
        "node_name": "hostname",
        "resources_total": "total",
    }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> NodeState:
        """Make a record from the head's data."""
        return super().of({**data, "reason": data["reason"] or None})


@dataclasses.dataclass(frozen=True)
class WorkerState(State):
    """A worker or driver that is attached."""

    worker_id: str
    is_alive: bool
    #: WORKER or DRIVER.
    worker_type: str
    node_id: str
    pid: int
    job_id: str
    #: The class of its actor, or the task for which it was started; empty if it is idle.
    name: str
    #: Empty if it runs tasks.
    actor_id: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> WorkerState:
        """Make a record from the head's data."""
        name = short_name(data["name"])
        kind = data["kind"].upper()
        return super().of({**data, "is_alive": True, "worker_type": kind, "name": name})


@dataclasses.dataclass(frozen=True)
class TaskState(State):
    """A task or a call of an actor that has not ended."""

    task_id: str
    #: As it was called: of an actor ``Class.method``.
    name: str
    #: NORMAL_TASK, ACTOR_TASK or ACTOR_CREATION_TASK.
    type: str
    #: PENDING_ARGS_AVAIL, PENDING_NODE_ASSIGNMENT, SUBMITTED_TO_WORKER (it waits there for its
    #: turn) or RUNNING.
    state: str
    #: How often it was repeated.
    attempt_number: int
    #: Seconds for which it runs; None if it does not.
    seconds: float | None
    #: Of its caller.
    job_id: str
    caller_id: str
    #: Empty of a task.
    actor_id: str
    #: Where it was sent; empty while it was not.
    node_id: str
    worker_id: str
    worker_pid: int
    #: Ids of arguments that have no value yet.
    waits_for: list[str]
    #: Ids of its results.
    makes: list[str]


@dataclasses.dataclass(frozen=True)
class ClusterEventState(State):
    """Something that has happened in the cluster."""

    event_id: int
    #: Seconds since the epoch.
    time: float
    #: INFO, WARNING or ERROR.
    severity: str
    #: NODE, ACTOR, WORKER, DEVICE, OBJECT, JOB, HEAD or SECURITY.
    source_type: str
    #: What has happened to it: ``joined``, ``died``, ``killed_for_memory``.
    event_type: str
    #: What has happened, in a sentence with the cause.
    message: str
    #: Hex ids of its subjects.
    custom_fields: dict[str, str]


@dataclasses.dataclass(frozen=True)
class PlacementGroupState(State):
    """A placement group, removed ones included."""

    placement_group_id: str
    name: str
    #: Empty if its creator is gone.
    creator_job_id: str
    #: PENDING, CREATED, RESCHEDULING or REMOVED.
    state: str
    strategy: str
    #: Amounts by resource, and the node of each bundle ("" where it is not placed).
    bundles: list[dict[str, float]]
    bundle_nodes: list[str]
    is_detached: bool
    stats: dict[str, Any]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> PlacementGroupState:
        """Make a record from the head's data."""
        nodes = list(data["bundles_to_node_id"].values())
        return super().of(
            {**data, "bundles": list(data["bundles"].values()), "bundle_nodes": nodes}
        )


@dataclasses.dataclass(frozen=True)
class JobState(State):
    """A job: one driver and its tasks and actors."""

    job_id: str
    #: Always DRIVER: the program that called ``init()``.
    type: str
    #: RUNNING or SUCCEEDED (how a driver ended is not known, as in Ray).
    status: str
    entrypoint: str
    namespace: str
    driver_node_id: str
    #: ``{"pid": ..., "node_id": ...}``.
    driver_info: dict[str, Any]
    #: Milliseconds since the epoch.
    start_time: int
    #: None while it runs.
    end_time: int | None
    #: Of its ``JobConfig``.
    metadata: dict[str, str]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> JobState:
        """Make a record from the head's data."""
        ended, node = data["end_time"], data["driver_node_id"]
        return super().of(
            {
                **data,
                "type": "DRIVER",
                "status": "RUNNING" if ended is None else "SUCCEEDED",
                "driver_info": {"pid": data["driver_pid"], "node_id": node},
                "start_time": round(1000 * data["start_time"]),
                "end_time": None if ended is None else round(1000 * ended),
            }
        )


@dataclasses.dataclass(frozen=True)
class PendingDemandState(State):
    """Requests of one shape that wait for resources."""

    #: task, actor or placement_group.
    kind: str
    #: Functions, classes or groups that wait, and their jobs.
    names: list[str]
    job_ids: list[str]
    #: What each requests; of a placement group, one entry per bundle.
    shape: list[dict[str, float]]
    count: int
    #: Since when the oldest waits, in seconds since the epoch.
    since: float
    #: Why, in a sentence and in a word, such as "busy".
    reason: str
    cause: str
    #: No node of the cluster could ever serve it.
    infeasible: bool
    #: The node where least is missing, and what is missing there; empty if there is no such node.
    node_id: str
    resource: str
    needed: float
    available: float

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> PendingDemandState:
        """Make a record from the head's data."""
        return super().of({**data, "names": [short_name(name) for name in data["names"]]})


@dataclasses.dataclass(frozen=True)
class HolderState(State):
    """A reason why a process holds an object."""

    #: As ``ObjectState.reference_type``.
    reference_type: ReferenceType
    #: How many refs, calls or objects.
    count: int
    #: Some of the calls, or ids of the objects that contain it.
    names: list[str]
    #: The process, for a person.
    process: str
    worker_id: str
    pid: int
    node_id: str


@dataclasses.dataclass(frozen=True)
class ObjectState(State):
    """An object, or a copy of one on another node, or large arguments of a call."""

    #: Empty for arguments, and where no process reported which object it is.
    object_id: str
    #: Bytes.
    object_size: int
    #: Of the task that makes it: PENDING_ARGS_AVAIL, PENDING_NODE_ASSIGNMENT,
    #: SUBMITTED_TO_WORKER, FINISHED or FAILED; NIL for values of ``put``.
    task_status: str
    #: The first reason why it is held: USED_BY_PENDING_TASK, LOCAL_REFERENCE,
    #: CAPTURED_IN_OBJECT, ACTOR_HANDLE, PINNED_IN_MEMORY (it is mapped somewhere) or
    #: UNKNOWN_STATUS (its process did not answer).
    reference_type: str
    #: ``FILE:LINE in FUNCTION`` of a put, or the name of the task or method that made it.
    call_site: str
    #: Of the owner: DRIVER, WORKER, NODE for a daemon that keeps it for a detached actor, or "" if
    #: it is gone.
    type: str
    #: Of the owner; 0 if it is gone.
    pid: int
    #: Of the owner's node.
    ip: str
    owner_id: str
    #: The owner, for a person.
    owner: str
    #: Where the bytes are.
    node_id: str
    #: HELD, PENDING (it has no value yet), WRITING, or FREED: its owner freed it, and it counts
    #: until the last process has unmapped it.
    state: str
    #: Bytes of shared memory that it takes; 0 if it is in its owner's own memory.
    allocated: int
    #: Another node's segment was copied to this one.
    is_copy: bool
    #: Its bytes are on disk.
    is_spilled: bool
    #: Every reason why it is held, and the holder.
    holders: list[HolderState]
    #: Why it is held, as a sentence.
    why: str


@dataclasses.dataclass(frozen=True)
class NodeMemoryState(State):
    """The object store of a node; sizes are bytes."""

    node_id: str
    node_ip: str
    #: Why the node did not answer; None if it did.
    state_message: str | None
    capacity: int
    #: In values, those that are freed and still mapped included.
    used: int
    #: Waits, warm, for the next values.
    pooled: int
    #: Of ``used``: freed and still mapped; and not complete yet.
    freed: int
    writing: int
    #: On disk.
    spilled: int
    num_segments: int
    #: Bytes that are freed and still mapped, by process.
    freed_by: dict[str, int]
    #: Small values in the memory of processes of this node.
    num_inline: int
    inline_bytes: int
    #: Processes that did not list in time what they hold.
    no_answer: list[str]


@dataclasses.dataclass(frozen=True)
class ClusterMemoryState(State):
    """The object store of a cluster."""

    nodes: list[NodeMemoryState]
    #: The largest first.
    objects: list[ObjectState]


def _fields(kind: type[State]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def check_all(kind: type[State], filters: Sequence[Filter] | None, limit: int) -> None:
    """Refuse filters that no listing can answer, before any request."""
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}.")
    for condition in filters or ():
        _check(condition, kind)


def chosen(records: list[StateT], filters: Sequence[Filter] | None, limit: int) -> list[StateT]:
    """Return the first records of those for which all conditions hold."""
    found = [record for record in records if all(_holds(record, each) for each in filters or ())]
    return found[:limit]


def _check(condition: Filter, kind: type[State]) -> None:
    if not isinstance(condition, (tuple, list)) or len(condition) != 3:
        raise ValueError(f"A filter is (field, '=' or '!=', value), not {condition!r}.")
    field, predicate, _ = condition
    known = sorted(_fields(kind))
    if field not in known:
        raise ValueError(f"{kind.__name__} has no field {field!r} to filter by; it has {known}.")
    if predicate not in ("=", "!="):
        raise ValueError(f"The predicate of a filter is '=' or '!=', not {predicate!r}.")


def _holds(record: State, condition: Filter) -> bool:
    field, predicate, value = condition
    return _same(record[field], value) == (predicate == "=")


def _same(actual: Any, wanted: Any) -> bool:
    """Compare as Ray does: without regard to case; texts may stand for numbers and truth."""
    if isinstance(wanted, str) and (actual is None or isinstance(actual, (str, int, float))):
        return str(actual).lower() == wanted.lower()
    return bool(actual == wanted)
