from __future__ import annotations

import pytest

from miniray.train import Checkpoint, context, get_checkpoint, get_context, report
from miniray.train.ranks import Ranks
from miniray.train.session import Session, SessionSetup, plain_metrics
from miniray.train.storage import RunStorage


class FakeController:
    """Has ``report.remote`` as the handle of an actor has."""

    def __init__(self):
        self.reports = []
        self.report = self

    def remote(self, *args):
        self.reports.append(args)


@pytest.fixture
def controller():
    return FakeController()


@pytest.fixture
def session(tmp_path, controller):
    setup = SessionSetup(RunStorage(tmp_path / "runs", "run"), "token", 2, 10, None, controller)
    session = Session(setup, Ranks(1, 4, 0, 2, 1))
    context.set_session(session)
    yield session
    context.set_session(None)


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


def test_the_folder_of_a_checkpoint_can_be_named(session, controller, tmp_path):
    (tmp_path / "files").mkdir()
    report({}, Checkpoint.from_directory(tmp_path / "files"), checkpoint_dir_name="epoch=1")
    assert controller.reports[0][3].upload.name == "epoch=1"


def test_a_failed_upload_is_no_report(session, controller, tmp_path):
    with pytest.raises(FileNotFoundError):
        report({}, Checkpoint.from_directory(tmp_path / "missing"))
    report({"loss": 1})
    assert controller.reports[0][2] == 0


def test_the_context_tells_the_place_of_the_process(session):
    place = get_context()
    assert place.get_experiment_name() == "run"
    assert (place.get_world_rank(), place.get_world_size()) == (1, 4)
    assert (place.get_local_rank(), place.get_local_world_size()) == (0, 2)
    assert place.get_node_rank() == 1
    assert place.get_storage().name == "run"


def test_a_storage_that_is_not_shared_is_refused(session):
    with pytest.raises(RuntimeError, match="not shared by the machines"):
        session.check_storage()
    session.storage.write_run_facts({"token": "token"})
    session.check_storage()


@pytest.mark.parametrize("function", [get_context, get_checkpoint, lambda: report({})])
def test_outside_a_train_loop_there_is_no_session(function):
    with pytest.raises(RuntimeError, match="only inside a train loop"):
        function()


def test_numpy_numbers_become_python_numbers():
    np = pytest.importorskip("numpy")
    metrics = plain_metrics({"a": np.float32(0.5), "b": {"c": [np.int64(3)]}})
    assert metrics == {"a": 0.5, "b": {"c": [3]}}
    assert type(metrics["a"]) is float
    assert type(metrics["b"]["c"][0]) is int


def test_a_tensor_as_a_metric_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"loss\.item\(\)"):
        plain_metrics({"eval": {"loss": torch.ones(1)}})


@pytest.mark.parametrize("metrics", [None, [1], 3.0])
def test_metrics_that_are_no_dictionary_are_refused(metrics):
    with pytest.raises(TypeError, match="metrics are a dictionary"):
        plain_metrics(metrics)


def test_keys_of_metrics_are_strings():
    with pytest.raises(TypeError, match="keys of metrics are strings"):
        plain_metrics({1: 2})


def test_a_path_is_not_taken_for_a_checkpoint(session, controller):
    with pytest.raises(TypeError, match="from_directory"):
        report({}, checkpoint="/tmp/files")
    assert controller.reports == []


def test_keys_of_nested_metrics_become_strings():
    assert plain_metrics({"accuracy": {0: 0.5, (1, 2): 1}}) == {"accuracy": {"0": 0.5, "(1, 2)": 1}}
