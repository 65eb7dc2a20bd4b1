"""Code and packages are kept for the jobs that use them, within a bound, and for nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from miniray.exceptions import CodeStoreFullError
from miniray.head.directories.jobs import JobCode, JobDirectory, KeyValues
from miniray.messages.protocol import split

ONE, TWO = b"job  one", b"job  two"


class Kept:
    """The code of two jobs, and what a storage has of it."""

    def __init__(self, limit: int = 1000) -> None:
        self.stored: dict[tuple[str, Any], bytes] = {}
        self.jobs = JobDirectory(lambda id: self.code.job_over(id), lambda _: None)
        self.code = JobCode(KeyValues(self.store), self.jobs, limit)
        for id in (ONE, TWO):
            self.jobs.started(id, id, b"node", 1, b"")

    def store(self, namespace: str, key: Any, value: bytes | None) -> None:
        if value is None:
            del self.stored[namespace, key]
        else:
            self.stored[namespace, key] = value

    def put(self, job_id: bytes, name: bytes, content: bytes) -> None:
        for each, part in split(name, content, piece=10):
            self.code.put(job_id, each, part)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_code_goes_with_its_job_from_the_storage_too(kept: Kept) -> None:
    kept.put(ONE, b"f", b"code")
    kept.put(TWO, b"g", b"code of another")
    kept.jobs.driver_ended(ONE)
    assert kept.code.get(b"f") is None
    assert kept.code.get(b"g") is not None
    kept.jobs.driver_ended(TWO)
    assert kept.stored == {}
    assert kept.code.used == 0


def test_what_two_jobs_brought_goes_with_the_last_of_them(kept: Kept) -> None:
    kept.put(ONE, b"f", b"code")
    kept.put(TWO, b"f", b"code")
    kept.put(ONE, b"package", bytes(25))
    assert kept.code.use(TWO, b"package")
    assert not kept.code.use(TWO, b"another")
    kept.jobs.driver_ended(ONE)
    assert None not in [kept.code.get(name) for name in (b"f", b"package", b"package#2")]
    kept.jobs.driver_ended(TWO)
    assert kept.stored == {}


def test_a_package_that_was_sent_in_part_goes_with_its_job_too(kept: Kept) -> None:
    kept.code.put(ONE, b"package#0", bytes(10))
    assert not kept.code.use(TWO, b"package")
    kept.jobs.driver_ended(ONE)
    assert kept.stored == {}


def test_a_process_that_outlives_its_job_leaves_nothing(kept: Kept) -> None:
    kept.jobs.driver_ended(ONE)
    kept.put(ONE, b"f", b"code")
    assert kept.stored == {}


def test_what_finds_no_room_is_refused_with_the_name_of_the_bound(kept: Kept) -> None:
    kept.code.put(ONE, b"f", bytes(900))
    kept.code.put(TWO, b"f", bytes(900))  # which takes no more room
    with pytest.raises(CodeStoreFullError, match="MINIRAY_JOB_CODE_LIMIT"):
        kept.code.put(TWO, b"g", bytes(101))
    with pytest.raises(CodeStoreFullError, match="MINIRAY_JOB_CODE_LIMIT"):
        kept.code.get(b"g")  # a worker that is to run it
    kept.jobs.driver_ended(ONE)
    kept.jobs.driver_ended(TWO)
    kept.jobs.started(TWO, TWO, b"node", 1, b"")
    kept.code.put(TWO, b"g", bytes(101))
    assert kept.code.get(b"g") == bytes(101)
