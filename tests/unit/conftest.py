"""A test of this folder that starts a process fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from no_processes import no_processes

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    with no_processes():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    with no_processes():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    with no_processes():
        yield
