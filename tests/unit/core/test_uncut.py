"""A cancel raises wherever it may, and after a step that it may not cut off."""

from __future__ import annotations

import inspect
import threading

import pytest

from miniray.core.uncut import Late, cuttable, may_cut, uncut


def here() -> bool:
    return may_cut(inspect.currentframe())


@uncut
def step(inner):
    return inner()


@cuttable
def wait(inner):
    return inner()


@pytest.mark.parametrize(
    ("place", "may"),
    [
        (here, True),
        (lambda: step(here), False),
        (lambda: step(lambda: wait(here)), True),
        (lambda: wait(lambda: step(here)), False),
    ],
    ids=["user code", "a step", "a wait in a step", "a step in a wait"],
)
def test_a_cancel_may_raise_unless_it_is_in_a_step_that_does_not_wait(place, may):
    assert place() is may


def test_a_cancel_that_came_late_ends_the_main_thread_once():
    late = Late()
    late.came = True
    with pytest.raises(KeyboardInterrupt):
        late.heed()
    assert not late.came


def test_a_step_of_another_thread_leaves_a_late_cancel_to_the_main_thread():
    late = Late()
    late.came = True
    thread = threading.Thread(target=late.heed)
    thread.start()
    thread.join()
    assert late.came
