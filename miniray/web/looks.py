"""Questions about processes that the page asks one at a time: stacks, profiles, logs, why it waits.

Targets and answers are those of the commands of the same names, whose code is imported at the first
request: the page is there sooner.
"""

from __future__ import annotations

import functools
import re
import shlex
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from miniray.logs.log_files import LogLineRead
    from miniray.profiling.targets import ClusterSource
    from miniray.web.answers import JsonAnswers

#: Lines of a log that are shown, at most.
_MOST_LINES = 2000
#: Escapes that colour text on a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def look_routes(source: ClusterSource, answers: JsonAnswers) -> list[Route]:
    """Return the routes to stacks, profiles and output of the cluster's processes."""

    async def metrics(request: Request) -> Response:
        return await answers.of(_metrics, source, request.headers.get("accept", ""))

    def route(path: str, function: Callable[..., Any], *, posted: bool) -> Route:
        of = functools.partial(function, source)
        return answers.route(path, "POST" if posted else "GET", of, posted=posted)

    return [
        route("/api/stack", _stack, posted=True),
        route("/api/profile", _profile, posted=True),
        route("/api/why", _why, posted=True),
        route("/api/logs", _logs, posted=False),
        route("/api/metrics", _charts, posted=False),
        Route("/metrics", metrics),
    ]


def _metrics(source: ClusterSource, accept: str) -> Response:
    from miniray.metrics.text import CONTENT_TYPE, OPENMETRICS, text

    openmetrics = "application/openmetrics-text" in accept
    kind = OPENMETRICS if openmetrics else CONTENT_TYPE
    return Response(text(source, openmetrics=openmetrics), headers={"content-type": kind})


def _stack(source: ClusterSource, asked: Mapping[str, Any]) -> dict[str, Any]:
    from miniray.profiling.looks import look

    return look(source, *_meant(asked))


def _profile(source: ClusterSource, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile, without its samples: they are in the tree."""
    from miniray.profiling.looks import profile

    of, rank = _meant(asked)
    seconds = asked.get("seconds", 5.0)
    if not isinstance(seconds, (int, float)):
        raise ValueError(f"seconds is a number, not {seconds!r:.80}.")
    found = profile(source, str(asked.get("kind")), of, seconds, rank)
    return {name: value for name, value in found.items() if name != "samples"}


def _why(source: ClusterSource, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return why something waits; without an id or name, all that drivers wait for."""
    from miniray.util.why import NothingWaitsError, why

    of, _ = _meant({"of": "", **asked})
    try:
        return why(source, of)
    except NothingWaitsError:
        if of:
            raise
        return {"chain": [], "deadlock": False, "notes": []}


def _charts(source: ClusterSource, _asked: Mapping[str, Any]) -> dict[str, Any]:
    from miniray.metrics.history import charts

    return charts(source)


def _logs(source: ClusterSource, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last lines that match, and the command that shows more of them."""
    from miniray.logs.log_files import LogQuery
    from miniray.util.logs import logs, select_logs

    (of, rank), grep = _meant(asked), asked.get("grep", "")
    tail = min(max(1, _number("tail", asked.get("tail", 200))), _MOST_LINES)
    try:
        re.compile(grep)
    except re.error:
        grep = re.escape(grep)  # a person types words
    found = logs(source, select_logs(source, of, rank, LogQuery(tail=tail, grep=grep)))
    several = len({each.pid for each in found.lines}) > 1
    words = ["miniray", "logs", of, *(["--rank", str(rank)] if rank is not None else [])]
    words += ["--grep", grep] if grep else []
    return {
        "lines": [_line(each, named=several) for each in found.lines],
        "more": shlex.join([*words, "--tail", str(10 * tail)]) if found.more else None,
        "notes": found.notes,
    }


def _line(line: LogLineRead, *, named: bool) -> str:
    """Return a line as text: colours are for terminals."""
    who = f" ({line.name} pid={line.pid})" if named else ""
    return f"{line.time}{who} {_COLOURS.sub('', line.text)}"


def _meant(asked: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the target, as commands name it, and the rank of a run if it is limited to one.

    Raises:
        ValueError: The request names no target.
    """
    of, rank = asked.get("of"), asked.get("rank")
    if not isinstance(of, str):
        raise ValueError(f"of names an actor, NODE:PID or a run, not {of!r:.80}.")
    return of, None if rank is None else _number("rank", rank)


def _number(name: str, given: Any) -> int:
    if not str(given).isdecimal():
        raise ValueError(f"{name} is a whole number, not {given!r:.80}.")
    return int(given)
