"""Jobs whose drivers have ended: over when nothing runs of them, then remembered for a while."""

from __future__ import annotations

import pytest

from miniray.head.directories.jobs import _REMEMBERED, JobDirectory


class Jobs(JobDirectory):
    """Jobs, and which of them are over and forgotten."""

    def __init__(self) -> None:
        self.over: list[bytes] = []
        self.forgotten: list[bytes] = []
        super().__init__(self.over.append, self.forgotten.append)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def start_and_end(jobs: JobDirectory, number: int) -> bytes:
    id = number.to_bytes(8, "big")
    jobs.started(id, id, b"node", 1, b"")
    jobs.driver_ended(id)
    return id


def test_only_the_latest_of_the_jobs_that_are_over_are_remembered(jobs: Jobs) -> None:
    ids = [start_and_end(jobs, number) for number in range(_REMEMBERED + 3)]
    assert [jobs.get(id) is None for id in ids[:4]] == [True, True, True, False]
    assert jobs.forgotten == ids[:3]


def test_a_job_is_over_when_its_driver_its_processes_and_its_detached_actors_are_gone(
    jobs: Jobs,
) -> None:
    id = b"12345678"
    jobs.started(id, id, b"node", 1, b"")
    for holder in (b"worker", b"actor"):
        jobs.hold(holder, id)
        jobs.hold(holder, id)  # told again
    jobs.release(b"actor")
    assert jobs.driver_ended(id) is not None
    assert jobs.over == []
    assert not jobs.is_over(id)
    jobs.release(b"worker")
    assert jobs.over == [id]
    assert jobs.is_over(id)


def test_a_job_is_remembered_as_long_as_something_holds_it(jobs: Jobs) -> None:
    held = b"12345678"
    jobs.started(held, held, b"node", 1, b"")
    jobs.hold(b"actor", held)
    jobs.driver_ended(held)
    for number in range(1, _REMEMBERED + 2):
        start_and_end(jobs, number)
    jobs.release(b"actor")  # now it is the latest
    for number in range(_REMEMBERED + 2, 2 * _REMEMBERED + 1):
        start_and_end(jobs, number)
    assert jobs.get(held) is not None
    start_and_end(jobs, 2 * _REMEMBERED + 1)
    assert jobs.get(held) is None


def test_a_job_whose_driver_comes_back_runs_again(jobs: Jobs) -> None:
    id = start_and_end(jobs, 0)
    jobs.started(id, id, b"node", 1, b"")
    for number in range(1, _REMEMBERED + 2):
        start_and_end(jobs, number)
    assert jobs.get(id) is not None
    assert not jobs.is_over(id)
