"""One cluster of real processes per test module, apart from every other cluster."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from command_helpers import CommandLine, command_line
from daemon_logs import pytest_runtest_makereport  # noqa: F401 -- a hook
from module_clusters import _sent_to_workers, cluster, session_root  # noqa: F401 -- fixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Whoever runs the tests in the background of a shell script ignores Ctrl-C, and so would every
# process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def command() -> Iterator[CommandLine]:
    """A command line that no other test shares; its nodes end with the test."""
    yield from command_line()


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Runs a train loop on two workers, or as many as it is told; see ``train_helpers``."""
    from train_helpers import fit_in

    return fit_in(tmp_path)
