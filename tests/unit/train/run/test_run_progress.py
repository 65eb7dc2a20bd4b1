"""What a driver shows of a run: how far it is, on a terminal and elsewhere."""

from __future__ import annotations

import io
import types

import pytest
from terminal import screen

from miniray.logs.log_printer import LogBatch, LogPrinter
from miniray.logs.screen import SCREEN
from miniray.train import ProgressCallback
from miniray.train.base.states import RunState
from miniray.train.controller.feed import Progress, Row
from miniray.train.run.display import (
    LiveDisplay,
    PlainDisplay,
    ProgressMeter,
    format_seconds,
    format_status,
    make_display,
)


def row(number, **metrics):
    return Row(number, metrics, None)


def test_the_meter_tells_steps_per_second_and_the_time_left():
    meter = ProgressMeter(ProgressCallback(total_steps=100))
    assert format_status(meter.update(row(0), 10.0)) == "step 1/100"
    status = meter.update(row(20), 20.0)
    assert status.rate == 2.0
    assert status.left == pytest.approx(39.5)
    assert format_status(status) == "step 21/100, 2 steps/s, 0:40 left"


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_ends_at_its_last_epoch_whether_they_are_counted_from_0_or_1(first):
    meter = ProgressMeter(ProgressCallback(total_epochs=12))
    for number in range(12):
        status = meter.update(row(number, epoch=number + first), float(number))
    assert format_status(status).startswith("epoch 12/12, step 12, ")
    assert status.done == 1.0


def test_the_meter_counts_the_epochs_and_steps_that_are_reported():
    meter = ProgressMeter(ProgressCallback(total_epochs=10))
    meter.update(row(0, epoch=0, step=50), 0.0)
    status = meter.update(row(1, epoch=1, step=100), 25.0)
    assert format_status(status) == "epoch 2/10, step 100, 2 steps/s, 3:20 left"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "three"])
def test_what_is_no_number_of_epochs_or_steps_is_not_counted_with(value):
    meter = ProgressMeter(ProgressCallback(total_epochs=10))
    status = meter.update(row(0, epoch=value, step=value), 0.0)
    assert format_status(status) == "step 1"


def test_a_slow_start_is_forgotten():
    meter = ProgressMeter()
    meter.update(row(0), 0.0)
    rates = [meter.update(row(n), 1000.0 + n).rate for n in range(1, 100)]
    assert rates[-1] == pytest.approx(1.0)


def test_the_meter_begins_anew_when_the_steps_do():
    meter = ProgressMeter()
    meter.update(row(0, step=500), 0.0)
    assert meter.update(row(1, step=100), 5.0).rate is None
    assert meter.update(row(2, step=110), 10.0).rate == 2.0


def test_long_durations_have_hours():
    assert format_seconds(59.6) == "1:00"
    assert format_seconds(3725) == "1:02:05"


def test_the_display_follows_the_progress_callback(capsys, monkeypatch):
    clock = iter([100.0, 100.0, 120.0, 120.0])
    monkeypatch.setattr("miniray.train.run.display.time.monotonic", lambda: next(clock))
    display = make_display("run", [ProgressCallback(total_steps=41)])
    assert isinstance(display, PlainDisplay)
    display.show(Progress(1, RunState.RUNNING, [row(0)], 0, []))
    display.show(Progress(2, RunState.RUNNING, [row(20)], 0, []))
    assert "[run] step 21/41, 1 steps/s, 0:20 left" in capsys.readouterr().out.splitlines()


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        return screen(self.getvalue().replace("\n", "\r\n"), columns=200)


@pytest.fixture(name="on_terminal")
def _on_terminal(monkeypatch):
    """Makes standard output a terminal when called; capturing replaces it after the fixtures."""

    def install():
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        return terminal

    monkeypatch.setattr("miniray.train.run.display.terminal_size", lambda _: (200, 20))
    return install


def test_a_terminal_gets_one_line_with_epoch_pace_time_left_and_metrics(monkeypatch, on_terminal):
    clock = types.SimpleNamespace(monotonic=iter([100.0, 120.0]).__next__)
    monkeypatch.setattr("miniray.train.run.display.time", clock)
    terminal = on_terminal()
    display = make_display("run", [ProgressCallback(total_steps=41)])
    assert isinstance(display, LiveDisplay)
    display.show(Progress(1, RunState.RUNNING, [row(0, epoch=0)], 0, ["Some note."]))
    news = Row(20, {"epoch": 1, "loss": 0.25}, "checkpoint_000020")
    display.show(Progress(2, RunState.RUNNING, [news], 0, []))
    assert terminal.screen()[-1].startswith("[##########----------] training, epoch 1, step 21/41")
    display.show(Progress(3, RunState.FINISHED, [], 0, []))
    display.close()
    *above, last = terminal.screen()
    assert above == ["Some note.", "report 20: epoch=1 loss=0.25 -> checkpoint_000020"]
    assert last == (
        "[####################] finished, epoch 1, step 21/41, 1 steps/s, 0:20 left, "
        "report 20: epoch=1 loss=0.25 -> checkpoint_000020 (run)"
    )


def test_the_bars_of_workers_are_lines_below_that_of_the_run(on_terminal):
    terminal = on_terminal()
    printer = LogPrinter(lambda delay, call: None)
    display = make_display("run")
    printer.print_batch(LogBatch("rank", 7, "", False, ["10%|#", "20%|##\r"]))
    long = "x" * 300
    printer.print_batch(LogBatch("rank", 8, "", False, [long, "5%|\r"]))
    display.show(Progress(1, RunState.RUNNING, [row(0)], 0, []))
    printer.print_batch(LogBatch("rank", 7, "", False, ["30%|###\r"]))
    *above, line, first, second = terminal.screen()
    assert "".join(above) == f"(rank pid=7) 10%|#(rank pid=8) {long}"
    assert line == "training, step 1, report 0: (run)"
    assert (first, second) == ("(rank pid=7) 30%|###", "(rank pid=8) 5%|")
    display.close()
    assert terminal.screen()[-1] == line  # bars go with the display
    printer.close()


def test_a_signal_handler_may_print_while_its_thread_draws_the_line(on_terminal, monkeypatch):
    terminal = on_terminal()
    display = make_display("run")
    write = terminal.write

    def interrupted(text):
        monkeypatch.setattr(terminal, "write", write)
        SCREEN.show([(False, "of a worker")], [])
        return write(text)

    monkeypatch.setattr(terminal, "write", interrupted)
    display.show(Progress(1, RunState.RUNNING, [], 0, []))
    display.close()
    assert terminal.screen() == ["of a worker", "training (run)"]


@pytest.mark.parametrize(
    ("goals", "metrics", "done"),
    [
        ({}, {"epoch": 3}, None),
        ({"total_steps": 4}, {"step": 1}, 0.25),
        ({"total_steps": 4}, {"step": 9}, 1.0),
        ({"total_epochs": 4}, {"epoch": 0}, 0.25),
        ({"total_epochs": 4}, {"loss": 1}, None),
    ],
)
def test_the_bar_of_a_run_is_as_full_as_the_run_is_done(goals, metrics, done):
    assert ProgressMeter(ProgressCallback(**goals)).update(row(0, **metrics), 0.0).done == done


@pytest.mark.parametrize("total", [0, -1, 1.5, "3"])
def test_nonsense_in_a_progress_callback_is_refused(total):
    with pytest.raises(ValueError, match="total_epochs"):
        ProgressCallback(total_epochs=total)
