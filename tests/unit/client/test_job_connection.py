"""Logs of submitted jobs, as clients read them."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from miniray.client.command_connection import JobConnection

if TYPE_CHECKING:
    from collections.abc import Iterator


class Talkative:
    """Stands for the connection to a cluster whose job prints while its log is read."""

    size = 10

    def ask(self, *_: Any) -> int:
        return self.size

    @contextlib.contextmanager
    def attached(self) -> Iterator[Any]:
        yield SimpleNamespace(link=self)

    def head_request(self, _method: str, _job: str, offset: int, _wait: bool) -> Any:
        data = bytes(self.size - offset)
        self.size += 10
        return data, offset + len(data), False


def test_what_a_job_has_printed_up_to_now_has_an_end() -> None:
    jobs = JobConnection(Talkative)  # type: ignore[arg-type]
    assert list(itertools.islice(jobs.log("a"), 3)) == [bytes(10)]


def test_a_log_whose_file_was_emptied_has_an_end() -> None:
    class Emptied(Talkative):
        def head_request(self, _method: str, _job: str, offset: int, _wait: bool) -> Any:
            return b"", offset, False

    jobs = JobConnection(Emptied)  # type: ignore[arg-type]
    assert list(itertools.islice(jobs.log("a"), 3)) == []
