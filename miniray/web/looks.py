"""Questions about processes that the page asks one at a time: stacks, profiles, logs, why it waits.

What is meant, and how it is found out, is what commands of the same names do.
"""

from __future__ import annotations

import functools
import re
import shlex
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

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

        return await self._answers.of(
            look, self._source, *_meant(await self._answers.posted(request))
        )

    async def _profile(self, request: Request) -> Response:
        asked = await self._answers.posted(request)
        of, rank = _meant(asked)
        kind, seconds = asked.get("kind"), asked.get("seconds", 5.0)
        return await self._answers.of(self._profiled, kind, of, seconds, rank)

    def _profiled(self, *asked: Any) -> dict[str, Any]:
        """Return a profile, without its samples: they are in the tree."""
        from miniray.profiling.looks import profile

        found = profile(self._source, *asked)
        return {name: value for name, value in found.items() if name != "samples"}

    async def _why(self, request: Request) -> Response:
        """Answer why something waits; without an id or name, whatever drivers wait for."""
        of, _ = _meant({"of": "", **await self._answers.posted(request)})
        return await self._answers.of(self._chain, of)

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
        tail = wanted.get("tail", "200")
        if not tail.isdecimal():
            raise HTTPException(400, f"tail is a whole number, not {tail!r:.80}.")
        most = min(max(1, int(tail)), _MOST_LINES)
        return await self._answers.of(self._lines, *_meant(wanted), most, wanted.get("grep", ""))

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


def _meant(asked: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return what is meant, as commands name it, and the rank of a run that is meant alone.

    Raises:
        HTTPException: It is not told.
    """
    of, rank = asked.get("of"), asked.get("rank")
    if not isinstance(of, str):
        raise HTTPException(400, f"of names an actor, NODE:PID or a run, not {of!r:.80}.")
    if rank is not None and not str(rank).isdecimal():
        raise HTTPException(400, f"rank is a whole number, not {rank!r:.80}.")
    return of, None if rank is None else int(rank)
