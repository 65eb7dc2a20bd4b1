"""Functions, classes and packages are there as long as their job, within a bound that is told."""

from __future__ import annotations

import marshal
import sqlite3
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_until

import miniray
from miniray.cluster_utils import Cluster
from miniray.exceptions import CodeStoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
FIRST, SECOND = {"first": 4.0}, {"second": 4.0}
LIMIT = 90 * MIB


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MINIRAY_JOB_CODE_LIMIT", str(LIMIT))
    patch.setenv("MINIRAY_CODE_CACHE", str(MIB))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": FIRST})
    cluster.add_node(num_cpus=2, resources=SECOND)
    yield cluster
    miniray.shutdown()
    cluster.shutdown()
    patch.undo()


@pytest.fixture
def job(nodes: Cluster) -> Iterator[Any]:
    """Begin a job, and end the one before."""

    def begin(**options: Any) -> None:
        miniray.shutdown()
        miniray.init(address=nodes.address, namespace="test", **options)

    begin()
    yield begin
    miniray.shutdown()


@pytest.fixture
def kept(session_root: Path) -> Any:
    """Bytes of code that the head has on disk."""
    (path,) = session_root.glob("*/session_*/head.db")

    def read() -> int:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            found = database.execute("SELECT record FROM things WHERE kind = 'value'").fetchall()
        database.close()
        values = [marshal.loads(record) for (record,) in found]
        return sum(len(value) for namespace, _, value in values if namespace.startswith("code"))

    return read


def function_of(size: int) -> Any:
    """A task that drags so much along, and tells how much."""
    data = np.random.default_rng().bytes(size)

    @miniray.remote(num_cpus=0)
    def length() -> int:
        return len(data)

    return length


def start(function: Any) -> Any:
    return function.options(resources=FIRST).remote()


def on_both_nodes(function: Any) -> list[int]:
    tasks = [function.options(resources={name: 1}).remote() for name in ("first", "second") * 2]
    found: list[int] = miniray.get(tasks)
    return found


@miniray.remote(num_cpus=0)
def one() -> int:
    return 1


@miniray.remote(num_cpus=0)
class Caller:
    """An actor that runs functions of its own."""

    def call(self) -> int:
        result: int = miniray.get(one.remote())
        return result


def test_code_and_packages_go_with_their_job(job: Any, kept: Any, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(np.random.default_rng().bytes(20 * MIB))
    job(runtime_env={"working_dir": str(tmp_path)})
    assert on_both_nodes(function_of(2 * MIB)) == [2 * MIB] * 4
    wait_until(lambda: kept() > 22 * MIB)
    miniray.shutdown()
    wait_until(lambda: kept() == 0, told=kept)


def test_a_detached_actor_has_its_code_at_every_restart(job: Any, kept: Any) -> None:
    options = {"lifetime": "detached", "name": "stays", "max_restarts": -1, "max_task_retries": -1}
    for _ in range(2):
        caller = Caller.options(**options, get_if_exists=True).remote()
        assert miniray.get(caller.call.remote()) == 1
        job()  # that driver is gone
        caller = miniray.get_actor("stays")
        miniray.kill(caller, no_restart=False)
        assert miniray.get(caller.call.remote()) == 1
    miniray.kill(caller)
    miniray.shutdown()
    wait_until(lambda: kept() == 0, told=kept)


def test_a_function_of_80_mib_runs_on_every_node_and_holds_up_nobody(job: Any) -> None:
    there = Caller.options(resources={"second": 1}).remote()
    miniray.get(there.call.remote())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        large = function_of(80 * MIB)
        tasks = [large.options(resources={name: 1}).remote() for name in ("first", "second")]
    calls, left = 0, tasks
    while left:
        calls += miniray.get(there.call.remote())
        _, left = miniray.wait(left, timeout=0.05)
    assert miniray.get(tasks) == [80 * MIB] * 2
    assert calls > 1


def test_what_a_daemon_keeps_no_longer_it_asks_the_head_for(job: Any) -> None:
    small = function_of(10)
    assert on_both_nodes(small) == [10] * 4
    assert on_both_nodes(function_of(8 * MIB)) == [8 * MIB] * 4
    again = small.options(runtime_env={"env_vars": {"OTHER": "worker"}})
    assert on_both_nodes(again) == [10] * 4


def test_more_than_the_head_may_keep_is_refused_with_the_name_of_the_bound(
    job: Any, kept: Any
) -> None:
    assert on_both_nodes(function_of(9 * MIB)) == [9 * MIB] * 4
    held = [function_of(9 * MIB) for _ in range(LIMIT // (9 * MIB))]
    with pytest.raises(CodeStoreFullError, match="MINIRAY_JOB_CODE_LIMIT"):
        list(map(start, held))
    assert miniray.get(Caller.remote().call.remote()) == 1  # what is small has room still
    miniray.shutdown()
    wait_until(lambda: kept() == 0, told=kept)
    job()
    assert on_both_nodes(function_of(9 * MIB)) == [9 * MIB] * 4


#: As in a daemon, other things lie between the pieces.
LARGE_JOB = """
import psutil
from miniray.node.process_setup import keep_freed_buffers
from miniray.node.code_cache import CodeCache

keep_freed_buffers()
cache = CodeCache(lambda name: None, 1 << 30)
between = []
before = psutil.Process().memory_info().rss
for number in range(50):
    cache.put(b"job", b"%d" % number, bytes([number + 1]) * (4 << 20))
    between.append(bytes(100_000))
cache.end_job(b"job")
print(psutil.Process().memory_info().rss - before)
"""


def test_the_memory_of_a_large_job_is_given_back_to_the_system() -> None:
    grown = subprocess.run(
        [sys.executable, "-c", LARGE_JOB], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) < 50 << 20
