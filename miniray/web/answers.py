"""Answers to single requests: what a function returns that may wait, or its error as a sentence."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from miniray.exceptions import JobNotFoundError, MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

#: Questions that are open at a time.
_MOST = 8
#: Bytes of a request.
_MOST_BYTES = 1 << 20
#: Seconds in which a request has to come: one that does not would keep the web process alive.
_SECONDS = 30.0


class JsonAnswers:
    """Runs what may wait in threads, as many as are allowed."""

    def __init__(self) -> None:
        self._open = 0

    async def of(
        self, function: Callable[..., Any], *arguments: Any, text: str | None = None
    ) -> Response:
        """Answer with what a function returns, or with its error; as JSON, or a type of text."""
        if self._open >= _MOST:
            return refusal(503, f"{_MOST} questions are being answered; ask again in a moment.")
        self._open += 1
        try:
            found = await asyncio.to_thread(function, *arguments)
        except JobNotFoundError as error:
            return refusal(404, str(error))
        except (TypeError, ValueError, OSError, MinirayError) as error:
            return refusal(400, str(error))
        finally:
            self._open -= 1
        if text is not None:
            return Response(found, headers={"content-type": text})
        return Response(as_json(found), media_type="application/json")

    @staticmethod
    async def posted(request: Request) -> dict[str, Any]:
        """Return the JSON object of a request.

        Raises:
            HTTPException: There is none, it is too large, or it does not come.
        """
        try:
            data = json.loads(await asyncio.wait_for(_body(request), _SECONDS))
        except asyncio.TimeoutError:
            raise HTTPException(408, f"The request did not come in {_SECONDS:g} s.") from None
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise HTTPException(400, "The request has no JSON object.")
        return data


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, f"A request may have {_MOST_BYTES} bytes.")
    return body


def as_json(data: Any) -> bytes:
    """Encode what there is JSON for; what there is none for becomes text, and a NaN null."""
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
