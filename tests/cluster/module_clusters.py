"""One cluster of real processes per test module: fixtures of the folders whose tests have one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from cluster_helpers import processes_with, socket_paths, wait_until

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a module gets that does not say otherwise in a constant named CLUSTER.
DEFAULT_CLUSTER: dict[str, Any] = {"num_cpus": 4}


@pytest.fixture(scope="module", autouse=True)
def _sent_to_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test module defines goes to the workers itself, as from a program or a notebook.

    Otherwise each of them would import the module, and pytest with it, which takes ten times as
    long as all that the worker is started for. ``IMPORTED_BY_WORKERS`` of a module has it so.
    """
    if getattr(request.module, "IMPORTED_BY_WORKERS", False):
        yield
        return
    picklers = [cloudpickle]
    if request.config.getoption("engine") == "ray":  # it has a cloudpickle of its own
        picklers.append(pytest.importorskip("ray.cloudpickle"))
    for pickler in picklers:
        pickler.register_pickle_by_value(request.module)
    yield
    for pickler in picklers:
        pickler.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def session_root(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A folder for session files that no other cluster knows, so that none finds another.

    When the module is done, no process that was started with it may be left, and
    neither may the sockets that those processes had. Temporary files are in a folder of their own
    meanwhile, as processes that are killed leave them behind.
    """
    # Not tmp_path: a socket's path has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="mr-test-", dir="/tmp"))
    tmp_path_factory.getbasetemp()  # where it was; else it would go with the next line's
    temporary = tempfile.mkdtemp(prefix="mr-temp-", dir="/tmp")
    patch = pytest.MonkeyPatch()
    patch.setenv("MINIRAY_TMPDIR", str(root))
    patch.setenv("TMPDIR", temporary)
    patch.setattr(tempfile, "tempdir", None)  # looked up again
    sockets: set[Path] = set()
    root_key = ("MINIRAY_TMPDIR", str(root))
    patience = 60 if request.config.getoption("engine") == "ray" else 10
    try:
        yield root
        sockets = socket_paths(processes_with(*root_key))
        miniray.shutdown()
        wait_until(lambda: not processes_with(*root_key), timeout=patience)
    finally:
        miniray.shutdown()
        patch.undo()
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(temporary, ignore_errors=True)
    left = {path for path in sockets if path.exists()}
    assert not left, f"sockets are left on disk: {left}"


@pytest.fixture(scope="module")
def cluster(session_root: Path, request: pytest.FixtureRequest) -> Any:
    """A running cluster, shared by the module; ``CLUSTER`` of the module says its size."""
    options = {**DEFAULT_CLUSTER, **getattr(request.module, "CLUSTER", {})}
    if request.config.getoption("engine") == "ray":
        options |= {"engine": "ray", "_temp_dir": str(session_root)}
    return miniray.init(**options)
