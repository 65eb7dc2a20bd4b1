"""Memory that a writer keeps mapped, with real memfds and a daemon that answers at once."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from open_files import open_files

from miniray.messages.protocol import ON_DISK
from miniray.objects import shared_memory
from miniray.objects.shared_memory import WarmMemory
from miniray.values.mapped import copy_into, map_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from process_doubles import FakeLink

SIZE = 3 * 4096
NAME = "of-warm-memory-"


@pytest.fixture
def warm(link: FakeLink) -> WarmMemory:
    return WarmMemory(link)  # type: ignore[arg-type]


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    made: list[int] = []
    numbers = itertools.count()

    def make() -> int:
        fd = os.memfd_create(NAME + str(next(numbers)))
        os.ftruncate(fd, SIZE)
        made.append(fd)
        return fd

    yield make
    for fd in made:
        os.close(fd)


def content(fd: int, size: int = SIZE) -> bytes:
    return os.pread(fd, size, 0)


def pieces(letter: bytes) -> list[bytes | memoryview]:
    array = np.frombuffer(letter * 5000, dtype=np.uint8)
    return [b"head", letter * 100, memoryview(array), memoryview(bytearray(letter * 7))]


def joined(letter: bytes) -> bytes:
    return b"".join(bytes(piece) for piece in pieces(letter))


def test_the_second_value_in_a_piece_of_memory_is_mapped_and_the_third_needs_no_descriptor(
    warm: WarmMemory, link: FakeLink, memory: Callable[[], int]
) -> None:
    fd = memory()
    before = open_files()
    for number, (letter, given) in enumerate([(b"a", fd), (b"b", fd), (b"c", -1), (b"d", -1)]):
        whole = joined(letter)
        warm.write(7, given, len(whole), pieces(letter))
        assert content(fd, len(whole)) == whole
        assert link.noticed("mapped_memory") == ([] if number == 0 else [(7,)])
    assert not open_files() - before


def test_memory_that_is_given_up_is_unmapped_and_written_anew(
    warm: WarmMemory, link: FakeLink, memory: Callable[[], int]
) -> None:
    fd = memory()
    for letter in (b"a", b"b"):
        warm.write(7, fd, SIZE, pieces(letter))
    assert maps()
    warm.give_up([7, 8])
    assert link.noticed("unmapped_memory") == [([7, 8],)]
    assert not maps()
    warm.write(7, fd, SIZE, pieces(b"c"))
    assert content(fd, len(joined(b"c"))) == joined(b"c")


def maps() -> int:
    """How many mappings this process has of what this test made."""
    return Path("/proc/self/maps").read_text().count(NAME)


def test_only_so_many_pieces_of_memory_stay_mapped(
    warm: WarmMemory,
    link: FakeLink,
    memory: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_WARM", 2)
    for number in (1, 2):
        fd = memory()
        for letter in (b"a", b"b"):
            warm.write(number, fd, SIZE, pieces(letter))
    warm.write(1, -1, SIZE, pieces(b"c"))  # so 2 is the one that was not used for longest
    fd = memory()
    for letter in (b"a", b"b"):
        warm.write(3, fd, SIZE, pieces(letter))
    assert link.noticed("unmapped_memory") == [([2],)]
    assert maps() == 2


def test_a_file_on_disk_is_written_and_never_mapped(
    warm: WarmMemory, link: FakeLink, memory: Callable[[], int]
) -> None:
    fd = memory()
    for letter in (b"a", b"b", b"c"):
        warm.write(ON_DISK, fd, SIZE, pieces(letter))
        assert content(fd, len(joined(letter))) == joined(letter)
    assert not maps()
    assert not link.notices


def test_memory_unmapped_by_another_thread_just_now_is_written_through_its_descriptor(
    warm: WarmMemory, link: FakeLink, memory: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = memory()

    def request(method: str, args: tuple[Any, ...]) -> tuple[Any, int]:
        assert (method, args) == ("memory", (7,))
        return None, os.dup(fd)

    monkeypatch.setattr(link, "node_request", request)
    before = open_files()
    warm.write(7, -1, SIZE, pieces(b"a"))
    assert content(fd, len(joined(b"a"))) == joined(b"a")
    assert not open_files() - before


def test_a_copy_beyond_the_end_is_refused(memory: Callable[[], int]) -> None:
    block = map_memory(memory(), SIZE, shared=True)
    copy_into(block, SIZE - 4, b"last")
    with pytest.raises(OSError, match="exceed"):
        copy_into(block, SIZE - 3, b"last")


def test_what_cannot_be_read_as_bytes_is_refused_and_nothing_leaks(
    memory: Callable[[], int],
) -> None:
    block = map_memory(memory(), SIZE, shared=True)
    scattered = memoryview(np.zeros(100, dtype=np.uint8)[::2])
    with pytest.raises(BufferError):
        copy_into(block, 0, scattered)
