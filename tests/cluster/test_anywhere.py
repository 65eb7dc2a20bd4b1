"""Everywhere that Python runs: scripts, the prompt, pipes, threads, event loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, processes_with, wait_until
from open_files import open_files

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def nothing_is_left(session_root: Path) -> Iterator[None]:
    """Each test has clusters of its own, and the last of their processes ends with it."""
    yield
    miniray.shutdown()
    wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(session_root)), timeout=10)


def run_python(*arguments: str, typed: str | None = None, folder: Path | None = None) -> str:
    """Run a program to its end and return what it printed; fails if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


PROGRAM = """
import miniray

OFFSET = 100

def helper(number):
    return number + OFFSET

@miniray.remote
def task(number):
    return helper(number)

class Base:
    def __init__(self, start):
        self.value = start

@miniray.remote
class Counter(Base):
    def add(self, amount=1):
        self.value += helper(amount)
        return self.value

print("sum:", sum(miniray.get([task.remote(i) for i in range(5)])))
counter = Counter.remote(1000)
print("count:", miniray.get(counter.add.remote(2)))
"""
PRINTED = ["sum: 510", "count: 1102"]


# --- where the program comes from -------------------------------------------------------------


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    assert run_python(str(script)).splitlines() == PRINTED


def test_python_c() -> None:
    assert run_python("-c", PROGRAM).splitlines() == PRINTED


def test_a_program_on_standard_input() -> None:
    assert run_python("-", typed=PROGRAM).splitlines() == PRINTED


def test_a_module_run_with_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("def double(x):\n    return 2 * x\n")
    (package / "__main__.py").write_text(
        "import miniray\nfrom pack.other import double\nfrom . import other\n"
        "f = miniray.remote(lambda x: double(x) + other.double(x))\n"
        "print(miniray.get(f.remote(3)))\n"
    )
    assert run_python("-m", "pack", folder=tmp_path).splitlines() == ["12"]


def test_modules_beside_the_script_are_imported_by_workers(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import miniray\n"
        "LOADED = []\n"
        "def triple(x):\n    return 3 * x\n"
        "@miniray.remote\ndef remote_triple(x):\n    return triple(x)\n"
        "class Box:\n    def __init__(self, x):\n        self.x = x\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import miniray, beside\n"
        "print(miniray.get(beside.remote_triple.remote(4)))\n"
        "print(miniray.get(miniray.remote(beside.triple).remote(5)))\n"
        "box = miniray.get(miniray.remote(beside.Box).remote.__self__ and "
        "miniray.remote(lambda: beside.Box(6)).remote())\n"
        "print(type(box) is beside.Box, box.x)\n"
    )
    # Not in the script's folder: what counts is sys.path, not the working directory.
    assert run_python(str(script)).splitlines() == ["12", "15", "True 6"]


def test_pytest_inside_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        textwrap.dedent("""
            import miniray, pytest

            class Point:
                def __init__(self, x): self.x = x
                def __eq__(self, other): return type(other) is Point and other.x == self.x

            @pytest.fixture(scope="module")
            def cluster():
                with miniray.init(num_cpus=1) as context:
                    yield context

            @miniray.remote
            def make(x): return Point(x)

            def test_classes_of_a_test_module(cluster):
                assert miniray.get(make.remote(3)) == Point(3)

            def test_functions_of_a_test(cluster):
                @miniray.remote
                def local(point): return point.x
                assert miniray.get(local.remote(Point(4))) == 4
        """)
    )
    text = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert "2 passed" in text


@pytest.mark.timeout(120)
def test_a_test_that_fails_leaves_nothing_and_shows_what_the_daemons_have_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest.py").write_text("from daemon_logs import pytest_runtest_makereport\n")
    (tmp_path / "test_inner.py").write_text(
        textwrap.dedent("""
            import os, subprocess
            from pathlib import Path
            import miniray

            @miniray.remote
            class Parent:
                def start_child(self):
                    self.child = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
                    return self.child.pid

            def test_that_fails():
                miniray.init("local", num_cpus=1)
                parent = Parent.remote()
                Path(__file__).with_name("pid").write_text(str(miniray.get(parent.start_child.remote())))
                [log] = Path(os.environ["MINIRAY_TMPDIR"]).glob("*/*/logs/node.log")
                with log.open("a") as file:
                    file.write("said by the daemon")
                raise ValueError("it fails here")
        """)
    )
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "1 failed" in done.stdout
    assert "said by the daemon" in done.stdout.partition("it fails here")[2]
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child) and not processes_with("MINIRAY_TMPDIR", str(tmp_path)))


# --- the prompt -----------------------------------------------------------------------------


class Prompt:
    """`python -i` on a terminal."""

    def __init__(self) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="dumb", PYTHON_BASIC_REPL="1")
            os.execv(sys.executable, [sys.executable, "-q", "-i", "-c", "import sys"])
        self._screen = ""

    def expect(self, text: str, timeout: float = 30.0) -> str:
        deadline = time.monotonic() + timeout
        while text not in self._screen:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, left))
            assert ready, f"{text!r} did not come, but: {self._screen}"
            self._screen += os.read(self._terminal, 65536).decode()
        before, found, self._screen = self._screen.partition(text)
        return before + found

    def run(self, code: str) -> str:
        """Type lines and return what they print."""
        for line in code.split("\n"):
            self.type(line.encode() + b"\r")
        self.type(b"print('do' + 'ne')\r")
        return self.expect("\r\ndone")

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def exit(self) -> int:
        self.type(b"exit()\r")
        with contextlib.suppress(OSError):  # once the terminal's other end is closed
            while os.read(self._terminal, 65536):
                pass
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.fixture
def prompt() -> Iterator[Prompt]:
    one = Prompt()
    yield one
    one.close()


def test_the_prompt(prompt: Prompt) -> None:
    prompt.run("import miniray, time")
    prompt.run("@miniray.remote\ndef f(x):\n    return x + 1\n")
    assert "\r\n42" in prompt.run("miniray.get(f.remote(41))")
    prompt.run("class Plain:\n    value = 7\n")
    prompt.run("@miniray.remote\nclass A:\n    def m(self): return Plain().value\n")
    assert "\r\n7" in prompt.run("miniray.get(A.remote().m.remote())")
    assert prompt.exit() == 0


def test_ctrl_c_at_the_prompt_interrupts_get_and_the_cluster_lives_on(prompt: Prompt) -> None:
    prompt.run("import miniray, time")
    prompt.run("slow = miniray.remote(lambda: time.sleep(1000))")
    prompt.run("a = miniray.remote(type('A', (), {'m': lambda self: 5})).remote()")
    assert "\r\n5" in prompt.run("miniray.get(a.m.remote())")
    for _ in range(2):
        prompt.type(b"print('wai' + 'ting'); miniray.get(slow.remote())\r")
        prompt.expect("\r\nwaiting")
        prompt.type(b"\x03")
        prompt.expect("KeyboardInterrupt")
    assert "\r\n5" in prompt.run("miniray.get(a.m.remote())")
    assert prompt.exit() == 0


# --- one process, many clusters ----------------------------------------------------------------


@pytest.mark.timeout(180)
def test_many_clusters_one_after_another_leak_nothing() -> None:
    @miniray.remote
    class Echo:
        def echo(self, value: Any) -> Any:
            return value

    add = miniray.remote(lambda a, b: a + b)

    def use_a_cluster() -> None:
        miniray.init(num_cpus=1)
        assert miniray.get(Echo.remote().echo.remote(miniray.put(bytes(300_000)))) is not None
        assert miniray.get(add.remote(1, 2)) == 3
        miniray.shutdown()

    use_a_cluster()
    before, threads = open_files(), set(threading.enumerate())
    for _ in range(2):
        use_a_cluster()
    assert set(threading.enumerate()) == threads
    assert not open_files() - before


# --- threads -----------------------------------------------------------------------------------


def test_threads_that_start_a_cluster_at_the_same_time_share_one() -> None:
    start = threading.Barrier(4)
    found = []

    def use() -> None:
        start.wait()
        ref = miniray.put(threading.get_ident())
        found.append((miniray.get_runtime_context().get_job_id(), miniray.get(ref)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({job for job, _ in found}) == 1


def test_threads_of_the_driver_may_call_at_once() -> None:
    miniray.init(num_cpus=2)
    counter = miniray.remote(type("Adder", (), {"add": lambda self, a, b: a + b})).remote()
    add = miniray.remote(lambda a, b: a + b)
    wrong: list[Any] = []

    def use(number: int) -> None:
        for step in range(30):
            refs = [counter.add.remote(number, step), add.remote(number, miniray.put(step))]
            values = miniray.get(refs)
            if values != [number + step] * 2:
                wrong.append(values)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_driver_that_works_in_a_thread_ends_with_its_main_thread() -> None:
    text = run_python(
        "-c",
        "import miniray, threading\n"
        "def work():\n"
        "    print(miniray.get(miniray.remote(lambda: 3).remote()))\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start(); thread.join()\n",
    )
    assert text.splitlines() == ["3"]


# --- event loops -------------------------------------------------------------------------------


def test_a_driver_with_an_event_loop() -> None:
    miniray.init(num_cpus=2)
    add = miniray.remote(lambda a, b: a + b)

    @miniray.remote
    def count(number: int) -> Any:
        yield from range(number)

    @miniray.remote
    class Asker:
        async def ask(self, value: int) -> int:
            await asyncio.sleep(0)
            return value

        async def stream(self, number: int) -> Any:
            for item in range(number):
                yield item

    async def main() -> None:
        assert await add.remote(1, 2) == 3
        assert await asyncio.gather(*[add.remote(n, n) for n in range(5)]) == [0, 2, 4, 6, 8]
        asker = Asker.remote()
        assert await asyncio.wait_for(asker.ask.remote(9), timeout=20) == 9
        assert [await ref async for ref in count.remote(4)] == [0, 1, 2, 3]
        assert [await ref async for ref in asker.stream.remote(3)] == [0, 1, 2]
        tasks = [asyncio.ensure_future(wrap(add.remote(n, 1))) for n in range(3)]
        done, pending = await asyncio.wait(tasks)
        assert not pending
        assert sorted(task.result() for task in done) == [1, 2, 3]

    async def wrap(ref: Any) -> Any:
        return await ref

    asyncio.run(main())
    asyncio.run(main())  # another loop, the same cluster


# --- what is carried to workers ------------------------------------------------------------------


def test_lambdas_closures_and_nested_classes() -> None:
    factor = 3

    class Outer:
        class Inner:
            def value(self) -> int:
                return 10 * factor

        def inner(self) -> Outer.Inner:
            return Outer.Inner()

    def make_adder(amount: int) -> Any:
        return lambda value: value + amount

    @miniray.remote
    def apply(function: Any, *args: Any) -> Any:
        return function(*args)

    assert miniray.get(apply.remote(make_adder(5), 1)) == 6
    assert miniray.get(apply.remote(lambda: Outer().inner().value())) == 30
    inner = miniray.get(apply.remote(Outer.Inner))
    assert isinstance(inner, Outer.Inner)
    assert miniray.get(miniray.remote(Outer.Inner).remote().value.remote()) == 30


def test_decorated_functions_and_classes_of_a_module_may_use_globals_that_cannot_be_pickled(
    tmp_path: Path,
) -> None:
    (tmp_path / "locked.py").write_text(
        textwrap.dedent("""
            import functools, threading
            import miniray

            LOCK = threading.Lock()

            def logged(function):
                @functools.wraps(function)
                def inner(*args):
                    with LOCK:
                        return function(*args)
                return inner

            @miniray.remote
            def with_lock(x):
                with LOCK:
                    return x + 1

            @miniray.remote
            @logged
            def decorated(x):
                return x + 2

            @miniray.remote
            class Locked:
                def add(self, x):
                    with LOCK:
                        return x + 3
        """)
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import locked, miniray\n"
        "print(miniray.get(locked.with_lock.remote(1)))\n"
        "print(miniray.get(locked.decorated.remote(1)))\n"
        "print(miniray.get(locked.Locked.remote().add.remote(1)))\n"
    )
    assert run_python(str(script)).splitlines() == ["2", "3", "4"]


def test_a_function_of_main_that_uses_a_global_that_cannot_be_pickled_is_refused_by_name() -> None:
    program = (
        "import miniray, threading\n"
        "LOCK = threading.Lock()\n"
        "@miniray.remote\n"
        "def f():\n"
        "    with LOCK: pass\n"
        "f.remote()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert re.search(r"TypeError: function f cannot be pickled: .*'LOCK' is a lock", done.stderr)


def test_ctrl_c_in_a_script_ends_it_and_its_cluster(session_root: Path) -> None:
    program = (
        "import miniray, time\n"
        "ref = miniray.remote(lambda: time.sleep(1000)).remote()\n"
        "print('waiting', flush=True)\n"
        "miniray.get(ref)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
