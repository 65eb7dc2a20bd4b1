"""What an error of several ranks says, and how ranks that failed alike are told together."""

from __future__ import annotations

import dataclasses
import threading

from miniray.common.exception_transport import add_note
from miniray.exceptions import TaskError
from miniray.train.base.exceptions import MOST_SHOWN, TrainingFailedError, WorkerFailure, describe
from miniray.train.base.ranks import listed


def failure(text: str) -> WorkerFailure:
    """A failure in this function, so that all of them come from one place."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return WorkerFailure.of(error)


def test_ranks_that_fail_alike_share_one_traceback():
    told = describe(dict.fromkeys(range(3), failure("out of data")), ())
    assert told.startswith("[Ranks 0, 1 and 2] ValueError: out of data\nTraceback (most recent")
    assert told.endswith("raise ValueError(text)\nValueError: out of data")
    assert told.count("Traceback") == 1


def test_ranks_that_fail_at_one_place_for_different_reasons_are_told_apart():
    reasons = ["peer 1 is gone", "peer 2 is gone", "peer 1 is gone"]
    told = describe({rank: failure(text) for rank, text in enumerate(reasons)}, ())
    assert told.startswith(
        "[Ranks 0 and 2] ValueError: peer 1 is gone\n"
        "[Rank 1] ValueError: peer 2 is gone\n"
        "All of these at the same place:\n"
        "Traceback (most recent"
    )
    assert told.endswith("raise ValueError(text)")
    assert told.count("Traceback") == 1


def test_ranks_that_fail_at_different_places_have_their_own_tracebacks():
    other = WorkerFailure(
        "ValueError: out of data", "Traceback: elsewhere\nValueError: out of data"
    )
    told = describe({0: failure("out of data"), 1: other}, ())
    assert told.count("Traceback") == 2
    assert "\n\n[Rank 1] ValueError: out of data\nTraceback: elsewhere\nValueError" in told


def test_processes_that_ended_without_a_traceback_are_told_one_by_one():
    told = describe({1: WorkerFailure("killed: pid 7"), 0: WorkerFailure("killed: pid 8")}, ())
    assert told == "[Rank 0] killed: pid 8\n\n[Rank 1] killed: pid 7"


def test_many_reasons_at_one_place_are_cut_off():
    failures = {rank: failure(f"peer {rank} is gone") for rank in range(MOST_SHOWN + 5)}
    told = describe(failures, ())
    assert told.count("is gone") == MOST_SHOWN
    assert "and 5 more of these, at the same place:\nTraceback" in told


def test_a_list_of_ranks_reads_as_part_of_a_sentence():
    assert listed([3]) == "rank 3"
    assert listed({1, 0}) == "ranks 0 and 1"
    assert listed(range(4)) == "ranks 0, 1, 2 and 3"
    assert listed(range(64), most=3) == "ranks 0, 1, 2 and 61 more"


def test_an_exception_keeps_its_causes_on_its_way_to_the_driver():
    outer = TrainingFailedError("outer")
    outer.__cause__ = ValueError("middle")
    outer.__cause__.__cause__ = KeyError("inner")
    found = WorkerFailure.of(outer).exception()
    assert isinstance(found, TrainingFailedError)
    assert repr(found.__cause__) == "ValueError('middle')"
    assert repr(found.__cause__.__cause__) == "KeyError('inner')"


def test_the_notes_of_an_exception_are_told_with_it():
    error = ValueError("out of data")
    add_note(error, "Raised in the background.")
    try:
        raise error
    except ValueError:
        failure = WorkerFailure.of(error)
    assert failure.summary == "ValueError: out of data\nRaised in the background."
    assert failure.traceback.rstrip().endswith(failure.summary)
    assert failure.traceback.count("Raised in the background.") == 1


def test_a_cause_that_can_not_be_pickled_costs_the_cause_and_not_the_exception():
    outer = ValueError("outer")
    outer.__cause__ = RuntimeError(threading.Lock())
    failure = WorkerFailure.of(outer)
    assert repr(failure.exception()) == "ValueError('outer')"
    assert failure.exception().__cause__ is None
    of_another_place = dataclasses.replace(failure, pickled=(*failure.pickled, b"no pickle"))
    assert repr(of_another_place.exception()) == "ValueError('outer')"


def test_a_train_loop_that_can_not_be_loaded_says_what_is_missing_and_how_to_bring_it():
    error = TaskError("TrainWorker.run", "Traceback ...", ModuleNotFoundError("No module 'x'"))
    failures = dict.fromkeys((0, 1), WorkerFailure.to_load(error))
    text = describe(failures, [])
    assert text.startswith(
        "[Ranks 0 and 1] miniray.train.base.exceptions.TrainLoopLoadError: The worker"
    )
    assert "ModuleNotFoundError: No module 'x'. What train_loop_per_worker" in text
    assert "worker_runtime_env" in text
    assert "Traceback" not in text
    assert isinstance(failures[0].exception().__cause__, ModuleNotFoundError)
