"""What an execution has done and does, by stage; shown on request, and at the terminal."""

from __future__ import annotations

import dataclasses
import math
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from miniray.common.names import format_bytes
from miniray.logs.screen import ERASE_BELOW, SCREEN, draw, is_terminal, stream, terminal_size, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Stages of this process that are reported, at most.
_MOST = 200
#: Seconds until the terminal shows an execution, and between two changes of it.
_SHOWN_AFTER, _BETWEEN = 1.0, 0.2


class Record(NamedTuple):
    """A task's report on a block that it has made.

    Attributes:
        first: How many rows the task has given before it.
        wall: Seconds that it took to make.
        cpu: Of these, seconds of the processor.
        heap: Most bytes that the process has held so far.
    """

    first: int
    rows: int
    size: int
    wall: float
    cpu: float
    heap: int


@dataclasses.dataclass
class StageStats:
    """The sums over the calls of a stage.

    Attributes:
        open: Calls that have begun and are not read to their end.
        total: Rows that will come out, if that is known.
        waits_for: "its input", "its tasks" or "its reader"; "" when all has been read.
    """

    name: str
    total: int | None = None
    calls: int = 0
    open: int = 0
    blocks: int = 0
    rows: int = 0
    size: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    heap: int = 0
    errors: int = 0
    waits_for: str = "its input"

    def add(self, record: Record) -> None:
        self.blocks += 1
        self.rows += record.rows
        self.size += record.size
        self.wall += record.wall
        self.cpu += record.cpu
        self.heap = max(self.heap, record.heap)

    @property
    def per_call(self) -> int:
        """Bytes that a call has made, of those that have ended."""
        return self.size // max(1, self.calls - self.open)

    def __str__(self) -> str:
        seconds = f"{self.wall:.2f} s wall, {self.cpu:.2f} s CPU"
        heap = f", {format_bytes(self.heap)} peak of a process" if self.heap else ""
        failed = f", {self.errors} failed" if self.errors else ""
        return (
            f"{self.name}: {self.calls} tasks{failed}, {self.blocks} blocks, {self.rows} rows, "
            f"{format_bytes(self.size)}, {seconds}{heap}"
        )


@dataclasses.dataclass(eq=False)
class ExecutionStats:
    """What an execution has done so far.

    Attributes:
        name: Of the dataset: what its last stage does.
        held: Resources that its pools hold.
        thread: The thread that reads it, by ``threading.get_ident``.
        asking: Whether the consumer waits for a block.
        waited: Seconds that the consumer has waited for blocks.
        started: When it began, by ``time.perf_counter``.
        ended: When it ended; 0 before that.
    """

    name: str = ""
    held: Mapping[str, float] = dataclasses.field(default_factory=dict)
    thread: int = 0
    stages: list[StageStats] = dataclasses.field(default_factory=list)
    asking: bool = False
    waited: float = 0.0
    started: float = dataclasses.field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has taken, or takes so far."""
        return (self.ended or time.perf_counter()) - self.started

    def rows(self) -> list[dict[str, Any]]:
        """Return what each stage does now, as plain values."""
        seconds = max(self.seconds, 1e-9)
        return [
            {
                "name": self.name,
                "operator": each.name,
                "state": "RUNNING" if each.waits_for else "FINISHED",
                "rows": each.rows,
                "position": each.rows,
                "total": each.total,
                "rows_per_second": round(each.rows / seconds, 1) if each.waits_for else None,
                "bytes": each.size,
                "bytes_in_flight": each.open * each.per_call,
                "running": each.open,
                "waits_for": each.waits_for and (each.waits_for if self.asking else "its reader"),
                "wait_seconds": round(self.waited, 3),
            }
            for each in list(self.stages)
        ]

    def text(self) -> str:
        """Return a line for each stage and one for all."""
        lines = [f"Operator {number} {each}" for number, each in enumerate(self.stages)]
        total = f"Total: {self.seconds:.2f} s, of which the consumer waited {self.waited:.2f} s"
        return "\n".join([*lines, total])

    def summary(self) -> dict[str, Any]:
        """Return these figures as plain values."""
        operators = [dataclasses.asdict(each) for each in self.stages]
        return {"operators": operators, "seconds": self.seconds, "waited": self.waited}


#: The executions of this process that go on.
RUNNING: weakref.WeakSet[ExecutionStats] = weakref.WeakSet()


def running() -> list[dict[str, Any]]:
    """Return what the stages of this process's executions do now."""
    return [row for each in list(RUNNING) for row in each.rows()][:_MOST]


class RowProgress:
    """Lines at the bottom of the terminal: one for each stage of an execution, in rows.

    There is none before a second, and none where stderr is no terminal. Drawn when a block comes,
    without a thread. Of executions at the same time, the first one is shown.
    """

    _shown: ClassVar[RowProgress | None] = None

    def __init__(self, stats: ExecutionStats, *, shown: bool = True) -> None:
        self._stats = stats
        self._bars: Sequence[str] = ()
        self._due = stats.started + _SHOWN_AFTER if shown else math.inf

    def tell(self) -> None:
        """Draw what has changed, if it is time."""
        now = time.perf_counter()
        if now < self._due:
            return
        self._due = now + _BETWEEN
        if RowProgress._shown is None and is_terminal(stream(True)):
            RowProgress._shown = self
            SCREEN.hand_over(self)
        if RowProgress._shown is self:
            SCREEN.show((), self._bars)

    def print_above(self, lines: Sequence[str], bars: Sequence[str]) -> None:
        """Print lines of workers above, and draw the stages and these bars below."""
        self._bars = bars
        terminal = stream(True)
        text = "".join(f"{line}\n" for line in lines)
        own = [_line(row) for row in self._stats.rows()]
        if terminal is not None:
            write(terminal, ERASE_BELOW + text + draw([*own, *bars], *terminal_size(terminal)))

    def close(self) -> None:
        if RowProgress._shown is self:
            SCREEN.take_back(self)
            RowProgress._shown = None
            write(stream(True), ERASE_BELOW)


def _line(row: dict[str, Any]) -> str:
    total = f" of {row['total']:,}" if row["total"] is not None else ""
    rows = f"{row['operator'][:60]}: {row['rows']:,}{total} rows"
    if not row["waits_for"]:
        return f"{rows}, done"
    flight = f", {format_bytes(row['bytes_in_flight'])} in flight" if row["bytes_in_flight"] else ""
    return f"{rows}, {row['rows_per_second']:,.0f}/s{flight}, waits for {row['waits_for']}"
