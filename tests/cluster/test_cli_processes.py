"""The commands that end processes, in the test's own process; what they end is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests_cli_support import Boot, new_session, one_line, publisher, runner

from miniray.launch.events import Events
from miniray.system.session import ProcessId, find_clusters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result

    from miniray.system.session import ClusterRecord, Session

#: A boot process with two workers that it ends when it is asked to.
OBEDIENT = """
import os, signal, sys, time
workers = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        time.sleep(60); os._exit(0)
    workers.append(pid)
def end(*_):
    for pid in workers: os.kill(pid, signal.SIGTERM)
    for pid in workers: os.waitpid(pid, 0)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(*workers, flush=True)
while True: signal.pause()
"""
#: One that ignores the request, and whose workers do too.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pid = os.fork()
if pid: print(pid, flush=True)
while True: signal.pause()
"""


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with new_session(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def boot() -> Boot:
    return Boot()


@pytest.fixture
def miniray(boot: Boot) -> Callable[..., Result]:
    return runner(boot)


@pytest.fixture
def record(session: Session) -> Callable[..., ClusterRecord]:
    return publisher(session)


@pytest.fixture
def start(session: Session) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[int]]]]:
    """Starts a process of the session; returns it and the pids that it printed."""
    started: list[subprocess.Popen[str]] = []
    pids: list[int] = []

    def run(code: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "MINIRAY_SESSION": session.id},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        children = [int(pid) for pid in process.stdout.readline().split()]
        pids.extend(children)
        return process, children

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for pid in pids:
        if running(pid):
            os.kill(pid, signal.SIGKILL)


def running(pid: int) -> bool:
    try:
        return ProcessId.of(pid).alive()
    except ProcessLookupError:
        return False


def test_without_nodes_stop_says_so_and_succeeds(miniray: Callable[..., Result]) -> None:
    result = miniray("stop")
    assert result.exit_code == 0
    assert result.stdout == "No node of yours is running on this machine.\n"


def test_stop_ends_a_node_and_leaves_only_its_logs(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    session: Session,
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, workers = start(OBEDIENT)
    record(processes={"boot": ProcessId.of(boot.pid)})
    (session.logs / "node.log").write_text("so far")
    result = miniray("stop")
    assert result.exit_code == 0, result.output
    assert "Ended the head of the cluster at 127.0.0.1:6379: 3 processes." in result.stdout
    assert boot.wait() == 0  # it ended by its own code, so it was asked and not killed
    assert not any(map(running, workers))
    assert not session.socket_dir.exists()
    assert list(session.folder.iterdir()) == [session.logs]
    assert (session.logs / "node.log").exists()
    assert find_clusters() == []


def test_what_ignores_the_request_is_killed_after_the_grace(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, workers = start(STUBBORN)
    record(processes={"boot": ProcessId.of(boot.pid)})
    result = miniray("stop", "--grace-period", "0.2")
    assert result.exit_code == 0, result.output
    assert "2 processes, of which 2 had to be killed" in result.stdout
    assert boot.wait() == -signal.SIGKILL
    assert not any(map(running, workers))


def test_force_kills_at_once(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, workers = start(OBEDIENT)
    record(processes={"boot": ProcessId.of(boot.pid)})
    result = miniray("stop", "--force")
    assert "3 processes." in result.stdout
    assert boot.wait() == -signal.SIGKILL
    assert not any(map(running, workers))


def test_workers_are_ended_when_their_boot_process_is_gone(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, _ = start(OBEDIENT)
    daemon, workers = start(OBEDIENT)
    record(processes={"boot": ProcessId.of(boot.pid), "node": ProcessId.of(daemon.pid)})
    boot.kill()
    boot.wait()
    assert miniray("stop").exit_code == 0
    assert daemon.wait() == 0  # asked itself, as there was nobody else to ask
    assert not any(map(running, workers))


def test_a_reused_pid_is_left_alone(
    miniray: Callable[..., Result], record: Callable[..., ClusterRecord]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        start = ProcessId.of(stranger.pid).start
        record(processes={"boot": ProcessId(stranger.pid, start - 1)})
        result = miniray("stop", "--force")
        assert "No node of yours" in result.stdout
        assert stranger.poll() is None
        stranger.kill()


def test_what_a_running_program_has_started_is_left_alone_unless_it_is_asked_for(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, _ = start(OBEDIENT)
    driver = ProcessId.of(os.getpid())
    record(processes={"boot": ProcessId.of(boot.pid)}, embedded=True, driver=driver)
    result = miniray("stop")
    assert result.exit_code == 0
    whose = f"the embedded cluster of the program with pid {driver.pid}"
    assert result.stdout.startswith(f"Left alone (--include-programs ends it too): {whose}")
    assert boot.poll() is None
    shown = miniray("stop", "--include-programs").stdout
    assert f"Ending: {whose}" in shown
    assert f"Ended {whose}" in shown
    assert boot.wait() == 0


def test_a_cluster_whose_program_has_ended_is_nobodys_and_is_ended(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, _ = start(OBEDIENT)
    gone = ProcessId(os.getpid(), ProcessId.of(os.getpid()).start - 1)
    record(processes={"boot": ProcessId.of(boot.pid)}, embedded=True, driver=gone)
    assert "Ended the embedded cluster" in miniray("stop").stdout
    assert boot.wait() == 0


def test_the_attachment_of_a_driver_outside_its_cluster_is_ended_only_with_all(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, _ = start(OBEDIENT)
    driver = ProcessId.of(os.getpid())
    record(processes={"boot": ProcessId.of(boot.pid)}, embedded=True, is_head=False, driver=driver)
    for arguments in ((), ("--address", "127.0.0.1:6379")):
        assert "Left alone" in miniray("stop", *arguments).stdout
    shown = miniray("stop", "--include-programs").stdout
    assert f"Ended the attachment of the program with pid {driver.pid}" in shown


def test_one_of_several_clusters_is_ended_by_its_address(
    miniray: Callable[..., Result],
    record: Callable[..., ClusterRecord],
    start: Callable[[str], tuple[subprocess.Popen[str], list[int]]],
) -> None:
    boot, _ = start(OBEDIENT)
    record(processes={"boot": ProcessId.of(boot.pid)}, address="127.0.0.1:7203")
    result = miniray("stop", "--address", "127.0.0.1:7204")
    assert result.exit_code == 1
    assert "Running here: 127.0.0.1:7203." in one_line(result)
    assert miniray("stop", "--address", "h:x").exit_code == 2
    assert boot.poll() is None
    shown = miniray("stop", "--address", "localhost:7203").stdout
    assert "Ended the head of the cluster at 127.0.0.1:7203: 3 processes." in shown


def test_a_negative_grace_is_refused(miniray: Callable[..., Result]) -> None:
    assert "-1" in one_line(miniray("stop", "--grace-period", "-1"))


# --- start --block ---------------------------------------------------------------------


@pytest.fixture
def when_it_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Runs an action at the moment when the blocking command begins to wait."""

    def arrange(action: Callable[[], None]) -> None:
        wait = Events.wait

        def act_and_wait(events: Events, until: float | None) -> list[int]:
            action()
            return wait(events, until)

        monkeypatch.setattr(Events, "wait", act_and_wait)

    return arrange


def test_block_fails_when_the_node_ends_by_itself(
    miniray: Callable[..., Result],
    boot: Boot,
    when_it_waits: Callable[[Callable[[], None]], None],
) -> None:
    with subprocess.Popen(["sleep", "60"]) as node:
        boot.pid = node.pid
        when_it_waits(node.kill)
        result = miniray("start", "--head", "--block")
    assert result.exit_code == 1
    assert "ended by itself" in result.stderr
    assert "session_x/logs" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_block_ends_the_node_when_asked(
    miniray: Callable[..., Result],
    boot: Boot,
    record: Callable[..., ClusterRecord],
    when_it_waits: Callable[[Callable[[], None]], None],
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with subprocess.Popen(["sleep", "60"]) as node:
        boot.pid = node.pid
        written = record(processes={"boot": ProcessId.of(node.pid)}, address="127.0.0.1:1")
        when_it_waits(lambda: os.kill(os.getpid(), number))
        result = miniray("start", "--head", "--block")
        assert node.wait() == -signal.SIGTERM
    assert result.exit_code == 0, result.output
    assert "The node has ended." in result.stdout
    assert not written.session.socket_dir.exists()
    assert signal.getsignal(number) == before


# --- any command -----------------------------------------------------------------------


def test_a_reader_who_has_enough_ends_the_command_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "miniray", "stop", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1
