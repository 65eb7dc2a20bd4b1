"""Ranks that wait in vain for one that has returned."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
import types

import pytest

from miniray.train.base.open_collectives import open_collective
from miniray.train.base.questions import Question
from miniray.train.controller import stalls
from miniray.train.controller.attempt import Attempt
from miniray.train.controller.stalls import (
    Sample,
    StallMeter,
    fail_stalled,
    sample_of,
    waits_for_others,
)

PLACE = (1, 2)


def judge(*samples):
    """What a meter with a patience of 10 s says of samples (time, place, processor time)."""
    meter = StallMeter(10)
    return [meter.add(Sample(place, used), now) for now, place, used in samples]


def test_a_loop_that_waits_at_one_place_is_stalled_when_the_patience_is_over():
    assert judge((0, PLACE, 5), (9.9, PLACE, 5), (10, PLACE, 5.1), (60, PLACE, 5.2)) == [
        False,
        False,
        True,
        True,
    ]


def test_a_loop_that_goes_on_is_judged_anew():
    assert judge((0, PLACE, 0), (9, (1, 3), 0), (12, (1, 3), 0), (19, (1, 3), 0)) == [
        False,
        False,
        False,
        True,
    ]


def test_a_loop_that_waits_for_nobody_is_not_stalled():
    assert not any(judge((0, None, 0), (20, None, 0), (40, None, 0)))


def test_a_process_that_works_meanwhile_is_not_stalled():
    assert judge((0, PLACE, 0), (11, PLACE, 1.2), (20, PLACE, 1.3), (21, PLACE, 1.3)) == [
        False,
        False,
        False,
        True,
    ]


def frames(*files):
    """A stack of frames in these files, the innermost first."""
    frame = None
    for file in reversed(files):
        code = types.SimpleNamespace(co_filename=file)
        frame = types.SimpleNamespace(f_code=code, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        (["/v/torch/distributed/distributed_c10d.py", "/u/train.py"], True),
        (["/v/torch/nn/parallel/distributed.py"], True),
        (["/v/torch/autograd/graph.py", "/v/torch/_tensor.py", "/u/train.py"], True),
        (["/v/torch/_ops.py", "/v/torch/distributed/_functional_collectives.py"], True),
        (["/u/train.py", "/v/torch/nn/modules/module.py", "/v/torch/autograd/graph.py"], False),
        (["/u/train.py", "/u/a.py", "/u/b.py", "/v/torch/distributed/run.py"], False),
        (["/u/distributed/torch.py"], False),
        (["/v/torch/distributed/checkpoint/filesystem.py"], False),
        (
            ["/v/torch/distributed/distributed_c10d.py", "/v/torch/distributed/checkpoint/a.py"],
            True,
        ),
        ([], False),
    ],
)
def test_functions_that_wait_for_others_are_known_by_their_files(files, waits):
    assert waits_for_others(frames(*files)) is waits


@pytest.fixture
def recorded(monkeypatch):
    """Sets what PyTorch's flight recorder has: (name of a call, whether it has ended)."""

    def record(*calls):
        entries = [{"profiling_name": name, "retired": ended} for name, ended in calls]
        module = types.SimpleNamespace(
            _dump_fr_trace=lambda *_: pickle.dumps({"version": "2.10", "entries": entries})
        )
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)

    return record


def test_a_loop_that_waits_for_the_device_is_where_a_call_is_open(recorded):
    me = threading.get_ident()
    recorded(("nccl:all_reduce", True))
    assert sample_of(me).place is None
    recorded(("nccl:all_reduce", True), ("nccl:broadcast", False))
    waiting = sample_of(me)
    assert waiting.place is not None
    assert waiting.processor_time == 0.0  # it keeps a processor busy while it waits
    recorded(("gloo:broadcast", False))
    assert sample_of(me).processor_time > 0.0


def test_a_record_that_can_not_be_read_is_none(monkeypatch):
    for module in (types.SimpleNamespace(), types.SimpleNamespace(_dump_fr_trace=lambda *_: b"?")):
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
        assert open_collective() is None


@pytest.fixture
def attempt(monkeypatch):
    monkeypatch.setattr(stalls, "GRACE", 0)
    return lambda size: Attempt(1, size, 0)


def test_an_attempt_fails_when_all_ranks_that_run_are_stalled(attempt):
    async def scenario():
        made = attempt(4)
        watching = asyncio.ensure_future(fail_stalled(made, 10))
        made.finish(3, b"")
        assert await made.questions.next(0) is Question.STALL
        made.stalls.enter(0, "Thread MainThread:\n  in all_reduce\n\nThread other:\n  in wait")
        made.stalls.enter(1, "Thread MainThread:\n  in backward\n")
        made.stalls.enter(1, "")  # goes on
        await asyncio.sleep(0)
        assert not made.failures
        made.stalls.enter(1, "Thread MainThread:\n  in backward\n")
        await asyncio.sleep(0)
        assert not made.failures
        made.finish(2, b"")  # the last that was not stalled
        await watching
        return made

    made = asyncio.run(scenario())
    assert sorted(made.failures) == [0, 1]
    assert "Ranks 2 and 3 have returned from the train loop" in made.failures[0].summary
    assert "ranks 0 and 1 have waited in a collective call" in made.failures[0].summary
    assert "in all_reduce" in made.failures[0].traceback
    assert "in wait" not in made.failures[0].traceback
    assert made.over.is_set()


def test_ranks_are_not_asked_before_one_has_returned_nor_when_all_have(attempt):
    async def scenario():
        made = attempt(2)
        watching = asyncio.ensure_future(fail_stalled(made, 10))
        asked = asyncio.ensure_future(made.questions.next(0))
        made.stalls.enter(0, "somewhere")
        made.stalls.enter(1, "somewhere")
        await asyncio.sleep(0.01)
        assert not asked.done()
        made.finish(0, b"")
        made.finish(1, b"")
        await asyncio.sleep(0.01)
        assert not watching.done()
        assert not made.failures
        watching.cancel()
        asked.cancel()

    asyncio.run(scenario())
