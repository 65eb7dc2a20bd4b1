"""Code that cannot be pickled by value is imported, where its module has it as remote."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import pytest
from process_doubles import Interrupted

import miniray
from miniray.values.call_signature import reference_to
from miniray.values.serialization import dumps_code

LOCK = threading.Lock()


INTERRUPTED = Interrupted()


@miniray.remote
def locked() -> int:
    with LOCK:
        return 5


@miniray.remote
class Locked:
    def value(self) -> int:
        with LOCK:
            return 6


@miniray.remote
def free() -> int:
    return 7


@miniray.remote
def interrupted() -> Interrupted:
    return INTERRUPTED


def plain() -> int:
    with LOCK:
        return 8


def test_a_remote_function_that_uses_a_lock_is_imported_by_name() -> None:
    target: Any = locked.__wrapped__
    blob, refs = dumps_code(target)
    assert pickle.loads(blob) is target
    assert refs == []


def test_a_remote_class_that_uses_a_lock_is_imported_by_name() -> None:
    blob, _ = dumps_code(Locked._export.target)
    assert pickle.loads(blob) is Locked._export.target


def test_what_can_be_pickled_is_pickled_by_value() -> None:
    target: Any = free.__wrapped__
    copy = pickle.loads(dumps_code(target)[0])
    assert copy is not target
    assert copy() == 7


def test_a_function_under_another_name_has_no_reference() -> None:
    other: Any = lambda: LOCK  # noqa: E731
    assert reference_to(other) is None
    with pytest.raises(TypeError, match="LOCK"):
        dumps_code(other)


def test_a_function_of_main_has_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = locked.__wrapped__
    monkeypatch.setattr(target, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "locked", locked, raising=False)
    assert reference_to(target) is None


def test_a_plain_function_is_pickled_as_its_module_has_it() -> None:
    assert reference_to(plain) is None  # cloudpickle itself names it
    assert pickle.loads(dumps_code(plain)[0]) is plain


def test_what_a_signal_handler_raises_does_not_have_code_imported_by_name() -> None:
    target: Any = interrupted.__wrapped__
    with pytest.raises(TimeoutError, match=r"^time limit$"):
        dumps_code(target)
    assert pickle.loads(dumps_code(target)[0]) is not target
