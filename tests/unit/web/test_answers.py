"""What requests bring, and how answers are written."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from miniray.web import answers
from miniray.web.answers import JsonAnswers, as_json, pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def request(body: bytes | None) -> Request:
    """A request with a body; None: which never comes."""

    async def receive() -> dict[str, Any]:
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body}

    receiver: Callable[[], Awaitable[dict[str, Any]]] = receive
    return Request({"type": "http", "method": "POST", "headers": []}, receiver)


def test_numbers_that_json_does_not_have_are_null() -> None:
    row = {"loss": math.nan, "most": [math.inf, -math.inf, 1.5], "of": (1, {"x": math.nan})}
    told = json.loads(as_json(row), parse_constant=pytest.fail)
    assert told == {"loss": None, "most": [None, None, 1.5], "of": [1, {"x": None}]}


async def test_a_body_that_is_no_object_is_refused() -> None:
    assert await JsonAnswers.posted(request(b'{"a": 1}')) == {"a": 1}
    for body in (b"", b"[1]", b"{", b"[" * 100_000):
        with pytest.raises(HTTPException, match="no JSON object"):
            await JsonAnswers.posted(request(body))


async def test_a_body_that_does_not_come_is_waited_for_no_longer_than_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.01)
    with pytest.raises(HTTPException, match="did not come"):
        await JsonAnswers.posted(request(None))


async def test_a_package_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_SECONDS", 0.01)
    told = [{"type": "http.request", "body": b"abc", "more_body": True}]

    async def receive() -> dict[str, Any]:
        if not told:
            await asyncio.Event().wait()
        return told.pop()

    sent = Request({"type": "http", "method": "PUT", "headers": []}, receive)
    got = pieces(sent, 10, "too large")
    assert await anext(got) == b"abc"
    with pytest.raises(HTTPException, match="nothing for"):
        await anext(got)


async def test_what_is_larger_than_allowed_is_refused() -> None:
    with pytest.raises(HTTPException, match="too large"):
        await anext(pieces(request(b"abc"), 2, "too large"))
