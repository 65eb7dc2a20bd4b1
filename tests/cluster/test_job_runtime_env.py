"""The runtime environment of a whole job, as ``init`` takes it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_wheel import tiny_wheel

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def job(session_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster whose job brings a folder, a module and variables along."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "data.txt").write_text("from the working folder")
    (folder / "beside.py").write_text("ANSWER = 41\n")
    (folder / "secret.key").write_text("stays behind")
    package = tmp_path_factory.mktemp("modules") / "tasty_module"
    package.mkdir()
    (package / "__init__.py").write_text("ANSWER = 42\n")
    miniray.init(
        num_cpus=2,
        runtime_env={
            "working_dir": str(folder),
            "py_modules": [str(package)],
            "excludes": ["*.key"],
            "config": {"setup_timeout_seconds": 100},
            "env_vars": {"FLAVOUR": "sweet", "COLOUR": "red"},
        },
    )
    yield folder
    miniray.shutdown()


@miniray.remote
def read() -> str:
    return Path("data.txt").read_text()


@miniray.remote
def import_answers() -> list[int]:
    import beside
    import tasty_module

    return [beside.ANSWER, tasty_module.ANSWER]


@miniray.remote
def variables() -> list[str | None]:
    return [os.environ.get(name) for name in ("FLAVOUR", "COLOUR", "SIZE")]


def test_tasks_run_in_a_copy_of_the_working_dir(job: Path) -> None:
    assert miniray.get(read.remote()) == "from the working folder"
    where = miniray.get(miniray.remote(lambda: str(Path.cwd())).remote())
    assert Path(where) != job


def test_modules_of_working_dir_and_py_modules_can_be_imported() -> None:
    assert miniray.get(import_answers.remote()) == [41, 42]


def test_excluded_files_stay_behind() -> None:
    files = miniray.get(miniray.remote(lambda: [path.name for path in Path().iterdir()]).remote())
    assert "data.txt" in files
    assert "secret.key" not in files


def test_a_config_says_how_long_setting_up_may_take() -> None:
    with pytest.raises((ValueError, TypeError)):
        read.options(runtime_env={"config": {"setup_timeout_seconds": -7}}).remote()
    quick = variables.options(runtime_env={"config": {"setup_timeout_seconds": 60}})
    assert miniray.get(quick.remote())[0] == "sweet"


def test_actors_run_in_it_too() -> None:
    @miniray.remote
    class Reader:
        def read(self) -> Any:
            return [Path("data.txt").read_text(), *miniray.get(variables.remote())]

    found = miniray.get(Reader.remote().read.remote())
    assert found == ["from the working folder", "sweet", "red", None]


def test_env_vars_of_a_task_are_laid_over_those_of_the_job() -> None:
    task = variables.options(runtime_env={"env_vars": {"COLOUR": "green", "SIZE": "xl"}})
    assert miniray.get(task.remote()) == ["sweet", "green", "xl"]
    assert miniray.get(variables.remote()) == ["sweet", "red", None]


def test_the_runtime_env_is_in_the_runtime_context() -> None:
    @miniray.remote
    def seen() -> Any:
        return dict(miniray.get_runtime_context().runtime_env)

    assert miniray.get(seen.remote())["env_vars"]["FLAVOUR"] == "sweet"


@pytest.mark.slow  # a virtual environment is made, which is what takes long
@pytest.mark.timeout(300)
def test_tasks_and_actors_import_what_pip_installs_once(tmp_path: Path) -> None:
    options = ["--no-index"]
    pip = {"packages": [str(tiny_wheel(tmp_path, value=5))], "pip_install_options": options}

    def look() -> tuple[int, str, str | None]:
        import tiny

        return tiny.VALUE, sys.prefix, os.environ.get("FLAVOUR")

    @miniray.remote
    class Looker:
        def look(self) -> tuple[int, str, str | None]:
            return look()

    environment = {"pip": pip}
    task = miniray.remote(look).options(runtime_env=environment)
    actor = Looker.options(runtime_env=environment).remote()
    seen = miniray.get([task.remote(), actor.look.remote(), task.remote()])
    [(value, prefix, flavour)] = set(seen)  # one environment for all of them
    assert value == 5
    assert prefix != sys.prefix
    assert flavour == "sweet"  # from the environment of the job
    with pytest.raises(ModuleNotFoundError, match="tiny"):
        miniray.get(miniray.remote(look).remote())


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises((ValueError, TypeError)):
        miniray.get(read.options(runtime_env={"env_vars": "no mapping"}).remote())
