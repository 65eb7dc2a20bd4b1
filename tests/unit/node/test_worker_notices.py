"""What workers may tell their daemon of themselves, between doubles of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from miniray.messages.plain import Arguments
from miniray.node.membership import WorkerNotices


def test_a_worker_that_leaves_has_the_usual_time_for_it_and_cannot_ask_for_another() -> None:
    given: list[Any] = []

    def kill_later(worker: str, grace: float | None = None) -> None:
        given.append((worker, grace))

    ends = SimpleNamespace(finishing=None, kill_later=kill_later)
    pool: Any = SimpleNamespace(ready=None, ends=ends, workers={b"w": "its worker"})
    clients: Any = SimpleNamespace(notices={})
    head: Any = None
    WorkerNotices(clients, pool, head)
    leaving = clients.notices["leaving"]
    Arguments(leaving, 1).check(())
    leaving(SimpleNamespace(process_id=b"w"))
    leaving(SimpleNamespace(process_id=b"a driver"))
    assert given == [("its worker", None)]
    with pytest.raises(ValueError, match="1 arguments were given"):
        Arguments(leaving, 1).check((1e9,))
