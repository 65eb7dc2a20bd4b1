"""Which breakpoint `miniray debug` attaches to, and how it shows them."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import click
import pytest

from miniray.cli.debug import Breakpoint, choose

FACTS: dict[str, Any] = {
    "file": "/home/me/train.py",
    "line": 12,
    "function": "step",
    "task": "Trainer.run",
    "pid": 4711,
    "since": 0.0,
}


@pytest.fixture
def waiting() -> Any:
    socks = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    yield [Breakpoint(f"4711-{number}", FACTS, sock) for number, sock in enumerate(socks)]
    for sock in socks:
        sock.close()


def test_the_only_one_needs_no_id(waiting: list[Breakpoint]) -> None:
    assert choose(waiting[:1], None) is waiting[0]


def test_of_several_the_user_has_to_choose(waiting: list[Breakpoint]) -> None:
    assert choose(waiting, None) is None
    assert choose(waiting, "4711-1") is waiting[1]


def test_nothing_is_chosen_where_nothing_waits() -> None:
    assert choose([], None) is None


@pytest.mark.parametrize("none", [True, False])
def test_an_unknown_id_is_an_error_with_those_that_are_known(
    waiting: list[Breakpoint], none: bool
) -> None:
    known = "none" if none else "4711-0, 4711-1"
    with pytest.raises(click.ClickException, match=f"No breakpoint 12 waits .*: {known}"):
        choose([] if none else waiting, "12")


def test_a_line_says_where_it_is_and_how_long_it_waits(waiting: list[Breakpoint]) -> None:
    facts = {**FACTS, "since": time.time() - 5}
    line = Breakpoint("4711-1", facts, waiting[0].sock).describe()
    assert re.fullmatch(
        r"4711-1  /home/me/train\.py:12 in step of Trainer\.run \(for [56] s\)", line
    )
