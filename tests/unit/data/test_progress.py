"""What an execution shows at the terminal, and what it tells when it is asked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest

from miniray import data

pytest.importorskip("pyarrow")

from miniray.data import stats
from miniray.data.stats import ExecutionStats, RowProgress, StageStats
from miniray.logs.screen import SCREEN

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: Any) -> Iterator[Terminal]:
    made = Terminal()
    for module in ("miniray.data.stats", "miniray.logs.screen"):
        monkeypatch.setattr(f"{module}.stream", lambda is_stderr: made)
    yield made
    assert RowProgress._shown is None


def execution(seconds: float) -> ExecutionStats:
    stage = StageStats(
        "Map(f)", 5000, calls=3, open=1, rows=1200, size=4 * 2**20, waits_for="its tasks"
    )
    made = ExecutionStats(name="Map(f)", stages=[stage], asking=True)
    made.started -= seconds
    return made


def test_a_line_for_each_stage_has_rows_and_what_it_waits_for(terminal: Terminal) -> None:
    progress = RowProgress(execution(2.0))
    progress.tell()
    assert "Map(f): 1,200 of 5,000 rows, 600/s, 2 MiB in flight, waits for its tasks" in (
        terminal.getvalue()
    )
    progress.close()
    assert terminal.getvalue().endswith("\x1b[J")


def test_what_workers_print_comes_above_the_lines(terminal: Terminal) -> None:
    progress = RowProgress(execution(2.0))
    progress.tell()
    terminal.truncate(0)
    SCREEN.show([(True, "(task pid=1) hello")], ["a bar"])
    shown = terminal.getvalue()
    assert shown.index("hello\n") < shown.index("Map(f)") < shown.index("a bar")
    progress.close()


def test_nothing_is_shown_in_the_first_second_or_without_a_terminal(
    terminal: Terminal, monkeypatch: Any
) -> None:
    progress = RowProgress(execution(0.0))
    progress.tell()
    monkeypatch.setattr("miniray.data.stats.stream", lambda is_stderr: io.StringIO())
    other = RowProgress(execution(2.0))
    other.tell()
    assert terminal.getvalue() == ""
    progress.close()
    other.close()


def test_nothing_is_shown_if_the_context_says_so(terminal: Terminal, monkeypatch: Any) -> None:
    monkeypatch.setattr("miniray.data.stats._SHOWN_AFTER", 0)
    assert data.range(4).take_all()
    assert terminal.getvalue()
    terminal.truncate(0)
    monkeypatch.setattr(data.DataContext.get_current(), "enable_progress_bars", False)
    assert data.range(4).take_all()
    assert terminal.getvalue() == ""


def test_of_two_executions_the_first_one_is_shown(terminal: Terminal) -> None:
    first, second = RowProgress(execution(2.0)), RowProgress(execution(3.0))
    first.tell()
    shown = len(terminal.getvalue())
    second.tell()
    assert len(terminal.getvalue()) == shown
    second.close()
    first.close()


def test_a_stage_waits_for_its_reader_its_tasks_or_its_input() -> None:
    made = execution(1.0)
    stage = made.stages[0]
    (row,) = made.rows()
    assert (row["name"], row["rows"], row["bytes_in_flight"]) == ("Map(f)", 1200, 2 * 2**20)
    assert row["rows_per_second"] == pytest.approx(1200, rel=0.1)
    assert row["waits_for"] == "its tasks"
    stage.waits_for = "its input"
    assert made.rows()[0]["waits_for"] == "its input"
    made.asking = False
    assert made.rows()[0]["waits_for"] == "its reader"


def test_a_stage_that_was_read_to_its_end_waits_for_nothing(terminal: Terminal) -> None:
    made = execution(2.0)
    made.stages[0].waits_for = ""
    (row,) = made.rows()
    assert (row["state"], row["waits_for"], row["rows_per_second"]) == ("FINISHED", "", None)
    progress = RowProgress(made)
    progress.tell()
    assert "Map(f): 1,200 of 5,000 rows, done" in terminal.getvalue()
    progress.close()


def test_an_execution_is_told_of_until_it_ends() -> None:
    batches = iter(data.range(10).iter_batches(batch_size=5))
    next(batches)
    assert len(stats.RUNNING) == 1
    assert list(batches)
    assert len(stats.RUNNING) == 0
