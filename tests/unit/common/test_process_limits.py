"""How many files may be open: raising the limit, and the error when there is no room."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from types import ModuleType
from typing import Any

import pytest

from miniray.common import process_state


@pytest.mark.parametrize(
    ("soft", "hard", "enough", "expected"),
    [
        (64, 4096, None, 4096),
        (64, 4096, 1000, 1000),
        (64, 512, 1000, 512),
        (2000, 4096, 1000, 2000),  # never lowered
        (64, resource.RLIM_INFINITY, 1000, 1000),
        (64, resource.RLIM_INFINITY, None, resource.RLIM_INFINITY),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_allowed_and_wanted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, enough: int | None, expected: int
) -> None:
    held = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: held.append(pair))
    process_state.raise_limit(enough)
    assert held[-1] == (expected, hard)


def test_no_limit_is_more_than_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinite)
    assert process_state.limit() > 1 << 40


def test_where_there_is_room_nothing_is_said() -> None:
    process_state.require_descriptors(1, "a test")


def test_the_error_names_both_numbers_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "limit", lambda: 5)
    with pytest.raises(OSError, match=r"at most 5 .* none for a test.*ulimit -n") as info:
        process_state.require_descriptors(10, "a test")
    assert info.value.errno == errno.EMFILE


VARIABLE = "OMP_NUM_THREADS"


@pytest.fixture(autouse=True)
def nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(process_state, "_threads_set", None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of that name, as far as it was loaded."""
    module = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize(("cpus", "count"), [(0, "1"), (0.5, "1"), (1, "1"), (2.5, "2")])
def test_libraries_get_as_many_threads_as_whole_cpus(cpus: float, count: str) -> None:
    process_state.limit_threads(cpus)
    assert os.environ[VARIABLE] == count


def test_a_library_that_is_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    torch(monkeypatch).set_num_threads = told.append
    process_state.limit_threads(3)
    process_state.limit_threads(2)
    assert told == [3, 2]


def test_a_library_that_is_being_loaded_reads_it_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch(monkeypatch)
    process_state.limit_threads(3)
    assert os.environ[VARIABLE] == "3"


@pytest.mark.parametrize("variable", [VARIABLE, "OPENBLAS_NUM_THREADS"])
def test_openblas_that_is_loaded_is_told_what_the_user_said_too(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    umath = pytest.importorskip("numpy._core._multiarray_umath")
    library = ctypes.CDLL(umath.__file__)
    if not hasattr(library, "scipy_openblas_get_num_threads64_"):
        pytest.skip("this NumPy has another BLAS")
    before = library.scipy_openblas_get_num_threads64_()
    counts = []
    for given in ("", "3"):
        if given:
            monkeypatch.setenv(variable, given)
        process_state.limit_threads(2)
        counts.append(library.scipy_openblas_get_num_threads64_())
    library.scipy_openblas_set_num_threads64_(before)
    assert counts == [2, 3]


def test_what_somebody_else_has_said_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    told: list[int] = []
    torch(monkeypatch).set_num_threads = told.append
    process_state.limit_threads(3)
    assert os.environ[VARIABLE] == "7"
    assert told == []
