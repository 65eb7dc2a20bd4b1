"""Whether a run goes on after a failure."""

from __future__ import annotations

import pytest

from miniray.train import FailureConfig, FailureDecision, GroupFailure
from miniray.train.base.failures import WorkerFailure
from miniray.train.config.rules import LimitedRetries


@pytest.mark.parametrize(
    ("at_start", "worker_failures", "start_failures", "goes_on"),
    [
        (False, 2, 0, True),
        (False, 3, 0, False),
        (False, 1, 9, True),
        (True, 0, 1, True),
        (True, 0, 2, False),
        (True, 9, 1, True),
    ],
)
def test_failures_of_workers_and_of_starts_have_limits_of_their_own(
    at_start: bool, worker_failures: int, start_failures: int, goes_on: bool
) -> None:
    policy = LimitedRetries(FailureConfig(max_failures=2, controller_failure_limit=1))
    by_rank = {1: WorkerFailure.of(ValueError("boom"))}
    failure = GroupFailure(by_rank, at_start, worker_failures, start_failures)
    assert isinstance(failure.by_rank[1].exception(), ValueError)
    expected = FailureDecision.RETRY if goes_on else FailureDecision.RAISE
    assert policy.decide(failure) is expected
