"""Answers to single requests: a function's result, or its error as a sentence."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from miniray.exceptions import JobNotFoundError, MinirayError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.requests import Request

#: Questions that are open at a time.
_MOST = 8
#: Bytes of a request.
_MOST_BYTES = 1 << 20
#: Seconds in which more of a request has to come: one that stalls would keep the web process alive.
_SECONDS = 30.0


class JsonAnswers:
    """Runs what may wait in threads, as many as are allowed."""

    def __init__(self) -> None:
        self._open = 0

    def route(
        self,
        path: str,
        method: str,
        function: Callable[[Mapping[str, Any]], Any],
        *,
        posted: bool = False,
    ) -> Route:
        """Return the route that answers with a function's result.

        It gets the parts of the path and the query, or the object that was ``posted``.
        """

        async def answer(request: Request) -> Response:
            asked = await self.posted(request) if posted else request.query_params
            return await self.of(function, {**asked, **request.path_params})

        return Route(path, answer, methods=[method])

    async def of(self, function: Callable[..., Any], *arguments: Any) -> Response:
        """Answer with a function's result, as JSON unless it is a response, or its error."""
        if self._open >= _MOST:
            return refusal(503, f"{_MOST} questions are being answered; ask again in a moment.")
        self._open += 1
        try:
            found = await asyncio.to_thread(function, *arguments)
        except (TypeError, ValueError, OSError, MinirayError) as error:
            return refusal(404 if isinstance(error, JobNotFoundError) else 400, str(error))
        finally:
            self._open -= 1
        if isinstance(found, Response):
            return found
        return Response(as_json(found), media_type="application/json")

    @staticmethod
    async def posted(request: Request) -> dict[str, Any]:
        """Return the JSON object of a request.

        Raises:
            HTTPException: There is none, it is too large, or it does not come.
        """
        whose = f"A request may have {_MOST_BYTES} bytes."
        body = b"".join([piece async for piece in pieces(request, _MOST_BYTES, whose)])
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise HTTPException(400, "The request has no JSON object.")
        return data


async def pieces(request: Request, most: int, too_large: str) -> AsyncIterator[bytes]:
    """Yield the body of a request.

    Raises:
        HTTPException: The body exceeds ``most`` bytes, or no data come for a while.
    """
    stream, size = request.stream(), 0
    while True:
        try:
            piece = await asyncio.wait_for(anext(stream, None), _SECONDS)
        except asyncio.TimeoutError:
            raise HTTPException(
                408, f"The request did not come: nothing for {_SECONDS:g} s."
            ) from None
        if piece is None:
            return
        size += len(piece)
        if size > most:
            raise HTTPException(413, too_large)
        yield piece


def as_json(data: Any) -> bytes:
    """Encode as JSON; values without a JSON form become text, and a NaN null."""
    try:
        return _ENCODE(data).encode()
    except ValueError:  # numbers such as a NaN, at which a browser stops to read
        return _ENCODE(_finite(data)).encode()


_ENCODE = json.JSONEncoder(default=str, separators=(",", ":"), allow_nan=False).encode


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def refusal(status: int, why: str) -> Response:
    """Return an error as a sentence."""
    return JSONResponse({"error": why}, status)


def refused(_request: Request, error: Exception) -> Response:
    """Answer an ``HTTPException``."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail)
