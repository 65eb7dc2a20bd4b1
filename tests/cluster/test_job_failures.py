"""Submitted jobs when heads, nodes and connections are killed, and when they print without end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from command_helpers import CommandLine, command_line, daemons, one_line
from job_helpers import details, log_of, submit, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Many commands, one after the other, on a machine that is busy with other tests.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

#: Prints a thousand lines for each file that appears, and exits with 5 after the last.
IN_PARTS = """
import os, sys, time
from pathlib import Path

folder, parts = Path(sys.argv[1]), int(sys.argv[2])
(folder / "pid").write_text(str(os.getpid()))
for part in range(parts):
    while not (folder / f"part{part}").exists():
        time.sleep(0.01)
    for line in range(1000):
        print(f"line {line} of part {part}")
sys.exit(5)
"""


@pytest.fixture
def outside() -> Iterator[CommandLine]:
    """The command line of a machine that has no node of the cluster."""
    yield from command_line()


def head_pid(command: CommandLine) -> int:
    [head] = [each["processes"]["head"]["pid"] for each in command.records() if each["is_head"]]
    return int(head)


def kill_head(command: CommandLine) -> None:
    """Kill the head, and wait for its successor."""
    before = head_pid(command)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: head_pid(command) != before)
    wait_until(lambda: command.run("status").returncode == 0)


def expected(parts: int) -> str:
    lines = (f"line {line} of part {part}\n" for part in range(parts) for line in range(1000))
    return "".join(lines)


def begin(command: CommandLine, folder: Path, parts: int, *options: str) -> str:
    """Submit a job of so many parts, and wait until it runs."""
    (folder / "parts.py").write_text(IN_PARTS)
    program = ["python", str(folder / "parts.py"), str(folder), str(parts)]
    name = submit(command, *options, "--", *program)
    wait_for_file(folder / "pid")
    return name


def test_a_head_that_comes_back_adopts_what_runs_and_has_what_has_ended(
    command: CommandLine, tmp_path: Path
) -> None:
    command.start_head("--num-cpus", "2")
    ended = submit(command, "--", "echo", "before")
    wait_for(command, ended, "SUCCEEDED")
    waits = submit(command, "--num-cpus", "50", "--", "true")
    name = begin(command, tmp_path, 2, "--num-cpus", "1")
    (tmp_path / "part0").touch()
    wait_until(lambda: log_of(command, name) == expected(1))
    kill_head(command)
    found = details(command, name)
    assert found["status"] == "RUNNING"
    assert is_alive(int((tmp_path / "pid").read_text()))
    assert details(command, waits)["status"] == "PENDING"
    assert log_of(command, ended) == "before\n"
    taken = "import json, miniray; miniray.init(); print(miniray.available_resources()['CPU'])"
    assert command.python(taken) == 1
    (tmp_path / "part1").touch()
    assert wait_for(command, name, "FAILED")["driver_exit_code"] == 5
    assert log_of(command, name) == expected(2)
    wait_until(lambda: command.python(taken) == 2)


def test_a_job_that_ends_while_there_is_no_head_has_its_exit_code_and_all_its_output(
    command: CommandLine, tmp_path: Path
) -> None:
    command.start_head()
    name = begin(command, tmp_path, 1)
    head = head_pid(command)
    os.kill(head, signal.SIGSTOP)
    (tmp_path / "part0").touch()
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
    os.kill(head, signal.SIGKILL)
    wait_until(lambda: head_pid(command) != head)
    assert wait_for(command, name, "FAILED")["driver_exit_code"] == 5
    assert log_of(command, name) == expected(1)


def test_a_job_whose_node_is_lost_has_failed_says_so_and_keeps_its_log(
    command: CommandLine, tmp_path: Path
) -> None:
    head = command.start_head()
    command.join(head, "--resources", '{"there": 1}')
    name = begin(command, tmp_path, 2, "--resources", '{"there": 1}')
    (tmp_path / "part0").touch()
    wait_until(lambda: log_of(command, name) == expected(1))
    node = details(command, name)["driver_node_id"]
    daemons(command)[1].kill()
    found = wait_for(command, name, "FAILED")
    assert f"Node {node} was lost" in found["message"]
    assert found["driver_exit_code"] is None
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert log_of(command, name) == expected(1)
    assert command.run("job", "logs", "-f", name).returncode == 1


def test_a_job_whose_node_is_lost_runs_on_another_one_if_it_may(
    command: CommandLine, tmp_path: Path
) -> None:
    head = command.start_head()
    command.join(head, "--resources", '{"there": 1}')
    options = ("--resources", '{"there": 1}', "--retries", "1")
    name = begin(command, tmp_path, 1, *options)
    (tmp_path / "pid").unlink()
    daemons(command)[1].kill()
    command.join(head, "--resources", '{"there": 1}')
    wait_for_file(tmp_path / "pid")
    (tmp_path / "part0").touch()
    assert wait_for(command, name, "SUCCEEDED", "FAILED")["driver_exit_code"] == 5
    log = log_of(command, name)
    assert "was lost" in log
    assert log.count("The job starts again.") == 2  # its exit code is 5, which counts apart
    assert log.count("line 999 of part 0\n") == 2


def test_a_followed_log_goes_on_after_three_cuts_shows_each_byte_once_and_has_the_exit_code(
    command: CommandLine, outside: CommandLine, tmp_path: Path
) -> None:
    head = command.start_head()
    name = begin(command, tmp_path, 4)
    shown = tmp_path / "shown"
    with shown.open("w") as file:
        follower = subprocess.Popen(
            ["miniray", "job", "logs", "-f", name, "--address", head.address],
            env={**outside.environment, "MINIRAY_TOKEN": head.token},
            stdout=file,
        )

    def kill_the_followers_node() -> None:
        before = outside.records()
        daemons(outside)[0].kill()
        wait_until(lambda: (now := outside.records()) and now != before)

    cuts = (lambda: kill_head(command), kill_the_followers_node, lambda: kill_head(command))
    for part, cut in enumerate(cuts):
        (tmp_path / f"part{part}").touch()
        wait_until(lambda part=part: shown.read_text() == expected(part + 1))  # type: ignore[misc]
        cut()
    assert follower.poll() is None
    (tmp_path / "part3").touch()
    assert follower.wait(60) == 5
    assert shown.read_text() == expected(4)


def test_a_followed_log_ends_with_3_and_a_sentence_when_the_cluster_is_gone(
    command: CommandLine, tmp_path: Path
) -> None:
    command.start_head()
    name = begin(command, tmp_path, 2)
    (tmp_path / "part0").touch()
    follower = subprocess.Popen(
        ["miniray", "job", "logs", "-f", name],
        env={**command.environment, "MINIRAY_NODE_TIMEOUT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == "line 0 of part 0\n"
    command.run("stop", "--force")
    _, error = follower.communicate(timeout=60)
    assert follower.returncode == 3
    assert f"The log of job {name} was cut" in error


def test_a_stop_that_the_head_did_not_live_to_see_is_done(
    command: CommandLine, tmp_path: Path
) -> None:
    command.start_head()
    name = submit(command, "--shell", "trap '' TERM; echo begun; while true; do sleep 1; done")
    wait_until(lambda: log_of(command, name) == "begun\n")
    command.run("job", "stop", "--no-wait", "--grace", "4", name)
    kill_head(command)
    found = wait_for(command, name, "STOPPED")
    assert found["driver_exit_code"] == -9


def test_every_command_works_from_outside_with_the_token_and_none_without(
    command: CommandLine, outside: CommandLine
) -> None:
    head = command.start_head()
    there = ("--address", head.address)
    done = outside.run("job", "submit", *there, "--", "echo", "hi", MINIRAY_TOKEN=head.token)
    assert (done.stdout, done.returncode) == ("hi\n", 0)
    [listed] = outside.run("job", "list", "--all", *there, MINIRAY_TOKEN=head.token).stdout.split(
        "Jobs:"
    )[1:]
    assert "SUCCEEDED" in listed
    name = submit(command, "--", "sleep", "1000")
    wrong = head.token[:-4] + ("AAAA" if not head.token.endswith("AAAA") else "BBBB")
    for subcommand in ("submit", "list", "status", "logs", "stop", "delete"):
        what = {"submit": ("--", "true"), "list": ()}.get(subcommand, (name,))
        arguments = ("job", subcommand, *there, *what)
        assert "MINIRAY_TOKEN" in one_line(outside.run(*arguments))
    assert "token" in one_line(outside.run("job", "stop", *there, name, MINIRAY_TOKEN=wrong))
    assert details(command, name)["status"] == "RUNNING"
    assert outside.run("job", "stop", *there, name, MINIRAY_TOKEN=head.token).returncode == 0
    assert outside.run("job", "delete", *there, name, MINIRAY_TOKEN=head.token).returncode == 0


FLOOD = "yes 0123456789abcdef | head -c 100000000"


def test_a_job_that_prints_100_mb_loses_nothing_and_the_head_answers_meanwhile(
    command: CommandLine,
) -> None:
    command.start_head()
    name = submit(command, "--shell", FLOOD)
    took = []
    probe = "import time, miniray; miniray.init(); t = time.monotonic(); miniray.nodes();"
    while details(command, name)["status"] not in ("SUCCEEDED", "FAILED"):
        took.append(command.python(f"{probe} print(time.monotonic() - t)"))
    assert min(took, default=0) < 1  # others may use the machine at the same time
    shown = subprocess.run(
        ["miniray", "job", "logs", name], env=command.environment, capture_output=True, check=True
    ).stdout
    sent = subprocess.run(["sh", "-c", FLOOD], capture_output=True, check=True).stdout
    assert hashlib.sha256(shown).digest() == hashlib.sha256(sent).digest()


def test_of_a_log_that_is_too_large_the_middle_is_left_out_and_that_is_said(
    command: CommandLine,
) -> None:
    limits = {"MINIRAY_LOG_FILE_BYTES": "10000", "MINIRAY_LOG_FILES": "3"}
    command.start_head(**limits)
    name = submit(command, "--shell", "seq 1 20000")
    wait_for(command, name, "SUCCEEDED")
    log = log_of(command, name)
    beginning, end = log.split("were left out here]\n")
    assert beginning.startswith("1\n2\n3\n")
    assert end.endswith("\n19999\n20000\n")
    assert len(log) < 32_000
    files = list(next(iter(command.sessions())).glob("logs/jobs/*"))
    assert len(files) == 3 + 1  # and when its output came
    command.run("job", "delete", name)
    assert not list(next(iter(command.sessions())).glob("logs/jobs/*"))
