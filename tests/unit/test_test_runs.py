"""What every run of the tests begins with, and what holds for all of ``tests/unit``."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import hypothesis
import pytest
from no_processes import no_processes


def test_a_busy_machine_fails_no_property() -> None:
    assert hypothesis.settings().deadline is None


def test_a_run_has_the_same_examples_each_time_but_for_the_slow_tests(
    pytestconfig: pytest.Config,
) -> None:
    assert hypothesis.settings().derandomize == (pytestconfig.option.markexpr == "not slow")


def test_what_a_shell_says_about_miniray_is_not_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"MINIRAY_ADDRESS": "10.0.0.1:6379", "MINIRAY_LEASE_IDLE": "9", "PATH": "/bin"}
    monkeypatch.setattr(os, "environ", shell)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    assert shell == {"PATH": "/bin", "GRPC_ENABLE_FORK_SUPPORT": "0"}


@pytest.mark.parametrize("event", ["os.fork", "subprocess.Popen"])
def test_a_process_that_a_unit_test_starts_is_told_with_its_place(event: str) -> None:
    told = rf"tests/cluster[^$]*{event}[^$]*{__name__}"
    with pytest.raises(pytest.fail.Exception, match=told), no_processes():
        sys.audit(event, "sleep", ["sleep", "60"])


def test_an_error_of_a_unit_test_is_not_hidden_by_its_process() -> None:
    def test() -> None:
        sys.audit("os.fork")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), no_processes():
        test()
