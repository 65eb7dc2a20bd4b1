"""What an error of several ranks says, and how ranks that failed alike are told together."""

from __future__ import annotations

from miniray.train.failures import MOST_TOLD, WorkerFailure, describe
from miniray.train.ranks import listed


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
    failures = {rank: failure(f"peer {rank} is gone") for rank in range(MOST_TOLD + 5)}
    told = describe(failures, ())
    assert told.count("is gone") == MOST_TOLD
    assert "and 5 more of these, at the same place:\nTraceback" in told


def test_a_list_of_ranks_reads_as_part_of_a_sentence():
    assert listed([3]) == "rank 3"
    assert listed({1, 0}) == "ranks 0 and 1"
    assert listed(range(4)) == "ranks 0, 1, 2 and 3"
    assert listed(range(64), most=3) == "ranks 0, 1, 2 and 61 more"
