"""Which ends of processes are put down to the kernel's kills for lack of memory."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from miniray.node.workers.process_names import MemoryKills

if TYPE_CHECKING:
    from pathlib import Path

KILLED = -signal.SIGKILL


class Machine:
    """A machine with a count of kills, and a clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        (root / "proc").mkdir()
        (root / "proc" / "meminfo").write_text("MemTotal: 8388608 kB\n")
        self.kills(3)

    def kills(self, count: int) -> None:
        text = f"nr_free_pages 7\noom_kill {count}\nnuma_hit 1\n"
        (self.root / "proc" / "vmstat").write_text(text)

    def watch(self) -> MemoryKills:
        return MemoryKills(self.root, lambda: self.now)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_kill_right_after_the_count_rose_was_for_lack_of_memory(machine: Machine) -> None:
    watch = machine.watch()
    machine.kills(4)
    told = watch.explain(KILLED)
    assert "because memory ran out" in told
    assert "has 8.0 GiB" in told


def test_the_end_may_be_known_some_seconds_after_the_count_rose(machine: Machine) -> None:
    watch = machine.watch()
    machine.kills(4)
    watch.look()
    machine.now += 5
    assert watch.explain(KILLED)


def test_kills_of_long_ago_explain_nothing(machine: Machine) -> None:
    watch = machine.watch()
    assert watch.explain(KILLED) == ""  # three were killed before it began to watch
    machine.kills(4)
    watch.look()
    machine.now += 60
    watch.look()
    assert watch.explain(KILLED) == ""


@pytest.mark.parametrize("code", [None, 0, 1, -signal.SIGTERM, -signal.SIGSEGV])
def test_other_ends_are_not_the_kernels(machine: Machine, code: int | None) -> None:
    watch = machine.watch()
    machine.kills(4)
    assert watch.explain(code) == ""


def test_a_machine_that_does_not_count_explains_nothing(machine: Machine) -> None:
    watch = machine.watch()
    (machine.root / "proc" / "vmstat").write_text("nr_free_pages 7\n")
    assert watch.explain(KILLED) == ""
    (machine.root / "proc" / "vmstat").unlink()
    assert watch.explain(KILLED) == ""
