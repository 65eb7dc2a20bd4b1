"""How `miniray logs` reads times, and what of a line reaches the terminal."""

from __future__ import annotations

import time

import pytest

from miniray.cli.logs import _safe, since_of

NOW = time.mktime((2026, 11, 24, 22, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("1.5h", 5400), ("1d", 86400), ("21:00", 3600)],
)
def test_a_time_is_a_duration_or_an_hour_of_today(text: str, seconds: float) -> None:
    assert NOW - since_of(text, NOW) == seconds


def test_a_time_is_a_date() -> None:
    assert NOW - since_of("2026-11-24 21:59", NOW) == 60
    assert NOW - since_of("2026-11-24T21:59:30", NOW) == 30


def test_what_is_no_time_is_told_with_examples() -> None:
    with pytest.raises(ValueError, match=r"'soon' is no time\. Write 30s, 10m, 2h"):
        since_of("soon", NOW)


def test_colours_and_tabs_reach_the_terminal_and_nothing_else_that_steers_it() -> None:
    assert _safe("a\tb \x1b[31mred\x1b[0m") == "a\tb \x1b[31mred\x1b[0m"
    assert _safe("\x1b[2Jgone\r\x07") == "\\x1b[2Jgone\\r\\x07"
