"""Processes that do not read what their daemon has for them: what is left out, and who is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_for_file, wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.common.config import config

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
#: Lines that a program's task prints, of a hundred bytes each.
LINES = 100_000


@pytest.fixture(scope="module")
def nodes(session_root: Path) -> Iterator[Cluster]:
    """Two nodes whose daemons hold little; the second one has the resource "far"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_UNREAD_OUTPUT", str(MIB))
        patch.setenv("MINIRAY_UNREAD_LIMIT", str(4 * MIB))
        config.cache_clear()
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        cluster.add_node(num_cpus=2, resources={"far": 2})
        yield cluster
        cluster.shutdown()
    config.cache_clear()


@pytest.mark.parametrize("resource", ["CPU", "far"])
def test_a_driver_that_is_stopped_is_told_how_many_lines_it_missed_and_where_they_are(
    nodes: Cluster, tmp_path: Path, resource: str
) -> None:
    program = f"""
        import time
        from pathlib import Path
        import miniray

        miniray.init(address="auto")

        @miniray.remote(resources={{"far": 1}} if {resource!r} == "far" else {{}})
        def chatter():
            Path({str(tmp_path / "begun")!r}).touch()
            while not Path({str(tmp_path / "go")!r}).exists():
                time.sleep(0.01)
            for number in range({LINES}):
                print("x" * 100)
            Path({str(tmp_path / "done")!r}).touch()

        miniray.get(chatter.remote())
        """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        try:
            wait_for_file(tmp_path / "begun")
            driver.send_signal(signal.SIGSTOP)
            (tmp_path / "go").touch()
            wait_for_file(tmp_path / "done")  # though nobody reads what it prints
            driver.send_signal(signal.SIGCONT)
            out, err = driver.communicate(timeout=50)
        finally:
            driver.kill()
    assert driver.returncode == 0, err
    shown = out.count("x" * 100)
    assert shown * 100 < 4 * MIB  # what waits, and what sockets and pipes hold
    told = re.findall(r"([\d,]+) in (\S+?)(?: on node \w+)?\.$", err, re.MULTILINE)
    assert shown + sum(int(count.replace(",", "")) for count, _ in told) == LINES, err
    [path] = {path for _, path in told}
    assert Path(path).read_text().count("x" * 100) == LINES


def test_an_actor_that_reads_nothing_is_ended_before_its_node_holds_too_much_for_it(
    nodes: Cluster,
) -> None:
    @miniray.remote(resources={"far": 1})
    class Stopped:
        def pid(self) -> int:
            return os.getpid()

        def take(self, data: bytes) -> int:
            return len(data)

    miniray.init(address="auto")
    try:
        stopped = Stopped.remote()
        os.kill(miniray.get(stopped.pid.remote()), signal.SIGSTOP)
        calls = [stopped.take.remote(b"x" * 90_000) for _ in range(100)]
        with pytest.raises(miniray.exceptions.ActorDiedError, match=r"left .* MiB unread"):
            miniray.get(calls[-1])
    finally:
        miniray.shutdown()


def test_a_driver_that_reads_nothing_is_disconnected_and_told_why(
    nodes: Cluster, tmp_path: Path
) -> None:
    program = f"""
        import os, time
        from pathlib import Path
        import miniray

        miniray.init(address="auto")

        @miniray.remote(resources={{"far": 1}})
        class Maker:
            def wait(self):
                Path({str(tmp_path / "begun")!r}).touch()
                while not Path({str(tmp_path / "go")!r}).exists():
                    time.sleep(0.01)

            def make(self):
                return os.urandom(90_000)

        maker = Maker.remote()
        refs = [maker.wait.remote(), *(maker.make.remote() for _ in range(100))]
        try:
            miniray.get(refs)
        except miniray.exceptions.NodeDiedError as error:
            print(error)
        """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            wait_for_file(tmp_path / "begun")
            driver.send_signal(signal.SIGSTOP)
            (tmp_path / "go").touch()
            logs = Path(nodes.head_node.session_dir) / "logs" / "node.log"
            wait_until(lambda: f"process {driver.pid} is disconnected" in logs.read_text())
            driver.send_signal(signal.SIGCONT)
            out, _ = driver.communicate(timeout=50)
        finally:
            driver.kill()
    assert "MINIRAY_UNREAD_LIMIT is 4 MiB" in out


def test_a_stream_pauses_while_its_reader_is_stopped(nodes: Cluster, tmp_path: Path) -> None:
    program = f"""
        import time
        from pathlib import Path
        import miniray

        miniray.init(address="auto")

        @miniray.remote(num_cpus=2)
        def make():
            Path({str(tmp_path / "begun")!r}).touch()
            while not Path({str(tmp_path / "go")!r}).exists():
                time.sleep(0.01)
            with open({str(tmp_path / "made")!r}, "wb", buffering=0) as made:
                for number in range(1000):
                    made.write(b"x")
                    yield bytes(100_000)

        items = make.remote()
        print(sum(len(miniray.get(item)) for item in items))
        """
    miniray.init(address="auto")
    try:
        all_free = miniray.cluster_resources()["CPU"]
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
        ) as driver:
            try:
                wait_for_file(tmp_path / "begun")
                driver.send_signal(signal.SIGSTOP)
                wait_until(lambda: miniray.available_resources()["CPU"] < all_free)
                (tmp_path / "go").touch()
                # A task that waits gives back its CPU.
                wait_until(lambda: miniray.available_resources()["CPU"] == all_free)
                assert (tmp_path / "made").stat().st_size < 500
                driver.send_signal(signal.SIGCONT)
                out, _ = driver.communicate(timeout=50)
            finally:
                driver.kill()
    finally:
        miniray.shutdown()
    assert out.strip() == str(1000 * 100_000)
