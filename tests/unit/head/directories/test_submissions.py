"""Submitted jobs in the head: when a command is started, and what a head that starts again does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from head_harness import FakeCluster, FakeDaemon, report

from miniray._proto import head_pb2
from miniray.common.specs import CommandSpec
from miniray.exceptions import JobAlreadyExistsError, JobError, JobNotFoundError
from miniray.head.storage import SqliteStorage
from miniray.system.log_file import StreamLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CLIENT, JOB_ID, NODE = b"client__", b"job_____", b"node____"


class OneFile:
    """Heads of one cluster, one after another, over one file."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self._path = folder / "head.db"

    @contextlib.asynccontextmanager
    async def head(self) -> AsyncIterator[FakeCluster]:
        """A head that ends without a word."""
        storage = SqliteStorage(self._path)
        saved = storage.start("first")
        cluster = FakeCluster(storage, saved.epoch)
        cluster.head.recovery.restore(saved)
        yield cluster
        await storage.close()


@pytest.fixture
def heads(tmp_path: Path) -> OneFile:
    return OneFile(tmp_path)


async def submit(daemon: FakeDaemon, job_id: bytes = JOB_ID, **changes: Any) -> None:
    """Submit a job, "a" if no other name is given, and return when that is answered."""
    spec = CommandSpec(**{"name": "a", "command": ["true"], "resources": {"CPU": 1.0}} | changes)
    daemon.tell(attached=head_pb2.ProcessAttached(process_id=CLIENT, pid=1, job_id=job_id))
    number = daemon.begin(CLIENT, "submit_job", job_id, spec.to_wire())
    while not daemon.answer(CLIENT, number):
        await asyncio.sleep(0.001)


async def started(daemon: FakeDaemon) -> Any:
    """The lease of the command that a daemon is told to start."""
    while not (found := daemon.take("start_lease")):
        await asyncio.sleep(0.001)
    assert len(found) == 1
    return found[0]


async def stop(daemon: FakeDaemon, process_id: bytes = NODE) -> bool:
    """Stop the job "a"; return whether it waited or ran."""
    number = daemon.begin(process_id, "stop_job", "a", 30.0)
    while not (found := daemon.answer(process_id, number)):
        await asyncio.sleep(0.001)
    return bool(found[0])


async def settled(cluster: FakeCluster) -> None:
    """Return when all that was changed is kept, and what followed was done."""
    written = asyncio.Event()
    cluster.head.cluster.submissions._keeper.when_written(written.set)
    await written.wait()


def state(daemon: FakeDaemon) -> str:
    told: str = daemon.ask(NODE, "job_info", "a")["status"]
    return told


async def test_a_job_that_waits_for_a_node_is_started_once_when_it_joins(heads: OneFile) -> None:
    async with heads.head() as cluster:
        await submit(cluster.node({"CPU": 1}), resources={"there": 1.0})
        there = cluster.node({"CPU": 1, "there": 1})
        await started(there)
        await settled(cluster)
        assert cluster.head.cluster.grants.waiting == {}


async def test_the_next_head_lists_and_starts_jobs_in_the_order_of_their_submission(
    heads: OneFile,
) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node({"CPU": 1})
        for name in "cab":
            await submit(daemon, name=name, resources={"there": 1.0})
    async with heads.head() as cluster:
        daemon = cluster.node({"CPU": 1, "there": 1}, node_id=NODE)
        assert (await started(daemon)).command.name == "c"
        listed = daemon.ask(NODE, "state", "submissions")
        assert [each["submission_id"] for each in listed] == ["c", "a", "b"]


async def test_the_next_head_adopts_a_command_that_its_node_reports(heads: OneFile) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        daemon.tell(lease_started=head_pb2.LeaseStarted(lease=lease.number, pid=77))
        assert state(daemon) == "RUNNING"
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE, leases=[report(lease)])
        await settled(cluster)
        assert daemon.take("start_lease") == daemon.take("end_lease") == []
        assert state(daemon) == "RUNNING"
        daemon.tell(ended=head_pb2.ProcessEnded(lease=lease.number, exit_code=3, exit_known=True))
        daemon.lease_ended(lease.number)
        assert state(daemon) == "FAILED"
        assert daemon.ask(NODE, "job_info", "a")["driver_exit_code"] == 3
        assert daemon.ask(NODE, "available_resources")["CPU"] == 4


async def test_a_command_whose_start_was_lost_with_the_head_is_started_by_the_next_one(
    heads: OneFile,
) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lost = await started(daemon)
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        assert (await started(daemon)).number != lost.number


async def test_a_job_that_was_stopped_and_whose_start_was_lost_is_not_started_by_the_next_head(
    heads: OneFile,
) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        await started(daemon)
        assert await stop(daemon)
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await settled(cluster)
        assert daemon.take("start_lease") == []
        assert state(daemon) == "STOPPED"
        assert daemon.ask(NODE, "available_resources")["CPU"] == 4


async def test_who_submits_stops_and_deletes_a_job_is_in_the_log_of_the_head(
    heads: OneFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon, command=["sh", "-c", "a\nb"], resources={"there": 1.0})
        await stop(daemon, CLIENT)
        daemon.ask(CLIENT, "delete_job", "a")
    told = [line for line in caplog.messages if "job a: " in line]
    by = f"process 1 on node {NODE.hex()} (box) "
    assert [line.removeprefix(by).partition(" ")[0] for line in told if line.startswith(by)] == [
        *("submits", "stops", "deletes")
    ]
    assert all("\n" not in line for line in told)


async def test_values_of_secrets_are_in_no_listing_and_in_no_error(heads: OneFile) -> None:
    def spec(value: str) -> dict[str, Any]:
        variables = {"KEY": value, "OTHER": "shown"}
        return {"secrets": ["KEY"], "runtime_env": json.dumps({"env_vars": variables})}

    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon, **spec("first"))
        assert "first" in (await started(daemon)).command.runtime_env
        told = json.loads(daemon.ask(NODE, "job_info", "a")["runtime_env"])
        assert told == {"env_vars": {"KEY": "***", "OTHER": "shown"}}
        assert "first" not in str(daemon.ask(NODE, "state", "submissions"))
        with pytest.raises(JobAlreadyExistsError) as refused:
            await submit(daemon, **spec("second"))
        assert "runtime_env is" in str(refused.value)
        assert "first" not in str(refused.value)
        assert "second" not in str(refused.value)


async def test_the_log_since_a_time_begins_where_that_output_does(
    heads: OneFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.time() - 100]
    monkeypatch.setattr("time.time", lambda: now[0])
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        for offset, text in ((0, b"old "), (4, b"newer "), (10, b"new")):
            daemon.ask(NODE, "job_output", lease.number, offset, text)
            assert daemon.ask(NODE, "job_log_offset", "a", 0.0) == offset + len(text)
            now[0] += 30
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE, leases=[report(lease)])
        now[0] -= 1
        # What came with the last output before that time is shown too.
        found = [daemon.ask(NODE, "job_log_offset", "a", seconds) for seconds in (1000, 50, 20)]
        assert found == [0, 4, 10]
        now[0] += 1000
        assert daemon.ask(NODE, "job_log_offset", "a", 10.0) == len("old newer new")


async def test_an_end_that_the_head_had_not_kept_is_reported_again(heads: OneFile) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        daemon.tell(lease_started=head_pb2.LeaseStarted(lease=lease.number, pid=77))
    ended = head_pb2.ProcessEnded(lease=lease.number, exit_code=0, exit_known=True)
    lately = head_pb2.FromNodeBatch(messages=[head_pb2.FromNode(ended=ended)])
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE, lately=lately)
        await settled(cluster)
        assert daemon.take("start_lease") == []
        assert state(daemon) == "SUCCEEDED"


async def test_output_that_is_sent_again_is_kept_once_and_none_after_the_end(
    heads: OneFile,
) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        daemon.ask(NODE, "job_output", lease.number, 0, b"one ")
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE, leases=[report(lease)])
        daemon.ask(NODE, "job_output", lease.number, 0, b"one ")
        daemon.ask(NODE, "job_output", lease.number, 2, b"e two")
        asked = daemon.begin(NODE, "read_job_log", "a", 0, True)
        assert daemon.answer(NODE, asked) == [(b"one two", 7, False)]
        waiting = daemon.begin(NODE, "read_job_log", "a", 7, True)
        assert daemon.answer(NODE, waiting) == []
        daemon.tell(ended=head_pb2.ProcessEnded(lease=lease.number, exit_code=0, exit_known=True))
        assert daemon.answer(NODE, waiting) == [(b"", 7, True)]
        with pytest.raises(JobNotFoundError):
            daemon.ask(NODE, "job_output", lease.number, 7, b"late")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_job_whose_output_finds_the_disk_full_says_so_until_there_is_room(
    heads: OneFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        daemon.tell(lease_started=head_pb2.LeaseStarted(lease=lease.number, pid=77))
        with monkeypatch.context() as disk:
            disk.setattr(StreamLog, "write", full_disk)
            with pytest.raises(OSError, match="No space left"):
                daemon.ask(NODE, "job_output", lease.number, 0, b"text")
            assert "No space left" in daemon.ask(NODE, "job_info", "a")["message"]
        daemon.ask(NODE, "job_output", lease.number, 0, b"text")
        assert daemon.ask(NODE, "job_info", "a")["message"] == ""


async def test_a_job_that_is_stopped_on_a_full_disk_does_not_wait_for_its_output(
    heads: OneFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamLog, "write", full_disk)
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon)
        lease = await started(daemon)
        assert await stop(daemon)
        with pytest.raises(JobError, match="No space left"):
            daemon.ask(NODE, "job_output", lease.number, 0, b"text")


async def test_a_job_runs_again_although_its_log_cannot_say_so(
    heads: OneFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamLog, "write", full_disk)
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        await submit(daemon, max_retries=1)
        lease = await started(daemon)
        daemon.tell(ended=head_pb2.ProcessEnded(lease=lease.number, exit_code=3, exit_known=True))
        assert (await started(daemon)).number != lease.number


async def test_packages_of_a_job_are_kept_until_it_has_ended(heads: OneFile) -> None:
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE)
        daemon.tell(attached=head_pb2.ProcessAttached(process_id=CLIENT, pid=1, job_id=JOB_ID))
        daemon.ask(CLIENT, "put_code", JOB_ID, b"package", b"content")
        await submit(daemon)
        daemon.end_process(CLIENT)
        lease = await started(daemon)
    async with heads.head() as cluster:
        daemon = cluster.node(node_id=NODE, leases=[report(lease)])
        assert daemon.ask(NODE, "get_code", b"package") == b"content"
        daemon.tell(ended=head_pb2.ProcessEnded(lease=lease.number, exit_code=0, exit_known=True))
        assert daemon.ask(NODE, "get_code", b"package") is None
        assert daemon.take("job_ended")[-1].over
