"""The driver's printing thread: order, its bound, and its end."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from watched_output import watch

from miniray.common.config import config
from miniray.logs.log_printer import LogBatch, LogThread, left_out_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Paused(io.StringIO):
    """A stream that takes nothing while it is paused, like a terminal after Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.resumed = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.resumed.wait()
        return super().write(text)


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Paused]]:
    """Pauses stdout when called; capturing would replace it after a fixture."""
    stream = Paused()

    def install() -> Paused:
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    yield install
    stream.resumed.set()


def batch(*lines: str, pid: int = 1) -> LogBatch:
    return LogBatch("f", pid, "", False, lines)


def test_what_waits_is_printed_in_order_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    thread = LogThread("/logs")
    for number in range(100):
        thread.put(batch(f"line {number}"))
    thread.close()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"(f pid=1) line {number}" for number in range(100)]


def test_a_note_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    thread = LogThread("/logs")
    thread.put("miniray: f waits")
    thread.close()
    assert capsys.readouterr() == ("", "miniray: f waits\n")


def test_putting_does_not_wait_for_a_paused_stream(pause: Callable[[], Paused]) -> None:
    paused = pause()
    thread = LogThread("/logs")
    thread.put(batch("first"))
    assert paused.reached.wait(10)
    thread.put(batch("second"))  # returns although the first one is stuck
    paused.resumed.set()
    thread.close()
    assert paused.getvalue() == "(f pid=1) first\n(f pid=1) second\n"


def test_what_exceeds_the_bound_is_left_out_with_a_note(
    pause: Callable[[], Paused], capsys: pytest.CaptureFixture[str]
) -> None:
    paused = pause()
    thread = LogThread("/the/logs", limit=1000)
    thread.put(batch("first"))
    assert paused.reached.wait(10)
    thread.put(batch("x" * 2000, "y"))
    thread.put(batch("z"))  # small enough
    paused.resumed.set()
    thread.close()
    assert paused.getvalue() == "(f pid=1) first\n(f pid=1) z\n"
    note = capsys.readouterr().err
    assert "2 lines" in note
    assert "/the/logs" in note


def test_files_of_lines_that_were_not_sent_are_named_up_to_a_number() -> None:
    counts = [("own", f"/logs/{number}", 1000 + number) for number in range(6)]
    note = left_out_note([*counts, ("far", "/logs/most", 2000)], "own")
    assert "8,015 lines" in note
    assert "2,000 in /logs/most on node far, 1,005 in /logs/5, " in note
    assert note.endswith(", 3,003 in 3 more files there.")


def test_room_is_there_again_when_lines_were_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = watch(monkeypatch, "stdout")
    stderr = watch(monkeypatch, "stderr")
    thread = LogThread("/logs", limit=1000)
    for number in range(20):
        thread.put(batch(f"<{number}>" + "x" * 500))
        stdout.wait_for(f"<{number}>")
        # Printed comes before counted as printed: the next one may have to wait for that.
        deadline = time.monotonic() + 10
        while thread._printed != thread._put:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    thread.close()
    assert stderr.getvalue() == ""


def test_closing_gives_up_on_a_stream_that_takes_nothing(
    pause: Callable[[], Paused], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_STOP_GRACE", "0.1")
    config.cache_clear()
    pause()
    try:
        thread = LogThread("/logs")
        thread.put(batch("stuck"))
        began = time.monotonic()
        thread.close()
        assert time.monotonic() - began < 5
    finally:
        config.cache_clear()


def test_a_count_of_folded_lines_is_printed_when_its_time_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stdout = watch(monkeypatch, "stdout")
    monkeypatch.setenv("MINIRAY_DEDUP_WINDOW", "0.5")
    config.cache_clear()
    try:
        thread = LogThread("/logs")
        for pid in range(4):
            thread.put(batch("same", pid=pid))
        stdout.wait_for("[repeated 3x]")
        thread.close()
    finally:
        config.cache_clear()
