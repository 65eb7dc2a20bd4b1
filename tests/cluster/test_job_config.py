"""What a ``JobConfig`` says takes effect, or is refused by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

import miniray
from miniray.job_config import JobConfig
from miniray.util.state import list_actors, list_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module", autouse=True)
def node(session_root: Path) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}, connect=False) as cluster:
        yield cluster


@pytest.fixture
def begin(node: Cluster) -> Iterator[Any]:
    """Start a job, and end the one before."""

    def start(*args: JobConfig, **options: Any) -> None:
        miniray.shutdown()
        config = args[0] if args else None
        miniray.init(address=node.address, job_config=config, **options)

    yield start
    miniray.shutdown()


@miniray.remote(num_cpus=0)
class Named:
    def job(self) -> str:
        return miniray.get_runtime_context().get_job_id()


@miniray.remote(num_cpus=0)
def make_one(name: str) -> None:
    miniray.get(Named.options(name=name).remote().job.remote())


def test_the_lifetime_of_a_job_is_that_of_all_its_actors_that_do_not_say_theirs(begin: Any) -> None:
    begin(JobConfig(ray_namespace="mine", default_actor_lifetime="detached"))
    miniray.get(make_one.remote("by a task"))
    miniray.get(Named.options(name="by the driver").remote().job.remote())
    short = Named.options(name="short", lifetime="non_detached").remote()
    miniray.get(short.job.remote())
    begin(namespace="mine")
    for name in ("by a task", "by the driver"):
        actor = miniray.get_actor(name)
        assert miniray.get(actor.job.remote()) != miniray.get_runtime_context().get_job_id()
        miniray.kill(actor)
    wait_until(lambda: not list_actors(filters=[("state", "=", "ALIVE")]))
    with pytest.raises(ValueError, match="short"):
        miniray.get_actor("short")


def test_without_one_actors_go_with_their_job(begin: Any) -> None:
    begin(JobConfig(), namespace="mine")
    kept = Named.options(name="kept").remote()
    miniray.get(kept.job.remote())
    begin(namespace="mine")
    with pytest.raises(ValueError, match="kept"):
        miniray.get_actor("kept")


def test_environment_and_namespace_are_those_of_the_job_unless_init_says_others(begin: Any) -> None:
    @miniray.remote(num_cpus=0)
    def seen() -> tuple[str | None, str]:
        return os.environ.get("FLAVOUR"), miniray.get_runtime_context().namespace

    config = JobConfig(ray_namespace="mine", runtime_env={"env_vars": {"FLAVOUR": "sweet"}})
    begin(config)
    assert miniray.get(seen.remote()) == ("sweet", "mine")
    begin(config, namespace="other", runtime_env={"env_vars": {"FLAVOUR": "sour"}})
    assert miniray.get(seen.remote()) == ("sour", "other")


def test_metadata_is_listed_with_the_job(begin: Any) -> None:
    config = JobConfig(metadata={"team": "vision"})
    config.set_metadata("ticket", "17")
    begin(config)
    own = miniray.get_runtime_context().get_job_id()
    (job,) = [job for job in list_jobs() if job.job_id == own]
    assert job.metadata == {"team": "vision", "ticket": "17"}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"code_search_path": ["/code"]}, "code_search_path.*py_modules"),
        ({"jvm_options": ["-Xmx1g"]}, "jvm_options"),
        ({"_client_job": True}, "_client_job"),
        ({"_disable_job_level_lineage_reconstruction": True}, "max_retries=0"),
        ({"_py_driver_sys_path": ["/code"]}, "_py_driver_sys_path"),
        ({"metadata": {"team": 1}}, r"metadata\['team'\] must be a string"),
        ({"default_actor_lifetime": "for ever"}, "default_actor_lifetime must be one of"),
        ({"runtime_env": {"conda": "x"}}, "conda"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        JobConfig(**arguments)


def test_a_config_can_be_made_of_json() -> None:
    config = JobConfig.from_json({"metadata": {"team": "vision"}, "client_job": False})
    assert config.metadata == {"team": "vision"}
    with pytest.raises(TypeError, match="client_job"):
        JobConfig.from_json({"client_job": True})
    with pytest.raises(TypeError, match="Did you mean 'metadata'"):
        JobConfig.from_json({"metdata": {}})


def test_something_else_is_no_config_and_logging_is_refused() -> None:
    with pytest.raises(TypeError, match="JobConfig"):
        miniray.init(job_config={"metadata": {}})  # type: ignore[arg-type]
    JobConfig().set_py_logging_config(None)
    with pytest.raises(TypeError, match="logging"):
        JobConfig().ensure_logging_config({"encoding": "JSON"})
