"""What there is in the cluster: nodes, actors, workers, jobs, objects, waiting demands, and so on.

Ray's ``ray.util.state``. Most of it the head knows; objects are asked of every node, and there of
every process. Works without ``init()`` where a cluster runs on this machine, as the command
``miniray status`` does.
"""

from __future__ import annotations

import collections
import contextlib
import operator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miniray.common.absent import absent, tell_imports
from miniray.common.host_port import same_address
from miniray.common.runtime import runtime_or_none
from miniray.common.state_types import MAX_OBJECTS
from miniray.util.memory_records import cluster_memory
from miniray.util.state_records import (
    ActorState,
    ClusterMemoryState,
    HolderState,
    JobState,
    NodeMemoryState,
    NodeState,
    ObjectState,
    PendingDemandState,
    PlacementGroupState,
    StateT,
    WorkerState,
    check_all,
    chosen,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.client.command_connection import CommandConnection
    from miniray.common.runtime import RuntimeHead
    from miniray.util.state_records import Filter

__all__ = [
    "ActorState",
    "ClusterMemoryState",
    "HolderState",
    "JobState",
    "NodeMemoryState",
    "NodeState",
    "ObjectState",
    "PendingDemandState",
    "PlacementGroupState",
    "WorkerState",
    "get_actor",
    "get_cluster_memory",
    "get_job",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_worker",
    "list_actors",
    "list_jobs",
    "list_nodes",
    "list_objects",
    "list_pending_demands",
    "list_placement_groups",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
]

_NO_RECORDS = "tasks are not recorded; list_pending_demands() has those that wait for resources"
_LOG_FILES = "logs are files, in the folder logs of init().address_info['session_dir']"

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    **dict.fromkeys(("get_task", "list_tasks", "summarize_tasks"), _NO_RECORDS),
    **dict.fromkeys(("get_log", "list_logs"), _LOG_FILES),
    "StateApiClient": "call the functions of this module, with address=",
    "list_cluster_events": "list_nodes() and list_actors() have what was lost, with the reason",
    "list_runtime_envs": "get_runtime_context().runtime_env tells that of a task or an actor",
}
tell_imports(__name__, _ABSENT)

ListedT_co = TypeVar("ListedT_co", covariant=True)

#: How many records a listing returns unless more are asked for.
DEFAULT_LIMIT = 100
#: Seconds that a process may take to tell what it holds.
DEFAULT_TIMEOUT = 2.0


class _List(Protocol[StateT]):
    """Return the first records for which all filters hold.

    Args:
        address: ``HOST:PORT`` of the cluster; that of this process, or of this machine, if None.
        filters: Conditions such as ``("state", "=", "ALIVE")`` that all must hold. Texts are
            compared without regard to case, as in Ray.
        limit: The most records that are returned.
        timeout: Without effect: the head answers at once.
        detail: Without effect: records have all their fields.
        raise_on_missing_output: Without effect: nothing is left out.

    Raises:
        ValueError: a filter names no field, or is malformed; or the limit is not positive.
        ConnectionError: there is no such cluster.
    """

    def __call__(
        self,
        address: str | None = None,
        filters: Sequence[Filter] | None = None,
        limit: int = DEFAULT_LIMIT,
        timeout: float = DEFAULT_TIMEOUT,
        detail: bool = False,
        raise_on_missing_output: bool = True,
    ) -> list[StateT]: ...


class _Get(Protocol[ListedT_co]):
    """Return the record with this hex id, or None. ``address`` as for ``list_actors``."""

    def __call__(
        self, id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> ListedT_co | None: ...


def _lists(name: str, what: str, kind: type[StateT]) -> _List[StateT]:
    """Return the function of this name: it makes records of one of the head's listings."""

    def listing(
        address: str | None = None,
        filters: Sequence[Filter] | None = None,
        limit: int = DEFAULT_LIMIT,
        timeout: float = DEFAULT_TIMEOUT,
        detail: bool = False,
        raise_on_missing_output: bool = True,
    ) -> list[StateT]:
        del timeout, detail, raise_on_missing_output
        check_all(kind, filters, limit)
        return chosen([kind.of(data) for data in _ask(address, what)], filters, limit)

    listing.__name__ = listing.__qualname__ = name
    listing.__doc__ = _List.__doc__
    return listing


def _gets(name: str, listing: _List[StateT]) -> _Get[StateT]:
    """Return the function ``get_NAME``, which finds the record with a certain ``NAME_id``."""

    def get(id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT) -> StateT | None:
        return next(iter(listing(address, [(f"{name}_id", "=", id)], 1, timeout)), None)

    get.__name__ = get.__qualname__ = f"get_{name}"
    get.__doc__ = _Get.__doc__
    return get


#: Actors, then those that have died, the latest last.
list_actors = _lists("list_actors", "actors", ActorState)
#: Nodes, then those that were lost.
list_nodes = _lists("list_nodes", "node_states", NodeState)
#: Workers and drivers.
list_workers = _lists("list_workers", "workers", WorkerState)
list_placement_groups = _lists("list_placement_groups", "placement_groups", PlacementGroupState)
#: Jobs, ended ones included.
list_jobs = _lists("list_jobs", "jobs", JobState)
#: What waits for resources, and why. What waits for its arguments does not wait for resources.
list_pending_demands = _lists("list_pending_demands", "pending", PendingDemandState)

get_actor = _gets("actor", list_actors)
get_node = _gets("node", list_nodes)
get_worker = _gets("worker", list_workers)
get_placement_group = _gets("placement_group", list_placement_groups)
get_job = _gets("job", list_jobs)


def summarize_actors(
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
) -> dict[str, Any]:
    """Return how many actors of each class are in each state. Arguments as for ``list_actors``.

    Returns:
        Ray's form: ``{"cluster": {"summary": {CLASS: {"class_name": CLASS, "state_counts":
        {STATE: COUNT}}}, "total_actors": COUNT, "summary_by": "class"}}``.
    """
    del timeout, raise_on_missing_output
    actors = [ActorState.of(data) for data in _ask(address, "actors")]
    counts: dict[str, collections.Counter[str]] = {}
    for actor in actors:
        counts.setdefault(actor.class_name, collections.Counter())[actor.state] += 1
    summary = {
        name: {"class_name": name, "state_counts": dict(states)} for name, states in counts.items()
    }
    return {
        "cluster": {"summary": summary, "total_actors": len(actors), "summary_by": "class"},
    }


def list_objects(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
) -> list[ObjectState]:
    """Return the objects, the largest first: whose they are, and why each is held.

    Those in shared memory, small values, which their owners keep, values that are still to come,
    and handles of actors. Values that were copied to other nodes are listed once for each, and so
    are large arguments of calls. With filters, the 10,000 largest are looked at; more are never
    listed, as in Ray.

    Args:
        address: As for ``list_actors``.
        filters: As for ``list_actors``.
        limit: The most records that are returned.
        timeout: Seconds that a process may take to tell what it holds. What one that is too busy
            owns is listed with what its node knows of it, and ``UNKNOWN_STATUS``.
        detail: Without effect: records have all their fields.
        raise_on_missing_output: Without effect: see ``timeout``.

    Raises:
        ValueError: a filter names no field, or is malformed; or the limit is not positive.
        ConnectionError: there is no such cluster.
    """
    del detail, raise_on_missing_output
    check_all(ObjectState, filters, limit)
    looked_at = MAX_OBJECTS if filters else limit
    memory = get_cluster_memory(address, looked_at, timeout, detail=True)
    return chosen(memory.objects, filters, limit)


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
        timeout: As for ``list_objects``.
        detail: List what is not in shared memory, too: small values, values that are still to come,
            and handles of actors.

    Raises:
        ValueError: the limit is not positive.
        ConnectionError: there is no such cluster.
    """
    check_all(ObjectState, None, limit)
    with _source(address) as source:
        reports = source.memory_report(operator.index(limit), bool(detail), float(timeout))
        nodes = source.listing("node_states")
    return cluster_memory(reports, nodes, limit, detail=detail)


def summarize_objects(
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
) -> dict[str, Any]:
    """Return how many objects in shared memory were made where, and how large they are.

    Arguments as for ``list_objects``. That one lists what is not in shared memory, too.

    Returns:
        Ray's form: ``{"cluster": {"summary": {CALL_SITE: {"total_objects": COUNT,
        "total_size_mb": SIZE, "total_num_workers": COUNT, "total_num_nodes": COUNT,
        "task_state_counts": {STATE: COUNT}, "ref_type_counts": {TYPE: COUNT}}},
        "total_objects": COUNT, "total_size_mb": SIZE, "summary_by": "callsite"}}``.
    """
    del raise_on_missing_output
    objects = get_cluster_memory(address, MAX_OBJECTS, timeout).objects
    by_site: dict[str, list[ObjectState]] = {}
    for found in objects:
        by_site.setdefault(found.call_site, []).append(found)
    return {
        "cluster": {
            "summary": {site: _summary_of(found) for site, found in by_site.items()},
            "total_objects": len(objects),
            "total_size_mb": sum(found.object_size for found in objects) / 2**20,
            "summary_by": "callsite",
        }
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


def _ask(address: str | None, what: str) -> list[dict[str, Any]]:
    with _source(address) as source:
        return source.listing(what)


@contextlib.contextmanager
def _source(address: str | None) -> Iterator[RuntimeHead | CommandConnection]:
    """Yield the cluster of this process, or attach to another one for the time."""
    runtime = runtime_or_none()
    own = runtime.context().address if runtime is not None else ""
    if runtime is not None and (address in (None, "auto") or same_address(address, own)):
        yield runtime.head
        return
    from miniray.client.command_connection import connect_for_cli

    with contextlib.closing(connect_for_cli(address, "address=", None)) as connection:
        yield connection


if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

    def __getattr__(name):
        raise absent(__name__, name, _ABSENT)
