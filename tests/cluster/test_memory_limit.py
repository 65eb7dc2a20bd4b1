"""A cluster in a control group that limits its memory, as in a container: nothing is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from miniray.node.store.spill_files import is_in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
LIMIT = 600 * MIB
IN_MEMORY = Path("/dev/shm")

PROGRAM = """
import json
import numpy as np
import miniray

miniray.init(num_cpus=2)
capacity = int(miniray.cluster_resources()["object_store_memory"])
VALUE = 8 << 20
count = 3 * capacity // VALUE + 1


def value_of(number):
    return np.full(VALUE // 8, number)


def check(refs, step):
    for number, ref in enumerate(refs):
        value = miniray.get(ref)
        assert value.nbytes == VALUE and (value == number + step).all(), (number, step)


@miniray.remote
def make(number):
    return value_of(number)


@miniray.remote
def successor(value):
    return value + 1


put = [miniray.put(value_of(number)) for number in range(count)]
check(put, 0)
made = [make.remote(number) for number in range(count)]
later = [successor.remote(ref) for ref in made]
check(later, 1)
check(made, 0)
check(put, 0)
print(json.dumps({"capacity": capacity, "bytes": 3 * count * VALUE}))
miniray.shutdown()
"""


class MemoryGroup:
    """A control group, and what the kernel counts in it."""

    def __init__(self, folder: Path, *, unified: bool) -> None:
        self.folder = folder
        self._limit = "memory.max" if unified else "memory.limit_in_bytes"
        self._swap = "memory.swap.max" if unified else "memory.memsw.limit_in_bytes"
        self._events = "memory.events" if unified else "memory.oom_control"
        self._unified = unified

    def limit(self, size: int) -> None:
        (self.folder / self._limit).write_text(str(size))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (self.folder / self._swap).write_text("0" if self._unified else str(size))

    @property
    def killed(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        lines = (self.folder / self._events).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def command(self, *command: str) -> list[str]:
        """What runs a command in the group."""
        enter = f"echo $$ > '{self.folder}/cgroup.procs' && exec \"$@\""
        return ["sh", "-c", enter, "sh", *command]


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """A group of this test's own, where this user may make one."""
    for base, unified in ((Path("/sys/fs/cgroup/memory"), False), (Path("/sys/fs/cgroup"), True)):
        folder = base / f"miniray-test-{uuid.uuid4().hex}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            made = MemoryGroup(folder, unified=unified)
            try:
                made.limit(LIMIT)
            except OSError:  # the memory controller is not there, or not passed on
                continue
            yield made
            return
        finally:
            folder.rmdir()
    pytest.skip(
        "this user can make no control group that limits memory: that needs root and a writable "
        "/sys/fs/cgroup with the memory controller"
    )


def run_in(group: MemoryGroup, program: str, **variables: str) -> str:
    done = subprocess.run(
        group.command(sys.executable, "-c", program),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert group.killed == 0, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", ["on disk", "in memory"])
def test_nine_times_the_store_goes_through_a_limited_container(
    group: MemoryGroup, session_root: Path, files: str
) -> None:
    """Also where files in /tmp are in memory, and so count in the group."""
    if files == "on disk":
        found = json.loads(run_in(group, PROGRAM))
    else:
        if not is_in_memory(IN_MEMORY) or is_in_memory(Path("/var/tmp")):
            pytest.skip(f"needs {IN_MEMORY} in memory, and /var/tmp on a disk")
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
            found = json.loads(run_in(group, PROGRAM, MINIRAY_TMPDIR=folder))
    assert abs(found["capacity"] - 0.3 * LIMIT) < MIB
    assert found["bytes"] > 2.5 * LIMIT
