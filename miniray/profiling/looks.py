"""What the command line and the page ask: the stacks of processes, equal ones together."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

from miniray.profiling.targets import TargetError, Targets, find

if TYPE_CHECKING:
    from miniray.profiling.targets import Cluster

#: Seconds after which a process that does not show its stacks is looked at from outside.
_STACKS = 1.0


def look(cluster: Cluster, of: str, rank: int | None = None) -> dict[str, Any]:
    """Return the stacks of what is meant, equal ones of several processes together.

    Args:
        cluster: To ask.
        of: As ``find`` takes it.
        rank: Of a run, this rank only.

    Returns:
        ``{"way": how they were seen, "groups": [{"who": [name], "stack": [frame]}], "notes":
        [sentence]}``; the outermost frame is first.

    Raises:
        TargetError: Nothing that lives is meant.
    """
    told, notes = ask_of(cluster, "stack", find(cluster, of), (), _STACKS)
    if rank is not None:
        told = [each for each in told if each["rank"] == rank]
        if not told:
            raise TargetError(f"{of} has no rank {rank}.")
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in sorted(told, key=lambda each: (each["rank"] is None, each["rank"])):
        if each["note"]:
            notes.append(f"{_name(each)}: {each['note']}")
        for found in each["stacks"]:
            label = found["who"] if len(told) == 1 else f"{_name(each)}, {found['who']}"
            groups.setdefault(tuple(found["stack"]), []).append(label.removesuffix(", MainThread"))
    ways = dict.fromkeys(each["way"] for each in told)
    return {
        "way": ", ".join(way for way in ways if way),
        "groups": [{"who": who, "stack": list(stack)} for stack, who in groups.items()],
        "notes": notes,
    }


def ask_of(
    cluster: Cluster, question: str, targets: Targets, args: tuple[Any, ...], seconds: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask the nodes of what is meant, all at once.

    Returns:
        What is told of each process, and a sentence on each node that does not answer.

    Raises:
        TargetError: No node knows a process that is meant.
    """

    def ask(item: tuple[str, list[int]]) -> list[tuple[bytes, Any, str]]:
        node, pids = item
        nodes = [bytes.fromhex(node)] if node else None
        return cluster.ask_nodes(question, (pids, *args), seconds, nodes)

    with concurrent.futures.ThreadPoolExecutor(max(1, len(targets.pids))) as pool:
        answers = [answer for each in pool.map(ask, targets.pids.items()) for answer in each]
    told = [process for _, answer, _ in answers for process in answer or ()]
    notes = [f"Node {node.hex()[:8]}: {why}." for node, _, why in answers if why]
    if not told and not notes:
        pids = sorted({str(pid) for each in targets.pids.values() for pid in each})
        raise TargetError(f"No process of this cluster has the pid {', '.join(pids)}.")
    return told, notes


def _name(process: dict[str, Any]) -> str:
    if process["rank"] is not None:
        return f"rank {process['rank']}"
    return f"{process['name'] or 'worker'} (pid {process['pid']})"
