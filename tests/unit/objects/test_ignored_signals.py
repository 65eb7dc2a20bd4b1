from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from miniray.common.object_ref import ObjectRef, RefHooks
from miniray.objects.ignored_signals import IgnoredSignals, finish
from miniray.objects.object_ref_generator import ObjectRefGenerator
from miniray.values.mapped import map_memory, unmap
from miniray.wire.io_loop import IOLoop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class LimitReachedError(Exception):
    """A handler of the user's raises it."""


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> RefHooks:
    gc.collect()  # else refs of other tests may be dropped in the middle of this one
    mine = RefHooks()
    monkeypatch.setattr("miniray.common.object_ref.hooks", mine)
    monkeypatch.setattr("miniray.objects.ignored_signals.hooks", mine)
    return mine


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python ignored and was told of."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.exc_type))
    return ignored


@pytest.fixture
def installed(told: list[Any]) -> Iterator[None]:
    loop = IOLoop()
    loop.start()
    signals = IgnoredSignals(loop)
    before = sys.unraisablehook
    signals.install()
    yield
    signals.remove()
    loop.stop()
    assert sys.unraisablehook is before


def interrupt_at_the_beginning_of(function: Any) -> None:
    """Let Ctrl-C come when a function is called next."""

    def look(frame: FrameType, _event: str, _arg: object) -> None:
        if frame.f_code is function.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def drop_a_ref() -> None:
    ObjectRef(b"some id", b"some node")


def reach_the_limit(_number: int, _frame: FrameType | None) -> None:
    raise LimitReachedError


class Limiter:
    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        raise LimitReachedError


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("number", "handler", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGALRM, reach_the_limit, LimitReachedError),
        (signal.SIGUSR2, Limiter().on_signal, LimitReachedError),
    ],
)
def test_a_signal_that_comes_while_a_ref_is_dropped_comes_again(
    hooks: RefHooks, told: list[Any], number: int, handler: Any, error: type[BaseException]
) -> None:
    wakes: list[None] = []

    def wake() -> None:
        wakes.append(None)
        if len(wakes) == 1:
            os.kill(os.getpid(), number)

    hooks.wake = wake
    with handled(number, handler):
        drop_a_ref()
        with pytest.raises(error):
            time.sleep(30)  # cut off by the signal
        drop_a_ref()
    assert len(wakes) == 2  # of the first drop, again as it had been cut off; then it is known
    assert list(hooks.dropped) == [b"some id"] * 2
    assert told == []


@pytest.mark.usefixtures("installed")
def test_a_ref_whose_end_is_cut_off_at_its_beginning_is_counted_as_dropped(
    hooks: RefHooks, told: list[Any]
) -> None:
    with handled(signal.SIGINT, signal.default_int_handler):
        for owner_node in (b"some node", b""):  # the second one is counted by nobody
            ref = ObjectRef(b"some id", owner_node)
            interrupt_at_the_beginning_of(ObjectRef.__del__)
            del ref
            with pytest.raises(KeyboardInterrupt):
                time.sleep(30)  # cut off by the signal
    assert list(hooks.dropped) == [b"some id"]
    assert told == []


@pytest.mark.usefixtures("installed")
def test_a_generator_whose_end_is_cut_off_at_its_beginning_is_closed(
    hooks: RefHooks, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miniray.objects.object_ref_generator.hooks", hooks)
    hooks.wake = lambda: None
    closed: list[None] = []
    state: Any = SimpleNamespace(id=b"some id", close=lambda: closed.append(None))

    with handled(signal.SIGINT, signal.default_int_handler):
        generator: ObjectRefGenerator[Any] = ObjectRefGenerator(state, lambda _wait: None)
        interrupt_at_the_beginning_of(ObjectRefGenerator.__del__)
        del generator
        assert closed == [None]
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)  # cut off by the signal
    assert told == []


@pytest.mark.usefixtures("installed")
def test_what_a_signal_keeps_from_being_unmapped_is_unmapped_and_the_signal_comes_again(
    told: list[Any],
) -> None:
    gone: list[None] = []
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 20)
    block = map_memory(fd, 1 << 20, shared=False, gone=lambda: gone.append(None))
    os.close(fd)

    with handled(signal.SIGINT, signal.default_int_handler):
        interrupt_at_the_beginning_of(unmap)
        del block
        assert gone == [None]
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)  # cut off by the signal
    assert told == []


@pytest.mark.usefixtures("installed")
def test_what_no_handler_raised_is_told_as_before(hooks: RefHooks, told: list[Any]) -> None:
    def wake() -> None:
        hooks.wake = None
        raise OSError

    hooks.wake = wake
    drop_a_ref()
    assert told == [OSError]


@pytest.mark.usefixtures("installed", "hooks")
def test_what_others_ignore_is_told_as_before(told: list[Any]) -> None:
    class Other:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with handled(signal.SIGINT, signal.default_int_handler):
        Other()
    assert told == [KeyboardInterrupt]


def test_a_drop_that_was_not_told_is_told_by_the_next(
    hooks: RefHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", finish)
    wakes: list[None] = []

    def wake() -> None:
        wakes.append(None)
        if len(wakes) == 1:
            raise KeyboardInterrupt

    hooks.wake = wake
    drop_a_ref()
    assert len(wakes) == 2
