"""Tasks, from the answers of all processes of the cluster.

The caller of a task records whether it waits, is sent or has ended; the process that runs it, that
it runs. The two are joined here by the id of the call.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.profiling.targets import answers_of_processes
from miniray.util.state_records import TaskState

if TYPE_CHECKING:
    from miniray.profiling.targets import ClusterSource, ProcessTold


#: Stands for the answer of a process that gave none.
NOTHING: dict[str, Any] = {
    **dict.fromkeys(("calls", "states", "works", "threads", "datasets"), ()),
    "ended": {},
    "running_by_name": {},
}


def ask_processes(
    source: ClusterSource,
    seconds: float,
    most: int,
    *,
    threads: bool = False,
    nodes: list[bytes] | None = None,
    pids: list[int] | None = None,
) -> tuple[list[ProcessTold], dict[str, str]]:
    """Ask drivers and workers for their calls.

    Args:
        source: The cluster.
        seconds: That a process may take.
        most: Calls of one process, at most; counts by function are always there.
        threads: Ask also what threads wait for, with their stacks.
        nodes: Ids of the nodes whose processes are queried; None: all.
        pids: Of the processes that are queried; None: all.

    Returns:
        The answers of processes, and by hex id why nodes and processes gave none.
    """
    told, nodes_silent = answers_of_processes(
        source, "calls", (most, threads), seconds, pids, nodes
    )
    silent = {f"node {node.hex()}": why for node, why in nodes_silent.items()}
    for each in told:
        if each.missing:
            silent[f"{each.role} {each.process.hex()} (pid {each.pid})"] = each.missing
    return [each._replace(told=each.told or NOTHING) for each in told], silent


def dataset_rows(processes: list[ProcessTold]) -> list[dict[str, Any]]:
    """Return a row for each operator of each dataset that a process executes now."""
    return [
        {
            **row,
            "key": f"{each.process.hex()}/{number}",
            "pid": each.pid,
            "node_id": each.node.hex(),
            "job_id": each.job.hex(),
        }
        for each in processes
        for number, row in enumerate(each.told["datasets"])
    ]


def task_states(processes: list[ProcessTold]) -> list[TaskState]:
    """Return the calls that have not ended: those that run first, the longest first."""
    running = {id: seconds for each in processes for id, _, seconds in each.told["works"]}
    pids = {each.process: each.pid for each in processes}
    states = [
        _task(each, call, running.get(call["task_id"]), pids)
        for each in processes
        for call in each.told["calls"]
    ]
    return sorted(states, key=lambda state: -1.0 if state.seconds is None else -state.seconds - 2)


def _task(
    caller: ProcessTold, call: dict[str, Any], seconds: float | None, pids: dict[bytes, int]
) -> TaskState:
    return TaskState(
        task_id=call["task_id"].hex(),
        name=short_name(call["name"]),
        type=call["type"],
        state=call["state"] if seconds is None else "RUNNING",
        attempt_number=call["attempt"],
        seconds=seconds,
        job_id=caller.job.hex(),
        caller_id=caller.process.hex(),
        actor_id=call["actor_id"].hex(),
        node_id=call["node"].hex(),
        worker_id=call["process"].hex(),
        worker_pid=pids.get(call["process"], 0),
        waits_for=[id.hex() for id in call["needs"]],
        makes=[id.hex() for id in call["makes"]],
    )


def summary_of(processes: list[ProcessTold]) -> dict[str, Any]:
    """Count tasks and calls of actors by name, in Ray's form.

    FINISHED and FAILED are those of callers that still live.
    """
    kinds: dict[str, str] = {}
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    totals: collections.Counter[str] = collections.Counter()

    def add(name: str, kind: str, state: str, count: int) -> None:
        name = short_name(name)
        counts[name][state] += count
        totals[kinds.setdefault(name, kind)] += count

    for each in processes:
        for kind, name, state, count in each.told["states"]:
            add(name, kind, state, count)
        for kind, (finished, failed) in each.told["ended"].items():
            for state, by_name in (("FINISHED", finished), ("FAILED", failed)):
                for name, count in by_name.items():
                    add(name, kind, state, count)
    for each in processes:
        for name, (count, _) in each.told["running_by_name"].items():
            # Its caller only recorded that it was sent.
            states = counts.get(short_name(name), collections.Counter())
            moved = min(count, states["SUBMITTED_TO_WORKER"])
            states.update(RUNNING=moved, SUBMITTED_TO_WORKER=-moved)
    summary = {
        name: {"func_or_class_name": name, "type": kind, "state_counts": dict(+counts[name])}
        for name, kind in kinds.items()
    }
    return {
        "summary": summary,
        "total_tasks": totals["NORMAL_TASK"],
        "total_actor_tasks": totals["ACTOR_TASK"],
        "total_actor_scheduled": totals["ACTOR_CREATION_TASK"],
        "summary_by": "func_name",
    }
