"""Topics whose rows are asked for."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from typing import TYPE_CHECKING, Any

from miniray.web import topics as topics_module
from miniray.web.tables import Table
from miniray.web.topics import Topics

if TYPE_CHECKING:
    import pytest


def test_a_fault_in_what_makes_rows_is_logged_and_told_to_the_page(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_module, "_BETWEEN", 0)
    again = threading.Event()
    tries: list[None] = []

    class Of:
        source = None

    def wrong(_source: Any) -> Any:
        tries.append(None)
        if len(tries) == 2:
            again.set()
        raise KeyError("metrics")

    async def ask() -> Table:
        table, topics = Table(), Of()
        asking = asyncio.ensure_future(Topics._ask(topics, wrong, table))  # type: ignore[arg-type]
        assert await asyncio.to_thread(again.wait, 10)
        asking.cancel()
        return table

    with caplog.at_level(logging.ERROR):
        table = asyncio.run(ask())
    assert "KeyError('metrics')" in table.error
    assert "KeyError: 'metrics'" in caplog.text


def test_a_page_that_may_not_watch_says_so_until_it_may() -> None:
    topics, table = Topics.__new__(Topics), Table()
    topics._tables, topics._error = {"nodes": table}, ""
    topics._on_watch(pickle.dumps(ValueError("16 processes watch this cluster")), None, -1)
    assert table.error == "16 processes watch this cluster"
    topics._on_watch(None, None, -1)
    assert table.error == ""
