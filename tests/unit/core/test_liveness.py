"""The pipe that tells how long memory stays mapped where the daemon gets no word of it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from miniray.objects.liveness import Liveness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Link:
    """A daemon that gives pipes when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Callable[[Any, Any, int], None]] = []
        self.forks: list[int] = []
        self.pipes: list[int] = []

    def node_request_async(
        self, method: str, args: tuple[int], answer: Callable[[Any, Any, int], None]
    ) -> None:
        assert method == "liveness"
        self.asked.append(answer)

    def node_notice(self, method: str, number: int) -> None:
        assert method == "forked"
        self.forks.append(number)

    def give(self) -> int:
        """Answer the oldest question; returns the descriptor that was given."""
        pipe, others = os.pipe()
        os.set_blocking(pipe, False)
        self.pipes.append(pipe)
        self.asked.pop(0)(None, None, others)
        return others

    def has_ended(self, index: int) -> bool:
        try:
            return os.read(self.pipes[index], 1) == b""
        except BlockingIOError:
            return False

    def close(self) -> None:
        for pipe in self.pipes:
            os.close(pipe)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


@pytest.fixture
def liveness(link: Link) -> Liveness:
    return Liveness(link)  # type: ignore[arg-type]


def nothing() -> None:
    """Nobody is told."""


def test_one_pipe_is_asked_for_before_the_first_value_is_mapped(
    link: Link, liveness: Liveness
) -> None:
    liveness.begin()
    liveness.begin()
    assert len(link.asked) == 1


def test_the_pipe_of_a_process_that_left_ends_with_the_last_view(
    link: Link, liveness: Liveness
) -> None:
    liveness.begin()
    link.give()
    told: list[str] = []
    first = liveness.mapped(lambda: told.append("first"))
    second = liveness.mapped(nothing)
    first()
    assert told == ["first"]
    liveness.leave()
    assert not link.has_ended(0)
    second()
    assert link.has_ended(0)


def test_the_pipe_of_a_process_that_looks_at_nothing_ends_when_it_leaves(
    link: Link, liveness: Liveness
) -> None:
    liveness.begin()
    liveness.mapped(nothing)()
    link.give()
    assert not link.has_ended(0)
    liveness.leave()
    assert link.has_ended(0)


def test_a_pipe_that_comes_too_late_is_closed(link: Link, liveness: Liveness) -> None:
    liveness.begin()
    liveness.leave()
    link.give()
    assert link.has_ended(0)


def test_each_fork_names_the_pipe_that_its_child_has(link: Link, liveness: Liveness) -> None:
    liveness.begin()
    link.give()
    liveness.before_fork()
    child = os.dup(liveness._fd)  # which it inherits
    liveness.after_fork()
    assert link.forks == [1]
    link.give()
    assert not link.has_ended(0)  # the child lives
    os.close(child)
    assert link.has_ended(0)
    liveness.before_fork()
    liveness.after_fork()
    assert link.forks == [1, 2]
    liveness.leave()


def test_who_has_no_pipe_yet_says_so_when_it_forks(link: Link, liveness: Liveness) -> None:
    liveness.before_fork()
    liveness.after_fork()
    assert link.forks == [0]
    assert link.asked == []


def test_a_pipe_is_not_exchanged_while_a_child_is_made(link: Link, liveness: Liveness) -> None:
    liveness.begin()
    given = link.give()
    liveness.before_fork()
    liveness.after_fork()
    liveness.before_fork()
    answer = threading.Thread(target=link.give)
    answer.start()
    answer.join(0.05)
    assert answer.is_alive()
    os.fstat(given)  # is still open
    liveness.after_fork()
    answer.join(20)
    assert link.forks == [1, 1]
    assert link.has_ended(0)
    liveness.leave()


def test_a_descriptor_that_user_code_has_taken_over_stays_open(
    link: Link, liveness: Liveness
) -> None:
    liveness.begin()
    number = link.give()
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, number)
    liveness.leave()
    os.fstat(number)
    os.close(number)
    os.close(other)
