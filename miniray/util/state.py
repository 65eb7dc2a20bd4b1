"""What there is in the cluster: nodes, actors, workers, jobs, objects, waiting demands, and so on.

Ray's ``ray.util.state``. Most of it comes from the head; objects are requested from every node and
every process on it. Works without ``init()`` where a cluster runs on this machine, as the command
``miniray status`` does.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from typing import TYPE_CHECKING, Any, Generic

from miniray.common.absent import absent, tell_imports
from miniray.common.host_port import same_address
from miniray.common.runtime import runtime_or_none
from miniray.common.state_types import MAX_OBJECTS
from miniray.engines import refuse_on_ray
from miniray.util.memory_records import ask_memory
from miniray.util.state_records import (
    ActorState,
    ClusterEventState,
    ClusterMemoryState,
    HolderState,
    JobState,
    NodeMemoryState,
    NodeState,
    ObjectState,
    PendingDemandState,
    PlacementGroupState,
    State,
    StateT,
    TaskState,
    WorkerState,
    check_all,
    chosen,
)
from miniray.util.task_records import ask_processes, summary_of, task_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.client.command_connection import CommandConnection
    from miniray.common.runtime import RuntimeHead
    from miniray.util.state_records import Filter

__all__ = [
    "ActorState",
    "ClusterEventState",
    "ClusterMemoryState",
    "HolderState",
    "JobState",
    "NodeMemoryState",
    "NodeState",
    "ObjectState",
    "PendingDemandState",
    "PlacementGroupState",
    "TaskState",
    "WorkerState",
    "get_actor",
    "get_cluster_memory",
    "get_job",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_task",
    "get_worker",
    "list_actors",
    "list_cluster_events",
    "list_jobs",
    "list_nodes",
    "list_objects",
    "list_pending_demands",
    "list_placement_groups",
    "list_tasks",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
    "summarize_tasks",
]


#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    **dict.fromkeys(("get_log", "list_logs"), "`miniray logs` shows them, of all nodes"),
    **dict.fromkeys(("api", "common"), "import from miniray.util.state itself what is public"),
    "StateApiClient": "call the functions of this module, with address=",
    "exception": "a cluster that does not answer raises ConnectionError",
    "list_runtime_envs": "get_runtime_context().runtime_env has that of a task or an actor",
}
tell_imports(__name__, _ABSENT)

#: How many records a listing returns unless more are requested.
DEFAULT_LIMIT = 100
#: Seconds that a process may take to list what it holds.
DEFAULT_TIMEOUT = 2.0


#: What can be listed, by its name in `miniray list`: the head's name of it, and its record.
KINDS: dict[str, tuple[str, type[State]]] = {
    "actors": ("actors", ActorState),
    "tasks": ("", TaskState),
    "nodes": ("node_states", NodeState),
    "workers": ("workers", WorkerState),
    "jobs": ("jobs", JobState),
    "groups": ("placement_groups", PlacementGroupState),
    "objects": ("", ObjectState),
    "events": ("events", ClusterEventState),
    "waiting": ("pending", PendingDemandState),
}


def listed(
    source: RuntimeHead | CommandConnection,
    thing: str,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
) -> list[Any]:
    """Return the first records of one of ``KINDS`` from a connected cluster.

    Arguments and errors as of ``list_actors``.
    """
    what, kind = KINDS[thing]
    check_all(kind, filters, limit)
    limit, timeout = operator.index(limit), float(timeout)
    looked_at = MAX_OBJECTS if filters else min(limit, MAX_OBJECTS)
    if thing == "tasks":
        processes, _ = ask_processes(source, timeout, looked_at)
        found: list[Any] = list(task_states(processes))
    elif thing == "objects":
        found = ask_memory(source, looked_at, timeout, detail=True).objects
    else:
        found = [kind.of(data) for data in source.listing(what)]
    return chosen(found, filters, limit)


class _List(Generic[StateT]):
    """Return the first records for which all filters hold.

    Args:
        address: ``HOST:PORT`` of the cluster; that of this process, or of this machine, if None.
        filters: Conditions such as ``("state", "=", "ALIVE")`` that all must hold. Texts are
            compared without regard to case, as in Ray.
        limit: The most records that are returned.
        timeout: Seconds that a process may take to answer; for tasks and objects. What is known of
            one that is later is listed.
        detail: Without effect: records have all their fields.
        raise_on_missing_output: Without effect: nothing is left out.

    Raises:
        ValueError: a filter names no field, or is malformed; or the limit is not positive.
        ConnectionError: there is no such cluster.
    """

    def __init__(self, thing: str, kind: type[StateT]) -> None:
        self._thing = thing
        self._kind = kind

    def __call__(
        self,
        address: str | None = None,
        filters: Sequence[Filter] | None = None,
        limit: int = DEFAULT_LIMIT,
        timeout: float = DEFAULT_TIMEOUT,
        detail: bool = False,
        raise_on_missing_output: bool = True,
    ) -> list[StateT]:
        del detail, raise_on_missing_output
        check_all(self._kind, filters, limit)
        with _source(address) as source:
            return listed(source, self._thing, filters, limit, timeout)


class _Get(Generic[StateT]):
    """Return the record with this hex id, or None. ``address`` as for ``list_actors``."""

    def __init__(self, listing: _List[StateT], field: str) -> None:
        self._listing = listing
        self._field = field

    def __call__(
        self, id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> StateT | None:
        return next(iter(self._listing(address, [(self._field, "=", id)], 1, timeout)), None)


class _Summarize:
    """Return how many there are of each name in each state. Arguments as for ``list_actors``."""

    def __init__(self, thing: str, form: str) -> None:
        self._thing = thing
        self.__doc__ = f"{type(self).__doc__}\n\nReturns:\n    {form}"

    def __call__(
        self,
        address: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        raise_on_missing_output: bool = True,
    ) -> dict[str, Any]:
        del raise_on_missing_output
        with _source(address) as source:
            return summary(source, self._thing, timeout)


#: Actors, then those that have died, the latest last.
list_actors = _List("actors", ActorState)
#: Nodes, then those that were lost.
list_nodes = _List("nodes", NodeState)
#: Workers and drivers.
list_workers = _List("workers", WorkerState)
list_placement_groups = _List("groups", PlacementGroupState)
#: Jobs, ended ones included.
list_jobs = _List("jobs", JobState)
#: What has happened in the cluster, the latest last: 1,000 of each source and severity are
#: remembered.
list_cluster_events = _List("events", ClusterEventState)
#: What waits for resources, and why. What waits for its arguments does not wait for resources.
list_pending_demands = _List("waiting", PendingDemandState)
#: Tasks and calls of actors that have not ended: those that run first, the longest first. Every
#: process is queried for them; nothing is recorded before. With filters, the 10,000 oldest calls of
#: each process are looked at.
list_tasks = _List("tasks", TaskState)
#: Objects, the largest first: their owners, and why each is held. Those in shared memory, small
#: values, which their owners keep, values that are still to come, and handles of actors. Values
#: that were copied to other nodes are listed once for each, and so are large arguments of calls.
#: Objects of a process that is too busy to answer are listed from its node's records, and
#: ``UNKNOWN_STATUS``. With filters, the 10,000 largest are looked at; more are never listed, as in
#: Ray.
list_objects = _List("objects", ObjectState)

get_actor = _Get(list_actors, "actor_id")
get_node = _Get(list_nodes, "node_id")
get_worker = _Get(list_workers, "worker_id")
get_placement_group = _Get(list_placement_groups, "placement_group_id")
get_job = _Get(list_jobs, "job_id")
get_task = _Get(list_tasks, "task_id")


summarize_actors = _Summarize(
    "actors",
    '{"cluster": {"summary": {CLASS: {"class_name": CLASS, "state_counts": {STATE: COUNT}}}, '
    '"total_actors": COUNT, "summary_by": "class"}}',
)
#: Tasks that have ended are counted by their callers, for as long as these live.
summarize_tasks = _Summarize(
    "tasks",
    '{"cluster": {"summary": {NAME: {"func_or_class_name": NAME, "type": TYPE, "state_counts": '
    '{STATE: COUNT}}}, "total_tasks": COUNT, "total_actor_tasks": COUNT, '
    '"total_actor_scheduled": COUNT, "summary_by": "func_name"}}',
)
#: Objects in shared memory, by where they were made; ``list_objects`` lists others, too.
summarize_objects = _Summarize(
    "objects",
    '{"cluster": {"summary": {CALL_SITE: {"total_objects": COUNT, "total_size_mb": SIZE, '
    '"total_num_workers": COUNT, "total_num_nodes": COUNT, "task_state_counts": {STATE: COUNT}, '
    '"ref_type_counts": {TYPE: COUNT}}}, "total_objects": COUNT, "total_size_mb": SIZE, '
    '"summary_by": "callsite"}}',
)


def summary(source: RuntimeHead | CommandConnection, thing: str, timeout: float) -> dict[str, Any]:
    """Return the summary of actors, tasks or objects of a cluster that is connected, as Ray's."""
    if thing == "tasks":
        processes, _ = ask_processes(source, timeout, 0)
        return {"cluster": summary_of(processes)}
    if thing == "objects":
        objects = ask_memory(source, MAX_OBJECTS, timeout, detail=False).objects
        return {"cluster": _summary_of_objects(objects)}
    actors = [ActorState.of(data) for data in source.listing("actors")]
    counts: dict[str, collections.Counter[str]] = {}
    for actor in actors:
        counts.setdefault(actor.class_name, collections.Counter())[actor.state] += 1
    by_class = {
        name: {"class_name": name, "state_counts": dict(states)} for name, states in counts.items()
    }
    return {
        "cluster": {"summary": by_class, "total_actors": len(actors), "summary_by": "class"},
    }


def get_objects(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT
) -> list[ObjectState]:
    """Return the object with this hex id, and its copies on other nodes; as in Ray, a list."""
    return list_objects(address, [("object_id", "=", id)], MAX_OBJECTS, timeout)


def get_cluster_memory(
    address: str | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
) -> ClusterMemoryState:
    """Return what ``miniray memory`` shows: the store of each node, and the largest objects.

    Args:
        address: As for ``list_actors``.
        limit: The most objects that are listed; the numbers are of all.
        timeout: As for ``list_actors``.
        detail: List what is not in shared memory, too: small values, values that are still to come,
            and handles of actors.

    Raises:
        ValueError: the limit is not positive.
        ConnectionError: there is no such cluster.
    """
    check_all(ObjectState, None, limit)
    with _source(address, "util.memory") as source:
        return ask_memory(source, operator.index(limit), float(timeout), detail=bool(detail))


def _summary_of_objects(objects: list[ObjectState]) -> dict[str, Any]:
    by_site: dict[str, list[ObjectState]] = {}
    for found in objects:
        by_site.setdefault(found.call_site, []).append(found)
    return {
        "summary": {site: _summary_of(found) for site, found in by_site.items()},
        "total_objects": len(objects),
        "total_size_mb": sum(found.object_size for found in objects) / 2**20,
        "summary_by": "callsite",
    }


def _summary_of(objects: list[ObjectState]) -> dict[str, Any]:
    return {
        "total_objects": len(objects),
        "total_size_mb": sum(found.object_size for found in objects) / 2**20,
        "total_num_workers": len({found.owner_id for found in objects}),
        "total_num_nodes": len({found.node_id for found in objects}),
        "task_state_counts": dict(collections.Counter(found.task_status for found in objects)),
        "ref_type_counts": dict(collections.Counter(found.reference_type for found in objects)),
    }


@contextlib.contextmanager
def _source(
    address: str | None, capability: str = "util.state"
) -> Iterator[RuntimeHead | CommandConnection]:
    """Yield the cluster of this process, or attach to another one for the time."""
    runtime = runtime_or_none()
    own = runtime.context().gcs_address if runtime is not None else ""
    if runtime is not None and (address in (None, "auto") or same_address(address, own)):
        refuse_on_ray(capability)
        yield runtime.head
        return
    from miniray.client.command_connection import connect_for_cli

    with contextlib.closing(connect_for_cli(address, "address=", None)) as connection:
        yield connection


if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

    def __getattr__(name):
        raise absent(__name__, name, _ABSENT)
