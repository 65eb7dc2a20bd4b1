"""Lines of logs from all nodes of a cluster, and from nodes of this machine that are gone.

Responsible for finding out which lines are meant, and for one order over several nodes; each node
reads and searches its own files (``logs/log_files.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.names import format_bytes
from miniray.logs.log_files import (
    MOST_SEARCHED,
    LogLineRead,
    LogQuery,
    found_in,
    order,
    pattern,
    search,
)
from miniray.profiling import targets
from miniray.profiling.targets import TargetError, actors_called, answers, process_called

if TYPE_CHECKING:
    from miniray.profiling.targets import ClusterSource

#: Seconds that nodes may take to search their files.
_PATIENCE = 30.0
#: Attempts of a run that has ended whose output is read, at most: the latest.
_MOST_ATTEMPTS = 20


@dataclasses.dataclass(slots=True)
class Logs:
    """Lines of several nodes, in the order of their times."""

    lines: list[LogLineRead] = dataclasses.field(default_factory=list)
    #: Whether there may be more than these.
    more: bool = False
    #: Sentences on nodes whose logs are missing.
    notes: list[str] = dataclasses.field(default_factory=list)
    #: For ``follow``: how far each node's files were read.
    ends: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def add(self, node: str, found: dict[str, Any]) -> None:
        """Add the answer of a node (hex id; empty: this machine) to a search."""
        self.lines += [LogLineRead(*line)._replace(node_id=node) for line in found["lines"]]
        self.more = self.more or found["more"]
        if found.get("cut"):
            whose = f"node {node[:8]}" if node else "this machine"
            size = format_bytes(MOST_SEARCHED)
            self.notes.append(f"Only the last {size} of the logs of {whose} were searched.")
        self.ends[node] = dict(found["ends"])

    def sorted(self, tail: int) -> Logs:
        """Return these with the last lines only, in order."""
        lines = sorted(self.lines, key=order)
        more = self.more or len(lines) > tail
        return dataclasses.replace(self, lines=lines[-tail:], more=more)


@dataclasses.dataclass(frozen=True, slots=True)
class LogSelection:
    """A selection of lines and nodes (none: of all)."""

    query: LogQuery
    nodes: tuple[str, ...] = ()
    #: Of a run that has ended: where its ranks' output was copied to, attempt by attempt.
    folders: tuple[Path, ...] = ()


def select_logs(
    source: ClusterSource, of: str | None, rank: int | None, query: LogQuery
) -> LogSelection:
    """Return the query, and the nodes to send it to, for a person's name of a process.

    Args:
        source: The cluster.
        of: ``head``, ``node``, ``web``, a pid, ``NODE:PID``, the id (or its first digits), name or
            class of an actor, a task, or a training run; None: all workers.
        rank: Of a run.
        query: Its other conditions.

    Raises:
        TargetError: A run has no such rank, or no node is called so.
    """
    if of is None:
        if rank is not None:
            raise TargetError("--rank is of a training run: name it.")
        return LogSelection(query)
    nodes, pid = process_called(source, of)
    if pid:
        return LogSelection(dataclasses.replace(query, pids=(pid,)), tuple(nodes))
    actors = actors_called(source, of)
    if all(each["state"] == "DEAD" for each in actors):  # or there are none
        ended = _ended_run(source, of, rank, query)
        if ended is not None:
            return ended
    if rank is None:
        # Files have the name of a class: also those of actors that the head has forgotten.
        of_class = any(each["class_name"] == of for each in actors)
        ids = [] if of_class else [each["actor_id"] for each in actors]
        return LogSelection(dataclasses.replace(query, actors=ids, names=() if ids else (of,)))
    found = targets.find(source, of, rank)
    pids = tuple(each["pid"] for each in found)
    where = tuple({each["node_id"] for each in found})
    return LogSelection(dataclasses.replace(query, pids=pids), where)


def _ended_run(
    source: ClusterSource, of: str, rank: int | None, query: LogQuery
) -> LogSelection | None:
    """Return where the output of a run that has ended is; None if none was copied to a folder here.

    Raises:
        TargetError: It has no such rank.
    """
    run = targets.run_called(source, of)
    if run is None:
        return None
    place = Path(run["path"].removeprefix("file://"), "logs")
    attempts = tuple(sorted(place.glob("attempt_*"))[-_MOST_ATTEMPTS:])
    if not attempts:
        return None
    ranks = {file.work for folder in attempts for file in found_in(folder)}
    names = ranks if rank is None else ranks & {f"rank {rank}"}
    if not names:
        printed = ", ".join(sorted(ranks))
        raise TargetError(f"{of} has no rank {rank} that has printed; these have: {printed}.")
    return LogSelection(dataclasses.replace(query, names=tuple(names)), (), attempts)


def logs(source: ClusterSource, wanted: LogSelection) -> Logs:
    """Return the last lines that are wanted, of all nodes, of those that are gone too.

    Raises:
        ValueError: The regular expression is none.
        TimeoutError: To search the folder of an ended run takes too long.
    """
    query = wanted.query
    pattern(query.grep)
    if wanted.folders:
        return of_folders(wanted.folders, query)
    found = Logs()
    _ask(source, wanted, found, None)
    return found.sorted(query.tail)


def follow(source: ClusterSource, wanted: LogSelection, before: Logs) -> Logs:
    """Return the lines that came after those of an earlier call, and match."""
    found = Logs(ends=dict(before.ends))
    _ask(source, wanted, found, before.ends)
    matches = pattern(wanted.query.grep)
    if matches is not None:
        found.lines = [each for each in found.lines if matches.search(each.text)]
    return found.sorted(len(found.lines) or 1)


def _ask(source: ClusterSource, wanted: LogSelection, found: Logs, ends: Any) -> None:
    """Request lines from the living nodes; ``ends``: by node, how far files were read already.

    None: not at all, and files of dead nodes are read, too.
    """
    living = []
    for each in source.listing("node_states"):
        if wanted.nodes and each["node_id"] not in wanted.nodes:
            continue
        if each["state"] != "DEAD":
            living.append(bytes.fromhex(each["node_id"]))
        elif ends is None:
            _add_dead(found, each, wanted.query)
    arguments = dataclasses.asdict(wanted.query), ends
    told, notes = answers(source, "logs", arguments, _PATIENCE, living)
    found.notes += notes
    for node, answer in told.items():
        found.add(node, answer)


def _add_dead(found: Logs, node: dict[str, Any], query: LogQuery) -> None:
    """Read the logs of a node that is gone, where they are on this machine."""
    folder = Path(node["session_dir"], "logs")
    name = node["node_id"]
    if node["hostname"] != os.uname().nodename or not os.access(folder, os.R_OK):
        found.notes.append(
            f"Node {name[:8]} is gone ({node['reason']}); its logs are on {node['hostname']} in "
            f"{folder}."
        )
        return
    try:
        found.add(name, asyncio.run(search(folder, query, _PATIENCE)))
    except OSError as error:  # a timeout is one, too
        found.notes.append(f"Node {name[:8]}: {error}.")


def of_folders(folders: tuple[Path, ...], query: LogQuery) -> Logs:
    """Return lines of folders of log files on this machine. Errors as of ``logs``."""
    found = Logs()
    for folder in folders:
        try:
            found.add("", asyncio.run(search(folder, query, _PATIENCE)))
        except TimeoutError as error:  # noqa: PERF203 - a search takes far longer
            raise TimeoutError(f"The logs in {folder}: {error}.") from None
    return found.sorted(query.tail)
