"""What a controller counts of a run: which part of its time was of use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miniray.train.controller import run_spec
from miniray.train.controller.run_spec import RunFacts


def test_time_in_train_loops_counts_up_to_a_checkpoint_and_to_the_end_of_a_run_that_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(run_spec, "time", SimpleNamespace(time=lambda: clock.now))
    facts = RunFacts("run", "0123", "token", started=100.0)
    facts.begin_attempt(2)
    facts.since = clock.now = 120.0
    assert facts.productive_ratio() == 0.0
    clock.now = 140.0
    facts.keep()
    assert facts.productive_ratio() == 0.5
    clock.now = 200.0
    facts.end_attempt("FAILED", "spoilt")
    assert facts.productive_ratio() == 0.2
    facts.begin_attempt(2)
    facts.end_attempt("FAILED", "did not start")
    facts.begin_attempt(2)
    facts.since, clock.now = 210.0, 300.0
    facts.end_attempt("FINISHED", "")
    assert facts.productive_ratio() == pytest.approx(0.55)
