"""The controller and checkpoints: when they are complete, which are kept, and under which names."""

from __future__ import annotations

import asyncio
import time

import pytest
from controller_helpers import run

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train import Checkpoint
from miniray.train.base.exceptions import AttemptOverError, WorkerFailure
from miniray.train.base.reports import Report
from miniray.train.base.states import RunState
from miniray.train.controller.feed import Seen
from miniray.train.storage.metrics_log import MetricsLog
from miniray.train.storage.storage import RunStorage


def test_a_checkpoint_is_complete_only_when_all_ranks_have_reported_it(start):
    async def loop(rank):
        if rank.rank == 1:
            await first_reported.wait()
            assert rank.setup.storage.records() == []
        await rank.report({"loss": 1}, {f"rank{rank.rank}": "x"})
        first_reported.set()

    async def scenario():
        nonlocal first_reported
        first_reported = asyncio.Event()
        controller = start()
        return await controller.run(controller, [loop])

    first_reported = None
    outcome = asyncio.run(scenario())
    assert [record.name for record in outcome.checkpoints] == ["checkpoint_000000"]


def test_a_score_that_is_not_reported_is_told_once(start):
    async def loop(rank):
        for epoch in range(2):
            await rank.report({"loss": epoch}, {"weights": "x"})

    async def scenario():
        controller = start(num_to_keep=1, checkpoint_score_attribute="accuracy")
        await controller.run(controller, [loop])
        return await controller.progress(Seen())

    told = [note for note in asyncio.run(scenario()).notes if "'accuracy'" in note]
    assert len(told) == 1
    assert "Checkpoint checkpoint_000000 has no number" in told[0]
    assert "the metrics: loss." in told[0]


def test_numbers_that_ended_workers_have_begun_are_not_given_again(start):
    async def loop(rank):
        numbers.append(rank.setup.first_number)
        if rank.setup.attempt == 1:
            if rank.rank == 1:
                for index in range(4):  # uploads that nobody has heard the end of
                    await rank.call("begin_upload", index, f"checkpoint_{index}", False)
                raise RuntimeError("boom")
            await asyncio.Event().wait()

    numbers = []
    run(start(max_failures=1), loop)
    assert numbers == [0, 0, 4, 4]


async def save(rank, folder, name, **metrics):
    """Report the files of a folder as a checkpoint of this name."""
    target = await rank.call("begin_upload", rank.index, name, False)
    try:
        upload = rank.setup.storage.upload(Checkpoint(folder), target)
    except ValueError:
        await rank.call("upload_failed", rank.index, None)
        raise
    await rank.call("report", rank.index, Report(metrics, upload))
    rank.index += 1


@pytest.mark.parametrize("again", ["run", "attempt"])
def test_a_checkpoint_takes_the_place_of_one_that_an_earlier_run_or_attempt_had(
    start, tmp_path, again
):
    async def loop(rank):
        version = len(controllers) if again == "run" else rank.setup.attempt
        folder = tmp_path / f"files_{rank.rank}_{version}"
        folder.mkdir()
        (folder / f"rank{rank.rank}").write_text(f"{version}")
        (folder / f"only_in_{version}").write_text("")
        for epoch in range(2):
            await save(rank, folder, f"epoch_{epoch}", version=version, epoch=epoch)
            await rank.call("reported_checkpoints", epoch + 1, None)
        if again == "attempt" and version == 1:
            raise RuntimeError("boom")

    controllers = []
    for _ in range(2 if again == "run" else 1):
        controllers.append(start(max_failures=1, num_to_keep=3))
        outcome = run(controllers[-1], loop)
    kept = [(record.name, record.number, record.metrics) for record in outcome.checkpoints]
    assert kept == [
        ("epoch_0", 2, {"version": 2, "epoch": 0}),
        ("epoch_1", 3, {"version": 2, "epoch": 1}),
    ]
    assert outcome.checkpoints == RunStorage(tmp_path, "run").records()
    files = {file.name: file.read_text() for file in (tmp_path / "run" / "epoch_0").iterdir()}
    assert files == {"rank0": "2", "rank1": "2", "only_in_2": ""}


def test_files_that_lie_in_the_folder_of_a_checkpoint_already_are_not_deleted_for_it(
    start, tmp_path
):
    async def loop(rank):
        storage = rank.setup.storage
        folder = tmp_path / "run" / "epoch"
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text("weights")
        await rank.call("begin_upload", 0, "epoch", True)
        assert storage.committed() == set()
        await rank.call("report", 0, Report({}, storage.adopt(storage.checkpoint("epoch"))))

    run(start(workers=1), loop)
    (record,) = run(start(workers=1), loop).checkpoints
    assert record.number == 1
    assert (tmp_path / "run" / "epoch" / "model").read_text() == "weights"


def test_a_name_that_the_same_workers_have_used_is_refused(start, tmp_path):
    async def loop(rank):
        (tmp_path / "files").mkdir(exist_ok=True)
        for index in range(2):
            await save(rank, tmp_path / "files", "epoch")
            await rank.call("reported_checkpoints", index + 1, None)

    for _ in range(2):
        message = run(start(workers=1), loop).message
        assert "ValueError: The run already has a complete checkpoint 'epoch'" in message


def test_a_rank_of_an_earlier_attempt_gets_no_folder(start):
    async def loop(rank):
        if rank.setup.attempt == 1:
            if rank.rank == 0:
                await rank.call("begin_upload", 0, "epoch", False)  # and goes on with it
                await asyncio.Event().wait()
            raise RuntimeError("boom")
        with pytest.raises(AttemptOverError):
            await rank.controller.call("begin_upload", 1, 0, 1, "next", False)
        folders.append(await rank.call("begin_upload", 0, "epoch", False))
        folders.append(await rank.call("begin_upload", 1, "next", False))

    folders = []
    run(start(max_failures=1), loop)
    assert folders[:2] == ["epoch_attempt_2", "next"]


def test_uploads_that_all_ranks_have_reported_are_recorded_after_a_failure(start, monkeypatch):
    async def loop(rank):
        if rank.rank == 0:
            await rank.report({}, {"model": "x"})
            await rank.report({}, {"model": "x"})
            raise ValueError("out of data")
        for index in range(3):  # of which rank 0 has made two
            await rank.call("announce_upload", index)
        for _ in range(2):
            await asyncio.sleep(0.05)  # an upload that takes longer than rank 0 does
            await rank.report({}, {"model": "x"})
        await asyncio.Event().wait()

    monkeypatch.setattr("miniray.train.controller.controller.FAILURE_GRACE", 0)
    began = time.monotonic()
    outcome = run(start(), loop)
    assert outcome.state is RunState.ERRORED
    assert [record.number for record in outcome.checkpoints] == [0, 1]
    assert time.monotonic() - began < 20  # the third is not waited for


def test_uploads_of_a_rank_that_is_lost_are_not_waited_for(start):
    async def loop(rank):
        await rank.call("announce_upload", 0)
        if rank.rank == 1:
            raise ActorDiedError(DeathCause.EXITED, exit_code=-9)
        failure = WorkerFailure.of(OSError("disk is full"))
        await rank.call("upload_failed", 0, failure)

    began = time.monotonic()
    outcome = run(start(), loop)
    assert sorted(outcome.worker_failures) == [0, 1]
    assert time.monotonic() - began < 20


def test_old_checkpoints_that_can_not_be_deleted_do_not_end_the_run(start, monkeypatch, caplog):
    def refuse(*_):
        raise RuntimeError("403 Forbidden")  # as the client of a store may

    async def loop(rank):
        for _ in range(2):
            await rank.report({}, {"model": "x"})
        monkeypatch.setattr(RunStorage, "delete_incomplete", refuse)

    monkeypatch.setattr(RunStorage, "delete", refuse)
    outcome = run(start(workers=1, num_to_keep=1), loop)
    assert outcome.state is RunState.FINISHED
    assert [record.number for record in outcome.checkpoints] == [1]
    assert caplog.text.count("RuntimeError: 403 Forbidden") == 2


def test_a_run_whose_metrics_can_not_be_written_at_its_end_has_not_gone_on(
    start, tmp_path, monkeypatch
):
    def fail(_):
        raise OSError("disk full")

    async def loop(rank):
        await rank.report({})

    monkeypatch.setattr(MetricsLog, "close", fail)
    assert run(start(), loop).state is RunState.ERRORED
    facts = RunStorage(tmp_path, "run").run_facts()
    assert (facts["state"], facts["error"]) == ("ERRORED", "OSError: disk full")


def test_a_folder_with_checkpoints_of_other_programs_is_not_touched(start, tmp_path):
    theirs = tmp_path / "run" / "checkpoint_000007"
    theirs.mkdir(parents=True)
    (theirs / "model").write_text("weights")
    failure = run(start(), None).controller_failure
    assert "'checkpoint_000007', which a run would take for an incomplete" in failure.summary
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint_000007"]
    assert (theirs / "model").read_text() == "weights"
