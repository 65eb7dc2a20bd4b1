"""``JobSubmissionClient``, with the names that programs for Ray use."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

from miniray.exceptions import (
    JobAlreadyExistsError,
    JobError,
    JobNotFoundError,
    JobRunningError,
)
from miniray.job_submission import (
    DriverInfo,
    JobDetails,
    JobErrorType,
    JobInfo,
    JobStatus,
    JobSubmissionClient,
    JobType,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def client(session_root: Path) -> Iterator[JobSubmissionClient]:
    """A client of a cluster of two nodes, one of which has a thing."""
    nodes = {"num_cpus": 2}, {"num_cpus": 1, "resources": {"thing": 2}, "labels": {"zone": "a"}}
    with running_cluster(nodes[0], nodes[1], connect=False) as cluster:
        yield JobSubmissionClient(cluster.address)


def ended(client: JobSubmissionClient, name: str) -> JobDetails:
    """What is known of a job that has ended."""
    wait_until(lambda: client.get_job_status(name).is_terminal())
    return client.get_job_info(name)


def test_a_job_is_submitted_and_its_end_and_output_are_known(client: JobSubmissionClient) -> None:
    before = 1000 * time.time()
    name = client.submit_job(entrypoint="echo one && echo two", metadata={"team": "vision"})
    info = ended(client, name)
    assert isinstance(info, JobInfo)
    assert info.type is JobType.SUBMISSION
    assert (info.status, info.driver_exit_code) == (JobStatus.SUCCEEDED, 0)
    assert str(info.status) == "SUCCEEDED"
    assert info.entrypoint == "echo one && echo two"
    assert info.metadata == {"team": "vision"}
    assert info.submission_id == name
    assert info.start_time is not None
    assert info.end_time is not None
    assert before - 1 <= info.start_time <= info.end_time <= 1000 * time.time()
    assert client.get_job_logs(name) == "one\ntwo\n"


def test_a_list_is_run_as_it_is(client: JobSubmissionClient) -> None:
    name = client.submit_job(entrypoint=["echo", "$HOME", "a  b"])
    assert ended(client, name).entrypoint == "echo '$HOME' 'a  b'"
    assert client.get_job_logs(name) == "$HOME a  b\n"


def test_tail_yields_what_is_printed_until_the_job_has_ended(client: JobSubmissionClient) -> None:
    name = client.submit_job(entrypoint="for i in 1 2 3; do echo äöü $i; sleep 0.1; done; exit 2")

    async def tail() -> str:
        return "".join([text async for text in client.tail_job_logs(name)])

    assert asyncio.run(tail()) == "äöü 1\näöü 2\näöü 3\n"
    info = client.get_job_info(name)
    assert (info.status, info.driver_exit_code) == (JobStatus.FAILED, 2)
    assert info.error_type is JobErrorType.JOB_ENTRYPOINT_COMMAND_ERROR


def test_resources_and_labels_say_where_a_job_runs_and_without_it_is_at_the_head(
    client: JobSubmissionClient,
) -> None:
    with_thing = client.submit_job(
        entrypoint="true",
        entrypoint_num_cpus=0.5,
        entrypoint_memory=1000,
        entrypoint_resources={"thing": 1},
    )
    labelled = client.submit_job(entrypoint="true", entrypoint_label_selector={"zone": "a"})
    plain = [client.submit_job(entrypoint="true") for _ in range(3)]
    info = ended(client, with_thing)
    assert (info.entrypoint_num_cpus, info.entrypoint_num_gpus) == (0.5, None)
    assert (info.entrypoint_memory, info.entrypoint_resources) == (1000, {"thing": 1})
    there = info.driver_node_id
    assert ended(client, labelled).driver_node_id == there
    heads = {ended(client, name).driver_node_id for name in plain}
    assert len(heads) == 1
    assert there not in heads


def test_stop_answers_whether_the_job_ran(client: JobSubmissionClient) -> None:
    name = client.submit_job(entrypoint="sleep 1000")
    assert client.stop_job(name) is True
    assert ended(client, name).status is JobStatus.STOPPED
    assert client.stop_job(name) is False


def test_an_environment_that_cannot_be_made_is_the_reason_of_the_failure(
    client: JobSubmissionClient,
) -> None:
    name = client.submit_job(
        entrypoint="true", runtime_env={"pip": ["./no-such-file-of-a-package.whl"]}
    )
    info = ended(client, name)
    assert info.status is JobStatus.FAILED
    assert info.error_type is JobErrorType.RUNTIME_ENV_SETUP_FAILURE
    assert info.message is not None
    assert "no-such-file" in info.message


def test_variables_of_the_environment_are_those_of_the_command(client: JobSubmissionClient) -> None:
    name = client.submit_job(
        entrypoint="echo $FLAVOUR", runtime_env={"env_vars": {"FLAVOUR": "mint"}}
    )
    assert ended(client, name).runtime_env == {"env_vars": {"FLAVOUR": "mint"}}
    assert client.get_job_logs(name) == "mint\n"


def test_drivers_that_were_not_submitted_are_listed_too(client: JobSubmissionClient) -> None:
    program = "import miniray; miniray.init()"
    name = client.submit_job(entrypoint=["python", "-c", program])
    driver = ended(client, name).driver_info
    assert isinstance(driver, DriverInfo)
    # One that does not say which job it is of.
    outside = ["env", "-u", "MINIRAY_JOB_CONFIG", "python", "-c", program]
    other = ended(client, client.submit_job(entrypoint=outside))
    listed = client.list_jobs()
    assert [each.submission_id for each in listed if each.submission_id == name] == [name]
    drivers = [each.job_id for each in listed if each.type is JobType.DRIVER]
    assert driver.id not in drivers
    assert len(drivers) == 1
    assert other.job_id is None


def test_what_cannot_be_done_is_refused_with_an_error_of_its_own(
    client: JobSubmissionClient,
) -> None:
    with pytest.raises(JobNotFoundError, match="nobody"):
        client.get_job_info("nobody")
    with pytest.raises(JobNotFoundError):
        client.get_job_logs("nobody")
    with pytest.raises(JobNotFoundError):
        client.delete_job("nobody")
    name = client.submit_job(entrypoint="sleep 1000", submission_id="sleeper")
    assert name == "sleeper"
    with pytest.raises(JobRunningError, match="Stop it first"):
        client.delete_job(name)
    with pytest.raises(JobAlreadyExistsError, match="sleep 1000"):
        client.submit_job(entrypoint="true", submission_id=name)
    client.stop_job(name)
    ended(client, name)
    assert client.delete_job(name) is True
    assert issubclass(JobNotFoundError, JobError)
    assert issubclass(JobError, RuntimeError)  # as Ray's client raises


def test_arguments_are_checked_at_the_call(client: JobSubmissionClient) -> None:
    with pytest.raises(ValueError, match="entrypoint is empty"):
        client.submit_job(entrypoint=" ")
    variables = {"env_vars": {"TOKEN": "hidden"}}
    with pytest.raises(ValueError, match="secrets has 'TOKN'"):
        client.submit_job(entrypoint="true", runtime_env=variables, secrets=["TOKN"])
    with pytest.raises(TypeError, match="entrypoint"):
        client.submit_job(entrypoint=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="letters, digits"):
        client.submit_job(entrypoint="true", submission_id="../x")
    with pytest.raises(ValueError, match="entrypoint_num_gpus"):
        client.submit_job(entrypoint="true", entrypoint_num_gpus=1.5)
    with pytest.raises(TypeError, match="metadata"):
        client.submit_job(entrypoint="true", metadata={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"HOST:PORT .* with the cluster's token in MINIRAY_TOKEN"):
        JobSubmissionClient("http://127.0.0.1:1")


def test_without_the_token_a_client_of_another_user_is_refused(
    client: JobSubmissionClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = client.get_address()
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))  # where no cluster is known
    assert "MINIRAY_TOKEN" not in os.environ
    with pytest.raises(ConnectionError, match="MINIRAY_TOKEN"):
        JobSubmissionClient(address)
