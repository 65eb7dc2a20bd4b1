from __future__ import annotations

import concurrent.futures
import pickle
import shutil
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from miniray.common.spans import SPANS
from miniray.train import (
    Checkpoint,
    CheckpointConsistencyMode,
    CheckpointUploadMode,
    CollectiveError,
    CollectiveTimeoutError,
    ReportedCheckpoint,
    ReportedCheckpointStatus,
    TrainContext,
    collective,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    report,
)
from miniray.train.base.exceptions import AttemptOverError, RunTakenOverError
from miniray.train.base.ranks import Ranks
from miniray.train.base.reports import Report, plain_metrics
from miniray.train.storage.storage import CheckpointRecord, RunStorage
from miniray.train.worker import context
from miniray.train.worker.backend import Backend
from miniray.train.worker.controller_client import CollectiveOutcome
from miniray.train.worker.session import RankSession, SessionSetup
from miniray.train.worker.worker import TrainLoop, TrainWorker


class FakeController:
    """What a session asks of the controller; each answer is ready at once."""

    def __init__(self):
        self.report = Mock(return_value=None)
        self.announce_upload = Mock(return_value=None)
        self.begin_upload = Mock(side_effect=lambda *args: args[3])
        self.upload_failed = Mock(return_value=None)
        self.join = Mock(return_value=CollectiveOutcome(pickle.dumps("from rank 0")))
        found = [CheckpointRecord("epoch", 0, {"loss": 1})]
        self.reported_checkpoints = Mock(return_value=(found, []))

    def __call__(self, method, *args):
        answer = concurrent.futures.Future()
        answer.set_result(getattr(self, method)(*args))
        return answer

    @property
    def reports(self):
        return calls(self.report)


def calls(method):
    """The arguments of each call of a method of the controller."""
    return [call.args for call in method.call_args_list]


@pytest.fixture
def controller():
    return FakeController()


@pytest.fixture
def session(tmp_path, controller):
    storage = RunStorage(tmp_path / "runs", "run")
    storage.write_run_facts({"token": "token"})
    session = RankSession(
        SessionSetup(storage, "token", 2, 10, None), Ranks(1, 4, 0, 2, 1), controller
    )
    context.set_session(session)
    yield session
    context.set_session(None)
    session.close()


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(name="files", text="weights"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model").write_text(text)
        return Checkpoint.from_directory(folder)

    return make


def test_a_report_is_sent_with_its_attempt_rank_and_index(session, controller):
    report({"loss": 1})
    report({"loss": 2})
    assert [args[:3] for args in controller.reports] == [(2, 1, 0), (2, 1, 1)]
    assert controller.reports[1][3].metrics == {"loss": 2}


def test_a_checkpoint_is_uploaded_before_it_is_reported(session, controller, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("weights")
    report({}, checkpoint=Checkpoint.from_directory(tmp_path / "files"))
    upload = controller.reports[0][3].upload
    assert (upload.name, upload.files) == ("checkpoint_000010", {"model": 7})
    assert (tmp_path / "runs" / "run" / "checkpoint_000010" / "model").read_text() == "weights"
    assert get_checkpoint().path.endswith("checkpoint_000010")


def test_a_timeline_has_reports_and_uploads(session, make_checkpoint):
    SPANS.begin()
    report({}, checkpoint=make_checkpoint())
    spans, _ = SPANS.end()
    assert [span[:2] for span in spans] == [
        ("upload", "checkpoint_000010"),
        ("report", "report 0"),
    ]


def test_the_context_tells_the_place_of_the_process(session):
    place = get_context()
    assert isinstance(place, TrainContext)
    assert place.get_experiment_name() == "run"
    assert (place.get_world_rank(), place.get_world_size()) == (1, 4)
    assert (place.get_local_rank(), place.get_local_world_size()) == (0, 2)
    assert place.get_node_rank() == 1
    assert place.get_storage().name == "run"


def test_names_that_belong_to_trials_say_so(session):
    for name in ("get_trial_name", "get_trial_id", "get_trial_resources", "get_trial_dir"):
        with pytest.raises(DeprecationWarning, match=f"{name}.. belongs to hyperparameter search"):
            getattr(get_context(), name)()
    with pytest.raises(DeprecationWarning, match="train_loop_config"):
        get_context().get_metadata()


def test_the_storage_has_rays_names(session, tmp_path):
    storage = get_context().get_storage()
    assert storage.experiment_fs_path == f"{tmp_path}/runs/run"
    assert storage.storage_fs_path == f"{tmp_path}/runs"
    assert storage.experiment_dir_name == "run"
    assert storage.build_checkpoint_path_from_name("a") == f"{tmp_path}/runs/run/a"
    found = storage.storage_filesystem.get_file_info(storage.experiment_fs_path)
    assert found.type.name == "Directory"


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_failed_upload_in_the_background_reaches_the_user_as_it_was_raised(
    session, controller, make_checkpoint, kind
):
    def broken(*args, **options):
        raise kind("the disk is full")

    session.storage.upload = broken
    report({}, make_checkpoint(), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    with pytest.raises(kind, match="the disk is full") as caught:
        session.finish()
    assert caught.value.__notes__ == ["Raised in the background upload of report 0."]
    ((attempt, rank, index, failure),) = calls(controller.upload_failed)
    assert (attempt, rank, index) == (2, 1, 0)
    assert "the disk is full" in failure.traceback
    assert failure.exception().__notes__ == caught.value.__notes__
    with pytest.raises(kind, match="the disk is full"):
        report({"next": 1})
    assert controller.reports == []


def test_a_folder_that_is_gone_before_its_upload_is_explained(session, tmp_path):
    gone = Checkpoint.from_directory(tmp_path / "gone")
    report({}, gone, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    with pytest.raises(FileNotFoundError) as caught:
        session.finish()
    assert "TemporaryDirectory" in caught.value.__notes__[0]


def test_local_files_are_deleted_after_the_upload_if_asked(session, make_checkpoint):
    kept, deleted = make_checkpoint("kept"), make_checkpoint("deleted")
    report({}, kept)
    report({}, deleted, delete_local_checkpoint_after_upload=True)
    assert Path(kept.path).exists()
    assert not Path(deleted.path).exists()


def test_what_was_uploaded_and_can_not_be_deleted_is_reported_all_the_same(
    session, controller, make_checkpoint, monkeypatch
):
    def refuse(_):
        raise RuntimeError("403 Forbidden")  # as the client of a store may

    monkeypatch.setattr(shutil, "rmtree", refuse)
    report({}, make_checkpoint(), delete_local_checkpoint_after_upload=True)
    assert len(controller.reports) == 1


def test_a_checkpoint_that_holds_the_runs_folder_is_not_deleted(session, tmp_path):
    with pytest.raises(ValueError, match="is inside the checkpoint"):
        report(
            {},
            Checkpoint.from_directory(tmp_path / "runs"),
            delete_local_checkpoint_after_upload=True,
        )


def test_files_written_where_they_belong_are_not_deleted_after_the_upload(session):
    folder = Path(session.storage.path, "checkpoint_000010")
    folder.mkdir()
    (folder / "model").write_text("weights")
    report({}, Checkpoint.from_directory(folder), delete_local_checkpoint_after_upload=True)
    assert (folder / "model").exists()


def test_a_checkpoint_that_is_in_the_storage_is_not_uploaded(session, controller):
    folder = Path(session.storage.path, "mine")
    folder.mkdir()
    (folder / "model").write_text("weights")
    mode = CheckpointUploadMode.NO_UPLOAD
    report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=mode)
    upload = controller.reports[0][3].upload
    assert (upload.name, upload.in_place) == ("mine", True)
    session.storage.commit(10, [upload], {})
    (record,) = session.storage.records()
    assert record.name == "mine"


def test_a_checkpoint_elsewhere_needs_an_upload(session, make_checkpoint):
    mode = CheckpointUploadMode.NO_UPLOAD
    with pytest.raises(ValueError, match="build_checkpoint_path_from_name"):
        report({}, make_checkpoint(), checkpoint_upload_mode=mode)


def test_the_users_own_upload_is_used(session, controller, make_checkpoint):
    def upload(checkpoint, name):
        target = get_context().get_storage().build_checkpoint_path_from_name(name)
        shutil.copytree(checkpoint.path, target)
        return Checkpoint(target)

    report({}, make_checkpoint(), "mine", checkpoint_upload_fn=upload)
    assert controller.reports[0][3].upload.name == "mine"
    assert (Path(session.storage.path) / "mine" / "model").exists()
    with pytest.raises(ValueError, match=r"must return the miniray\.train\.Checkpoint"):
        report({}, make_checkpoint("more"), checkpoint_upload_fn=lambda checkpoint, name: None)
    with pytest.raises(TypeError, match="must be a function"):
        report({}, make_checkpoint("again"), checkpoint_upload_fn="s3")


def test_what_the_users_own_upload_left_when_it_was_killed_is_deleted(session, make_checkpoint):
    class KilledError(BaseException):
        pass

    def upload(checkpoint, name):
        target = get_context().get_storage().build_checkpoint_path_from_name(name)
        shutil.copytree(checkpoint.path, target)
        raise KilledError

    with pytest.raises(KilledError):
        report({}, make_checkpoint(), "mine", checkpoint_upload_fn=upload)
    session.storage.delete_incomplete()
    assert not Path(session.storage.path, "mine").exists()


@pytest.mark.parametrize(
    ("path", "mode", "in_place"),
    [
        ("files", CheckpointUploadMode.SYNC, False),
        ("runs/run/epoch", CheckpointUploadMode.SYNC, True),
        ("runs/run/epoch/part", CheckpointUploadMode.SYNC, True),
        ("runs/run/epoch/../epoch_1", CheckpointUploadMode.SYNC, False),
        ("runs/run/epoch", CheckpointUploadMode.NO_UPLOAD, True),
    ],
)
def test_the_controller_is_told_of_files_that_lie_in_the_checkpoints_folder_already(
    session, controller, tmp_path, path, mode, in_place
):
    (tmp_path / path).mkdir(parents=True)
    checkpoint = Checkpoint.from_directory(tmp_path / path)
    report({}, checkpoint, "epoch", checkpoint_upload_mode=mode)
    assert calls(controller.begin_upload) == [(2, 1, 0, "epoch", in_place)]


def test_a_rank_whose_place_was_taken_uploads_nothing(session, controller, make_checkpoint):
    def refuse(*args):
        raise AttemptOverError("others run")

    controller.begin_upload.side_effect = refuse
    with pytest.raises(AttemptOverError, match="others run"):
        report({}, make_checkpoint(), "epoch")
    assert not Path(session.storage.path, "epoch").exists()


def test_a_rank_of_an_older_driver_uploads_nothing(session, make_checkpoint):
    session.storage.write_run_facts({"token": "another"})
    with pytest.raises(RunTakenOverError, match="Another driver has started a run named 'run'"):
        report({}, make_checkpoint(), "epoch")
    assert not Path(session.storage.path, "epoch").exists()


def test_files_go_where_the_controller_says(session, controller, make_checkpoint):
    controller.begin_upload.side_effect = lambda *args: "epoch_attempt_2"
    report({}, make_checkpoint(), "epoch")
    assert controller.reports[0][3].upload.name == "epoch_attempt_2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_upload_mode": "ASYNC"}, "CheckpointUploadMode.ASYNC"),
        ({"validation": True}, "Validate in the train loop"),
        ({"checkpoint_dir_name": "../escape"}, "name of one folder"),
    ],
)
def test_what_can_not_be_done_is_refused_with_what_can(
    session, controller, make_checkpoint, arguments, message
):
    with pytest.raises(ValueError, match=message):
        report({}, make_checkpoint(), **arguments)
    assert controller.reports == []


def test_reported_checkpoints_come_with_their_metrics(session, controller):
    report({})
    (found,) = get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
    assert isinstance(found, ReportedCheckpoint)
    assert found.checkpoint.path.endswith("run/epoch")
    assert (found.metrics, found.status) == ({"loss": 1}, ReportedCheckpointStatus.COMMITTED)
    assert calls(controller.reported_checkpoints) == [(2, 1, 1, None)]
    with pytest.raises(ValueError, match=r"CheckpointConsistencyMode\.COMMITTED"):
        get_all_reported_checkpoints("COMMITTED")


def test_who_did_not_report_is_named_when_time_runs_out(session, controller):
    controller.reported_checkpoints.side_effect = lambda *args: ([], [0, 3])
    with pytest.raises(CollectiveTimeoutError, match="ranks 0 and 3 did not make"):
        get_all_reported_checkpoints()
    assert get_all_reported_checkpoints(timeout_s=0.1) == []


def test_collective_calls_are_numbered(session, controller):
    collective.barrier()
    assert collective.broadcast_from_rank_zero("ignored") == "from rank 0"
    assert calls(controller.join) == [
        (2, 1, 0, "barrier()", b""),
        (2, 1, 1, "broadcast_from_rank_zero()", b""),
    ]


def test_a_collective_call_raises_what_the_controller_says(session, controller):
    error = CollectiveError("Rank 0 returned")
    controller.join.side_effect = lambda *args: CollectiveOutcome(error=error)
    with pytest.raises(CollectiveError, match="Rank 0 returned"):
        collective.barrier()


@pytest.fixture
def fail_to_upload(make_checkpoint):
    """Reports a checkpoint whose upload fails."""

    def refuse(checkpoint, name):
        raise OSError("full")

    def run(metrics, name):
        with pytest.raises(OSError, match="full"):
            report(metrics, make_checkpoint(name), checkpoint_upload_fn=refuse)

    return run


def test_a_report_whose_upload_has_failed_can_be_repeated(
    session, controller, make_checkpoint, fail_to_upload
):
    fail_to_upload({"i": float("nan")}, "a")
    fail_to_upload({"i": float("nan")}, "b")
    report({"i": float("nan")}, make_checkpoint("c"))
    report({"i": 1})
    session.finish()
    assert [args[2] for args in controller.reports] == [0, 1]
    assert controller.reports[0][3].upload.name == "checkpoint_000010"


@pytest.mark.parametrize("metrics", [{"i": 0}, {"i": 1}])
def test_a_rank_does_not_go_on_after_a_failed_upload(session, controller, fail_to_upload, metrics):
    fail_to_upload({"i": 0}, "a")
    for go_on in (lambda: report(metrics), session.finish):
        with pytest.raises(OSError, match="full"):
            go_on()
    assert controller.reports == []


@pytest.mark.parametrize(
    "function",
    [
        get_context,
        get_checkpoint,
        get_all_reported_checkpoints,
        lambda: report({}),
        collective.barrier,
        lambda: collective.broadcast_from_rank_zero(1),
    ],
)
def test_outside_a_train_loop_there_is_no_session(function):
    with pytest.raises(RuntimeError, match="only inside a train loop"):
        function()


def test_numpy_numbers_become_python_numbers():
    np = pytest.importorskip("numpy")
    metrics = plain_metrics({"a": np.float32(0.5), "b": {"c": [np.int64(3)]}})
    assert metrics == {"a": 0.5, "b": {"c": [3]}}
    assert type(metrics["a"]) is float
    assert type(metrics["b"]["c"][0]) is int


@pytest.mark.parametrize("metrics", [None, [1], 3.0])
def test_metrics_that_are_no_dictionary_are_refused(metrics):
    with pytest.raises(TypeError, match="metrics are a dictionary"):
        plain_metrics(metrics)


def test_keys_of_metrics_are_strings():
    with pytest.raises(TypeError, match="keys of metrics are strings"):
        plain_metrics({1: 2})


class NoText:
    def __repr__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (threading.Lock(), "cannot pickle '_thread.lock' object"),
        (NoText(), "ValueError: no text"),
    ],
)
def test_a_metric_that_can_not_be_sent_or_kept_is_named(value, reason):
    message = f"a {type(value).__name__} as the metric 'eval/it', .*{reason}"
    with pytest.raises(TypeError, match=message):
        plain_metrics({"loss": 0.5, "eval": {"it": value}})


def test_a_path_is_not_taken_for_a_checkpoint(session, controller):
    with pytest.raises(TypeError, match="from_directory"):
        report({}, checkpoint="/tmp/files")
    assert controller.reports == []


def test_keys_of_nested_metrics_become_strings():
    assert plain_metrics({"accuracy": {0: 0.5, (1, 2): 1}}) == {"accuracy": {"0": 0.5, "(1, 2)": 1}}


def test_a_report_during_the_upload_of_the_same_thread_is_told_so(
    session, controller, make_checkpoint
):
    def upload(checkpoint, name):
        report({"from": "a signal handler"})

    with pytest.raises(RuntimeError, match="Have the handler set a flag"):
        report({}, checkpoint=make_checkpoint(), checkpoint_upload_fn=upload)
    report({}, checkpoint=make_checkpoint("again"))
    report({"n": 1})
    assert [args[2:] for args in controller.reports][1:] == [(1, Report({"n": 1}))]


@pytest.mark.parametrize("broken", [False, True])
def test_the_failure_of_a_loop_is_told_when_the_controller_has_its_reports(
    broken, tmp_path, caplog
):
    """The failure may come by another connection, and ends the attempt."""
    confirmed = []

    def begin(method, *args):
        def result():
            if broken:
                raise AttemptOverError
            if method == "report":
                confirmed.append(args[2:])

        return Mock(spec=concurrent.futures.Future, result=result)

    def loop():
        report({"loss": 1})
        raise ValueError("spoilt")

    worker = TrainWorker(Backend())
    worker._ranks = Ranks(1, 4, 0, 2, 1)
    setup = SessionSetup(RunStorage(tmp_path, "run"), "token", 2, 0, None)
    try:
        outcome = worker.run(TrainLoop(loop, ()), setup, begin)
    finally:
        context.set_session(None)  # a worker that fails has its session to its end
    assert outcome.failure.summary == "ValueError: spoilt"
    assert len(confirmed) == (0 if broken else 1)
    assert ("did not reach" in caplog.text) == broken
