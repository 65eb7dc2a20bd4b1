"""joblib's loops on a pool of actors."""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

import miniray
from miniray import api

joblib = pytest.importorskip("joblib")
numpy = pytest.importorskip("numpy")

from miniray.util.joblib import register_ray  # noqa: E402 - it imports joblib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_ray()


@pytest.fixture(params=["ray", "miniray"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with joblib.parallel_backend(request.param, n_jobs=2):
        yield request.param


def square(n: int) -> int:
    return n * n


def picky(n: int) -> int:
    if n == 3:
        raise ValueError("three")
    return n


def meet(folder: Path) -> int:
    (folder / str(os.getpid())).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    return os.getpid()


def run(function: Any, values: Any, **options: Any) -> Any:
    return joblib.Parallel(**options)(joblib.delayed(function)(value) for value in values)


@pytest.mark.usefixtures("backend")
def test_results_come_in_their_order() -> None:
    assert run(square, range(3000)) == [n * n for n in range(3000)]


@pytest.mark.usefixtures("backend")
def test_calls_run_in_several_processes(tmp_path: Path) -> None:
    pids = run(meet, [tmp_path] * 2)
    assert len({*pids, os.getpid()}) == 3


@pytest.mark.usefixtures("backend")
def test_an_error_is_raised_and_the_next_loop_runs() -> None:
    with pytest.raises(ValueError, match="three") as raised:
        run(picky, range(50))
    assert "picky" in str(raised.value.__cause__)  # the traceback of the process
    assert run(square, range(5)) == [0, 1, 4, 9, 16]


@pytest.mark.usefixtures("backend")
def test_results_can_be_read_as_they_come() -> None:
    assert list(run(square, range(50), return_as="generator")) == [n * n for n in range(50)]


@pytest.mark.usefixtures("backend")
def test_a_loop_gives_up_after_its_timeout() -> None:
    with pytest.raises(multiprocessing.TimeoutError):
        run(time.sleep, [60], timeout=0.5)


@pytest.mark.usefixtures("backend")
def test_loops_can_be_nested() -> None:
    def inner(n: int) -> list[int]:
        return run(square, range(n), n_jobs=2)

    assert run(inner, range(4)) == [[m * m for m in range(n)] for n in range(4)]


def test_minus_one_is_all_cpus_of_the_cluster() -> None:
    with joblib.parallel_backend("ray"):
        assert joblib.effective_n_jobs(-1) == int(miniray.cluster_resources()["CPU"])
        assert run(square, range(10), n_jobs=-1) == [n * n for n in range(10)]


def test_the_processes_stay_for_the_next_loop(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with joblib.parallel_backend("ray", n_jobs=2):
        assert {*run(meet, [tmp_path / "one"] * 2)} == {*run(meet, [tmp_path / "two"] * 2)}


def test_a_large_argument_is_stored_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    stored: list[Any] = []
    put = api.put
    monkeypatch.setattr(api, "put", lambda value: stored.append(value) or put(value))
    data = numpy.arange(100_000)
    with joblib.parallel_backend("ray", n_jobs=2):
        sums = joblib.Parallel()(joblib.delayed(numpy.sum)(data) for _ in range(20))
    assert sums == [data.sum()] * 20
    assert len(stored) == 1


def test_large_arguments_of_calls_that_are_done_do_not_stay_for_the_whole_loop() -> None:
    given: list[weakref.ref[Any]] = []

    def calls() -> Iterator[Any]:
        for number in range(200):
            array = numpy.full(20_000, number)
            given.append(weakref.ref(array))
            yield joblib.delayed(numpy.max)(array)
        assert sum(ref() is not None for ref in given) < 150

    with joblib.parallel_backend("ray", n_jobs=2):
        assert joblib.Parallel(batch_size=1)(calls()) == list(range(200))


def test_options_of_the_processes_can_be_given() -> None:
    def resources(_: int) -> float:
        return miniray.get_runtime_context().get_assigned_resources()["CPU"]

    with joblib.parallel_backend("ray", n_jobs=2, ray_remote_args={"num_cpus": 0.5}):
        assert run(resources, range(2)) == [0.5, 0.5]
