"""Which processes are meant: by the id, name or class of an actor, a pid, or a training run."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from miniray.common.names import short_name
from miniray.common.object_ref import short_id

#: Hex digits that may stand for an actor's id, at least; digits of a pid, at most.
_SHORTEST_ID, _LONGEST_PID = 6, 7
#: Seconds that processes may take to say which rank they are.
_SOON = 1.0


#: A process, as the head lists it among workers.
Process = dict[str, Any]


class ClusterSource(Protocol):
    """The requests of a command or the page to a cluster."""

    def listing(self, what: str) -> list[dict[str, Any]]:
        """Return one of the head's listings."""

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        """Return (node id, answer or None, why there is none) of each node queried."""


def answers(
    cluster: ClusterSource, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """Ask nodes; return their answers by hex id, and a sentence on each that has none."""
    told = cluster.ask_nodes(what, arguments, seconds, nodes)
    notes = [f"Node {node.hex()[:8]}: {why}." for node, _, why in told if why]
    return {node.hex(): answer for node, answer, why in told if not why}, notes


class ProcessTold(NamedTuple):
    """What a driver or worker answers to a question."""

    node: bytes
    process: bytes
    pid: int
    role: str
    job: bytes
    #: None if it does not answer.
    told: Any
    #: Why it does not.
    missing: str


def answers_of_processes(
    cluster: ClusterSource,
    what: str,
    arguments: tuple[Any, ...],
    seconds: float,
    only: Any = None,
    nodes: Any = None,
) -> tuple[list[ProcessTold], dict[bytes, str]]:
    """Ask processes of these ids or pids, or all; also return why nodes have not passed it on."""
    told = cluster.ask_nodes("processes", (what, arguments, only), seconds, nodes)
    found = [ProcessTold(node, *each) for node, processes, _ in told for each in processes or ()]
    return found, {node: why for node, _, why in told if why}


class TargetError(ValueError):
    """Nothing that lives is meant, or too much."""


def process_called(cluster: ClusterSource, of: str) -> tuple[list[str], int]:
    """Return the pid that ``PID`` or ``NODE:PID`` names, and its nodes (none: all); 0: no pid.

    Raises:
        TargetError: There is no such node.
    """
    node, _, pid = of.rpartition(":")
    if not pid.isdigit() or len(pid) > _LONGEST_PID:
        return [], 0
    nodes = [each["node_id"] for each in cluster.listing("node_states")] if node else []
    meant = [each for each in nodes if each.startswith(node)]
    if node and not meant:
        raise TargetError(f"No node has an id that begins with {node}.")
    return meant, int(pid)


def is_called(of: str, id: str) -> bool:
    """Return whether an id in hex is written so: whole, its first digits, or short."""
    return of == short_id(id) or (len(of) >= _SHORTEST_ID and id.startswith(of))


def actors_called(cluster: ClusterSource, of: str) -> list[dict[str, Any]]:
    """Return the actors of an id (or its first digits), a name, a class or a training run.

    Dead ones are among them, as far as the head lists them.
    """
    actors = cluster.listing("actors")
    found = [each for each in actors if is_called(of, each["actor_id"])]
    found = found or [each for each in actors if each["name"] == of]
    found = found or [
        each for each in actors if of in (each["class_name"], short_name(each["class_name"]))
    ]
    if found or (run := run_called(cluster, of)) is None:
        return found
    # The ranks are its controller's actors: their ids begin with the id of that process.
    return [each for each in actors if each["actor_id"].startswith(run["worker_id"])]


def run_called(cluster: ClusterSource, of: str) -> dict[str, Any] | None:
    """Return the training run of an id or a name: of several, one that goes on, or the newest."""
    runs = [each for each in cluster.listing("runs") if of in (each["name"], each["run_id"])]
    return max(runs, key=lambda run: (run["alive"], float(run["started"])), default=None)


def find(cluster: ClusterSource, of: str, rank: int | None = None) -> list[Process]:
    """Return the processes that are meant.

    Args:
        cluster: To look in.
        of: A pid, ``NODE:PID``, the id (or its first digits), name or class of actors, or the name
            of a training run.
        rank: Of a run, this rank only; those that do not answer, if no other one is it.

    Raises:
        TargetError: Nothing that lives is called so, or there is no such rank.
    """
    processes = cluster.listing("workers")
    nodes, pid = process_called(cluster, of)
    chosen = [] if pid else actors_called(cluster, of)
    ids = {actor["actor_id"] for actor in chosen}
    if pid:
        found = [each for each in processes if each["pid"] == pid]
        found = [each for each in found if not nodes or each["node_id"] in nodes]
        if not found:
            raise TargetError(f"No process of this cluster has the pid {pid}.")
    elif not chosen:
        raise TargetError(
            f"Nothing that runs is called {of!r}: give a pid, NODE:PID, the id, name or class of "
            "an actor, or the name of a training run. `miniray status` shows what runs."
        )
    elif not (found := [each for each in processes if each["actor_id"] in ids]):
        states = ", ".join(sorted({actor["state"] for actor in chosen}))
        raise TargetError(f"{of} has no process now: it is {states}. `miniray why {of}` says why.")
    if rank is None:
        return found
    told, _ = answers_of_processes(cluster, "probe", ("rank",), _SOON, *ids_of(found))
    ranks = {each.process.hex(): each.told for each in told if not each.missing}
    meant = [each for each in found if ranks.get(each["worker_id"]) == rank]
    # One that holds Python's lock cannot say its rank.
    meant = meant or [each for each in found if each["worker_id"] not in ranks]
    if not meant:
        raise TargetError(f"{of} has no rank {rank}.")
    return meant


def ids_of(processes: list[Process]) -> tuple[list[bytes], list[bytes]]:
    """Return the ids of processes, and of their nodes."""
    nodes = sorted({each["node_id"] for each in processes})
    ids = [bytes.fromhex(each["worker_id"]) for each in processes]
    return ids, [*map(bytes.fromhex, nodes)]
