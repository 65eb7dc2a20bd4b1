"""Which processes are meant: by the id, name or class of an actor, a pid, or a training run."""

from __future__ import annotations

from typing import Any, Protocol

from miniray.common.names import short_name

#: Hex digits that may stand for an actor's id, at least; digits of a pid, at most.
_SHORTEST_ID, _LONGEST_PID = 6, 7
#: Seconds that processes may take to say which rank they are.
_SOON = 1.0
#: Names of the placement groups of runs: ``train-NAME-1a2b3c4d``.
_RUN_PREFIX, _RUN_SUFFIX = "train-", len("-1a2b3c4d")


#: Processes: ids of nodes, and the pids there; no id: on all nodes.
Pids = dict[str, list[int]]


class ClusterSource(Protocol):
    """What a command or the page asks of a cluster."""

    def listing(self, what: str) -> list[dict[str, Any]]:
        """Return one of the head's listings."""

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        """Return (node id, answer or None, why there is none) of each node that is asked."""


def answers(
    cluster: ClusterSource, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
) -> tuple[dict[str, Any], list[str]]:
    """Ask nodes; return their answers by hex id, and a sentence on each that has none."""
    told = cluster.ask_nodes(what, arguments, seconds, nodes)
    notes = [f"Node {node.hex()[:8]}: {why}." for node, _, why in told if why]
    return {node.hex(): answer for node, answer, why in told if not why}, notes


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


def actors_called(actors: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """Return the actors with an id that begins so, else those of this name, dead ones too."""
    is_id = len(of) >= _SHORTEST_ID
    return [each for each in actors if is_id and each["actor_id"].startswith(of)] or [
        each for each in actors if each["name"] == of
    ]


def find(cluster: ClusterSource, of: str) -> Pids:
    """Return the processes that are meant.

    Args:
        cluster: To look in.
        of: A pid, ``NODE:PID``, the id (or its first digits), name or class of actors, or the name
            of a training run.

    Raises:
        TargetError: Nothing that lives is called so.
    """
    nodes, pid = process_called(cluster, of)
    if pid:
        return {each: [pid] for each in nodes or [""]}
    actors = cluster.listing("actors")
    chosen = actors_called(actors, of) or [
        each for each in actors if of in (each["class_name"], short_name(each["class_name"]))
    ]
    if chosen:
        return _living(of, chosen)
    groups = {
        group["placement_group_id"]
        for group in cluster.listing("placement_groups")
        if group["name"].startswith(_RUN_PREFIX)
        and group["name"][len(_RUN_PREFIX) : -_RUN_SUFFIX] == of
    }
    ranks = [each for each in actors if each.get("placement_group_id") in groups]
    if ranks:
        return _living(of, ranks)
    raise TargetError(
        f"Nothing that runs is called {of!r}: give a pid, NODE:PID, the id, name or class of an "
        "actor, or the name of a training run. `miniray status` shows what runs."
    )


def nodes_of(pids: Pids) -> list[bytes] | None:
    """Return the ids of the nodes that have these processes; None: any may."""
    return None if "" in pids else [bytes.fromhex(node) for node in pids]


def of_rank(cluster: ClusterSource, of: str, pids: Pids, rank: int) -> Pids:
    """Return the process of a rank among those of the run ``of``.

    Raises:
        TargetError: There is none, or it does not answer.
    """
    question = "probe", ("rank",), [pid for each in pids.values() for pid in each]
    told, _ = answers(cluster, "processes", question, _SOON, nodes_of(pids))
    found = {
        node: [pid for _, pid, _, _, number, _ in processes if number == rank and pid in pids[node]]
        for node, processes in told.items()
        if node in pids
    }
    if not any(found.values()):
        raise TargetError(f"{of} has no rank {rank}, or it does not answer.")
    return {node: each for node, each in found.items() if each}


def _living(of: str, actors: list[dict[str, Any]]) -> Pids:
    found: Pids = {}
    for actor in actors:
        if actor["pid"] and actor["state"] != "DEAD":
            found.setdefault(actor["node_id"], []).append(actor["pid"])
    if not found:
        states = ", ".join(sorted({actor["state"] for actor in actors}))
        raise TargetError(f"{of} has no process now: it is {states}.")
    return found
