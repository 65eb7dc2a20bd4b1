"""Memory that is mapped for writing, and the children of who has mapped it."""

from __future__ import annotations

import os
from pathlib import Path

from miniray.values.mapped import map_memory

SIZE = 4096


def test_children_do_not_inherit_what_is_mapped_for_writing() -> None:
    fd = os.memfd_create("of-a-writer")
    os.ftruncate(fd, SIZE)
    block = map_memory(fd, SIZE, shared=True)
    os.close(fd)
    assert "of-a-writer" in Path("/proc/self/maps").read_text()
    child = os.fork()
    if child == 0:
        os._exit(1 if "of-a-writer" in Path("/proc/self/maps").read_text() else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(block) == SIZE
