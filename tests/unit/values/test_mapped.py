"""Copies of mapped memory as bytes."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from miniray.values.mapped import address_of, bytes_of

MIB = 1024 * 1024


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, 32 * MIB - 1, 32 * MIB, 33 * MIB + 5])
def test_a_copy_has_the_bytes_that_were_there_and_keeps_them(size: int) -> None:
    with mmap.mmap(-1, size + 4096) as block, memoryview(block) as view:
        pattern = os.urandom(4099)
        expected = (pattern * (size // len(pattern) + 1))[:size]
        view[13 : 13 + size] = expected
        with view[13 : 13 + size] as part:
            copy = bytes_of(part)
        view[13 : 13 + size] = bytes(size)
    assert type(copy) is bytes
    assert copy == expected
    assert hash(copy) == hash(expected)
    assert {copy: 1}[expected] == 1


def flags_of(address: int) -> list[str]:
    """What the kernel was told of the memory at an address (proc_pid_smaps(5), VmFlags)."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and begin <= address < end:
            return rest
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this kernel"
)
def test_large_pages_are_asked_for_a_large_copy() -> None:
    with mmap.mmap(-1, 64 * MIB) as block, memoryview(block) as view:
        large = bytes_of(view)
    assert "hg" in flags_of(address_of(large) + 32 * MIB)
