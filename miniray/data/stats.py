"""What an execution has done, by stage: tasks, rows, bytes, time, memory."""

from __future__ import annotations

import dataclasses
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """What a task tells of a block that it has made.

    Attributes:
        number: How many blocks the task has given before it.
        first: How many rows these have.
        rows: Its rows.
        size: Its bytes.
        wall: Seconds that it took to make.
        cpu: Of these, seconds of the processor.
        heap: Most bytes that the process has held so far.
    """

    number: int
    first: int
    rows: int
    size: int
    wall: float
    cpu: float
    heap: int


@dataclasses.dataclass
class StageStats:
    """The sums over the calls of a stage."""

    name: str
    calls: int = 0
    blocks: int = 0
    rows: int = 0
    size: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    heap: int = 0
    errors: int = 0

    def add(self, record: Record) -> None:
        """Count a block."""
        self.blocks += 1
        self.rows += record.rows
        self.size += record.size
        self.wall += record.wall
        self.cpu += record.cpu
        self.heap = max(self.heap, record.heap)

    def __str__(self) -> str:
        seconds = f"{self.wall:.2f} s wall, {self.cpu:.2f} s CPU"
        heap = f", {_bytes(self.heap)} peak of a process" if self.heap else ""
        failed = f", {self.errors} failed" if self.errors else ""
        return (
            f"{self.name}: {self.calls} tasks{failed}, {self.blocks} blocks, {self.rows} rows, "
            f"{_bytes(self.size)}, {seconds}{heap}"
        )


@dataclasses.dataclass
class ExecutionStats:
    """What an execution has done so far.

    Attributes:
        stages: The stages, in the order of the data.
        waited: Seconds that the consumer has waited for blocks.
        started: When it began, by ``time.perf_counter``.
        ended: When it ended; 0 before that.
    """

    stages: list[StageStats] = dataclasses.field(default_factory=list)
    waited: float = 0.0
    started: float = dataclasses.field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has taken, or takes so far."""
        return (self.ended or time.perf_counter()) - self.started

    def text(self) -> str:
        """Return a line for each stage and one for all."""
        lines = [f"Operator {number} {each}" for number, each in enumerate(self.stages)]
        lines.append(
            f"Total: {self.seconds:.2f} s, of which the consumer waited {self.waited:.2f} s"
        )
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "operators": [dataclasses.asdict(each) for each in self.stages],
            "seconds": self.seconds,
            "waited": self.waited,
        }


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
