import io
import os
import pty
import sys

import pytest
from terminal import screen

from miniray.common.config import config
from miniray.logs.log_printer import LogBatch, LogDeduplicator, LogPrinter
from miniray.logs.screen import SCREEN, BarKey, BarRegion, draw


class Timers:
    """A clock that stands still, and timers that are run by hand."""

    def __init__(self):
        self.now = 0.0
        self.waiting = []

    def call_later(self, delay, callback):
        self.waiting.append((self.now + delay, callback))

    def advance(self, seconds):
        self.now += seconds
        due = [callback for at, callback in self.waiting if at <= self.now]
        self.waiting = [item for item in self.waiting if item[0] > self.now]
        for callback in due:
            callback()


class Terminal(io.StringIO):
    """A stream that says it is a terminal and knows what stands there."""

    def isatty(self):
        return True

    def screen(self):
        """The lines as they stand there."""
        return screen(self.getvalue().replace("\n", "\r\n"))


@pytest.fixture
def timers():
    return Timers()


@pytest.fixture
def printer(timers):
    return LogPrinter(timers.call_later, dedup=True, window=5.0, clock=lambda: timers.now)


@pytest.fixture(name="on_terminal")
def _on_terminal(monkeypatch):
    """Makes both streams a terminal when called; capturing replaces them after the fixtures."""

    def install():
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.delenv("NO_COLOR", raising=False)
    return install


def batch(*lines, name="f", pid=1, node="", is_stderr=False):
    return LogBatch(name, pid, node, is_stderr, lines)


# --- prefixes and streams -------------------------------------------------------------------


def test_a_line_says_who_wrote_it_and_where(printer, capsys):
    printer.print_batch(batch("one", "two", name="Counter", pid=7))
    printer.print_batch(batch("three", name="", pid=8, node="ab12"))
    assert capsys.readouterr().out.splitlines() == [
        "(Counter pid=7) one",
        "(Counter pid=7) two",
        "(pid=8, node=ab12) three",
    ]


def test_a_name_cannot_steer_the_terminal(printer, capsys):
    printer.print_batch(batch("one", name="f\x1b[2J"))
    assert capsys.readouterr().out == "(f\\x1b[2J pid=1) one\n"


def test_a_stream_that_is_replaced_later_is_the_one_used(printer, monkeypatch):
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stdout", replaced)
    printer.print_batch(batch("x"))
    assert replaced.getvalue() == "(f pid=1) x\n"


def test_no_color_is_respected(printer, on_terminal, monkeypatch):
    terminal = on_terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    printer.print_batch(batch("a"))
    assert terminal.getvalue() == "(f pid=1) a\n"


class Broken(io.StringIO):
    def write(self, text):
        raise RuntimeError("broken")

    def isatty(self):
        raise RuntimeError("broken")


@pytest.mark.parametrize("stream", [None, Broken(), object()])
def test_a_stream_that_can_not_be_written_to_does_not_disturb(printer, monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    printer.print_batch(batch("x", "y\r"))
    printer.close()


def test_characters_that_the_stream_can_not_hold_are_escaped(printer, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    printer.print_batch(batch("é"))
    assert raw.getvalue() == b"(f pid=1) \\xe9\n"


# --- folding --------------------------------------------------------------------------------


def test_a_line_of_many_workers_is_printed_once_and_then_counted(printer, timers, capsys):
    for pid in range(6):
        printer.print_batch(batch("loaded the model", pid=pid))
    assert capsys.readouterr().out == "(f pid=0) loaded the model\n"
    timers.advance(5.0)
    printed = capsys.readouterr().out
    assert printed.startswith("(f pid=5) loaded the model [repeated 5x] ")
    assert "MINIRAY_DEDUP_LOGS=0" in printed


def test_a_line_of_several_nodes_is_repeated_across_the_cluster(printer, timers, capsys):
    for node in ("", "ab12", "cd34"):
        printer.print_batch(batch("same", node=node))
    timers.advance(5.0)
    assert "same [repeated 2x across cluster] " in capsys.readouterr().out


def test_lines_that_differ_in_a_number_are_all_printed_at_once(printer, capsys):
    lines = [f"epoch {number // 2} val_acc {number / 20} lr 3e-4" for number in range(12)]
    for number, line in enumerate(lines):
        printer.print_batch(batch(line, pid=number % 2))
    assert [line.partition(") ")[2] for line in capsys.readouterr().out.splitlines()] == lines


@pytest.fixture(name="_numbers_folded")
def _numbers_folded(monkeypatch):
    monkeypatch.setenv("MINIRAY_DEDUP_NUMBERS", "1")
    config.cache_clear()
    yield
    config.cache_clear()


@pytest.mark.usefixtures("_numbers_folded")
def test_lines_that_differ_in_numbers_are_folded_if_that_is_asked_for(timers, capsys):
    printer = LogPrinter(timers.call_later, dedup=True, window=5.0, clock=lambda: timers.now)
    for pid in range(3):
        printer.print_batch(batch(f"rank {pid} of 3 is ready", pid=pid))
    printer.print_batch(batch("rank 7 is late", pid=3))
    timers.advance(5.0)
    printed = capsys.readouterr().out
    assert printed.count("is ready") == 2
    assert "rank 2 of 3 is ready [repeated 2x] " in printed
    assert "rank 7 is late" in printed


FATAL = [
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f (most recent call first):",
    '  File "main.py", line 10 in crash',
    '  File "worker.py", line 182 in run',
]
CHAIN = [
    "Traceback (most recent call last):",
    '  File "main.py", line 3, in f',
    "KeyError: 'a'",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "main.py", line 5, in f',
    "ValueError: no a",
]


@pytest.mark.parametrize("trace", [FATAL, CHAIN[:3]], ids=["fatal", "traceback"])
def test_traces_of_several_workers_come_whole_and_one_after_the_other(
    printer, timers, capsys, trace
):
    for line in trace:  # as slowly as they are written
        for pid in (1, 2, 3):
            printer.print_batch(batch(line, pid=pid, is_stderr=True))
    timers.advance(0.2)
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"(f pid={pid}) {line}" for pid in (1, 2, 3) for line in trace]


def test_a_trace_that_is_cut_off_is_printed_soon(printer, timers, capsys):
    printer.print_batch(batch(*FATAL[:2], is_stderr=True))
    printer.print_batch(batch("another", pid=2, is_stderr=True))
    timers.advance(0.2)
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["(f pid=2) another", *(f"(f pid=1) {line}" for line in FATAL[:2])]


def test_no_line_of_a_chain_of_tracebacks_is_folded(printer, capsys):
    for pid in (1, 2, 3):
        printer.print_batch(batch(*CHAIN, pid=pid, is_stderr=True))
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"(f pid={pid}) {line}" for pid in (1, 2, 3) for line in CHAIN]


def test_what_a_worker_writes_after_a_traceback_is_folded_again(printer, capsys):
    for pid in (1, 2):
        printer.print_batch(
            batch(*CHAIN, *FATAL, "Extension modules: a (total: 1)", "done", pid=pid)
        )
    assert capsys.readouterr().out.count("done") == 1


def test_how_to_turn_folding_off_is_told_once(printer, timers, capsys):
    for _ in range(2):
        for pid in range(3):
            printer.print_batch(batch("same", pid=pid))
        timers.advance(5.0)
    assert capsys.readouterr().out.count("MINIRAY_DEDUP_LOGS=0") == 1


def test_a_single_line_that_was_held_back_is_printed_as_it_is(printer, timers, capsys):
    printer.print_batch(batch("same", pid=1))
    printer.print_batch(batch("same", pid=2))
    timers.advance(5.0)
    assert capsys.readouterr().out == "(f pid=1) same\n(f pid=2) same\n"


def test_what_one_worker_repeats_is_printed(printer, capsys):
    printer.print_batch(batch("same", "same", "same"))
    assert capsys.readouterr().out.count("same") == 3


def test_lines_of_numbers_are_printed(printer, capsys):
    for pid in range(3):
        printer.print_batch(batch(f"{pid}.5", pid=pid))
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_stdout_and_stderr_are_folded_apart(printer, capsys):
    printer.print_batch(batch("same", pid=1))
    printer.print_batch(batch("same", pid=2, is_stderr=True))
    assert capsys.readouterr() == ("(f pid=1) same\n", "(f pid=2) same\n")


def test_a_count_that_is_held_back_is_printed_at_shutdown(printer, capsys):
    for pid in range(4):
        printer.print_batch(batch("same", pid=pid))
    printer.close()
    assert "[repeated 3x]" in capsys.readouterr().out


def test_no_timer_runs_while_nothing_is_held_back(printer, timers):
    printer.print_batch(batch("a"))
    assert timers.waiting == []
    for pid in range(5):
        printer.print_batch(batch("a", pid=pid))
    assert len(timers.waiting) == 1
    timers.advance(5.0)
    timers.advance(5.0)
    assert timers.waiting == []


def test_a_line_that_goes_on_is_counted_in_every_window():
    folding = LogDeduplicator(5.0)
    counts = []
    for second in range(20):
        counts += [folded.count for folded in folding.due(second)]
        for worker in range(3):
            folding.admit(worker, "same", second)
    assert counts == [14, 15, 15]


def test_more_patterns_than_can_be_followed_are_printed():
    folding = LogDeduplicator(5.0)
    letters = [chr(0x4E00 + number) for number in range(12_000)]
    admitted = [folding.admit(worker, letter, 0.0) for worker in (1, 2) for letter in letters]
    assert admitted.count(True) == 12_000 + 2_000


# --- progress bars --------------------------------------------------------------------------


def test_lines_are_printed_above_the_bars_of_all_workers(printer, on_terminal):
    terminal = on_terminal()
    printer.print_batch(batch("10%|\r", pid=1, is_stderr=True))
    printer.print_batch(batch("20%|\r", pid=2, is_stderr=True))
    printer.print_batch(batch("hello", pid=3))
    printer.print_batch(batch("11%|\r", pid=1, is_stderr=True))
    hello = "(f pid=3) hello"
    assert terminal.screen() == [hello, "", "(f pid=1) 11%|", "(f pid=2) 20%|"]
    printer.print_batch(batch("100%|", pid=1, is_stderr=True))
    assert terminal.screen() == [hello, "(f pid=1) 100%|", "", "(f pid=2) 20%|"]


def test_a_line_that_the_driver_has_not_finished_goes_on_where_it_was(printer, on_terminal):
    terminal = on_terminal()
    terminal.write("loading")
    for percent in (10, 20):
        printer.print_batch(batch(f"{percent}%|\r"))
        terminal.write(".")
    assert terminal.screen() == ["loading..", "(f pid=1) 20%|"]


def test_bars_stay_where_they_are_at_the_lower_edge_of_the_terminal(printer, on_terminal):
    terminal = on_terminal()
    for number in range(100):
        terminal.write(f"driver {number}\n")
        printer.print_batch(batch(f"{number}%|\r", pid=1))
        printer.print_batch(batch(f"{number}%|\r", pid=2))
        printer.print_batch(batch(f"line {number}", pid=3))
    shown = terminal.screen()
    assert shown[-3:] == ["", "(f pid=1) 99%|", "(f pid=2) 99%|"]
    assert shown[-5:-3] == ["driver 99", "(f pid=3) line 99"]
    assert sum("%" in line for line in shown) == 2


class Display:
    """A live display that takes what workers print."""

    def __init__(self):
        self.seen = []

    def print_above(self, lines, bars):
        self.seen.append((list(lines), list(bars)))


def test_a_live_display_prints_what_is_for_the_terminal_and_draws_the_bars(
    printer, on_terminal, monkeypatch
):
    terminal, display = on_terminal(), Display()
    file = io.StringIO()
    printer.print_batch(batch("5%|\r"))
    SCREEN.hand_over(display)
    monkeypatch.setattr(sys, "stderr", file)
    printer.print_batch(batch("one", "10%|\r"))
    printer.print_batch(batch("two", is_stderr=True))
    SCREEN.take_back(display)
    assert terminal.screen() == []
    bar = "(f pid=1) 10%|"
    assert [lines[0][-3:] for lines, _ in display.seen if lines] == ["one"]
    assert [bars for _, bars in display.seen] == [[bar], [bar]]
    assert file.getvalue() == "(f pid=1) two\n"
    printer.print_batch(batch("20%|\r"))
    assert terminal.screen() == ["", "(f pid=1) 20%|"]


def test_what_a_live_display_fails_to_print_is_printed_all_the_same(printer, on_terminal):
    class Broken(Display):
        def print_above(self, lines, bars):
            raise OSError("gone")

    terminal, display = on_terminal(), Broken()
    SCREEN.hand_over(display)
    printer.print_batch(batch("one"))
    SCREEN.take_back(display)
    assert terminal.screen() == ["(f pid=1) one"]


def test_nested_bars_of_a_worker_are_lines_of_their_own(printer, on_terminal):
    terminal = on_terminal()
    printer.print_batch(batch("outer 0%\r", "inner 0%\r\r"))
    printer.print_batch(batch("inner 50%\r\r"))
    assert terminal.screen() == ["", "(f pid=1) outer 0%", "(f pid=1) inner 50%"]
    printer.print_batch(batch("outer 100%"))
    assert terminal.screen() == ["(f pid=1) outer 100%", "", "(f pid=1) inner 50%"]


def test_a_bar_that_clears_itself_is_gone(printer, on_terminal):
    terminal = on_terminal()
    printer.print_batch(batch("10%|\r"))
    printer.print_batch(batch("\r"))
    printer.print_batch(batch("next"))
    assert terminal.screen() == ["(f pid=1) next"]


def test_closing_removes_unfinished_bars(printer, on_terminal):
    terminal = on_terminal()
    printer.print_batch(batch("10%|\r"))
    printer.close()
    assert terminal.screen() == []


def test_a_bar_is_cut_to_the_width_of_the_terminal(printer, monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 10)))
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        printer.print_batch(batch("x" * 100 + "\r"))
        assert screen(os.read(leader, 1000).decode()) == ["", "(f pid=1) " + "x" * 9]
    os.close(leader)


def test_a_bar_of_wide_characters_takes_one_row():
    assert screen(draw(["進" * 30, "below"], 20, 10), columns=20) == ["", "進" * 9, "below"]
    coloured = "\x1b[32m進捗\x1b[0m 10%|██"
    assert coloured in draw([coloured], 20, 10)


def test_more_bars_than_fit_wait_their_turn():
    bars = BarRegion()
    for pid in range(30):
        bars.update(BarKey("", pid, True, 0), f"bar {pid}")
    assert len(screen(draw(bars.lines(), 80, 50))) == 1 + 16
    assert len(screen(draw(bars.lines(), 80, 5))) == 1 + 4
    bars.finish_row("", 0, True)
    assert screen(draw(bars.lines(), 80, 2)) == ["", "bar 1"]
