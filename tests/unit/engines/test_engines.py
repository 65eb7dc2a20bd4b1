"""Which engine a program gets, and what is told of those that lack something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from miniray import engines
from miniray.cli.main import main
from miniray.client.init_options import check_init
from miniray.cluster_utils import Cluster
from miniray.engines.capabilities import REFUSED, refuse, table
from miniray.exceptions import EngineError, MinirayError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_chosen", None)


@pytest.mark.parametrize(
    ("given", "variable", "engine"),
    [
        ({}, None, "miniray"),
        ({"engine": "ray"}, None, "ray"),
        ({}, "ray", "ray"),
        ({"engine": "miniray"}, "ray", "miniray"),
        ({"address": "ray://host:10001"}, None, "ray"),
        ({"address": "10.0.0.7:6379"}, "ray", "ray"),
    ],
)
def test_an_argument_comes_before_the_variable(
    given: dict[str, str], variable: str | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(engines.ENGINE_VARIABLE, variable)
    assert check_init({}, **given).engine == engine


def test_an_unknown_engine_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="engine must be one of miniray, ray, not 'dask'"):
        check_init({}, engine="dask")


def test_an_address_of_ray_is_refused_for_another_engine() -> None:
    with pytest.raises(ValueError, match="is Ray's: leave out engine='miniray'"):
        check_init({}, engine="miniray", address="ray://host:10001")


@pytest.mark.usefixtures("undecided")
def test_a_process_keeps_its_engine() -> None:
    engines.choose("miniray")
    engines.choose("miniray")
    with pytest.raises(RuntimeError, match="has used the engine 'miniray' and can't change to"):
        engines.choose("ray")


@pytest.mark.parametrize("capability", REFUSED)
def test_what_an_engine_lacks_is_refused_with_what_to_do_instead(capability: str) -> None:
    with pytest.raises(EngineError, match="The engine 'ray' does not have this") as caught:
        refuse(capability)
    assert isinstance(caught.value, MinirayError)
    assert isinstance(caught.value, NotImplementedError)
    assert REFUSED[capability] in str(caught.value)


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("command", [["status"], ["list", "actors"], ["job", "submit", "--", "ls"]])
def test_commands_are_refused_in_one_line_where_ray_is_the_engine(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(engines.ENGINE_VARIABLE, "ray")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert result.output == f"Error: The engine 'ray' does not have this: {REFUSED['commands']}.\n"
    assert CliRunner().invoke(main, ["engines"]).exit_code == 0


@pytest.mark.usefixtures("undecided")
def test_a_cluster_of_nodes_is_refused_where_ray_is_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(engines.ENGINE_VARIABLE, "ray")
    with pytest.raises(EngineError, match=r"use `ray\.cluster_utils\.Cluster`"):
        Cluster(initialize_head=True)


def test_the_page_has_the_table_of_what_differs() -> None:
    """Paste the output of `miniray engines` there."""
    assert table() in (ROOT / "docs/ray_engine.md").read_text()
    assert CliRunner().invoke(main, ["engines"]).output.strip() == table()


def test_each_test_that_differs_on_ray_exists() -> None:
    tests = ROOT / "tests"
    for line in (tests / "engines/ray.txt").read_text().splitlines():
        if line and line[0] != "#":
            file, name = re.fullmatch(r"(?:- )?(\w+\.py)::(\w+)(?:\[.*\])?: .+", line).groups()
            assert f"def {name}(" in (tests / "cluster" / file).read_text()


@pytest.mark.usefixtures("undecided")
def test_the_error_without_ray_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("miniray.engines.ray")]:
        monkeypatch.delitem(sys.modules, name)
    from miniray.client.bootstrap import connect

    with pytest.raises(ImportError, match=r"pip install 'miniray\[ray\]'"):
        connect(check_init({}, engine="ray"))


@pytest.mark.usefixtures("undecided")
def test_a_ray_that_can_not_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text("import absent_of_ray\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ImportError, match="No module named 'absent_of_ray'"):
        engines.start_ray(None)
