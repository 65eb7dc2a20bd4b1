"""Questions about processes that the page asks one at a time: stacks, profiles, logs, why it waits.

What is meant, and how it is found out, is what commands of the same names do.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from miniray.logs.log_files import LogLineRead
    from miniray.profiling.targets import ClusterSource
    from miniray.web.answers import JsonAnswers

#: Lines of a log that are shown, at most.
_MOST_LINES = 2000
#: Escapes that colour text on a terminal.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LookRoutes:
    """Routes to what the cluster's processes do and have printed."""

    def __init__(self, source: ClusterSource, answers: JsonAnswers) -> None:
        self._source = source
        self._answers = answers
        self.routes = [
            Route("/api/stack", self._stack, methods=["POST"]),
            Route("/api/profile", self._profile, methods=["POST"]),
            Route("/api/why", self._why, methods=["POST"]),
            Route("/api/logs", self._logs, methods=["GET"]),
            Route("/api/metrics", self._charts, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]

    async def _stack(self, request: Request) -> Response:
        from miniray.profiling.looks import look

        of = _named((await self._answers.posted(request)).get("of"))
        return await self._answers.of(look, self._source, *of)

    async def _profile(self, request: Request) -> Response:
        asked = await self._answers.posted(request)
        of, rank = _named(asked.get("of"))
        kind, seconds = str(asked.get("kind")), asked.get("seconds", 5)
        if not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise HTTPException(400, f"seconds is a number, not {seconds!r:.80}.")
        return await self._answers.of(self._profiled, kind, of, float(seconds), rank)

    def _profiled(self, *asked: Any) -> dict[str, Any]:
        """Return a profile, without its samples: they are in the tree."""
        from miniray.profiling.looks import profile

        found = profile(self._source, *asked)
        return {name: value for name, value in found.items() if name != "samples"}

    async def _why(self, request: Request) -> Response:
        """Answer why something waits; without an id or name, whatever drivers wait for."""
        match (await self._answers.posted(request)).get("of", {}):
            case {"id": str(id)}:
                return await self._answers.of(self._chain, id)
            case {} as of if not of:
                return await self._answers.of(self._chain, "")
            case of:
                raise HTTPException(400, f"of has an id, not {of!r:.80}.")

    def _chain(self, of: str) -> dict[str, Any]:
        from miniray.util.why import NothingWaitsError, why

        try:
            return why(self._source, of)
        except NothingWaitsError:
            if of:
                raise
            return {"chain": [], "deadlock": False, "notes": []}

    async def _logs(self, request: Request) -> Response:
        wanted = request.query_params
        of: dict[str, Any] = {name: wanted[name] for name in ("actor", "run") if name in wanted}
        try:
            if "node" in wanted:
                of = {"node": wanted["node"], "pid": int(wanted.get("pid", ""))}
            if wanted.get("rank", "").isdigit():
                of["rank"] = int(wanted["rank"])
            tail = min(max(1, int(wanted.get("tail", "200"))), _MOST_LINES)
        except ValueError:
            raise HTTPException(400, "pid and tail are whole numbers.") from None
        return await self._answers.of(self._lines, *_named(of), tail, wanted.get("grep", ""))

    async def _charts(self, _request: Request) -> Response:
        from miniray.metrics.history import charts

        return await self._answers.of(charts, self._source)

    async def _metrics(self, request: Request) -> Response:
        from miniray.metrics.text import CONTENT_TYPE, OPENMETRICS, text

        if "application/openmetrics-text" in request.headers.get("accept", ""):
            of = functools.partial(text, openmetrics=True)
            return await self._answers.of(of, self._source, text=OPENMETRICS)
        return await self._answers.of(text, self._source, text=CONTENT_TYPE)

    def _lines(self, of: str, rank: int | None, tail: int, grep: str) -> dict[str, Any]:
        """Return the last lines that match, and the command that shows more of them."""
        from miniray.logs.log_files import LogQuery
        from miniray.util.logs import logs, whose

        try:
            re.compile(grep)
        except re.error:
            grep = re.escape(grep)  # a person types words
        found = logs(self._source, whose(self._source, of, rank, LogQuery(tail=tail, grep=grep)))
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


def _named(of: Any) -> tuple[str, int | None]:
    """Return what is meant, as commands name it, and the rank of a run that is meant alone.

    Raises:
        HTTPException: It is no description of an actor, a process or a run.
    """
    match of:
        case {"actor": str(actor)}:
            return actor, None
        case {"node": str(node), "pid": int(pid)}:
            return f"{node}:{pid}", None
        case {"run": str(run), **rest}:
            rank = rest.get("rank")
            return run, rank if isinstance(rank, int) else None
    raise HTTPException(400, f"of names an actor, a node and a pid, or a run, not {of!r:.80}.")
