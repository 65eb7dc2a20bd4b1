from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

NODE = "ab12cd34" * 4


class Connection:
    def __init__(self, drained: bool | Exception = True) -> None:
        self.asked: list[Any] = []
        self._drained = drained

    def drain(self, prefix: str, *, undo: bool) -> str:
        self.asked.append((prefix, undo))
        if not NODE.startswith(prefix):
            raise ValueError(f"No living node has an id that begins with {prefix!r}")
        return NODE

    def wait_drained(self, node_id: str, seconds: float | None) -> bool:
        self.asked.append((node_id, seconds))
        if isinstance(self._drained, Exception):
            raise self._drained
        return self._drained

    def close(self) -> None:
        self.asked.append("closed")


@pytest.fixture
def drain(miniray: Callable[..., Result], record: Callable[..., Any]) -> Callable[..., Result]:
    record()

    def run(connection: Connection, *args: str) -> Result:
        return miniray("drain", *args, connect=lambda *_: connection)

    return run


def test_a_node_is_named_by_the_first_digits_of_its_id(drain: Callable[..., Result]) -> None:
    connection = Connection()
    result = drain(connection, "ab12")
    assert (result.exit_code, result.output) == (0, "Nothing new is placed on node ab12cd34.\n")
    assert connection.asked == [("ab12", False), "closed"]


@pytest.mark.parametrize(
    ("drained", "args", "complaint"),
    [
        (True, ["nothing"], "begins with 'nothing'"),
        (True, ["ab", "--undo", "--wait"], "leave --wait out"),
        (True, ["ab", "--timeout", "3"], "give both"),
        (False, ["ab", "--wait"], "put back into service meanwhile"),
        (
            TimeoutError(),
            ["ab", "--wait", "--timeout", "3"],
            "still runs on node ab12cd34 after 3 s",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(
    drain: Callable[..., Result], drained: bool | Exception, args: list[str], complaint: str
) -> None:
    result = drain(Connection(drained), *args)
    assert result.exit_code != 0
    assert complaint in result.output.splitlines()[-1]
