from __future__ import annotations

from typing import Any

import pytest

from miniray.worker.leases import _REMEMBERED, Leases


@pytest.fixture
def queued() -> list[Any]:
    return []


@pytest.fixture
def leases(queued: list[Any]) -> Leases:
    found = Leases(queued.append)
    found.begin(3)
    return found


def test_a_task_of_the_lease_is_queued_at_once(leases: Leases, queued: list[Any]) -> None:
    leases.take(3, "task")  # type: ignore[arg-type]
    assert queued == ["task"]


def test_a_task_that_is_sooner_than_word_of_its_lease_waits_for_that(
    leases: Leases, queued: list[Any]
) -> None:
    for lease, task in ((2, "first"), (5, "other"), (2, "second")):
        leases.take(lease, task)  # type: ignore[arg-type]
    assert queued == []
    leases.begin(2)
    assert queued == ["first", "second"]
    leases.begin(5)
    assert queued == ["first", "second", "other"]


def test_a_task_of_a_lease_that_is_over_runs_all_the_same(
    leases: Leases, queued: list[Any]
) -> None:
    leases.begin(4)
    leases.take(3, "late")  # type: ignore[arg-type]
    assert queued == ["late"]


def test_leases_that_are_over_are_not_remembered_for_ever(
    leases: Leases, queued: list[Any]
) -> None:
    for lease in range(4, 4 + _REMEMBERED + 1):
        leases.begin(lease)
    leases.take(3, "much too late")  # type: ignore[arg-type]
    assert queued == []
