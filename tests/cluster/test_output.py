"""What workers print, as drivers see it: each driver is a program of its own, read through a pipe
or a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster
from terminal import screen

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster

PRELUDE = """
import os, sys, time
from pathlib import Path
import miniray
"""


class Output(NamedTuple):
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes; the second one, which has the resource "far", is not the drivers'."""
    with running_cluster(
        {"num_cpus": 8}, {"num_cpus": 2, "resources": {"far": 2}}, connect=False
    ) as cluster:
        yield cluster


def start(code: str, init: str = "address='auto'", **variables: str) -> subprocess.Popen[str]:
    program = f"{PRELUDE}\nminiray.init({init})\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def drive(code: str, init: str = "address='auto'", **variables: str) -> Output:
    """Run a driver that attaches to the cluster, to its end."""
    with start(code, init, **variables) as driver:
        try:
            out, err = driver.communicate(timeout=50)
        finally:
            driver.kill()
    assert driver.returncode == 0, err
    return Output(out, err)


def drive_on_terminal(code: str, **variables: str) -> str:
    """The same with a terminal; returns all that was written to it."""
    leader, follower = pty.openpty()
    program = f"{PRELUDE}\nminiray.init(address='auto')\n{textwrap.dedent(code)}"
    environment = {**os.environ, **variables}
    environment.pop("NO_COLOR", None)
    driver = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written = b""
    with contextlib.suppress(OSError):  # the terminal is gone when nobody has it open
        while data := os.read(leader, 65536):
            written += data
    os.close(leader)
    assert driver.wait(30) == 0, written.decode()
    return written.decode()


def logged(cluster: Cluster, suffix: str = "out") -> bytes:
    """All that is in the log files of all workers."""
    files = [
        path
        for node in cluster.list_all_nodes()
        for path in (Path(node.session_dir) / "logs").glob(f"worker-*.{suffix}")
    ]
    return b"".join(path.read_bytes() for path in files)


def body_of(line: str) -> str:
    """A line without its prefix."""
    return re.sub(r"^\([^)]*pid=\d+[^)]*\) ", "", line)


# --- when and how it appears ------------------------------------------------------------------


def test_a_line_appears_while_its_task_still_runs(nodes: Cluster, tmp_path: Path) -> None:
    with start(f"""
        @miniray.remote
        def work():
            print("begun")
            while not Path({str(tmp_path / "go")!r}).exists():
                time.sleep(0.01)

        miniray.get(work.remote())
        """) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert re.fullmatch(r"\(work pid=\d+\) begun\n", line)
        assert driver.poll() is None
        (tmp_path / "go").touch()
        assert driver.wait(30) == 0


def test_lines_name_the_task_or_the_actor_that_printed_them(nodes: Cluster) -> None:
    output = drive("""
        @miniray.remote
        def plain():
            print("by a task")

        def local():
            @miniray.remote
            def inner():
                print("by a local one")

            return inner

        class Shard:
            def __init__(self, number=None):
                self.number = number
                print("by a constructor")

            def speak(self):
                print("by a method")

        class Named(Shard):
            def __repr__(self):
                return f"Shard-{self.number}"

        miniray.get([plain.remote(), plain.options(name="renamed").remote()])
        miniray.get(local().remote())
        for cls in (Shard, Named):
            miniray.get(miniray.remote(cls).remote(7).speak.remote())
        """)
    found = {re.sub(r"pid=\d+", "pid=", line) for line in output.lines}
    assert found == {
        "(plain pid=) by a task",
        "(renamed pid=) by a task",
        "(inner pid=) by a local one",
        "(Shard pid=) by a constructor",
        "(Shard pid=) by a method",
        "(Named pid=) by a constructor",
        "(Shard-7 pid=) by a method",
    }


def test_the_error_of_a_constructor_is_seen_although_no_method_is_called(nodes: Cluster) -> None:
    output = drive("""
        @miniray.remote
        class Broken:
            def __init__(self):
                raise ValueError("no such file: weights")

        broken = Broken.remote()
        while miniray.util.state.get_actor(broken._actor_id.hex()).state != "DEAD":
            time.sleep(0.01)
        """)
    assert re.search(r"^\(Broken pid=\d+\) ValueError: no such file: weights$", output.err, re.M)


def test_tasks_may_set_up_logging_as_any_program_does(nodes: Cluster) -> None:
    output = drive("""
        import logging

        @miniray.remote
        def work():
            logging.getLogger("mine").warning("before")
            logging.basicConfig(level=logging.INFO, format="%(name)s says %(message)s")
            logging.getLogger("mine").info("after")

        miniray.get(work.remote())
        """)
    found = [re.sub(r"pid=\d+", "pid=", line) for line in output.err.splitlines()]
    assert found == ["(work pid=) before", "(work pid=) mine says after"]


def test_prefixes_are_coloured_on_a_terminal_and_plain_elsewhere(nodes: Cluster) -> None:
    code = """
        @miniray.remote
        def work():
            print("seen")

        miniray.get(work.remote())
        """
    assert re.search(r"\x1b\[\d+m\(work pid=\d+\)\x1b\[0m seen", drive_on_terminal(code))
    assert "\x1b" not in drive(code).out


def test_output_of_another_node_is_shown_with_that_node(nodes: Cluster) -> None:
    output = drive("""
        @miniray.remote(resources={"far": 1})
        class Far:
            def speak(self):
                print("from afar")
                print("complaint", file=sys.stderr)

        miniray.get(Far.remote().speak.remote())
        """)
    far = nodes.worker_nodes[0].node_id[:8]
    assert re.fullmatch(rf"\(Far pid=\d+, node={far}\) from afar\n", output.out)
    assert re.search(rf"\(Far pid=\d+, node={far}\) complaint\n", output.err)


def test_stderr_and_logging_go_to_stderr(nodes: Cluster) -> None:
    output = drive("""
        import logging

        @miniray.remote
        def work():
            print("to stdout")
            print("to stderr", file=sys.stderr)
            logging.getLogger("user").warning("a warning")

        miniray.get(work.remote())
        """)
    assert [body_of(line) for line in output.lines] == ["to stdout"]
    assert [body_of(line) for line in output.err.splitlines()] == [
        "to stderr",
        "a warning",
    ]


def test_output_is_not_shown_to_a_driver_that_does_not_want_it(nodes: Cluster) -> None:
    output = drive(
        """
        @miniray.remote
        def work():
            print("unwanted but kept")
            print("unwanted but kept", file=sys.stderr)

        miniray.get(work.remote())
        """,
        init="address='auto', log_to_driver=False",
    )
    assert output == ("", "")
    wait_until(lambda: b"unwanted but kept\n" in logged(nodes))


# --- many lines ---------------------------------------------------------------------------------


SAME_LINE = """
    @miniray.remote(num_cpus=0)
    class Rank:
        def load(self):
            print("loaded the model")

    ranks = [Rank.remote() for _ in range(6)]
    for rank in ranks:
        miniray.get(rank.load.remote())
    """


def test_a_line_that_many_workers_print_is_folded_into_one_with_a_count(nodes: Cluster) -> None:
    first, count = drive(SAME_LINE, MINIRAY_DEDUP_WINDOW="60").lines
    assert body_of(first) == "loaded the model"
    assert body_of(count).startswith("loaded the model [repeated 5x")


def test_folding_can_be_turned_off(nodes: Cluster) -> None:
    lines = drive(SAME_LINE, MINIRAY_DEDUP_LOGS="0").lines
    assert [body_of(line) for line in lines] == ["loaded the model"] * 6


def test_a_hundred_thousand_lines_arrive_whole_and_in_order(nodes: Cluster) -> None:
    lines = drive("""
        @miniray.remote
        def chatter():
            for number in range(100_000):
                print("line", number)

        miniray.get(chatter.remote())
        """).lines
    assert [body_of(line) for line in lines] == [f"line {number}" for number in range(100_000)]


def test_a_driver_whose_output_nobody_reads_goes_on(nodes: Cluster, tmp_path: Path) -> None:
    done = tmp_path / "done"
    with start(f"""
        @miniray.remote
        def chatter():
            print("x" * 200_000)

        for _ in range(20):
            miniray.get(chatter.remote())
        Path({str(done)!r}).touch()
        """) as driver:
        wait_until(done.exists)  # a pipe holds 64 KiB, which is a third of the first call's
        assert driver.poll() is None  # it waits until its output is read
        out, err = driver.communicate(timeout=30)
    assert driver.returncode == 0, err
    assert out.count("x") == 20 * 200_000


# --- progress bars ------------------------------------------------------------------------------


BAR = """
    @miniray.remote
    def train():
        from tqdm import tqdm

        for _ in tqdm(range(40), desc="epoch", mininterval=0, file=sys.stderr):
            time.sleep(0.005)

    miniray.get(train.remote())
    """


def test_a_progress_bar_stays_one_line_on_a_terminal(nodes: Cluster) -> None:
    pytest.importorskip("tqdm")
    written = drive_on_terminal(BAR)
    [line] = screen(written)
    assert re.match(r"\(train pid=\d+\) epoch: 100%.* 40/40 ", line)
    assert written.count("epoch:") > 2  # it moved


def test_what_the_driver_prints_beside_the_bars_of_workers_is_not_erased(nodes: Cluster) -> None:
    pytest.importorskip("tqdm")
    written = drive_on_terminal(
        """
        @miniray.remote
        class Worker:
            def __init__(self):
                from tqdm import tqdm

                self.bar = tqdm(total=10, desc="epoch", mininterval=0, file=sys.stderr)

            def step(self):
                self.bar.update()

            def end(self):
                self.bar.close()

        workers = [Worker.remote() for _ in range(2)]
        for number in range(10):
            miniray.get([worker.step.remote() for worker in workers])
            print(f"driver {number}", flush=True)
        miniray.get([worker.end.remote() for worker in workers])
        """
    )
    shown = screen(written)
    assert [line[:8] for line in shown if line.startswith("driver")] == [
        f"driver {number}" for number in range(10)
    ]
    bars = [line for line in shown if "epoch" in line and not line.startswith("driver")]
    assert len(bars) == 2
    assert all("100%" in bar for bar in bars)


def test_a_progress_bar_leaves_its_last_state_where_there_is_no_terminal(nodes: Cluster) -> None:
    pytest.importorskip("tqdm")
    [line] = drive(BAR).err.splitlines()
    assert re.match(r"\(train pid=\d+\) epoch: 100%.* 40/40 ", line)
    wait_until(lambda: b"epoch: 100%" in logged(nodes, "err"))
    assert b"\r" not in logged(nodes, "err")


def test_bars_of_tqdm_ray_are_below_each_other_on_the_drivers_terminal(nodes: Cluster) -> None:
    pytest.importorskip("tqdm")
    written = drive_on_terminal(
        """
        from miniray.experimental import tqdm_ray

        @miniray.remote
        class Worker:
            def __init__(self, name):
                self.bars = [
                    tqdm_ray.tqdm(total=4, desc=f"{name} {row}", position=row, flush_interval_s=0)
                    for row in range(2)
                ]

            def step(self):
                for bar in self.bars:
                    bar.update()
                tqdm_ray.safe_print("between the bars")

            def end(self):
                for bar in self.bars[::-1]:
                    bar.set_description(f"{bar.n} of {bar.total}")
                    bar.close()

        workers = [Worker.remote(name) for name in "ab"]
        for _ in range(4):
            miniray.get([worker.step.remote() for worker in workers])
        miniray.get([worker.end.remote() for worker in workers])
        """
    )
    assert "b 1:" in written
    bars = [line for line in screen(written) if "4 of 4" in line]
    assert len(bars) == 4
    assert all("100%" in bar and " 4/4 " in bar for bar in bars)
    assert "between the bars" in written


def test_a_loop_over_tqdm_ray_is_a_bar_in_a_task_and_in_the_driver(nodes: Cluster) -> None:
    pytest.importorskip("tqdm")
    err = drive(
        """
        from miniray.experimental.tqdm_ray import tqdm

        @miniray.remote
        def train():
            return sum(tqdm(range(5), desc="there"))

        assert miniray.get(train.remote()) == sum(tqdm([0, 1, 2, 3, 4], desc="here")) == 10
        try:
            list(tqdm(total=2))
        except ValueError as error:
            assert "iterable" in str(error)
        """
    ).err
    assert re.search(r"\(train pid=\d+\) there: 100%.* 5/5 ", err)
    assert re.search(r"(?m)^here: 100%.* 5/5 |\rhere: 100%.* 5/5 ", err)


# --- nothing is lost --------------------------------------------------------------------------


def test_every_way_to_write_reaches_the_driver(nodes: Cluster) -> None:
    lines = drive("""
        @miniray.remote
        def write():
            import ctypes, subprocess

            sys.stdout.buffer.write("bytes: é\\n".encode())
            sys.stdout.flush()
            os.write(1, b"descriptor\\n")
            subprocess.run(["sh", "-c", "echo child"], check=True)
            libc = ctypes.CDLL(None)
            libc.printf(b"C code\\n")
            libc.fflush(None)
            print("no newline", end="")

        miniray.get(write.remote())
        """).lines
    assert [body_of(line) for line in lines] == [
        "bytes: é",
        "descriptor",
        "child",
        "C code",
        "no newline",
    ]


def test_what_is_not_flushed_is_not_lost_when_a_worker_ends(nodes: Cluster) -> None:
    lines = drive("""
        @miniray.remote(max_calls=1)
        def write():
            import ctypes

            ctypes.CDLL(None).printf(b"left in C's buffer")
            print("left in Python's buffer", end="")
            return os.getpid()

        pid = miniray.get(write.remote())
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.01)
        """).lines
    written = "".join(body_of(line) for line in lines)
    assert "left in Python's buffer" in written
    assert "left in C's buffer" in written


@pytest.mark.parametrize(
    "end",
    ["miniray.kill(actor)", "actor.crash.remote(9)", "actor.crash.remote(11)"],
    ids=["kill", "SIGKILL", "SIGSEGV"],
)
def test_what_was_printed_before_a_violent_end_is_shown(nodes: Cluster, end: str) -> None:
    lines = drive(f"""
        @miniray.remote
        class Mortal:
            def speak(self):
                print("unfinished", end="")

            def crash(self, number):
                print("")
                print("last words")
                os.kill(os.getpid(), number)

            def pid(self):
                return os.getpid()

        actor = Mortal.remote()
        pid = miniray.get(actor.pid.remote())
        miniray.get(actor.speak.remote())
        {end}
        while os.path.exists(f"/proc/{{pid}}"):
            time.sleep(0.01)
        """).lines
    expected = ["unfinished"] if "kill" in end else ["unfinished", "last words"]
    assert [body_of(line) for line in lines] == expected


def test_lines_of_native_code_have_names_too(nodes: Cluster) -> None:
    lines = drive("""
        @miniray.remote
        class Native:
            def write(self):
                os.write(1, b"of an actor\\n")

        @miniray.remote
        def write():
            os.write(1, b"of a task\\n")

        native = Native.remote()
        miniray.get([native.write.remote(), write.remote()])
        """).lines
    assert sorted(line.split(" ")[0] for line in lines) == ["(Native", "(write"]


def test_what_is_not_printed_by_python_is_shown_under_the_name_of_what_runs(
    nodes: Cluster,
) -> None:
    shown = drive("""
        import subprocess

        @miniray.remote
        def by_python():
            print("python")

        @miniray.remote
        def by_child():
            subprocess.run("echo child; echo child >&2", shell=True, check=True)

        @miniray.remote
        def silent():
            pass

        @miniray.remote(max_retries=0)
        def by_crash():
            os.kill(os.getpid(), 11)

        for function in [by_python, by_child, silent, by_python, by_child, silent]:
            miniray.get(function.remote())
        try:
            miniray.get(by_crash.remote())
        except miniray.exceptions.WorkerCrashedError:
            pass
        """)
    names = [re.sub(r"\((\w+) pid=\d+\).*", r"\1", line) for line in shown.lines]
    assert names == ["by_python", "by_child"] * 2
    errors = [re.sub(r"\((\w+) pid=\d+\) (.*)", r"\1: \2", line) for line in shown.err.splitlines()]
    assert errors[:2] == ["by_child: child"] * 2
    assert errors[2] == "by_crash: Fatal Python error: Segmentation fault"
    assert {error.partition(":")[0] for error in errors[2:]} == {"by_crash"}


def test_where_code_was_that_crashed_its_process_is_shown(nodes: Cluster) -> None:
    shown = drive("""
        @miniray.remote(max_retries=0)
        def crash_here():
            import ctypes

            ctypes.string_at(0)

        try:
            miniray.get(crash_here.remote())
        except miniray.exceptions.WorkerCrashedError as error:
            print(error)
        """)
    assert "signal 11 (SIGSEGV)" in shown.out
    assert "Segmentation fault" in shown.err
    assert "in crash_here" in shown.err


@pytest.mark.parametrize(
    ("resource", "call"),
    [
        ("CPU", "crash.remote()"),
        ("far", "crash.remote()"),
        ("CPU", "Crasher.remote().crash.remote()"),
        ("far", "Crasher.remote().crash.remote()"),
    ],
)
def test_the_error_of_a_process_that_died_names_its_log_file(
    nodes: Cluster, resource: str, call: str
) -> None:
    lines = drive(f"""
        @miniray.remote
        class Crasher:
            def crash(self):
                print("last words", file=sys.stderr)
                sys.stderr.flush()
                os._exit(7)

        @miniray.remote(max_retries=0)
        def crash():
            print("last words", file=sys.stderr)
            os._exit(7)

        if {resource!r} == "far":
            crash, Crasher = (each.options(resources={{"far": 1}}) for each in (crash, Crasher))
        try:
            miniray.get({call})
        except miniray.exceptions.MinirayError as error:
            print(error)
        """).lines
    [(path, name, pid, told)] = re.findall(
        r"Its log is (\S+/worker-(\w+)-(\d+)-\d+-\d+-[0-9a-f-]+\.err): `miniray logs (\d+)`",
        "".join(lines),
    )
    assert name == ("crash" if call.startswith("crash") else "Crasher")
    assert pid == told
    written = Path(path).read_text()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d [\d:.]+ \[{name}\] last words\n", written)


def test_the_error_of_a_process_that_died_in_silence_names_no_log_file(nodes: Cluster) -> None:
    lines = drive("""
        @miniray.remote(max_retries=0)
        def crash():
            os._exit(7)

        try:
            miniray.get(crash.options(name="other").remote())
        except miniray.exceptions.WorkerCrashedError as error:
            print(error)
        """).lines
    assert "exited with code 7" in lines[0]
    assert "log" not in lines[0]


@pytest.mark.parametrize(
    "call",
    [
        "leave.remote()",
        "Leaver.remote().leave.remote()",
        "Leaver.remote(early=True).leave.remote()",
        "Leaver.options(max_concurrency=2).remote().leave.remote()",
        "Leaver.remote().leave_later.remote()",
    ],
    ids=["task", "method", "constructor", "thread", "coroutine"],
)
def test_the_text_with_which_user_code_exits_is_shown(nodes: Cluster, call: str) -> None:
    plain = "" if "later" in call else "del Leaver.leave_later\n        "
    shown = drive(f"""
        class Leaver:
            def __init__(self, early=False):
                if early:
                    self.leave()

            def leave(self):
                sys.exit("there is no such file")

            async def leave_later(self):
                self.leave()

        {plain}Leaver = miniray.remote(Leaver)

        @miniray.remote(max_retries=0)
        def leave():
            sys.exit("there is no such file")

        try:
            miniray.get({call})
        except miniray.exceptions.MinirayError as error:
            print(error)
        """)
    assert "exited with code 1" in shown.out
    assert "there is no such file" in shown.err


@pytest.mark.parametrize("resource", ["CPU", "far"])
def test_output_right_before_shutdown_appears(nodes: Cluster, resource: str) -> None:
    lines = drive(
        f"""
        @miniray.remote(resources={{"far": 1}} if {resource!r} == "far" else {{}})
        class Writer:
            def write(self, number):
                print("line", number)
                print("unfinished", number, end="")

        writers = [Writer.remote() for _ in range(2)]
        miniray.get([writer.write.remote(n) for n, writer in enumerate(writers)])
        miniray.shutdown()
        """,
        MINIRAY_DEDUP_LOGS="0",
    ).lines
    expected = [f"{kind} {number}" for kind in ("line", "unfinished") for number in range(2)]
    assert sorted(body_of(line) for line in lines) == expected


def test_output_right_before_the_end_of_an_embedded_cluster_appears(session_root: Path) -> None:
    lines = drive(
        """
        @miniray.remote
        def write(number):
            print("line", number)

        miniray.get([write.remote(number) for number in range(50)])
        """,
        init="address='local', num_cpus=2",
        MINIRAY_DEDUP_LOGS="0",
    ).lines
    assert sorted(body_of(line) for line in lines) == sorted(f"line {n}" for n in range(50))


def test_the_output_of_a_detached_actor_whose_driver_is_gone_is_logged(nodes: Cluster) -> None:
    first = drive("""
        @miniray.remote
        class Keeper:
            def speak(self, text):
                for number in range(1000):
                    print(text, number)

        keeper = Keeper.options(name="keeper", namespace="n", lifetime="detached").remote()
        miniray.get(keeper.speak.remote("early"))
        """)
    assert len(first.lines) == 1000
    second = drive("""
        keeper = miniray.get_actor("keeper", namespace="n")
        miniray.get(keeper.speak.remote("late"))
        miniray.kill(keeper)
        """)
    assert second == ("", "")
    wait_until(lambda: b"late 999\n" in logged(nodes))


def test_the_log_files_hold_all_output_and_nothing_else(nodes: Cluster) -> None:
    drive("""
        @miniray.remote
        def write(text):
            print(text)
            print("error of", text, file=sys.stderr)

        miniray.get([write.options(name=text).remote(text) for text in ("apple", "pear")])
        """)
    wait_until(lambda: b"apple\n" in logged(nodes) and b"pear\n" in logged(nodes))
    wait_until(lambda: b"error of pear\n" in logged(nodes, "err"))
    for suffix in ("out", "err"):
        assert b"\0" not in logged(nodes, suffix)
        assert b"miniray:name" not in logged(nodes, suffix)


def test_this_process_is_not_attached() -> None:
    assert not miniray.is_initialized()
