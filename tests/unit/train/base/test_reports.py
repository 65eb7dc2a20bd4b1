from __future__ import annotations

import pytest

from miniray.train.base.reports import (
    MAX_LAG,
    PATIENCE,
    SILENT_LAG,
    Report,
    ReportBoard,
    ReportMismatchError,
    Step,
    Upload,
)


def test_a_step_is_complete_when_every_rank_has_reported_it():
    board = ReportBoard(2)
    assert board.add(1, 0, Report({"from": 1})) == []
    (step,) = board.add(0, 0, Report({"from": 0}))
    assert step.index == 0
    assert step.metrics == {"from": 0}
    assert [report.metrics["from"] for report in step.reports] == [0, 1]


def test_a_rank_may_run_ahead_of_the_others():
    board = ReportBoard(2)
    assert [board.add(0, index, Report({"i": index})) for index in range(3)] == [[]] * 3
    steps = [board.add(1, index, Report({})) for index in range(3)]
    assert [step.metrics["i"] for (step,) in steps] == [0, 1, 2]


def test_a_rank_that_returns_before_a_checkpoint_that_needs_it_is_named():
    board = ReportBoard(3)
    for rank in range(3):
        board.add(rank, 0, Report({}))
    board.returned(2)
    board.add(1, 1, Report({}))
    assert board.mismatch() is None
    board.add(1, 2, Report({}, Upload("epoch", {})))
    rank, reason = board.mismatch()
    assert rank == 2
    assert "Rank 2 returned after 1 reports" in reason
    assert "rank 1 reported a checkpoint as report number 2" in reason


def test_metrics_do_not_wait_for_a_rank_that_has_returned():
    board = ReportBoard(2)
    board.add(0, 0, Report({"loss": 1}))
    assert board.uneven is None
    (step,) = board.returned(1)
    assert (step.index, step.metrics, sorted(step.by_rank)) == (0, {"loss": 1}, [0])
    assert "report number 0 is missing on rank 1" in board.uneven
    assert [step.index for step in board.add(0, 1, Report({}))] == [1]


def test_metrics_go_on_when_only_rank_0_reports():
    board = ReportBoard(3)
    steps = [
        step for index in range(50) for step in board.add(0, index, Report({"i": index}), now=index)
    ]
    assert [step.metrics["i"] for step in steps] == list(range(50 - SILENT_LAG))
    assert "missing on ranks 1 and 2" in board.uneven


def test_metrics_of_a_step_are_told_by_rank_also_if_some_are_missing():
    step = Step(0, {1: Report({"loss": 2})}, 3)
    assert step.metrics_of_all == [{}, {"loss": 2}, {}]
    assert step.metrics == {"loss": 2}


def test_a_rank_that_is_only_a_moment_behind_is_waited_for():
    board = ReportBoard(2)
    for index in range(10 * MAX_LAG):
        assert board.add(0, index, Report({}), now=PATIENCE * index / (10 * MAX_LAG)) == []
    assert len(board.add(1, 0, Report({}), now=PATIENCE * 2)) > 1  # more than its own


def test_metrics_wait_longer_for_a_rank_that_reports():
    board = ReportBoard(2)
    board.add(1, 0, Report({}))
    steps = [
        step for index in range(MAX_LAG + 9) for step in board.add(0, index, Report({}), now=index)
    ]
    assert [step.index for step in steps] == list(range(9))
    assert board.add(1, 1, Report({}), now=MAX_LAG) == []  # the others have gone on


def test_a_checkpoint_waits_for_every_rank_however_far_they_are_behind():
    board = ReportBoard(2)
    board.add(0, 0, Report({}, Upload("epoch", {})))
    for index in range(1, 500):
        assert board.add(0, index, Report({}), now=index) == []
    step, *later = board.add(1, 0, Report({}), now=500)
    assert step.uploads == [Upload("epoch", {})]
    assert len(step.by_rank) == 2
    assert [step.index for step in later] == list(range(1, 500 - MAX_LAG))


def test_a_checkpoint_that_comes_after_the_others_have_gone_on_is_refused():
    board = ReportBoard(2)
    for index in range(50):
        board.add(0, index, Report({}), now=index)
    with pytest.raises(ReportMismatchError, match="Rank 1 reported the checkpoint 'late'"):
        board.add(1, 0, Report({}, Upload("late", {})))


def test_a_rank_that_still_runs_may_be_behind():
    board = ReportBoard(2)
    board.add(0, 0, Report({}))
    board.returned(0)
    assert board.mismatch() is None


def test_different_names_for_one_checkpoint_are_refused():
    board = ReportBoard(2)
    board.add(0, 0, Report({}, Upload("epoch_0", {})))
    with pytest.raises(ReportMismatchError, match=r"\['epoch_0', 'epoch_zero'\]"):
        board.add(1, 0, Report({}, Upload("epoch_zero", {})))
    assert board.returned(0) == board.returned(1) == []  # so there is no such checkpoint


def test_steps_are_given_out_in_order_whatever_order_reports_arrive_in():
    board = ReportBoard(1)
    assert board.add(0, 1, Report({})) == []
    assert [step.index for step in board.add(0, 0, Report({}))] == [0, 1]


def test_at_the_end_metrics_alone_do_not_wait_for_a_rank_that_never_reported():
    board = ReportBoard(3)
    for index in range(2):
        board.add(1, index, Report({"rank": 1}))
        board.add(0, index, Report({"i": index}))
    steps = board.close(PATIENCE)
    assert [(step.index, step.metrics) for step in steps] == [(0, {"i": 0}), (1, {"i": 1})]
    assert "report number 0 is missing on rank 2, and others have made 2" in board.uneven
    assert board.close(PATIENCE) == []


def test_at_the_end_ranks_that_were_a_moment_behind_are_not_told_as_uneven():
    board = ReportBoard(2)
    board.add(1, 0, Report({}))
    for index in range(3):
        board.add(0, index, Report({}))
    assert [step.index for step in board.close(2 * PATIENCE)] == [1, 2]
    silent = ReportBoard(2)
    silent.add(0, 0, Report({}))
    assert len(silent.close(PATIENCE / 2)) == 1
    assert board.uneven is silent.uneven is None


def test_at_the_end_no_other_rank_stands_for_rank_0_where_that_reports():
    behind, silent, returned = ReportBoard(2), ReportBoard(2), ReportBoard(2)
    for board in (behind, returned):
        board.add(0, 0, Report({}))
        board.add(1, 0, Report({}))
    returned.returned(0)
    for board in (behind, silent, returned):
        board.add(1, board.count(0), Report({"rank": 1}))
    assert behind.close() == []
    assert [step.metrics for step in silent.close()] == [{"rank": 1}]
    assert returned.close() == []  # was given out before


def test_at_the_end_a_report_counts_only_with_its_checkpoint():
    board = ReportBoard(2)
    board.add(0, 0, Report({"epoch": 0}, Upload("epoch", {})))
    board.add(0, 1, Report({"batch": 1}))
    assert [(step.index, step.metrics) for step in board.close()] == [(1, {"batch": 1})]


def test_it_is_known_how_late_each_rank_made_the_newest_reports():
    board = ReportBoard(2)
    for index in range(100):
        board.add(0, index, Report({}), now=float(index))
    board.add(1, 98, Report({}), now=98.25)
    lags = board.lags(first_number=1000)
    assert lags["reports"] == list(range(1050, 1100))
    assert lags["seconds"][0] == [0.0] * 50
    assert lags["seconds"][1] == [None] * 48 + [0.25, None]
