"""`miniray profile`: what processes use, and what is said when they cannot tell."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from click.testing import CliRunner
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.cli.main import main
from miniray.client.command_connection import CommandConnection, connect_for_cli
from miniray.common.runtime import current_runtime
from miniray.profiling import inside
from miniray.profiling.looks import profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


pytestmark = pytest.mark.engine("miniray")


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[CommandConnection]:
    with running_cluster({"num_cpus": 4}, {"num_cpus": 2, "resources": {"far": 2}}):
        connection = connect_for_cli(None, "--address", None)
        yield connection
        connection.close()


@miniray.remote
class Works:
    def pid(self) -> int:
        return os.getpid()

    def spins(self, path: str) -> None:
        open(path, "w").close()
        while os.path.exists(path):
            sum(range(1000))

    def allocates(self, path: str) -> None:
        open(path, "w").close()
        kept: list[bytearray] = []
        while os.path.exists(path):
            kept = [*kept[-10:], bytearray(1 << 20)]
            time.sleep(0.01)

    def profiles_itself(self) -> list[str]:
        """Compute while a thread records, as it does where there is no py-spy; the largest part."""
        record = inside.probe(current_runtime(), "cpu", 0.5)  # type: ignore[arg-type]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            recorded = threads.submit(record)
            while not recorded.done():
                sum(range(1000))
        frames, _ = max(recorded.result(), key=lambda sample: sample[1])
        return frames  # type: ignore[no-any-return]


def is_profiled(pid: int, kind: str) -> bool:
    """Whether py-spy looks at a process, or memray writes of it."""
    if kind == "cpu":
        commands = (each.info["cmdline"] or () for each in psutil.process_iter(["cmdline"]))
        return any(str(pid) in each and "record" in each for each in commands)
    return any("miniray-profile-" in each.path for each in psutil.Process(pid).open_files())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Call a method of a new actor, until the test ends; returns the actor."""
    path = tmp_path / "runs"
    calls = []

    def run(method: str, **options: Any) -> Any:
        actor = Works.options(**options).remote()
        calls.append(getattr(actor, method).remote(str(path)))
        wait_until(path.exists)
        return actor

    yield run
    path.unlink()
    miniray.wait(calls, num_returns=len(calls), timeout=30)


def total(found: dict[str, Any], function: str) -> float:
    """What all samples cost that have a function in them."""
    return float(
        sum(cost for frames, cost in found["samples"] if any(function in each for each in frames))
    )


@pytest.mark.parametrize("where", [{}, {"far": 1}])
def test_the_cpu_that_a_method_uses_is_in_its_frames(
    cluster: CommandConnection, run: Callable[..., Any], where: dict[str, float]
) -> None:
    actor = run("spins", resources=where)
    found = profile(cluster, "cpu", actor._actor_id.hex(), 1.0)
    assert (found["way"], found["unit"], found["notes"]) == ("py-spy", "seconds", [])
    assert total(found, "spins") > 0.2
    assert found["tree"]["value"] == pytest.approx(sum(cost for _, cost in found["samples"]))


def test_a_process_that_records_itself_sees_its_main_thread() -> None:
    frames = miniray.get(Works.remote().profiles_itself.remote())
    assert "Works.profiles_itself" in frames[-1]


def test_what_a_method_allocates_is_recorded_by_memray(
    cluster: CommandConnection, run: Callable[[str], Any]
) -> None:
    actor = run("allocates")
    found = profile(cluster, "memory", actor._actor_id.hex(), 1.0)
    assert (found["way"], found["unit"]) == ("memray", "bytes")
    assert total(found, "allocates") > 5 << 20
    assert profile(cluster, "memory", actor._actor_id.hex(), 0.5, leaks=True)["tree"]["value"] > 0


def test_an_idle_actor_is_said_to_be_idle(cluster: CommandConnection) -> None:
    actor = Works.remote()
    pid = miniray.get(actor.pid.remote())
    assert profile(cluster, "cpu", str(pid), 1.0)["notes"] == [
        f"Works (pid {pid}): It was idle for these 1 s."
    ]


def test_two_profiles_of_one_process_at_once_are_refused(
    cluster: CommandConnection, run: Callable[[str], Any]
) -> None:
    of = run("spins")._actor_id.hex()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: profile(cluster, "cpu", of, 2.0), range(2)))
    refused = [each for each in found if "It is being profiled already" in str(each["notes"])]
    assert len(refused) == 1
    assert sorted(each["way"] for each in found) == ["", "py-spy"]


@pytest.mark.parametrize("kind", ["cpu", "memory"])
def test_a_process_that_dies_in_the_middle_is_said_to_have_ended(
    cluster: CommandConnection, run: Callable[[str], Any], kind: str
) -> None:
    actor = run("allocates")
    of = actor._actor_id.hex()
    [pid] = [each["pid"] for each in cluster.listing("actors") if each["actor_id"] == of]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        began = time.monotonic()
        asked = pool.submit(profile, cluster, kind, of, 60.0)
        wait_until(lambda: is_profiled(pid, kind))
        os.kill(pid, signal.SIGKILL)
        found = asked.result()
    assert time.monotonic() - began < 55
    if kind == "memory":
        assert "It ended meanwhile." in found["notes"][0]


@pytest.mark.parametrize("kind", ["cpu", "memory"])
def test_a_stopped_process_is_named(cluster: CommandConnection, kind: str) -> None:
    actor = Works.remote()
    pid = miniray.get(actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        [note] = profile(cluster, kind, str(pid), 0.1)["notes"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "is stopped (SIGSTOP)" in note


def test_the_command_writes_the_form_that_the_files_name_asks_for(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    run("spins", name="spinner")
    for ending in (".html", ".collapsed", ".speedscope.json"):
        path = tmp_path / f"profile{ending}"
        arguments = ["profile", "cpu", "spinner", "--seconds", "1", "-o", str(path)]
        assert CliRunner().invoke(main, arguments).exit_code == 0
        assert "spins" in path.read_text()
    done = CliRunner().invoke(main, ["profile", "cpu", "spinner", "-o", "x.svg"])
    assert done.exit_code == 2
    assert ".collapsed" in done.output


def test_no_process_of_a_cluster_imports_what_nobody_has_asked_for() -> None:
    program = (
        "import sys, miniray.node.daemon, miniray.worker.main, miniray.head.main\n"
        "print([name for name in sys.modules if name.startswith(('miniray.profiling', "
        "'miniray.metrics', 'miniray.web', 'starlette', 'uvicorn', 'memray', 'tracemalloc'))])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr
