"""Jobs whose drivers have ended: remembered for a while, and as long as something runs of them."""

from __future__ import annotations

from miniray.head.jobs import _REMEMBERED, JobDirectory


def start_and_end(jobs: JobDirectory, number: int) -> bytes:
    id = number.to_bytes(8, "big")
    jobs.started(id, id, b"node", 1, "{}")
    jobs.driver_ended(id)
    return id


def test_only_the_latest_of_the_ended_jobs_are_remembered() -> None:
    jobs = JobDirectory()
    ids = [start_and_end(jobs, number) for number in range(_REMEMBERED + 3)]
    assert [jobs.get(id) is None for id in ids[:4]] == [True, True, True, False]


def test_a_job_is_remembered_as_long_as_it_has_detached_actors() -> None:
    jobs = JobDirectory()
    held = start_and_end(jobs, 0)
    jobs.hold(held)
    jobs.hold(held)
    for number in range(1, _REMEMBERED + 2):
        start_and_end(jobs, number)
    jobs.release(held)
    assert jobs.get(held) is not None
    jobs.release(held)  # now it is one of the ended ones
    assert jobs.get(held) is not None
    for number in range(_REMEMBERED + 2, 2 * _REMEMBERED + 3):
        start_and_end(jobs, number)
    assert jobs.get(held) is None
