"""What a detached run is made of, without a cluster: news, packed values, outcomes, names."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

from miniray.common.object_ref import ObjectRef, hooks
from miniray.train import DataParallelTrainer, Result, RunConfig, ScalingConfig, WorkerGroupError
from miniray.train.base.failures import WorkerFailure
from miniray.train.base.policies import RunState
from miniray.train.controller.outcome import (
    OUTCOME_FILE,
    RunOutcome,
    make_error,
    read_outcome,
    write_outcome,
)
from miniray.train.data.config import DataConfig
from miniray.train.data.shards import Datasets, Packed
from miniray.train.progress.feed import MAX_ROWS, ProgressFeed, Row, Seen
from miniray.train.run.detached import controller_name
from miniray.train.storage.manifests import CheckpointRecord
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.worker import PackedLoop, TrainLoop
from miniray.values.serialization import collector


def rows(first, count):
    return [Row(number, {}, None) for number in range(first, first + count)]


def after(feed, seen):
    return asyncio.run(asyncio.wait_for(feed.after(seen), 1))


def test_each_reader_gets_the_news_that_it_does_not_have():
    feed = ProgressFeed()
    feed.add_rows(rows(0, 2))
    first = after(feed, Seen())
    feed.note("a remark")
    feed.add_rows(rows(2, 1))
    assert [row.number for row in after(feed, first.seen).rows] == [2]
    everything = after(feed, Seen())
    assert [row.number for row in everything.rows] == [0, 1, 2]
    assert everything.notes == after(feed, first.seen).notes == ["a remark"]
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(feed.after(everything.seen), 0.01))


def test_a_slow_reader_hears_how_many_rows_it_has_missed():
    feed = ProgressFeed()
    feed.add_rows(rows(0, 3))
    seen = after(feed, Seen()).seen
    feed.add_rows(rows(3, MAX_ROWS + 7))
    news = after(feed, seen)
    assert (news.skipped, len(news.rows), news.rows[0].number) == (7, MAX_ROWS, 10)


def test_a_reader_of_an_earlier_controller_is_told_everything_anew():
    old, new = ProgressFeed(), ProgressFeed()
    old.add_rows(rows(0, 5))
    seen = after(old, Seen()).seen
    new.note("started again")
    assert after(new, seen).notes == ["started again"]


def test_packed_arrays_are_passed_on_beside_the_pickle():
    array = np.arange(10_000)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(Packed.of({"x": array}), 5, buffer_callback=buffers.append)
    assert len(data) < 1000
    passed_on = pickle.loads(data, buffers=buffers)
    found = passed_on.load()["x"]
    assert (found == array).all()
    assert not found.flags.writeable
    assert np.shares_memory(found, array)
    assert (pickle.loads(pickle.dumps(passed_on, 5)).load()["x"] == array).all()
    assert Packed.of(b"x" * 100_000).load() == b"x" * 100_000


def test_what_ends_with_the_driver_can_not_be_taken_along(monkeypatch):
    # As the runtime of a process does it.
    monkeypatch.setattr(hooks, "serialized", lambda ref: collector.refs.append(ref))
    ref = ObjectRef(bytes(16), bytes(8))
    with pytest.raises(ValueError, match="ends with this driver"):
        Packed.of({"model": ref})
    Packed.of([ObjectRef(bytes(16), b"")])  # as a handle of a detached actor has it


def test_a_packed_train_loop_is_loaded_with_its_datasets():
    loop = TrainLoop(lambda x: x + 1, (1,), Datasets({"train": [1, 2]}, DataConfig(seed=3)))
    packed = pickle.loads(pickle.dumps(PackedLoop.of(loop), 5))
    loaded = packed.load()
    assert loaded() == 2
    assert loaded.datasets.sources["train"].load() == [1, 2]
    assert loaded.datasets.config == DataConfig(seed=3)


DONE = RunOutcome(
    RunState.FINISHED,
    {"loss": 0.5},
    [CheckpointRecord("checkpoint_000000", 0, {"loss": 0.5})],
    pickle.dumps("done"),
)


def test_an_outcome_is_read_back_as_it_was(tmp_path):
    storage = RunStorage(tmp_path, "run")
    failed = RunOutcome(
        RunState.ERRORED,
        message="[Rank 1] bad",
        worker_failures={1: WorkerFailure.of(ValueError("bad"))},
    )
    for each in (DONE, failed):
        write_outcome(storage, "a", each)
        assert read_outcome(storage, "a") == each
    assert read_outcome(storage, "b") is None
    error = make_error(read_outcome(storage, "a"))
    assert isinstance(error, WorkerGroupError)
    assert isinstance(error.worker_failures[1], ValueError)


def test_an_outcome_that_was_cut_off_anywhere_is_none(tmp_path):
    storage = RunStorage(tmp_path, "run")
    write_outcome(storage, "a", DONE)
    text = storage.read_text(OUTCOME_FILE)
    for length in range(len(text)):
        storage.write_text(OUTCOME_FILE, text[:length])
        assert read_outcome(storage, "a") is None


def test_the_results_of_a_detached_run_are_read_back(tmp_path):
    storage = RunStorage(tmp_path, "run")
    storage.write_run_facts({"token": "a-1", "run_id": "a", "state": "FINISHED"})
    write_outcome(storage, "a", DONE)
    assert Result.from_path(tmp_path / "run").return_value == "done"
    storage.write_run_facts({"token": "b-1", "run_id": "b", "state": "FINISHED"})
    assert Result.from_path(tmp_path / "run").return_value is None


def test_a_return_value_that_can_not_be_loaded_is_told_and_left_out(tmp_path, caplog):
    storage = RunStorage(tmp_path, "run")
    storage.write_run_facts({"token": "a-1", "run_id": "a", "state": "FINISHED"})
    write_outcome(storage, "a", RunOutcome(RunState.FINISHED, return_value=b"cnowhere\nNothing\n."))
    assert Result.from_path(tmp_path / "run").return_value is None
    assert "can't be loaded" in caplog.text


@pytest.mark.parametrize("state", ["INITIALIZING", "RUNNING"])
def test_a_run_that_has_not_ended_says_so(tmp_path, state):
    storage = RunStorage(tmp_path, "run")
    storage.write_run_facts({"token": "a-1", "run_id": "a", "state": state})
    result = Result.from_path(tmp_path / "run")
    assert result.error is None
    assert f"state: {state} when this was last written" in str(result)


def test_one_folder_is_one_controller(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    name = controller_name(RunStorage(tmp_path, "run"))
    assert name.startswith("train:run:")
    assert controller_name(RunStorage(f"{tmp_path}/link/", "run")) == name
    assert controller_name(RunStorage(tmp_path / "other", "run")) != name
    assert controller_name(RunStorage("memory://runs", "run")) != name


def test_a_run_in_the_drivers_process_can_not_be_detached(tmp_path):
    trainer = DataParallelTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, detached=True),
    )
    with pytest.raises(ValueError, match=r"detached=True\) has no meaning in local mode"):
        trainer.fit()


def test_detached_is_true_or_false():
    with pytest.raises(ValueError, match=r"RunConfig\(detached\) must be True or False, not 'yes'"):
        RunConfig(detached="yes")
