"""Threads of numerical libraries: as many as a task has CPUs, unless somebody else decides it."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from miniray.common import process_state

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


def test_what_somebody_else_has_said_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "7")
    told: list[int] = []
    torch(monkeypatch).set_num_threads = told.append
    process_state.limit_threads(3)
    assert os.environ[VARIABLE] == "7"
    assert told == []
