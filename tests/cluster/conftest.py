"""One cluster of real processes per test module, apart from every other cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from command_helpers import CommandLine, command_line
from daemon_logs import pytest_runtest_makereport  # noqa: F401 -- a hook
from module_clusters import _sent_to_workers, cluster, session_root  # noqa: F401 -- fixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


@pytest.fixture
def memory_group() -> Iterator[str]:
    """A control group that may use 64 MiB; empty where none can be made."""
    root = Path("/sys/fs/cgroup")
    limits = ((root / "memory", "memory.limit_in_bytes"), (root, "memory.max"))
    for parent, limit in limits:
        folder = parent / f"miniray-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(64 << 20))
        except OSError:
            folder.rmdir()
            continue
        yield str(folder)
        wait_until(lambda folder=folder: not (folder / "cgroup.procs").read_text(), timeout=10)
        folder.rmdir()
        return
    yield ""
