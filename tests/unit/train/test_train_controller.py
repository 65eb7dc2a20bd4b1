"""The controller with a worker group in this process: ranks are coroutines."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import secrets
import shutil
import threading
import time

import pytest

from miniray.exceptions import ActorDiedError, DeathCause
from miniray.train import (
    Callback,
    CallbackError,
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from miniray.train.attempt import Attempt
from miniray.train.backend import Backend
from miniray.train.controller import TrainController
from miniray.train.exceptions import (
    PlacementTimeoutError,
    RunTakenOverError,
    StorageNotSharedError,
    StorageUnusableError,
    WorkerHungError,
)
from miniray.train.failures import GroupStartError, WorkerFailure
from miniray.train.metrics_log import read_rows
from miniray.train.policies import (
    FailureDecision,
    FailurePolicy,
    LimitedRetries,
    ScalingDecision,
    ScalingPolicy,
    default_scaling,
)
from miniray.train.progress_feed import ProgressFeed, Seen
from miniray.train.ranks import WorkerInfo
from miniray.train.reports import Report, Upload
from miniray.train.run_spec import RunSpec
from miniray.train.state import RunState
from miniray.train.storage import RunStorage, default_checkpoint_name
from miniray.train.worker import WorkerOutcome


class Rank:
    """What the train loop of a test can do on one rank."""

    def __init__(self, rank, setup, controller):
        self.rank = rank
        self.setup = setup
        self.controller = controller
        self.index = 0

    async def report(self, metrics, files=None):
        upload = None
        if files is not None:
            name = default_checkpoint_name(self.setup.first_number + self.index)
            folder = f"{self.setup.storage.path}/{name}"
            self.setup.storage.filesystem.makedirs(folder, exist_ok=True)
            for file, text in files.items():
                self.setup.storage.filesystem.pipe_file(f"{folder}/{file}", text.encode())
            upload = Upload(name, {file: len(text) for file, text in files.items()})
        report = Report(metrics, upload)
        await self.controller.report(self.setup.attempt, self.rank, self.index, report)
        self.index += 1


class FakeGroup:
    """A worker group whose ranks run ``loop`` as coroutines."""

    def __init__(self, size, groups):
        self.size = size
        self.groups = groups
        self.stopped = None
        self.infos = []
        groups.append(self)

    async def place(self):
        pass

    async def start(self):
        if self.start_error is not None:
            raise self.start_error

    start_error = None

    async def storage_problems(self, storage, token):
        problem = storage.problem_here(token, writes=True)
        return dict.fromkeys(range(self.size), problem) if problem else {}

    def run(self, loop, setup, carrier):
        return [self._run(loop, Rank(rank, setup, carrier)) for rank in range(self.size)]

    async def _run(self, loop, rank):
        try:
            value = await loop(rank)
        except ActorDiedError:
            raise
        except Exception as error:
            return WorkerOutcome(failure=WorkerFailure.of(error))
        return WorkerOutcome(value=pickle.dumps(value))

    async def stop(self, *, graceful):
        self.stopped = graceful


@pytest.fixture
def start(tmp_path):
    """Makes a controller whose groups are collected in ``controller.groups``."""

    def make(
        workers=2,
        max_failures=0,
        callbacks=(),
        make_group=None,
        scaling=None,
        placement_timeout_s=None,
        controller_failure_limit=-1,
        hang_timeout=None,
        failure_policy=None,
        run_id=None,
        configuration=None,
        **checkpoint_config,
    ):
        failure_config = FailureConfig(
            max_failures=max_failures, controller_failure_limit=controller_failure_limit
        )
        run_config = RunConfig(
            failure_config=failure_config,
            checkpoint_config=CheckpointConfig(**checkpoint_config),
            callbacks=list(callbacks),
        )
        scaling_config = ScalingConfig(
            num_workers=workers,
            placement_timeout_s=placement_timeout_s,
            elastic_resize_monitor_interval_s=0,
        )
        spec = RunSpec(
            name="run",
            storage=RunStorage(tmp_path, "run"),
            run_config=run_config,
            scaling_config=scaling_config,
            backend=Backend(),
            failure_policy=failure_policy or LimitedRetries(failure_config),
            scaling_policy=scaling or default_scaling(scaling_config),
            hang_timeout=hang_timeout,
            configuration=configuration or {},
            run_id=run_id or secrets.token_hex(4),
        )
        groups = []
        controller = TrainController(
            spec, make_group or (lambda _, decision: FakeGroup(decision.num_workers, groups))
        )
        controller.groups = groups
        return controller

    return make


def run(controller, loop):
    return asyncio.run(controller.run(controller, [loop]))


def test_a_run_returns_the_metrics_and_the_value_of_rank_0(start):
    async def loop(rank):
        await rank.report({"rank": rank.rank, "epoch": 0})
        await rank.report({"rank": rank.rank, "epoch": 1})
        return f"value of {rank.rank}"

    controller = start()
    outcome = run(controller, loop)
    assert outcome.state is RunState.FINISHED
    assert outcome.metrics == {"rank": 0, "epoch": 1}
    assert pickle.loads(outcome.return_value) == "value of 0"
    assert [group.stopped for group in controller.groups] == [True]


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


def test_only_the_best_checkpoints_stay_in_the_storage(start, tmp_path):
    async def loop(rank):
        for accuracy in (0.9, 0.1, 0.5, 0.2):
            await rank.report({"accuracy": accuracy}, {"model": "x"})

    outcome = run(start(num_to_keep=1, checkpoint_score_attribute="accuracy"), loop)
    assert [record.number for record in outcome.checkpoints] == [3, 0]
    assert {path.name for path in (tmp_path / "run").glob("checkpoint_*")} == {
        "checkpoint_000000",
        "checkpoint_000003",
    }


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


def test_an_exception_on_a_rank_ends_the_run_and_names_the_rank(start):
    async def loop(rank):
        if rank.rank == 1:
            raise ValueError("out of data")
        await asyncio.Event().wait()

    controller = start()
    outcome = run(controller, loop)
    assert outcome.state is RunState.ERRORED
    assert list(outcome.worker_failures) == [1]
    assert "[Rank 1] ValueError: out of data" in outcome.message
    assert isinstance(outcome.worker_failures[1].exception(), ValueError)
    assert [group.stopped for group in controller.groups] == [False]


def test_a_rank_that_dies_is_named_beside_the_rank_that_missed_it(start):
    async def loop(rank):
        if rank.rank == 1:
            await asyncio.sleep(0)
            raise ActorDiedError(DeathCause.EXITED, exit_code=-9)
        raise ConnectionError("peer is gone")

    outcome = run(start(), loop)
    assert sorted(outcome.worker_failures) == [0, 1]
    assert "SIGKILL" in outcome.message


def test_a_rank_that_returns_while_others_report_a_checkpoint_is_named(start):
    async def loop(rank):
        await rank.report({})
        if rank.rank == 0:
            await rank.report({}, {"model": "x"})
            await asyncio.Event().wait()

    outcome = run(start(), loop)
    assert outcome.state is RunState.ERRORED
    assert "Rank 1 returned after 1 reports, while rank 0 reported a checkpoint" in outcome.message
    assert "rank 0 was in its train loop" in outcome.message


def test_ranks_may_report_metrics_alone_a_different_number_of_times(start):
    async def loop(rank):
        if rank.rank == 0:
            for epoch in range(5):
                await rank.report({"epoch": epoch})

    async def scenario():
        controller = start()
        outcome = await controller.run(controller, [loop])
        return outcome, await controller.progress(Seen())

    outcome, progress = asyncio.run(scenario())
    assert outcome.state is RunState.FINISHED
    assert outcome.metrics == {"epoch": 4}
    assert [note for note in progress.notes if "do not report equally often" in note]
    assert len(progress.rows) == 5


def test_that_ranks_do_not_report_equally_often_is_told_once():
    told = []
    attempt = Attempt(1, 2, 0, tell=told.append)
    attempt.finish(1, b"")
    for index in range(5):
        attempt.report(0, index, Report({}))
    assert len(told) == 1


def test_an_error_tells_what_the_other_ranks_did(start):
    async def loop(rank):
        controller, attempt = rank.controller, rank.setup.attempt
        if rank.rank == 0:
            await rank.report({})
            reported.set()
            await controller.join(attempt, 0, 0, "barrier()", b"")
        elif rank.rank == 1:
            await controller.begin_upload(attempt, 1, 0, "epoch_0")
            await asyncio.Event().wait()
        await reported.wait()
        raise ValueError("out of data")

    async def scenario():
        nonlocal reported
        reported = asyncio.Event()
        controller = start(workers=3)
        return await controller.run(controller, [loop])

    reported = None
    message = asyncio.run(scenario()).message
    assert "[Ranks 0 and 2] ValueError: out of data" in message
    assert "rank 1 uploaded the checkpoint 'epoch_0'" in message


def test_a_rank_that_returns_ends_the_barrier_of_the_others(start):
    async def loop(rank):
        if rank.rank == 0:
            join = rank.controller.join(rank.setup.attempt, 0, 0, "barrier()", b"")
            raise (await join).error

    outcome = run(start(), loop)
    assert "Rank 1 returned from its train loop, while rank 0 waited for it in barrier()" in (
        outcome.message
    )


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        ("not shared", StorageNotSharedError, "rank 1 on 10.0.0.1 did not find"),
        ("OSError: disk", StorageUnusableError, "Rank 1 on 10.0.0.1 got OSError: disk"),
    ],
)
def test_a_storage_that_a_rank_can_not_use_ends_the_run_at_once_and_is_named(
    start, tmp_path, problem, kind, message
):
    class Apart(FakeGroup):
        async def storage_problems(self, storage, token):
            self.infos = [WorkerInfo("ab", f"10.0.0.{rank}", 1, 1, {}) for rank in range(2)]
            return {1: problem}

        async def stop(self, *, graceful):
            self.infos = []  # nothing ran there, so there is no output

    groups = []
    controller = start(
        max_failures=5, make_group=lambda _, decision: Apart(decision.num_workers, groups)
    )
    outcome = run(controller, None)
    assert len(groups) == 1
    error = outcome.controller_failure.exception()
    assert isinstance(error, kind)
    assert message in str(error)
    assert str(tmp_path) in str(error)
    assert list(tmp_path.glob("run/.probe-*")) == []


def test_what_was_uploaded_before_an_abort_is_kept(start, monkeypatch):
    async def loop(rank):
        for _ in range(3):
            await rank.report({"rank": rank.rank}, {"model": "x"})
        reported.append(rank.rank)
        if len(reported) == 2:
            await rank.controller.abort()
        await asyncio.Event().wait()

    reported = []
    outcome = run(start(), loop)
    assert outcome.state is RunState.ABORTED
    assert [record.number for record in outcome.checkpoints] == [0, 1, 2]
    assert outcome.metrics == {"rank": 0}


def test_numbers_of_reports_go_on_after_a_resume(start, tmp_path):
    async def loop(rank):
        for _ in range(3):
            await rank.report({"first": rank.setup.first_number})

    run(start(), loop)
    run(start(), loop)
    rows = read_rows(RunStorage(tmp_path, "run"))
    assert [row["number"] for row in rows] == list(range(6))
    assert [row["metrics"]["first"] for row in rows] == [0, 0, 0, 3, 3, 3]


def test_a_resumed_run_that_reports_nothing_has_the_metrics_of_before(start):
    async def loop(rank):
        await rank.report({"loss": 0.5})

    async def silent(rank):
        pass

    run(start(), loop)
    assert run(start(), silent).metrics == {"loss": 0.5}


def test_numbers_that_ended_workers_have_begun_are_not_given_again(start):
    async def loop(rank):
        numbers.append(rank.setup.first_number)
        if rank.setup.attempt == 1:
            if rank.rank == 1:
                for index in range(4):  # uploads that nobody has heard the end of
                    await rank.controller.begin_upload(1, 1, index, f"checkpoint_{index}")
                raise RuntimeError("boom")
            await asyncio.Event().wait()

    numbers = []
    run(start(max_failures=1), loop)
    assert numbers == [0, 0, 4, 4]


async def save(rank, folder, name, **metrics):
    """Report the files of a folder as a checkpoint of this name."""
    begun = rank.setup.attempt, rank.rank, rank.index
    place = await rank.controller.begin_upload(*begun, name)
    try:
        upload = rank.setup.storage.upload(Checkpoint(folder), place.folder)
    except ValueError:
        await rank.controller.upload_failed(*begun, None)
        raise
    await rank.controller.report(*begun, Report(metrics, upload))
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
            await rank.controller.reported_checkpoints(rank.setup.attempt, 0, epoch + 1, None)
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
        begun = rank.setup.attempt, rank.rank, 0
        storage = rank.setup.storage
        folder = tmp_path / "run" / "epoch"
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text("weights")
        await rank.controller.begin_upload(*begun, "epoch", in_place=True)
        assert storage.committed() == set()
        await rank.controller.report(*begun, Report({}, storage.adopt(storage.checkpoint("epoch"))))

    run(start(workers=1), loop)
    (record,) = run(start(workers=1), loop).checkpoints
    assert record.number == 1
    assert (tmp_path / "run" / "epoch" / "model").read_text() == "weights"


def test_a_name_that_the_same_workers_have_used_is_refused(start, tmp_path):
    async def loop(rank):
        (tmp_path / "files").mkdir(exist_ok=True)
        for index in range(2):
            await save(rank, tmp_path / "files", "epoch")
            await rank.controller.reported_checkpoints(rank.setup.attempt, 0, index + 1, None)

    for _ in range(2):
        message = run(start(workers=1), loop).message
        assert "ValueError: The run already has a complete checkpoint 'epoch'" in message


def test_a_rank_of_an_earlier_attempt_gets_no_folder(start):
    async def loop(rank):
        controller = rank.controller
        if rank.setup.attempt == 1:
            if rank.rank == 0:
                await controller.begin_upload(1, 0, 0, "epoch")  # and goes on with it
                await asyncio.Event().wait()
            raise RuntimeError("boom")
        places.append(await controller.begin_upload(1, 0, 1, "next"))
        places.append(await controller.begin_upload(2, rank.rank, 0, "epoch"))
        places.append(await controller.begin_upload(2, rank.rank, 1, "next"))

    places = []
    run(start(max_failures=1), loop)
    assert [place.folder for place in places[:3]] == ["", "epoch_attempt_2", "next"]
    assert places[0].refusal


def test_a_failed_upload_in_the_background_fails_its_rank(start):
    async def loop(rank):
        if rank.rank == 1:
            failure = WorkerFailure.of(OSError("disk is full"))
            await rank.controller.upload_failed(1, 1, 0, failure)
        await asyncio.Event().wait()

    outcome = run(start(), loop)
    assert list(outcome.worker_failures) == [1]
    assert "disk is full" in outcome.message


def test_a_second_driver_of_the_same_name_ends_the_first(start, tmp_path):
    async def first(rank):
        started.set()
        await other_over.wait()
        await rank.report({}, {"model": "x"})
        await asyncio.Event().wait()

    async def second(rank):
        await rank.report({"second": True}, {"model": "y"})

    async def scenario():
        nonlocal started, other_over
        started, other_over = asyncio.Event(), asyncio.Event()
        one, two = start(), start()
        ended = asyncio.ensure_future(one.run(one, [first]))
        await started.wait()
        outcome = await two.run(two, [second])
        other_over.set()
        return await ended, outcome

    started = other_over = None
    one, two = asyncio.run(scenario())
    assert isinstance(one.controller_failure.exception(), RunTakenOverError)
    assert two.state is RunState.FINISHED
    storage = RunStorage(tmp_path, "run")
    assert storage.run_facts()["state"] == "FINISHED"
    assert [record.metrics for record in storage.records()] == [{"second": True}]


def test_the_checkpoints_of_a_run_can_be_listed_while_it_goes_on(start):
    async def loop(rank):
        await rank.report({"epoch": 0}, {"model": "x"})
        await rank.report({"epoch": 1})
        found, missing = await rank.controller.reported_checkpoints(1, 0, 2, None)
        assert not missing
        assert [record.metrics for record in found] == [{"epoch": 0}]
        if rank.rank == 0:
            await rank.report({})
            _, missing = await rank.controller.reported_checkpoints(1, 0, 3, 0.01)
            asked.set()
            return missing
        await asked.wait()
        return None

    async def scenario():
        nonlocal asked
        asked = asyncio.Event()
        controller = start()
        return await controller.run(controller, [loop])

    asked = None
    outcome = asyncio.run(scenario())
    assert outcome.state is RunState.FINISHED
    assert pickle.loads(outcome.return_value) == [1]


def test_workers_are_started_again_from_the_newest_checkpoint(start):
    begins = []

    async def loop(rank):
        begins.append(rank.setup.checkpoint and rank.setup.checkpoint.path.rsplit("/", 1)[-1])
        await rank.report({"attempt": rank.setup.attempt}, {"model": "x"})
        if rank.setup.attempt < 3:
            if rank.rank == 0:
                await rank.report({"lost": True}, {"model": "y"})
            raise RuntimeError("boom")

    outcome = run(start(max_failures=2), loop)
    assert outcome.state is RunState.FINISHED
    assert begins == [None] * 2 + ["checkpoint_000000"] * 2 + ["checkpoint_000002"] * 2
    assert [record.number for record in outcome.checkpoints] == [0, 2, 4]
    assert outcome.metrics == {"attempt": 3}


def test_failures_beyond_the_limit_end_the_run(start):
    async def loop(rank):
        raise RuntimeError("boom")

    controller = start(max_failures=2)
    assert run(controller, loop).state is RunState.ERRORED
    assert len(controller.groups) == 3


def test_workers_that_can_not_be_started_end_the_run(start):
    groups = []

    def make_group(_, decision):
        group = FakeGroup(decision.num_workers, groups)
        group.start_error = GroupStartError({1: WorkerFailure("no module named torch")})
        return group

    outcome = run(start(make_group=make_group), None)
    assert outcome.state is RunState.ERRORED
    assert "[Rank 1] no module named torch" in outcome.message
    assert groups[0].stopped is False


def lost_start(starts, groups):
    """Makes groups of which the first so many lose a process while they start."""

    def make_group(_, decision):
        group = FakeGroup(decision.num_workers, groups)
        if len(groups) <= starts:
            died = WorkerFailure.of(ActorDiedError(DeathCause.NODE_LOST, node_id="ab"))
            group.start_error = GroupStartError({0: died})
        return group

    return make_group


async def return_at_once(rank):
    return None


def test_a_lost_start_does_not_count_as_a_failure_of_the_workers(start):
    groups = []
    outcome = run(start(make_group=lost_start(2, groups)), return_at_once)
    assert outcome.state is RunState.FINISHED
    assert len(groups) == 3


def test_lost_starts_end_the_run_when_their_limit_is_passed(start):
    groups = []
    make_group = lost_start(5, groups)
    controller = start(max_failures=9, controller_failure_limit=1, make_group=make_group)
    outcome = run(controller, return_at_once)
    assert outcome.state is RunState.ERRORED
    assert "was lost" in outcome.message
    assert len(groups) == 2


def test_a_failure_policy_of_the_user_decides_by_the_exceptions(start):
    class OnlyTimeouts(FailurePolicy):
        def decide(self, failure):
            errors = [each.exception() for each in failure.by_rank.values()]
            seen.append((failure.worker_failures, failure.at_start))
            timeouts = all(isinstance(error, TimeoutError) for error in errors)
            return FailureDecision.RETRY if timeouts else FailureDecision.RAISE

    async def loop(rank):
        raise TimeoutError if rank.setup.attempt < 3 else KeyError("x")

    seen = []
    outcome = run(start(workers=1, failure_policy=OnlyTimeouts()), loop)
    assert outcome.state is RunState.ERRORED
    assert "KeyError" in outcome.message
    assert seen == [(1, False), (2, False), (3, False)]


class FakeRoom:
    """Room for more workers that is there at once."""

    def __init__(self, free, log):
        self.count = 0
        self._free = free
        self._log = log

    async def collect(self, wanted):
        self.count = min(wanted, self._free)
        self._log.append(f"kept {self.count}")

    def give_back(self):
        self._log.append("gave back")


def test_a_group_grows_at_a_checkpoint_and_its_failures_are_not_counted(start):
    class Elastic(FakeGroup):
        async def place(self):
            self.size = 2 if len(groups) == 1 else self.size

        def more_room(self):
            return FakeRoom(1, log)

    async def loop(rank):
        size = len(groups[-1:]) and groups[-1].size
        sizes.append((rank.setup.attempt, size, rank.setup.checkpoint is not None))
        while groups[-1].size < 4:
            await rank.report({}, {f"rank{rank.rank}": "x"})
            await asyncio.sleep(0)

    groups, log, sizes = [], [], []
    make_group = lambda _, decision: Elastic(decision.num_workers, groups)  # noqa: E731
    outcome = run(start(workers=(2, 4), make_group=make_group), loop)
    assert outcome.state is RunState.FINISHED
    assert [group.size for group in groups] == [2, 3, 4]
    assert [group.stopped for group in groups] == [False, False, True]
    assert sorted(set(sizes)) == [(1, 2, False), (2, 3, True), (3, 4, True)]
    assert log == ["kept 1", "gave back"] * 2


def test_a_group_that_makes_no_progress_has_failed_with_the_stacks_of_its_ranks(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr("miniray.train.stacks.ANSWER_TIMEOUT", 0.5)

    class Answering(FakeGroup):
        async def _run(self, loop, rank):
            asking = asyncio.ensure_future(self._answer(rank))
            try:
                return await super()._run(loop, rank)
            finally:
                asking.cancel()

        async def _answer(self, rank):
            controller, attempt = rank.controller, rank.setup.attempt
            if await controller.await_stack_request(attempt, rank.rank) and rank.rank == 0:
                text = "Thread MainThread:\n  in all_reduce\n\nThread other:\n  in wait"
                await controller.show_stacks(attempt, rank.rank, text)

    async def loop(rank):
        assert rank.setup.shows_stacks
        if rank.setup.attempt == 1:
            await rank.report({"n": 1})
            await asyncio.Event().wait()
        return "done"

    class Listener(Callback):
        def after_exception(self, run_context, worker_exceptions):
            seen.update(worker_exceptions)

    groups, seen = [], {}
    controller = start(
        max_failures=1,
        hang_timeout=0.05,
        callbacks=[Listener()],
        make_group=lambda _, decision: Answering(decision.num_workers, groups),
    )
    outcome = run(controller, loop)
    assert outcome.state is RunState.FINISHED
    assert [type(seen[rank]) for rank in (0, 1)] == [WorkerHungError, WorkerHungError]
    assert "for 0.05 s" in str(seen[0])
    stacks = (tmp_path / "run" / "stacks_attempt_1.txt").read_text()
    assert "=== rank 0 ===\nThread MainThread:\n  in all_reduce" in stacks
    assert "=== rank 1 ===\nIt did not show its stacks" in stacks


def test_progress_of_one_rank_is_progress(start):
    async def loop(rank):
        if rank.rank == 0:
            for _ in range(10):
                await asyncio.sleep(0.1)
                await rank.report({})
            over.set()
        await over.wait()

    async def scenario():
        nonlocal over
        over = asyncio.Event()
        controller = start(hang_timeout=0.5)
        return await controller.run(controller, [loop])

    over = None
    assert asyncio.run(scenario()).state is RunState.FINISHED


def test_a_run_that_is_stopped_completes_the_checkpoint_that_is_being_uploaded(start):
    async def loop(rank):
        controller, attempt = rank.controller, rank.setup.attempt
        place = await controller.begin_upload(attempt, rank.rank, 0, "checkpoint_000000")
        assert place.folder
        uploading.release()
        await stopped.wait()
        if rank.rank == 0:
            await first_may_end.wait()
        await rank.report({"n": 0}, {f"rank{rank.rank}": "x"})
        later = controller.begin_upload(attempt, rank.rank, 1, "checkpoint_000001")
        ahead.set()
        refusals.append((await later).refusal)

    async def scenario():
        nonlocal stopped, uploading, first_may_end, ahead
        stopped, first_may_end, ahead = asyncio.Event(), asyncio.Event(), asyncio.Event()
        uploading = asyncio.Semaphore(0)
        controller = start()
        running = asyncio.ensure_future(controller.run(controller, [loop]))
        for _ in range(2):
            await uploading.acquire()
        stopping = asyncio.ensure_future(controller.abort())
        await asyncio.sleep(0)
        stopped.set()
        # Rank 1 is done, and wants to upload more while rank 0 still uploads.
        await ahead.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not stopping.done()
        assert not refusals
        first_may_end.set()
        await stopping
        return await running

    stopped = uploading = first_may_end = ahead = None
    refusals = []
    outcome = asyncio.run(scenario())
    assert outcome.state is RunState.ABORTED
    assert [record.name for record in outcome.checkpoints] == ["checkpoint_000000"]


def test_stacks_that_can_not_be_written_are_in_the_error_all_the_same(start, monkeypatch):
    def fail(self, name, text):
        if name.startswith("stacks"):
            raise OSError("disk full")

    async def loop(rank):
        await asyncio.Event().wait()

    monkeypatch.setattr(RunStorage, "write_text", fail)
    monkeypatch.setattr("miniray.train.stacks.ANSWER_TIMEOUT", 0.05)
    outcome = run(start(hang_timeout=0.05), loop)
    assert outcome.state is RunState.ERRORED
    assert "could not be written" in outcome.message
    assert "disk full" in outcome.message


def test_a_later_run_of_the_same_name_continues(start):
    async def loop(rank):
        seen.append(rank.setup.checkpoint)
        await rank.report({"n": len(seen)}, {"model": "x"})

    seen = []
    run(start(workers=1), loop)
    outcome = run(start(workers=1), loop)
    assert seen[0] is None
    assert seen[1].path.endswith("checkpoint_000000")
    assert [record.number for record in outcome.checkpoints] == [0, 1]


def test_reports_of_an_ended_attempt_are_dropped(start):
    async def loop(rank):
        if rank.setup.attempt == 1:
            stale.append(rank)
            raise RuntimeError("boom")
        await stale[0].report({"stale": True})
        await rank.report({"stale": False})

    stale = []
    assert run(start(workers=1, max_failures=1), loop).metrics == {"stale": False}


def test_an_aborted_run_ends_its_workers(start):
    async def loop(rank):
        running.set()
        await asyncio.Event().wait()

    async def scenario():
        nonlocal running
        running = asyncio.Event()
        controller = start()
        ended = asyncio.ensure_future(controller.run(controller, [loop]))
        await running.wait()
        await controller.abort()
        return controller, await ended

    running = None
    controller, outcome = asyncio.run(scenario())
    assert outcome.state is RunState.ABORTED
    assert controller.groups[0].stopped is False


def test_callbacks_see_states_reports_and_failures(start):
    class Listener(Callback):
        def on_state_change(self, run_context, old, new):
            events.append((old.value, new.value))

        def on_start(self, run_context):
            events.append("start")

        def after_report(self, run_context, metrics, checkpoint):
            number = run_context.report_number
            events.append((number, metrics, checkpoint and checkpoint.path[-17:]))

        def after_checkpoint(self, run_context, checkpoint, metrics):
            events.append((run_context.report_number, metrics, checkpoint.path[-17:]))

        def after_exception(self, run_context, worker_exceptions):
            events.append({rank: str(error) for rank, error in worker_exceptions.items()})

        def on_end(self, run_context, state, error):
            events.append((state.value, error.splitlines()[0]))

    async def loop(rank):
        await rank.report({"r": rank.rank}, {"model": "x"})
        if rank.rank == 1:
            raise RuntimeError("boom")

    events = []
    run(start(callbacks=[Listener()]), loop)
    assert events == [
        "start",
        ("INITIALIZING", "SCHEDULING"),
        ("SCHEDULING", "RUNNING"),
        (0, {"r": 0}, "checkpoint_000000"),
        (0, [{"r": 0}, {"r": 1}], "checkpoint_000000"),
        {1: "boom"},
        ("RUNNING", "ERRORED"),
        ("ERRORED", "[Rank 1] RuntimeError: boom"),
    ]


def test_callbacks_are_told_which_run_it_is_and_what_its_loop_is_called_with(start):
    class Listener(Callback):
        def on_start(self, run_context):
            told.append((run_context.run_id, run_context.train_loop_config))

    async def loop(rank):
        pass

    told = []
    config = {"train_loop_config": {"lr": 0.1}}
    run(start(callbacks=[Listener()], run_id="abc", configuration=config), loop)
    assert told == [("abc", {"lr": 0.1})]


def test_reports_are_numbered_on_over_restarts_and_resumed_runs(start):
    class Listener(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            numbers.append(run_context.report_number)

        def on_end(self, run_context, state, error):
            numbers.append(state.value)

    async def loop(rank):
        await rank.report({}, {"model": "x"})
        if rank.setup.attempt == 1:
            raise RuntimeError("boom")

    numbers = []
    for _ in range(2):
        run(start(workers=1, max_failures=1, callbacks=[Listener()]), loop)
    assert numbers == [0, 1, "FINISHED", 2, 3, "FINISHED"]


def test_a_hook_that_does_not_return_is_named(start, monkeypatch, caplog):
    class Slow(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            assert told.wait(20)

    class Handler(logging.Handler):
        def emit(self, record):
            told.set()

    async def loop(rank):
        await rank.report({})

    told = threading.Event()
    monkeypatch.setattr("miniray.train.callbacks.runner.SLOW_HOOK", 0.01)
    handler = Handler(logging.WARNING)
    logging.getLogger("miniray.train.callbacks.runner").addHandler(handler)
    try:
        assert run(start(callbacks=[Slow()]), loop).state is RunState.FINISHED
    finally:
        logging.getLogger("miniray.train.callbacks.runner").removeHandler(handler)
    assert re.search(r"Run run waits for after_report\(\) of the callback .*Slow", caplog.text)


@pytest.mark.parametrize("what", ["commit", "write_text"])
def test_the_user_is_told_that_a_run_waits_for_its_storage(start, monkeypatch, what):
    store = getattr(RunStorage, what)
    told = threading.Event()

    def slow(storage, *args):
        assert told.wait(20)
        return store(storage, *args)

    async def loop(rank):
        await rank.report({}, {"model": "weights"})

    monkeypatch.setattr("miniray.train.blocking_work.SLOW_WORK", 0.01)
    monkeypatch.setattr(RunStorage, what, slow)
    notes = []
    monkeypatch.setattr(ProgressFeed, "note", lambda _, text: (notes.append(text), told.set()))
    assert run(start(), loop).state is RunState.FINISHED
    assert re.match(r"The run waits for its storage: .*/run has not returned for \d+ s\.", notes[0])


def test_callbacks_are_told_of_another_world_size(start):
    class Listener(Callback):
        def after_resize(self, run_context, old_size, new_size):
            sizes.append((old_size, new_size))

    class Shrinking(ScalingPolicy):
        def __init__(self):
            self.sizes = iter([3, 3, 2])

        def next_group(self):
            return ScalingDecision(next(self.sizes), {"CPU": 1})

    async def loop(rank):
        if rank.setup.attempt < 3:
            raise RuntimeError("boom")

    sizes = []
    controller = start(workers=3, max_failures=2, callbacks=[Listener()], scaling=Shrinking())
    assert run(controller, loop).state is RunState.FINISHED
    assert sizes == [(3, 2)]


HOOKS = ["on_start", "on_state_change", "after_checkpoint", "after_report", "on_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_any_hook_names_it_and_all_callbacks_hear_of_the_end(start, hook):
    class Listener(Callback):
        def on_end(self, run_context, state, error):
            ended.append(state)

    def fail(self, *arguments):
        raise OSError("no route to host")

    async def loop(rank):
        await rank.report({}, {"model": "x"})

    ended = []
    broken = type("Broken", (Callback,), {hook: fail})()
    outcome = run(start(callbacks=[Listener(), broken]), loop)
    assert outcome.state is RunState.ERRORED
    assert f"Broken failed in {hook}(): OSError" in outcome.controller_failure.summary
    assert f"Broken failed in {hook}(): OSError" in outcome.message
    assert ended == [RunState.FINISHED if hook == "on_end" else RunState.ERRORED]


def test_an_aborted_run_tells_callbacks_of_its_end_also_if_one_fails_at_it(start):
    class Listener(Callback):
        def on_state_change(self, run_context, old, new):
            if new is RunState.ABORTED:
                raise OSError("no route to host")

        def on_end(self, run_context, state, error):
            ended.append(state)

    async def loop(rank):
        running.set()
        await asyncio.Event().wait()

    async def scenario():
        nonlocal running
        running = asyncio.Event()
        controller = start(callbacks=[Listener()])
        result = asyncio.ensure_future(controller.run(controller, [loop]))
        await running.wait()
        await controller.abort()
        return await result

    running, ended = None, []
    outcome = asyncio.run(scenario())
    assert "no route to host" in outcome.message
    assert ended == [RunState.ERRORED]


def test_an_exception_in_a_callback_ends_the_run_as_the_controllers(start):
    class Broken(Callback):
        def after_report(self, run_context, metrics, checkpoint):
            raise ZeroDivisionError("in a callback")

    async def loop(rank):
        await rank.report({})
        await asyncio.Event().wait()

    controller = start(callbacks=[Broken()])
    outcome = run(controller, loop)
    assert outcome.state is RunState.ERRORED
    error = outcome.controller_failure.exception()
    assert isinstance(error, CallbackError)
    assert isinstance(error.cause, ZeroDivisionError)
    assert (error.callback.rpartition(".")[2], error.hook) == ("Broken", "after_report")
    assert "Broken failed in after_report(): ZeroDivisionError: in a callback" in outcome.message
    assert outcome.worker_failures == {}
    assert controller.groups[0].stopped is False


def test_the_driver_is_told_of_states_and_rows(start):
    async def loop(rank):
        for epoch in range(3):
            await rank.report({"epoch": epoch})

    async def scenario():
        controller = start()
        ended = asyncio.ensure_future(controller.run(controller, [loop]))
        news, seen = [], Seen()
        while not news or not news[-1].state.terminal:
            news.append(await controller.progress(seen))
            seen = news[-1].seen
        await ended
        return news

    news = asyncio.run(scenario())
    assert [row.metrics["epoch"] for progress in news for row in progress.rows] == [0, 1, 2]
    assert news[-1].state is RunState.FINISHED


def test_the_folder_of_a_run_tells_its_end(start, tmp_path):
    async def loop(rank):
        await rank.report({"loss": 0.5, "eval": {"accuracy": 1}})

    run(start(), loop)
    storage = RunStorage(tmp_path, "run")
    assert storage.run_facts()["state"] == "FINISHED"
    header, row = storage.read_text("metrics.csv").splitlines()
    assert header == "number,time,checkpoint,loss,eval/accuracy"
    assert row.endswith(",0.5,1")


@pytest.mark.parametrize("what", ["storage", "callback"])
def test_what_fails_at_the_end_does_not_hide_why_ranks_have_failed(start, tmp_path, caplog, what):
    class AtTheEnd(Callback):
        def on_end(self, run_context, state, error):
            raise ValueError("no end")

    async def loop(rank):
        if rank.rank == 1:
            if what == "storage":
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").write_text("no folder")
            raise ValueError("the disk is gone")
        await asyncio.sleep(60)

    outcome = run(start(callbacks=[AtTheEnd()] if what == "callback" else []), loop)
    assert outcome.state is RunState.ERRORED
    assert outcome.message.startswith("[Rank 1] ValueError: the disk is gone")
    assert list(outcome.worker_failures) == [1]
    assert outcome.controller_failure is None
    cause = "NotADirectoryError" if what == "storage" else "failed in on_end()"
    assert "Run run has failed, and could not be ended as it should:" in caplog.text
    assert cause in caplog.text


def test_a_run_that_waits_for_resources_says_so_and_can_be_aborted(start, monkeypatch):
    class WaitingGroup(FakeGroup):
        async def place(self):
            await asyncio.Event().wait()

        def why_waiting(self):
            return "GPU is short by 2."

    async def scenario():
        groups = []
        controller = start(
            make_group=lambda _, decision: WaitingGroup(decision.num_workers, groups)
        )
        ended = asyncio.ensure_future(controller.run(controller, [None]))
        notes, seen = [], Seen()
        while not notes:
            progress = await controller.progress(seen)
            notes, seen = progress.notes, progress.seen
        await controller.abort()
        return notes, (await ended).state, groups[0].stopped

    monkeypatch.setattr("miniray.train.startup.PLACEMENT_NOTE_AFTER", 0.01)
    notes, state, stopped = asyncio.run(scenario())
    assert notes == ["GPU is short by 2."]
    assert state is RunState.ABORTED
    assert stopped is False


def test_workers_that_are_not_placed_in_time_end_the_run(start, monkeypatch):
    class WaitingGroup(FakeGroup):
        async def place(self):
            await asyncio.Event().wait()

        def why_waiting(self):
            return "GPU is short by 2."

    groups = []
    controller = start(
        make_group=lambda _, decision: WaitingGroup(decision.num_workers, groups),
        placement_timeout_s=0.01,
    )
    outcome = run(controller, None)
    error = outcome.controller_failure.exception()
    assert isinstance(error, PlacementTimeoutError)
    assert str(error) == "The workers were not placed in 0.01 s. GPU is short by 2."
    assert groups[0].stopped is False


def test_a_controller_that_starts_again_counts_on_from_where_the_one_before_was(start, tmp_path):
    async def loop(rank):
        attempts.append(rank.setup.attempt)
        if rank.setup.attempt < 3:
            raise RuntimeError("boom")

    attempts = []
    first = start(workers=1, max_failures=5)
    asyncio.run(first.run(first, [loop]))
    storage = RunStorage(tmp_path, "run")
    facts = storage.run_facts()
    assert (facts["attempts"], facts["worker_failures"], facts["start_failures"]) == (3, 2, 0)
    again = start(workers=1, max_failures=2, run_id=facts["run_id"])
    asyncio.run(again.run(again, [loop]))
    assert attempts == [1, 2, 3, 4]
    facts = storage.run_facts()
    assert (facts["attempts"], facts["worker_failures"], facts["start_failures"]) == (4, 2, 1)


def test_the_folder_of_a_run_tells_that_it_runs(start, tmp_path):
    async def loop(rank):
        states.append(rank.setup.storage.run_facts()["state"])

    states = []
    run(start(workers=1), loop)
    assert states == ["RUNNING"]


def test_a_run_that_was_taken_over_while_it_started_stops(start, tmp_path):
    class Taken(FakeGroup):
        async def start(self):
            RunStorage(tmp_path, "run").write_run_facts({"token": "another"})

    groups = []
    controller = start(make_group=lambda _, decision: Taken(decision.num_workers, groups))
    outcome = run(controller, None)
    assert isinstance(outcome.controller_failure.exception(), RunTakenOverError)
    assert RunStorage(tmp_path, "run").run_facts() == {"token": "another"}


def test_a_run_that_is_stopped_before_it_has_begun_is_aborted(start):
    async def scenario():
        controller = start()
        await controller.abort()
        return await controller.run(controller, [None])

    assert asyncio.run(scenario()).state is RunState.ABORTED


def test_uploads_that_all_ranks_have_reported_are_recorded_after_a_failure(start, monkeypatch):
    async def loop(rank):
        controller, attempt = rank.controller, rank.setup.attempt
        if rank.rank == 0:
            await rank.report({}, {"model": "x"})
            await rank.report({}, {"model": "x"})
            raise ValueError("out of data")
        for index in range(3):  # of which rank 0 has made two
            await controller.announce_upload(attempt, 1, index)
        for _ in range(2):
            await asyncio.sleep(0.05)  # an upload that takes longer than rank 0 does
            await rank.report({}, {"model": "x"})
        await asyncio.Event().wait()

    monkeypatch.setattr("miniray.train.controller.FAILURE_GRACE", 0)
    began = time.monotonic()
    outcome = run(start(), loop)
    assert outcome.state is RunState.ERRORED
    assert [record.number for record in outcome.checkpoints] == [0, 1]
    assert time.monotonic() - began < 20  # the third is not waited for


def test_uploads_of_a_rank_that_is_lost_are_not_waited_for(start):
    async def loop(rank):
        await rank.controller.announce_upload(rank.setup.attempt, rank.rank, 0)
        if rank.rank == 1:
            raise ActorDiedError(DeathCause.EXITED, exit_code=-9)
        failure = WorkerFailure.of(OSError("disk is full"))
        await rank.controller.upload_failed(rank.setup.attempt, 0, 0, failure)

    began = time.monotonic()
    outcome = run(start(), loop)
    assert sorted(outcome.worker_failures) == [0, 1]
    assert time.monotonic() - began < 20
