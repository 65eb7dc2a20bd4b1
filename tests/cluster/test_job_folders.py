"""The working folder belongs to a job: what a job writes there is its own, and goes with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster


FIRST, SECOND = {"first": 2.0}, {"second": 2.0}


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster(
        {"num_cpus": 2, "resources": FIRST}, {"num_cpus": 1, "resources": SECOND}, connect=False
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A folder and a module, the same for every job."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "lib.py").write_text("VALUE = 42\n")
    module = tmp_path_factory.mktemp("modules") / "tasty"
    module.mkdir()
    (module / "__init__.py").write_text("TASTE = 'sweet'\n")
    return {"working_dir": str(folder), "py_modules": [str(module)]}


@pytest.fixture
def job(nodes: Cluster, environment: dict[str, Any]) -> Iterator[Any]:
    """Begin a job, and end the one before."""

    def begin() -> None:
        miniray.shutdown()
        miniray.init(address=nodes.address, namespace="test", runtime_env=environment)

    yield begin
    miniray.shutdown()


@miniray.remote
def look() -> tuple[str, list[str], int, str]:
    """Where a task runs, what is there, and what it imports."""
    import lib
    import tasty

    found = sorted(path.name for path in Path().iterdir() if path.name != "__pycache__")
    return os.getcwd(), found, lib.VALUE, tasty.TASTE


@miniray.remote
def spoil() -> None:
    """Change code and leave a secret beside it."""
    import lib
    import tasty

    for module, text in ((lib, "VALUE = 0\n"), (tasty, "TASTE = 'bitter'\n")):
        Path(module.__file__).write_text(text)
    Path("password.txt").write_text("hunter2")


@miniray.remote(num_cpus=0, resources={"first": 1})
class Keeper:
    """Works in the folder of its job."""

    def where(self) -> str:
        return os.getcwd()

    def write(self, name: str) -> None:
        Path(name).touch()


def test_a_job_sees_neither_what_another_one_changed_nor_what_it_left(job: Any) -> None:
    job()
    miniray.get(spoil.remote())
    job()
    _, found, value, taste = miniray.get(look.remote())
    assert (found, value, taste) == (["lib.py"], 42, "sweet")


def test_workers_of_a_job_share_its_folder_and_nodes_have_one_each(job: Any) -> None:
    job()
    keepers = [Keeper.remote(), Keeper.remote()]
    there = Keeper.options(resources={"second": 1}).remote()
    miniray.get(keepers[0].write.remote("result.txt"))
    first, second, third = miniray.get([each.where.remote() for each in (*keepers, there)])
    assert first == second != third
    assert (Path(first) / "result.txt").exists()
    assert not (Path(third) / "result.txt").exists()


def test_the_folder_goes_with_its_job_on_every_node(job: Any) -> None:
    job()
    places = [Keeper.options(resources=need).remote() for need in (FIRST, SECOND)]
    folders = [Path(where) for where in miniray.get([each.where.remote() for each in places])]
    assert all(folder.exists() for folder in folders)
    miniray.shutdown()
    wait_until(lambda: not any(folder.parent.exists() for folder in folders))


def test_a_detached_actor_keeps_the_folder_of_its_job(job: Any) -> None:
    job()
    keeper = Keeper.options(lifetime="detached", name="keeper", max_restarts=1, max_task_retries=-1)
    keeper = keeper.remote()
    folder = Path(miniray.get(keeper.where.remote()))
    miniray.get(keeper.write.remote("state"))
    job()
    keeper = miniray.get_actor("keeper")
    assert (folder / "state").exists()
    miniray.kill(keeper, no_restart=False)
    assert Path(miniray.get(keeper.where.remote())) == folder
    assert (folder / "state").exists()
    miniray.kill(keeper)
    wait_until(lambda: not folder.exists())
