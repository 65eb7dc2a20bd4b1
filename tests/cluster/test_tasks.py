"""Tasks: arguments, results, options, retries."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import count_up, is_alive, wait_for_file, wait_until

import miniray
from miniray.exceptions import RayTaskError, WorkerCrashedError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
def add(a: Any, b: Any = 10, *more: Any, scale: Any = 1) -> Any:
    return (a + b + sum(more)) * scale


@miniray.remote
def identity(value: Any) -> Any:
    return value


@miniray.remote
def fail() -> None:
    raise ValueError("no luck")


def test_a_task_runs_in_another_process() -> None:
    assert miniray.get(miniray.remote(lambda: os.getpid()).remote()) != os.getpid()


def test_positional_keyword_and_default_arguments_arrive() -> None:
    assert miniray.get(add.remote(1)) == 11
    assert miniray.get(add.remote(1, 2)) == 3
    assert miniray.get(add.remote(1, b=5)) == 6
    assert miniray.get(add.remote(1, 2, 3, 4, scale=2)) == 20


def test_wrong_arguments_are_refused_where_they_are_given() -> None:
    with pytest.raises(TypeError):
        add.remote()
    with pytest.raises(TypeError):
        add.remote(1, unknown=2)


def test_a_remote_function_cannot_be_called_directly() -> None:
    with pytest.raises(TypeError, match="remote"):
        add(1)


def test_refs_given_as_arguments_arrive_as_their_values() -> None:
    one = miniray.put(1)
    assert miniray.get(add.remote(one, add.remote(one, 1), scale=miniray.put(2))) == 6


def test_refs_inside_arguments_stay_refs() -> None:
    @miniray.remote
    def unpack(values: list[Any], named: dict[str, Any]) -> Any:
        assert all(isinstance(ref, miniray.ObjectRef) for ref in [*values, named["b"]])
        return miniray.get(values[0]) + miniray.get(named["b"])

    assert miniray.get(unpack.remote([miniray.put(1)], {"b": add.remote(1, 1)})) == 3


def test_a_ref_in_a_result_can_be_used_by_the_caller() -> None:
    @miniray.remote
    def make() -> list[Any]:
        return [miniray.put("inner"), add.remote(1, 1)]

    inner = miniray.get(make.remote())
    assert miniray.get(inner) == ["inner", 2]


def test_a_task_may_capture_a_ref_in_its_closure() -> None:
    ref = miniray.put(41)

    @miniray.remote
    def captured() -> Any:
        return miniray.get(ref) + 1

    assert miniray.get(captured.remote()) == 42


def test_a_task_that_returns_nothing_gives_none() -> None:
    @miniray.remote
    def nothing() -> None:
        pass

    assert miniray.get(nothing.remote()) is None


def test_lambdas_and_closures_are_carried_over() -> None:
    offset = 5
    assert miniray.get(miniray.remote(lambda x: x + offset).remote(1)) == 6


def test_a_remote_function_may_call_itself() -> None:
    @miniray.remote
    def factorial(n: int) -> int:
        return 1 if n == 0 else n * miniray.get(factorial.remote(n - 1))

    assert miniray.get(factorial.remote(4)) == 24


def test_a_module_that_the_driver_can_import_can_be_imported_by_a_task() -> None:
    assert miniray.get(miniray.remote(is_alive).remote(os.getpid())) is True


@pytest.mark.parametrize("count", [2, 3])
def test_num_returns_gives_one_ref_for_each_value(count: int) -> None:
    @miniray.remote
    def several(n: int) -> tuple[int, ...]:
        return tuple(range(n))

    refs = several.options(num_returns=count).remote(count)
    assert len(refs) == count
    assert miniray.get(refs) == list(range(count))
    assert miniray.get(refs[1]) == 1


def test_num_returns_can_be_given_to_the_decorator() -> None:
    @miniray.remote(num_returns=2)
    def pair() -> list[str]:
        return ["a", "b"]

    first, second = pair.remote()
    assert miniray.get([second, first]) == ["b", "a"]


def test_num_returns_zero_gives_no_ref_but_runs_the_task(tmp_path: Path) -> None:
    assert miniray.remote(count_up).options(num_returns=0).remote(tmp_path / "ran") is None
    wait_until((tmp_path / "ran").exists)


def test_a_wrong_number_of_results_is_an_error_of_every_ref() -> None:
    first, second, third = identity.options(num_returns=3).remote((1, 2))
    for ref in (first, second, third):
        with pytest.raises(ValueError, match="num_returns") as caught:
            miniray.get(ref)
        assert "Traceback" not in str(caught.value)  # nothing but frames of miniray


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    @miniray.remote
    def make_lock() -> Any:
        return threading.Lock()

    with pytest.raises(TypeError, match=r"what .*make_lock returned, a value of type lock"):
        miniray.get(make_lock.remote())


def test_an_error_reaches_every_ref_of_a_task() -> None:
    for ref in fail.options(num_returns=2).remote():
        with pytest.raises(ValueError, match="no luck"):
            miniray.get(ref)


def test_a_task_whose_argument_failed_fails_with_that_error_and_does_not_run(
    tmp_path: Path,
) -> None:
    @miniray.remote
    def late(_: Any, path: Path) -> None:
        count_up(path)

    with pytest.raises(ValueError, match="no luck"):
        miniray.get(late.remote(fail.remote(), tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


def test_results_are_taken_as_they_are_ready(tmp_path: Path) -> None:
    @miniray.remote
    def held(number: int) -> int:
        if number == 0:
            wait_for_file(tmp_path / "go")
        return number

    values = miniray.util.as_completed([held.remote(n) for n in range(3)], chunk_size=1)
    assert {next(values), next(values)} == {1, 2}
    (tmp_path / "go").touch()
    assert list(values) == [0]
    (tmp_path / "go").unlink()
    values = miniray.util.map_unordered(held, range(9), backpressure_size=3, chunk_size=1)
    assert {next(values) for _ in range(8)} == set(range(1, 9))
    (tmp_path / "go").touch()
    assert list(values) == [0]


def test_options_make_a_variant_and_leave_the_original_alone() -> None:
    variant = identity.options(num_returns=2)
    assert len(variant.remote((1, 2))) == 2
    assert miniray.get(identity.remote((1, 2))) == (1, 2)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_cpu"):
        miniray.remote(num_cpu=1)(lambda: None)
    with pytest.raises(ValueError, match="max_restarts"):
        identity.options(max_restarts=1)


@pytest.mark.parametrize(
    "options",
    [{"num_cpus": -1}, {"num_returns": -1}, {"max_retries": -2}, {"resources": {"CPU": 1}}],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))}|CPU|quantit|non-negative"):
        identity.options(**options).remote(1)


def test_only_functions_and_classes_can_be_remote() -> None:
    with pytest.raises(TypeError):
        miniray.remote(num_cpus=1)(functools.partial(add))


def test_the_name_of_a_task_is_in_its_runtime_context() -> None:
    @miniray.remote
    def who() -> Any:
        context = miniray.get_runtime_context()
        return context.get_task_name(), context.get_task_function_name()

    name, function = miniray.get(who.options(name="chosen").remote())
    assert name == "chosen"
    assert function == f"{__name__}.who"
    assert miniray.get(who.remote())[0] == "who"


def test_a_task_knows_its_ids() -> None:
    @miniray.remote
    def ids() -> dict[str, Any]:
        context = miniray.get_runtime_context()
        return {
            "task": context.get_task_id(),
            "node": context.get_node_id(),
            "job": context.get_job_id(),
            "worker": context.get_worker_id(),
            "actor": context.get_actor_id(),
        }

    found, other = miniray.get([ids.remote(), ids.remote()])
    assert found["task"] != other["task"]
    assert found["node"] == miniray.get_runtime_context().get_node_id()
    assert found["job"] == miniray.get_runtime_context().get_job_id()
    assert found["worker"] != miniray.get_runtime_context().get_worker_id()
    assert found["actor"] is None


def test_a_task_knows_its_resources() -> None:
    @miniray.remote
    def resources() -> dict[str, float]:
        return miniray.get_runtime_context().get_assigned_resources()

    assert miniray.get(resources.options(num_cpus=2).remote())["CPU"] == 2


def test_many_tasks_run_at_the_same_time(tmp_path: Path) -> None:
    @miniray.remote
    def meet(number: int, folder: Path) -> None:
        (folder / str(number)).touch()
        wait_until(lambda: len(list(folder.iterdir())) == 4)

    miniray.get([meet.remote(n, tmp_path) for n in range(4)], timeout=30)


def test_a_task_is_run_again_when_its_process_is_killed(tmp_path: Path) -> None:
    @miniray.remote(max_retries=2)
    def dies_twice(path: Path) -> int:
        runs = count_up(path)
        if runs < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return runs

    assert miniray.get(dies_twice.remote(tmp_path / "runs")) == 3


def test_a_task_without_retries_fails_when_its_process_is_killed(tmp_path: Path) -> None:
    @miniray.remote(max_retries=0)
    def dies(path: Path) -> None:
        count_up(path)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerCrashedError, match="SIGKILL") as caught:
        miniray.get(dies.remote(tmp_path / "runs"))
    assert caught.value.exit_code == -signal.SIGKILL
    assert caught.value.pid
    assert (tmp_path / "runs").stat().st_size == 1


def test_an_error_is_not_retried_unless_asked_for(tmp_path: Path) -> None:
    @miniray.remote(max_retries=2)
    def fails(path: Path) -> None:
        count_up(path)
        raise ValueError("again")

    with pytest.raises(ValueError, match="again"):
        miniray.get(fails.remote(tmp_path / "runs"))
    assert (tmp_path / "runs").stat().st_size == 1


def test_retry_exceptions_runs_a_failed_task_again(tmp_path: Path) -> None:
    @miniray.remote(max_retries=3, retry_exceptions=True)
    def fails_twice(path: Path) -> int:
        runs = count_up(path)
        if runs < 3:
            raise ValueError("not yet")
        return runs

    assert miniray.get(fails_twice.remote(tmp_path / "runs")) == 3


def test_the_retries_of_a_task_bridge_an_outage_of_seconds() -> None:
    @miniray.remote(max_retries=3, retry_exceptions=[ConnectionError])
    def connect(back: float) -> str:
        if time.time() < back:
            raise ConnectionError("out of reach")
        return "connected"

    assert miniray.get(connect.remote(time.time() + 2), timeout=60) == "connected"


def test_retry_exceptions_may_name_the_classes(tmp_path: Path) -> None:
    @miniray.remote(max_retries=1)
    def fails(path: Path) -> None:
        count_up(path)
        raise KeyError("gone")

    with pytest.raises(KeyError):
        miniray.get(fails.options(retry_exceptions=[KeyError]).remote(tmp_path / "listed"))
    with pytest.raises(KeyError):
        miniray.get(fails.options(retry_exceptions=[ValueError]).remote(tmp_path / "other"))
    assert (tmp_path / "listed").stat().st_size == 2
    assert (tmp_path / "other").stat().st_size == 1


def test_max_calls_ends_the_process_after_that_many_calls() -> None:
    @miniray.remote(max_calls=1)
    def pid() -> int:
        return os.getpid()

    first = miniray.get(pid.remote())
    second = miniray.get(pid.remote())
    assert first != second
    wait_until(lambda: not is_alive(first))


def test_environment_variables_of_a_runtime_env_are_set() -> None:
    @miniray.remote(runtime_env={"env_vars": {"FLAVOUR": "sweet"}})
    def flavour() -> str | None:
        return os.environ.get("FLAVOUR")

    plain = miniray.remote(lambda: os.environ.get("FLAVOUR"))
    assert miniray.get(flavour.remote()) == "sweet"
    assert miniray.get(plain.remote()) is None


def test_an_unpicklable_argument_is_refused_at_the_call() -> None:
    import threading

    with pytest.raises(TypeError, match="lock"):
        identity.remote(threading.Lock())


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    @miniray.remote
    def lock() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(RayTaskError, match="lock"):
        miniray.get(lock.remote())
