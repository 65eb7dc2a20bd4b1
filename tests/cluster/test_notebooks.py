"""Notebooks: cells of a real Jupyter kernel are a driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import processes_with, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Notebook:
    """A real Jupyter kernel, which has imported miniray and started a cluster."""

    def __init__(self, folder: Path, **variables: str) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager()
        self._manager.start_kernel(
            cwd=str(folder),
            env={
                **os.environ,
                "IPYTHONDIR": str(folder),
                "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                **variables,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=40)
        self.run("import miniray, time; miniray.init(num_cpus=2)")

    def start(self, code: str) -> str:
        return str(self._client.execute(code))

    def outputs(self, cell: str, until: str | None = None, timeout: float = 40.0) -> str:
        """What a cell shows: all of it, or up to a text that may come after its end."""
        text = ""
        deadline = time.monotonic() + timeout
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind == "execute_result":
                text += content["data"]["text/plain"]
            elif kind == "error":
                text += "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle" and until is None:
                return text
            if until is not None and until in text:
                return text

    def run(self, code: str) -> str:
        return self.outputs(self.start(textwrap.dedent(code)))

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        if self._manager.has_kernel:
            self._client.stop_channels()
            self._manager.shutdown_kernel()


@pytest.fixture(scope="module", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where kernels tell their connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("jupyter")))
        yield


@pytest.fixture(scope="module")
def notebook(
    tmp_path_factory: pytest.TempPathFactory, session_root: Path, runtime_folder: None
) -> Iterator[Notebook]:
    """One that tests of this module share, and leave with the CPUs of its cluster free."""
    one = Notebook(tmp_path_factory.mktemp("notebook"))
    yield one
    one.close()


def test_functions_and_classes_of_cells_work_in_a_notebook(notebook: Notebook) -> None:
    notebook.run(
        """
        import dataclasses
        @dataclasses.dataclass
        class Point:
            x: int
        def double(point):
            return Point(point.x * 2)
        @miniray.remote
        def task(point):
            return double(point)
        @miniray.remote
        class Actor:
            def method(self, point):
                return double(point)
        """
    )
    assert notebook.run("miniray.get(task.remote(Point(4)))") == "Point(x=8)"
    notebook.run("def double(point): return Point(point.x * 3)")  # a cell that is run again
    assert notebook.run("miniray.get(Actor.remote().method.remote(Point(4)))") == "Point(x=12)"
    assert notebook.run("isinstance(miniray.get(task.remote(Point(4))), Point)") == "True"


def test_what_workers_print_appears_in_the_cell(notebook: Notebook) -> None:
    for number in range(2):
        code = f"miniray.get(miniray.remote(lambda: print('printed in cell {number}')).remote())"
        notebook.outputs(notebook.start(code), until=f"printed in cell {number}")


def test_an_interrupted_cell_leaves_the_cluster_usable(notebook: Notebook) -> None:
    cell = notebook.start(
        "slow = miniray.remote(lambda: time.sleep(1000)).remote()\n"
        "print('waiting', flush=True)\n"
        "miniray.get(slow)"
    )
    notebook.outputs(cell, until="waiting")
    notebook.interrupt()
    assert "KeyboardInterrupt" in notebook.outputs(cell)
    assert notebook.run("miniray.get(miniray.remote(lambda: 5).remote())") == "5"
    notebook.run("miniray.cancel(slow, force=True)")


def test_await_works_in_a_cell(notebook: Notebook) -> None:
    assert notebook.run("await miniray.remote(lambda: 6).remote()") == "6"


def test_the_end_of_a_kernel_leaves_nothing(tmp_path: Path) -> None:
    root = tempfile.mkdtemp(prefix="mr-nb-", dir="/tmp")  # a socket's path has at most 107 bytes
    notebook = Notebook(tmp_path, MINIRAY_TMPDIR=root)
    try:
        notebook.run("miniray.get(miniray.remote(lambda: 1).remote())")
        assert processes_with("MINIRAY_TMPDIR", root)
    finally:
        notebook.close()
    try:
        wait_until(lambda: not processes_with("MINIRAY_TMPDIR", root), timeout=10)
        assert not list(Path(root).glob("mr-*"))
    finally:
        shutil.rmtree(root)
