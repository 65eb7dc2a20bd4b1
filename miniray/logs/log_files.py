"""Log files of a node, read and searched: the end first, never more of them than requested.

Used by daemons, and by commands for files of their own machine. Log files of workers have names
that say what ran (``log_name``, ``system/log_file.py``), and lines that begin with a time and the
name of the task or actor that wrote them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.process_state import python_command
from miniray.system.log_file import stamp, work_in_name
from miniray.system.programs import HelperFailedError, output_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Bytes that are read at once, searched in all files together, and returned, at most.
_BLOCK, MOST_SEARCHED, _MOST_RETURNED = 256 * 1024, 512 << 20, 4 << 20
#: Characters of a line that are returned.
_MOST_OF_LINE = 16 * 1024
#: Lines that are returned at most, and files that are looked at: the latest.
MOST_LINES, MOST_FILES = 100_000, 10_000
#: Seconds after which a process that searches ends by itself, as when its daemon is gone.
_LONGEST = 60
_WORKER = re.compile(
    r"worker-(?P<work>.+)-(?P<pid>\d+)-(?P<time>\d{8}-\d{6})-(?P<worker>[0-9a-f]{16})"
    r"(?:-(?P<actor>[0-9a-f]{32}))?\.(?P<stream>out|err)(?P<older>\.\d+)?$"
)
_RANK = re.compile(r"rank_(?P<rank>\d+)\.(?P<stream>out|err)$")
_OWN = re.compile(r"(?P<work>head|node|web)\.log(?P<older>\.\d+)?$")
#: Time and name at the beginning of a line of a worker, and time of one of a daemon.
_STAMPED = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{3}) (?:\[(?P<name>.*?)\] )?")


class LogLineRead(NamedTuple):
    """A line, as it travels."""

    #: As ``stamp`` writes it; empty if neither the line nor one before it has one.
    time: str
    #: The task or actor that wrote it, or ``head``, ``node`` or ``web``.
    name: str
    pid: int
    #: out, err or log.
    stream: str
    text: str
    #: Hex id of the node that has read it; empty: this machine.
    node_id: str = ""


def order(line: LogLineRead) -> tuple[str, int, bool]:
    """Return the sort key of lines: lines that a process wrote at one time stay together."""
    return line.time, line.pid, line.stream == "err"


@dataclasses.dataclass(frozen=True, slots=True)
class LogQuery:
    """A selection of lines."""

    #: Names of tasks and actors, or ``head``, ``node`` and ``web``; none: of all workers.
    names: Sequence[str] = ()
    pids: Sequence[int] = ()
    #: Ids in hex.
    actors: Sequence[str] = ()
    #: How many of the last lines.
    tail: int = 100
    #: A regular expression that lines match; empty: any.
    grep: str = ""
    #: Seconds since the epoch; 0: from the beginning.
    since: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class LogFound:
    """A log file and the fields of its name."""

    path: Path
    work: str
    pid: int
    actor: str
    stream: str
    info: os.stat_result

    @property
    def key(self) -> str:
        """Identifies it also when it was rotated, which gives it another name."""
        return f"{self.path.name.rstrip('.0123456789')}:{self.info.st_ino}"

    @property
    def of_tasks(self) -> bool:
        """Whether different tasks wrote to it, which its name does not show."""
        return self.pid > 0 and not self.actor


def found_in(folder: Path) -> list[LogFound]:
    """Return the log files in a folder, those that were written last first."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _WORKER.match(entry.name) or _OWN.match(entry.name) or _RANK.match(entry.name)
            if match is None:
                continue
            part = match.groupdict()
            with contextlib.suppress(FileNotFoundError):  # it is being rotated
                of = LogFound(
                    Path(entry.path),
                    part.get("work") or f"rank {part.get('rank')}",
                    int(part.get("pid") or 0),
                    part.get("actor") or "",
                    part.get("stream") or "log",
                    entry.stat(),
                )
                found.append(of)
    return sorted(found, key=lambda file: file.info.st_mtime, reverse=True)[:MOST_FILES]


def read(folder: Path, query: LogQuery) -> dict[str, Any]:
    """Return the last lines that are wanted, in the order of their times.

    Returns:
        ``lines`` (each a ``LogLineRead``), ``more`` (whether there may be earlier ones), ``cut``
        (whether files were too large to be read to their beginnings), ``ends`` (the size of each
        file, for ``read_on``).

    Raises:
        ValueError: The regular expression is none.
    """
    wanted = pattern(query.grep)
    since = stamp(query.since) if query.since else ""
    tail = max(1, min(query.tail, MOST_LINES))
    budget = _Budget()
    lines: list[LogLineRead] = []
    files = found_in(folder)
    more = False
    for file in files:
        if not _may_have(file, query) or file.info.st_mtime < query.since:
            continue
        # No file that is written to later can have later lines than those that are there already.
        if len(lines) >= tail and stamp(file.info.st_mtime) < lines[0].time:
            more = True
            continue
        of_file: list[LogLineRead] = []
        for line in _backwards(file, budget):
            if since and line.time and line.time < since:
                break
            if _fits(line, file, query) and (wanted is None or wanted.search(line.text)):
                of_file.append(line)
                if len(of_file) > tail:
                    break
        lines = sorted([*reversed(of_file), *lines], key=order)
        more = more or len(lines) > tail or budget.left <= 0
        lines = lines[-tail:]
    kept = _limited(lines)
    return {
        "lines": [tuple(line) for line in kept],
        "more": more or len(kept) < len(lines),
        "cut": budget.left <= 0,
        "ends": {file.key: file.info.st_size for file in files},
    }


def read_on(folder: Path, query: LogQuery, ends: Mapping[str, int]) -> dict[str, Any]:
    """Return the lines that were written since ``read``, or since the last call of this.

    Args:
        folder: Of the log files.
        query: As for ``read``; its ``tail``, ``since`` and ``grep`` do not count.
        ends: What that returned.
    """
    lines: list[LogLineRead] = []
    now = dict(ends)  # also of one that is not seen while it is rotated
    left = _MOST_RETURNED
    # The oldest first: of a process at one time, rotated files come before the current one.
    for file in {file.key: file for file in reversed(found_in(folder))}.values():
        begin = ends.get(file.key, 0)
        if begin > file.info.st_size:
            begin = 0  # a new file
        now[file.key] = begin
        if begin == file.info.st_size or left <= 0 or not _may_have(file, query):
            now[file.key] = begin if _may_have(file, query) else file.info.st_size
            continue
        data = _piece(file, begin, min(_BLOCK, left))
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == _BLOCK:
            whole = _BLOCK  # of a line that is longer
        now[file.key], left = begin + whole, left - whole
        lines += [line for line in _parsed(data[:whole], file) if _fits(line, file, query)]
    lines.sort(key=order)
    return {"lines": [tuple(line) for line in _limited(lines)], "more": False, "ends": now}


def _piece(file: LogFound, begin: int, size: int) -> bytes:
    """Read a piece of a file; empty if it was rotated just now, so that its name is another's."""
    with contextlib.suppress(FileNotFoundError), file.path.open("rb") as opened:
        if os.fstat(opened.fileno()).st_ino == file.info.st_ino:
            opened.seek(begin)
            return opened.read(size)
    return b""


@dataclasses.dataclass(slots=True)
class _Budget:
    """Bytes that may still be searched."""

    left: int = MOST_SEARCHED


def pattern(grep: str) -> re.Pattern[str] | None:
    """Return a regular expression; None if there is none.

    Raises:
        ValueError: The text is no regular expression.
    """
    try:
        return re.compile(grep) if grep else None
    except re.error as error:
        raise ValueError(f"{grep!r} is no regular expression: {error}.") from None


def _may_have(file: LogFound, query: LogQuery) -> bool:
    """Return whether a file may have lines that are wanted."""
    chosen = query.names or query.pids or query.actors
    if not chosen:
        return file.pid > 0
    if file.pid in query.pids or (file.actor and file.actor in query.actors):
        return True
    return any(file.work in (name, work_in_name(name)) or file.of_tasks for name in query.names)


def _fits(line: LogLineRead, file: LogFound, query: LogQuery) -> bool:
    """Return whether a line of a file that may have some is one of them."""
    by_file = file.pid in query.pids or (file.actor and file.actor in query.actors)
    return bool(by_file or not query.names or not file.of_tasks or line.name in query.names)


def _backwards(file: LogFound, budget: _Budget) -> Iterator[LogLineRead]:
    """Yield the lines of a file, the last first, reading no more than is taken."""
    with contextlib.suppress(FileNotFoundError), file.path.open("rb") as opened:
        at, rest = file.info.st_size, b""
        while at > 0 and budget.left > 0:
            size = min(_BLOCK, at)
            at -= size
            budget.left -= size
            opened.seek(at)
            data = opened.read(size) + rest
            begin = 0 if at == 0 else data.find(b"\n") + 1
            if at and not begin and len(data) < 4 * _BLOCK:
                rest = data
                continue
            rest = data[:begin]
            yield from reversed(list(_parsed(data[begin:], file)))


def _parsed(data: bytes, file: LogFound) -> Iterator[LogLineRead]:
    """Yield the lines of a piece of a file; lines without a time have that of the one before."""
    when, name = "", file.work
    lines = data.decode(errors="replace").split("\n")  # other ends of lines are text of a line
    for text in lines if lines[-1] else lines[:-1]:
        match = _STAMPED.match(text)
        if match is not None:
            when = match["time"].replace(",", ".")
            name = (match["name"] if file.pid else "") or file.work
            text = text[match.end() :]  # noqa: PLW2901
        text = text.removesuffix("\r")[:_MOST_OF_LINE]  # noqa: PLW2901
        yield LogLineRead(when, name, file.pid, file.stream, text)


def _limited(lines: Iterable[LogLineRead]) -> list[LogLineRead]:
    """Return as many of the last lines as an answer may have."""
    kept: list[LogLineRead] = []
    size = 0
    for line in reversed(list(lines)):
        size += len(line.text) + 64
        if size > _MOST_RETURNED:
            break
        kept.append(line)
    return kept[::-1]


async def search(folder: Path, query: LogQuery, seconds: float) -> dict[str, Any]:
    """Do as ``read``; in a process of its own if a pattern is searched for.

    A regular expression may take hours for one line, and Python's ``re`` lets no other thread run
    meanwhile: a daemon that searched itself would fall silent, and be given up.

    Raises:
        ValueError: The regular expression is none.
        TimeoutError: The search takes longer than ``seconds``.
        OSError: The folder cannot be read, or the process failed.
    """
    if pattern(query.grep) is None:
        return await asyncio.to_thread(read, folder, query)
    program = sys.executable, "-c", python_command("miniray.logs.log_files")
    asked = json.dumps([str(folder), dataclasses.asdict(query)]).encode()
    try:
        found: dict[str, Any] = json.loads(await output_of(program, seconds, asked))
    except TimeoutError:
        raise TimeoutError(f"to search takes more than {seconds:g} s") from None
    except HelperFailedError as error:
        raise OSError(f"the search failed: {error}") from None
    return found


def main() -> None:
    """Search for another process: folder and query come on stdin."""
    signal.alarm(_LONGEST)
    folder, query = json.load(sys.stdin)
    json.dump(read(Path(folder), LogQuery(**query)), sys.stdout)
