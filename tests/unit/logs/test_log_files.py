"""Log files are read from their ends, and searched where they are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from miniray.logs import log_files
from miniray.logs.log_files import LogLineRead, LogQuery, read, read_on
from miniray.system.log_file import LogFile, log_name, stamped
from miniray.util.logs import Logs

WORKER, ACTOR = "ab" * 8, "cd" * 16
NOON = 1_800_000_000.0


def write(
    folder: Path, work: str, pid: int, lines: list[tuple[float, str, str]], **how: str
) -> Path:
    name = log_name(work, pid, f"{pid:016x}", how.get("actor", ""))
    path = folder / f"{name}.{how.get('stream', 'out')}"
    with path.open("a") as file:
        file.writelines(stamped(NOON + at, who, text) for at, who, text in lines)
    os.utime(path, (NOON + lines[-1][0], NOON + lines[-1][0]))
    return path


def texts(found: dict[str, list[tuple[str, str, int, str, str]]]) -> list[str]:
    return [LogLineRead(*line).text for line in found["lines"]]


def test_lines_of_several_files_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    write(tmp_path, "f", 1, [(0, "f", "one"), (2, "f", "three")])
    write(tmp_path, "Counter", 2, [(1, "Counter", "two")], actor=ACTOR)
    found = read(tmp_path, LogQuery())
    assert texts(found) == ["one", "two", "three"]
    assert not found["more"]
    assert texts(read(tmp_path, LogQuery(tail=2))) == ["two", "three"]
    assert read(tmp_path, LogQuery(tail=2))["more"]


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "f", 1, [(at, "f", f"line {at}") for at in range(100_000)])
    assert path.stat().st_size > 3_000_000
    before = bytes_read()
    assert texts(read(tmp_path, LogQuery(tail=3))) == ["line 99997", "line 99998", "line 99999"]
    assert bytes_read() - before < 500_000


def bytes_read() -> int:
    """Return how much this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_lines_longer_than_a_block_are_whole_and_cut_for_the_answer(tmp_path: Path) -> None:
    long = "x" * (log_files._BLOCK + 1000)
    write(tmp_path, "f", 1, [(0, "f", "before"), (1, "f", long), (2, "f", "after")])
    before, cut, after = texts(read(tmp_path, LogQuery()))
    assert (before, after) == ("before", "after")
    assert cut == long[: log_files._MOST_OF_LINE]


def test_a_search_finds_what_is_far_from_the_end(tmp_path: Path) -> None:
    write(tmp_path, "f", 1, [(at, "f", f"line {at}") for at in range(50_000)])
    assert texts(read(tmp_path, LogQuery(grep=r"line 1{5}$"))) == ["line 11111"]
    with pytest.raises(ValueError, match="'\\[' is no regular expression"):
        read(tmp_path, LogQuery(grep="["))


def test_that_a_search_did_not_come_to_the_beginning_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "f", 1, [(at, "f", f"line {at}") for at in range(50_000)])
    found = Logs()
    found.add("", read(tmp_path, LogQuery(grep="line 7$")))
    assert ([each.text for each in found.lines], found.notes) == (["line 7"], [])
    monkeypatch.setattr(log_files, "_Budget", lambda: SimpleNamespace(left=1 << 20))
    found = Logs()
    found.add("", read(tmp_path, LogQuery(grep="line 7$")))
    assert (found.lines, found.notes) == (
        [],
        ["Only the last 512 MiB of the logs of this machine were searched."],
    )


def test_lines_before_a_time_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "f", 1, [(0, "f", "old"), (10, "f", "new")])
    write(tmp_path, "g", 2, [(0, "g", "ancient")])
    assert texts(read(tmp_path, LogQuery(since=NOON + 5))) == ["new"]


def test_a_worker_of_several_tasks_gives_each_its_lines(tmp_path: Path) -> None:
    write(tmp_path, "f", 1, [(0, "f", "of f"), (1, "g", "of g")])
    write(tmp_path, "Counter", 2, [(2, "<renamed>", "of an actor")], actor=ACTOR)
    assert texts(read(tmp_path, LogQuery(names=("g",)))) == ["of g"]
    assert texts(read(tmp_path, LogQuery(names=("Counter",)))) == ["of an actor"]
    assert texts(read(tmp_path, LogQuery(actors=(ACTOR,)))) == ["of an actor"]
    assert texts(read(tmp_path, LogQuery(pids=(1,)))) == ["of f", "of g"]
    assert texts(read(tmp_path, LogQuery(pids=(3,)))) == []


@pytest.mark.parametrize("name", ["Caf\u00e9", "Table[int]", 70 * "Long"])
def test_a_class_is_found_by_its_name_though_files_cannot_have_it(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, name, 1, [(0, name, "one")], actor=ACTOR)
    write(tmp_path, "Other", 2, [(0, "Other", "two")], actor=ACTOR)
    assert texts(read(tmp_path, LogQuery(names=(name,)))) == ["one"]


@pytest.mark.parametrize("name", ["head", "node", "web"])
def test_logs_of_daemons_are_shown_when_they_are_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.log").write_text(
        "2026-11-24 22:17:33,123 ERROR miniray.head: it failed\nTraceback\n  why\n"
    )
    write(tmp_path, "f", 1, [(0, "f", "of a task")])
    assert texts(read(tmp_path, LogQuery())) == ["of a task"]
    found = read(tmp_path, LogQuery(names=(name,)))
    assert texts(found) == ["ERROR miniray.head: it failed", "Traceback", "  why"]
    assert {LogLineRead(*line).time for line in found["lines"]} == {"2026-11-24 22:17:33.123"}


def test_what_is_followed_comes_once_and_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "f", 1, [(0, "f", "one")])
    found = read(tmp_path, LogQuery(names=("f",)))
    with path.open("a") as file:
        file.write(stamped(NOON, "f", "two") + "2026-11-24 half a li")
    more = read_on(tmp_path, LogQuery(names=("f",)), found["ends"])
    assert texts(more) == ["two"]
    with path.open("a") as file:
        file.write("ne\n")
    write(tmp_path, "f", 2, [(3, "f", "of a new process")])
    last = read_on(tmp_path, LogQuery(names=("f",)), more["ends"])
    assert sorted(texts(last)) == ["2026-11-24 half a line", "of a new process"]
    assert not read_on(tmp_path, LogQuery(names=("f",)), last["ends"])["lines"]


def test_what_a_process_wrote_at_one_time_stays_together(tmp_path: Path) -> None:
    trace = ["Traceback (most recent call last):", "  somewhere", "ValueError: no"]
    for pid in (1, 2):
        write(tmp_path, "f", pid, [(0, "f", f"{pid} {line}") for line in trace], stream="err")
    assert texts(read(tmp_path, LogQuery())) == [
        f"{pid} {line}" for pid in (1, 2) for line in trace
    ]


def test_a_log_that_rotates_while_it_is_followed_comes_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SimpleNamespace(log_file_bytes=2000, log_files=4)
    monkeypatch.setattr("miniray.system.log_file.config", lambda: limits)
    log = LogFile(tmp_path / f"{log_name('f', 1, WORKER)}.out")
    ends = read(tmp_path, LogQuery())["ends"]
    seen: list[str] = []
    for number in range(400):
        log.write(stamped(NOON + number, "f", f"line {number}"))
        if number % 7 == 0:
            found = read_on(tmp_path, LogQuery(), ends)
            ends, seen = found["ends"], seen + texts(found)
    seen += texts(read_on(tmp_path, LogQuery(), ends))
    assert seen == [f"line {number}" for number in range(400)]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_that_goes_while_files_are_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "f", 1, [(0, "f", "stays")])
    gone = write(tmp_path, "f", 2, [(1, "f", "goes")])
    files = log_files.found_in(tmp_path)
    gone.unlink()
    monkeypatch.setattr(log_files, "found_in", lambda _folder: files)
    assert texts(read(tmp_path, LogQuery())) == ["stays"]
    assert texts(read_on(tmp_path, LogQuery(), {})) == ["stays"]


def test_a_line_longer_than_a_block_does_not_stop_what_follows(tmp_path: Path) -> None:
    long = "x" * (3 * log_files._BLOCK)
    write(tmp_path, "f", 1, [(0, "f", long), (1, "f", "after")])
    ends: dict[str, int] = {}
    seen: list[str] = []
    for _ in range(5):
        found = read_on(tmp_path, LogQuery(), ends)
        ends, seen = found["ends"], seen + texts(found)
    assert seen[-1] == "after"


def test_only_a_line_feed_ends_a_line_so_that_none_is_forged(tmp_path: Path) -> None:
    forged = "one\u20282026-11-24 22:17:33.123 [other] two\x0bthree\x85four"
    write(tmp_path, "f", 1, [(0, "f", forged)])
    assert texts(read(tmp_path, LogQuery())) == [forged]
