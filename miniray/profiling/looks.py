"""Requests of the command line and the page: stacks, equal ones together, and profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.profiling.forms import tree_of
from miniray.profiling.targets import TargetError, answers, find, ids_of

if TYPE_CHECKING:
    from miniray.profiling.inside import Samples
    from miniray.profiling.targets import ClusterSource

#: Seconds that a node may take to show stacks; a process of its own has a quarter of them.
_STACKS = 4.0
#: Seconds that a node may take beside the profile, and that a profile may take.
_READING, _LONGEST = 30.0, 300.0
#: By kind: the most that an idle process uses in a second, and the words for it.
_NOTHING = {
    "cpu": (0.01, "It was idle for"),
    "memory": (0.0, "It allocated nothing in"),
}


def look(cluster: ClusterSource, of: str, rank: int | None = None) -> dict[str, Any]:
    """Return the stacks of the target, equal ones of several processes together.

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
    told, notes = _asked(cluster, of, rank, _STACKS, "stack")
    groups: dict[tuple[str, ...], list[str]] = {}
    for each in told:
        for found in each["stacks"]:
            label = found["who"] if len(told) == 1 else f"{_name(each)}, {found['who']}"
            groups.setdefault(tuple(found["stack"]), []).append(label.removesuffix(", MainThread"))
    return {
        "way": _ways(told),
        "groups": [{"who": who, "stack": list(stack)} for stack, who in groups.items()],
        "notes": notes,
    }


def profile(
    cluster: ClusterSource,
    kind: str,
    of: str,
    seconds: float = 5.0,
    rank: int | None = None,
    *,
    leaks: bool = False,
) -> dict[str, Any]:
    """Profile the target for some seconds, all of its processes at once.

    Args:
        cluster: To ask.
        kind: "cpu", or "memory": allocations of that time, at the peak.
        of: As ``find`` takes it.
        seconds: That it takes.
        rank: Of a run, this rank only.
        leaks: Of memory, allocations that are still there at the end.

    Returns:
        ``{"way", "unit": "seconds" or "bytes", "tree": {"name", "value", "children"}, "samples":
        [[frame], value], "notes": [sentence]}``.

    Raises:
        TargetError: Nothing that lives is meant.
        ValueError: The kind or the seconds are none.
    """
    if kind not in ("cpu", "memory"):
        raise ValueError(f"There is no profile of {kind!r}: it is 'cpu' or 'memory'.")
    if leaks and kind != "memory":
        raise ValueError("Leaks are of memory: a profile of the CPU has none.")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(
            f"A profile takes more than 0 and up to {_LONGEST:g} seconds, not {seconds:g}."
        )
    # Of py-spy, and of the process itself when py-spy gave no result.
    patience = 2 * seconds + _READING
    how = kind, float(seconds), leaks
    told, notes = _asked(cluster, of, rank, patience, "profile", *how)
    samples: Samples = []
    for each in told:
        used = sum(cost for _, cost in each["samples"])
        least, nothing = _NOTHING[kind]
        if used <= least * seconds and not each["note"]:
            notes.append(f"{_name(each)}: {nothing} these {seconds:g} s.")
        whose = [_name(each)] if len(told) > 1 else []
        samples += [(whose + frames, cost) for frames, cost in each["samples"]]
    return {
        "way": _ways(told),
        "unit": "seconds" if kind == "cpu" else "bytes",
        "tree": tree_of(samples, _name(told[0]) if len(told) == 1 else of),
        "samples": samples,
        "notes": notes,
    }


def _asked(
    cluster: ClusterSource, of: str, rank: int | None, seconds: float, question: str, *args: Any
) -> tuple[list[dict[str, Any]], list[str]]:
    """Send the question to the nodes of the target, all at once.

    Returns:
        The answer for each process, by rank; sentences on nodes that do not answer, and processes.

    Raises:
        TargetError: Nothing that lives is meant.
    """
    ids, nodes = ids_of(find(cluster, of, rank))
    found, notes = answers(cluster, question, (ids, *args), seconds, nodes)
    told = [process for each in found.values() for process in each]
    if not told and not notes:
        raise TargetError(f"{of} has ended a moment ago.")
    notes += [f"{_name(each)}: {each['note']}" for each in told if each["note"]]
    return sorted(told, key=lambda each: (each["rank"] is None, each["rank"] or 0)), notes


def _ways(told: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(each["way"] for each in told if each["way"]))


def _name(process: dict[str, Any]) -> str:
    if process["rank"] is not None:
        return f"rank {process['rank']}"
    return f"{process['name'] or 'worker'} (pid {process['pid']})"
