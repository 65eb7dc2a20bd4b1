"""``breakpoint()`` in a worker, and `miniray debug` that attaches a terminal to it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from watched_output import watch

import miniray
from miniray.exceptions import RayTaskError, TaskCancelledError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("cluster")

COMMAND = [sys.executable, "-c", "from miniray.cli.main import main; main()", "debug"]


class Terminal:
    """`miniray debug` with a keyboard and a screen."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.screen = ""

    def expect(self, text: str, timeout: float = 20.0) -> str:
        """Wait for a text; returns what was on the screen up to its end, and clears that."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while text not in self.screen:
            ready, _, _ = select.select([self.process.stdout], [], [], deadline - time.monotonic())
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert data, f"{text!r} did not come, but: {self.screen}"
            self.screen += data.decode()
        before, found, self.screen = self.screen.partition(text)
        return before + found

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end_of_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def ends(self) -> int:
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def terminal() -> Iterator[Any]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def listed() -> str:
    """What `miniray debug` tells when it has nothing to attach to, or too much."""
    done = subprocess.run([*COMMAND, "nobody"], capture_output=True, text=True, check=False)
    return done.stderr


def wait_for_breakpoints(root: Path, number: int) -> list[str]:
    """Ids of the waiting breakpoints, once there are so many."""
    found: list[str] = []

    def as_many() -> bool:
        found[:] = sorted(path.name.removeprefix("debug-") for path in root.rglob("debug-*"))
        return len(found) == number

    wait_until(as_many)
    return found


@miniray.remote
def stop_here(number: int) -> int:
    local = number * 10
    breakpoint()
    return local + 1


def test_a_breakpoint_can_be_attached_to_and_continued(terminal: Any, session_root: Path) -> None:
    ref = stop_here.remote(4)
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    session.type("p local")
    assert "40" in session.expect("(Pdb) ")
    session.type("local = 99")
    session.expect("(Pdb) ")
    session.type("c")
    session.expect("The program goes on.")
    session.expect("has ended")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 100


def test_the_worker_prints_how_to_attach(
    session_root: Path, monkeypatch: pytest.MonkeyPatch, terminal: Any
) -> None:
    stderr = watch(monkeypatch, "stderr")
    ref = stop_here.remote(1)
    (id,) = wait_for_breakpoints(session_root, 1)
    stderr.wait_for(f"miniray debug {id}")
    seen = stderr.getvalue()
    assert "test_debugger.py" in seen
    assert "stop_here" in seen
    assert f"a terminal of {socket.gethostname()} with" in seen  # it may run on another machine
    session = terminal(id)
    session.expect("(Pdb) ")
    session.type("c")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 11


def test_several_breakpoints_wait_at_once_and_are_listed(terminal: Any, session_root: Path) -> None:
    refs = [stop_here.remote(number) for number in range(3)]
    ids = wait_for_breakpoints(session_root, 3)
    session = terminal()
    listing = session.expect("miniray debug ID")
    assert session.ends() == 0
    for id in ids:
        assert id in listing
    assert listing.count("in stop_here") == 3
    assert re.search(r"test_debugger\.py:\d+", listing)
    for id in reversed(ids):
        session = terminal(id)
        session.expect("(Pdb) ")
        session.type("c")
        assert session.ends() == 0
    assert miniray.get(refs, timeout=10) == [1, 11, 21]


def test_an_attached_breakpoint_is_not_listed_any_more(terminal: Any, session_root: Path) -> None:
    ref = stop_here.remote(1)
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    other = terminal()
    other.expect("No breakpoint waits")
    session.type("c")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 11


@pytest.mark.parametrize("way", ["end of input", "interrupt", "kill", "detach"])
def test_detaching_lets_the_program_go_on(terminal: Any, session_root: Path, way: str) -> None:
    ref = stop_here.remote(2)
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    session.type("b stop_here")
    session.expect("(Pdb) ")
    if way == "end of input":
        session.end_of_input()
    elif way == "interrupt":
        session.process.send_signal(signal.SIGINT)
    elif way == "kill":
        session.process.kill()
    else:
        session.type("detach")
    assert miniray.get(ref, timeout=20) == 21
    session.ends()


def test_a_step_out_of_the_task_ends_the_session(terminal: Any, session_root: Path) -> None:
    ref = stop_here.remote(3)
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    for _ in range(3):
        session.type("n")
    session.expect("has ended")
    assert miniray.get(ref, timeout=10) == 31
    assert miniray.get(echo.remote(5), timeout=10) == 5


@miniray.remote
def echo(value: Any) -> Any:
    return value


def test_stepping_over_get_stays_in_the_task(terminal: Any, session_root: Path) -> None:
    @miniray.remote
    def outer() -> int:
        breakpoint()
        value = miniray.get(echo.remote(7))
        return value + 1

    ref = outer.remote()
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    session.type("n")
    session.expect("(Pdb) ")
    session.type("p 'value is', value")
    assert "7" in session.expect("(Pdb) ")
    session.type("c")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 8


def test_a_breakpoint_set_in_the_session_stops_again(terminal: Any, session_root: Path) -> None:
    @miniray.remote
    def loop() -> int:
        total = 0
        breakpoint()
        for number in range(3):
            total += number
            total += 100
        return total

    ref = loop.remote()
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    line = int(re.findall(r"test_debugger\.py\((\d+)\)", session.expect("(Pdb) "))[-1])
    session.type(f"b {line + 2 - (sys.version_info >= (3, 13))}")
    session.expect("(Pdb) ")
    for number in range(3):
        session.type("c")
        session.expect("(Pdb) ")
        session.type("p 'number', number")
        assert f"('number', {number})" in session.expect("(Pdb) ")
    session.type("c")
    session.expect("has ended")
    assert miniray.get(ref, timeout=10) == 303


def test_quit_ends_the_task_with_an_error(terminal: Any, session_root: Path) -> None:
    ref = stop_here.remote(2)
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    session.type("q")
    assert session.ends() == 0
    with pytest.raises(RayTaskError, match="BdbQuit"):
        miniray.get(ref, timeout=10)


def test_the_end_of_the_worker_ends_the_session(terminal: Any, session_root: Path) -> None:
    @miniray.remote
    class Debugged:
        def stop(self) -> None:
            breakpoint()

    actor = Debugged.remote()
    actor.stop.remote()
    wait_for_breakpoints(session_root, 1)
    session = terminal()
    session.expect("(Pdb) ")
    miniray.kill(actor)
    session.expect("has ended")
    assert session.ends() == 0


def test_what_a_killed_worker_leaves_is_cleared_away(terminal: Any, session_root: Path) -> None:
    @miniray.remote
    class Debugged:
        def pid(self) -> int:
            return os.getpid()

        def stop(self) -> None:
            breakpoint()

    actor = Debugged.remote()
    pid = miniray.get(actor.pid.remote())
    actor.stop.remote()
    wait_for_breakpoints(session_root, 1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    session = terminal()
    session.expect("No breakpoint waits")
    wait_for_breakpoints(session_root, 0)


def test_a_waiting_task_can_be_cancelled(session_root: Path) -> None:
    ref = stop_here.remote(2)
    wait_for_breakpoints(session_root, 1)
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref, timeout=10)
    wait_for_breakpoints(session_root, 0)


def test_methods_of_threaded_and_asyncio_actors_can_be_debugged(
    terminal: Any, session_root: Path
) -> None:
    @miniray.remote(max_concurrency=2)
    class Threaded:
        def stop(self) -> int:
            value = 1
            breakpoint()
            return value

    @miniray.remote
    class Asyncio:
        async def stop(self) -> int:
            value = 1
            breakpoint()
            return value

    actors = [Threaded.remote(), Asyncio.remote()]
    refs = [actor.stop.remote() for actor in actors]
    for id in wait_for_breakpoints(session_root, 2):
        session = terminal(id)
        session.expect("(Pdb) ")
        session.type("value = 5")
        session.expect("(Pdb) ")
        session.type("c")
        assert session.ends() == 0
    assert miniray.get(refs, timeout=10) == [5, 5]


def test_an_id_that_does_not_wait_is_an_error_that_names_those_that_do(
    terminal: Any, session_root: Path
) -> None:
    assert "No breakpoint nobody waits" in listed()
    ref = stop_here.remote(1)
    (id,) = wait_for_breakpoints(session_root, 1)
    assert id in listed()
    session = terminal(id)
    session.expect("(Pdb) ")
    session.type("c")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 11


def test_a_process_without_the_clusters_key_cannot_attach(
    terminal: Any, session_root: Path
) -> None:
    ref = stop_here.remote(1)
    (id,) = wait_for_breakpoints(session_root, 1)
    (path,) = session_root.rglob("debug-*")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(20)
        stranger.connect(str(path))
        stranger.sendall(bytes(64))
        received = b""
        while data := stranger.recv(1024):
            received += data
    assert len(received) == 32  # the nonce of the challenge, and nothing of the program
    session = terminal(id)
    session.expect("(Pdb) ")
    session.type("c")
    assert session.ends() == 0
    assert miniray.get(ref, timeout=10) == 11


def test_another_debugger_of_the_user_is_left_in_its_place() -> None:
    @miniray.remote(runtime_env={"env_vars": {"PYTHONBREAKPOINT": "0"}})
    def stop() -> int:
        breakpoint()
        return 3

    assert miniray.get(stop.remote(), timeout=30) == 3
