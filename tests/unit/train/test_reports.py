from __future__ import annotations

import pytest

from miniray.train.reports import Report, ReportBoard, ReportMismatchError, Upload


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


def test_a_rank_that_returns_with_fewer_reports_is_named():
    board = ReportBoard(3)
    for rank in range(3):
        board.add(rank, 0, Report({}))
    board.returned(2)
    assert board.mismatch() is None
    board.add(1, 1, Report({}))
    rank, reason = board.mismatch()
    assert rank == 2
    assert "Rank 2 returned after 1 reports" in reason
    assert "rank 1 has reported 2 times" in reason


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


def test_steps_are_given_out_in_order_whatever_order_reports_arrive_in():
    board = ReportBoard(1)
    assert board.add(0, 1, Report({})) == []
    assert [step.index for step in board.add(0, 0, Report({}))] == [0, 1]
