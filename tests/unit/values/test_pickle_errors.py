from __future__ import annotations

import abc
import array
import collections
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import Interrupted

from miniray.common.config import config
from miniray.values import closures
from miniray.values.closures import check_large, warn_large_arguments
from miniray.values.serialization import dumps_code, serialize, serialize_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK = threading.Lock()


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def message_of(value: Any) -> str:
    with pytest.raises(TypeError) as caught:
        serialize(value)
    return str(caught.value)


def test_the_error_names_the_item_at_fault() -> None:
    text = message_of({"good": 1, "bad": [0, Holder(threading.Lock())]})
    assert "['bad'][1].inner is a lock" in text
    assert "__getstate__" in text


def test_a_value_that_is_itself_at_fault_is_named() -> None:
    assert "a value of type lock cannot be pickled" in message_of(threading.Lock())


def test_a_value_is_called_what_it_is_to_the_user() -> None:
    with pytest.raises(TypeError, match="what f returned, a value of type lock, cannot be pickled"):
        serialize(threading.Lock(), "f")


class Refuses:
    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("no")


@pytest.mark.parametrize(
    "pickle", [serialize, lambda value: serialize_arguments((value,), {}), dumps_code]
)
def test_the_pickler_is_shown_in_the_traceback_only_where_code_of_the_user_has_raised(
    pickle: Callable[[Any], Any],
) -> None:
    with pytest.raises(TypeError) as plain:
        pickle(LOCK)
    assert plain.value.__suppress_context__
    assert plain.value.__cause__ is None
    with pytest.raises(TypeError) as raised:
        pickle(Refuses())
    assert isinstance(raised.value.__cause__, ValueError)


def test_what_a_signal_handler_raises_is_not_taken_for_a_fault_of_the_value() -> None:
    with pytest.raises(TimeoutError, match=r"^time limit$"):
        serialize([1, Interrupted()])
    with pytest.raises(TimeoutError, match=r"^time limit$"):
        serialize_arguments((1, Interrupted()), {})
    interrupted = Interrupted()
    with pytest.raises(TimeoutError, match=r"^time limit$"):
        dumps_code(lambda: interrupted)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, threading.Lock()), {}, "argument 2, a value of type lock, cannot be pickled"),
        ((1,), {"to": threading.Lock()}, "argument 'to', a value of type lock, cannot be"),
        ((1, {"a": [threading.Lock()]}), {}, "type dict, cannot be pickled: ['a'][0] is a lock"),
    ],
)
def test_the_error_of_a_call_names_the_argument_at_fault(
    args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError) as caught:
        serialize_arguments(args, kwargs)
    assert text in str(caught.value)
    assert caught.value.__suppress_context__


def test_the_error_of_a_function_names_its_variable() -> None:
    inner = threading.Lock()

    def function() -> Any:
        return inner

    with pytest.raises(TypeError, match=r"variable 'inner' is a lock"):
        dumps_code(function)


def test_the_error_of_a_class_names_the_variable_of_its_method() -> None:
    inner = threading.Lock()

    class Actor:
        def method(self) -> Any:
            return inner

    with pytest.raises(TypeError, match=r": method: variable 'inner' is a lock"):
        dumps_code(Actor)


def test_so_does_that_of_a_class_of_which_only_the_constructor_is_at_fault() -> None:
    inner = threading.Lock()

    class Actor:
        def __init__(self) -> None:
            self.used = inner

    with pytest.raises(TypeError, match=r": __init__: variable 'inner' is a lock"):
        dumps_code(Actor)


class Runner:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def run(self) -> None:
        """Do nothing."""


class Slotted:
    __slots__ = ("lock", "unset")

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Stateful(Runner):
    def __getstate__(self) -> Any:
        return {"kept": [self.lock]}


class Filled(dict[str, Any]):
    """A dict of a class of its own."""


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else LOCK


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Runner().run, "method Runner.run cannot be pickled: __self__.lock is a lock"),
        (functools.partial(print, 1, LOCK), "args[1] is a lock"),
        (functools.partial(print, file=LOCK), "keywords['file'] is a lock"),
        (Slotted(), "type Slotted cannot be pickled: lock is a lock"),
        (Stateful(), "kept[0] is a lock"),
        (Filled(x=LOCK), "['x'] is a lock"),
        (collections.deque([1, LOCK]), "[1] is a lock"),
        (nested(20), "[0]" * 20 + " is a lock"),
        ([*range(3000), LOCK], "[3000] is a lock"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[-20:],
)
def test_the_error_names_the_part_of_any_kind_of_value(value: Any, text: str) -> None:
    assert text in message_of(value)


def test_the_error_of_a_function_names_the_default_at_fault() -> None:
    lock = threading.Lock()

    def positional(one: int, two: Any = lock) -> Any:
        return one, two

    def keyword(*, two: Any = lock) -> Any:
        return two

    def inner() -> Any:
        return [lock for _ in range(3)]

    for function in (positional, keyword):
        with pytest.raises(TypeError, match=r"pickled: default of 'two' is a lock"):
            dumps_code(function)
    with pytest.raises(TypeError, match=r"pickled: variable 'inner': variable 'lock' is a lock"):
        dumps_code(lambda: [inner() for _ in range(3)])


def test_an_abstract_class_is_not_blamed_for_what_python_keeps_in_it() -> None:
    lock = threading.Lock()

    class Base(abc.ABC):
        value = 1

        @abc.abstractmethod
        def method(self) -> None:
            """Do nothing."""

        @staticmethod
        def make() -> Any:
            return lock

    with pytest.raises(TypeError, match=r"Base cannot be pickled: make: variable 'lock' is a lock"):
        dumps_code(Base)


def test_a_value_that_contains_itself_ends_the_search() -> None:
    value: list[Any] = [threading.Lock()]
    value.insert(0, value)
    assert "cannot be pickled" in message_of(value)


def test_a_variable_without_a_value_yet_does_not_hide_the_error() -> None:
    lock = threading.Lock()

    def make() -> Any:
        def function() -> Any:
            return later, lock

        with pytest.raises(TypeError, match=r"function .* cannot be pickled"):
            dumps_code(function)
        later = 1
        return later

    make()


def test_a_large_function_is_told_with_its_largest_variables() -> None:
    big, small = b"x" * 3_000_000, b"y" * 100

    def function() -> Any:
        return big, small

    with pytest.warns(UserWarning, match=r"function is 3\.0 MiB .*variable 'big'.*\(2\.9 MiB\)"):
        check_large(function, "function", 3_145_728, 1 << 30)


def test_variables_that_cannot_be_measured_do_not_turn_the_warning_into_an_error() -> None:
    class Stubborn:
        def __reduce__(self) -> Any:
            raise NotImplementedError("not like this")

    stubborn = Stubborn()

    class Large:
        def method(self) -> Any:
            return stubborn, unset

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_large(Large, "Large", 20_000_000, 1 << 30)
    unset = 1
    assert len(caught) == 1
    assert unset


BIG = bytes(3_000_000)


def uses_big() -> int:
    return len(BIG)


class Loaded:
    """Holds much, and has a length besides."""

    table = BIG

    def __init__(self) -> None:
        self.name, self.cache = "x", {"a": BIG}

    def __len__(self) -> int:
        return 1

    def run(self) -> None:
        """Do nothing."""


def defaulted(rows: bytes = BIG) -> bytes:
    return rows


@pytest.mark.parametrize(
    ("target", "culprit"),
    [
        (Loaded, "attribute 'table' of Loaded"),
        (defaulted, "default of 'rows' of defaulted"),
        (lambda: uses_big(), "global variable 'BIG' of uses_big"),
        (lambda: [uses_big() for _ in "ab"], "global variable 'BIG' of uses_big"),
    ],
)
def test_the_culprit_is_named_wherever_it_is(
    target: Any, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a program: pickled itself, with what it uses.
    for item in (uses_big, Loaded, defaulted, target):
        monkeypatch.setattr(item, "__module__", "__main__")
    with pytest.warns(UserWarning, match=f"{culprit} \\(2.9 MiB\\)"):
        check_large(target, "it", 3_145_728, 1 << 30)


@pytest.mark.parametrize(
    "value",
    [Loaded(), [1, Loaded()], {"a": (Loaded(),)}, Loaded().run, functools.partial(print, Loaded())],
)
def test_an_object_drags_in_what_it_holds_also_in_a_list_or_with_a_length(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config()._replace(large_closure_warning=1 << 20)
    monkeypatch.setattr(closures, "config", lambda: settings)
    monkeypatch.setattr(closures, "_looked_at", {})
    with pytest.warns(UserWarning, match=r"drags in 2\.9 MiB.* 'cache' of Loaded"):
        warn_large_arguments((value,), {}, 3_145_728)


def test_data_is_not_dragged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config()._replace(large_closure_warning=1 << 20)
    monkeypatch.setattr(closures, "config", lambda: settings)
    endless: list[Any] = [BIG]
    endless.append(endless)
    values = [BIG, [BIG, None], {"a": ([BIG], 1.5)}, endless, array.array("b", BIG)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in values:
            monkeypatch.setattr(closures, "_looked_at", {})
            warn_large_arguments((value,), {}, 3_145_728)


def test_what_is_too_large_for_the_head_is_refused_with_the_culprit() -> None:
    payload = bytes(2_000_000)

    def function() -> int:
        return len(payload)

    with pytest.raises(ValueError, match=r"function is 1\.9 MiB .* may be 1\.0 MiB.*payload"):
        check_large(function, "function", 2_000_000, 1 << 20)


def test_arguments_of_one_place_are_looked_at_again_when_they_are_twice_as_large() -> None:
    """A look pickles them: done for each call, it would take longer than the call."""
    looked: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 0

        def __reduce__(self) -> tuple[Any, ...]:
            looked.append(1)
            return (str, ())

    found = []
    for size in (1000, 1000, 1999, 2000, 2001):
        warn_large_arguments((Data(),), {}, size)
        found.append(len(looked))
    assert found == [1, 1, 1, 2, 2]
    warn_large_arguments((Data(),), {}, 1000)  # another place
    assert len(looked) == 3


def test_a_place_that_was_warned_of_what_it_passes_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = config()._replace(large_argument_warning=1000)
    monkeypatch.setattr(closures, "config", lambda: settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (2000, 8000):
            warn_large_arguments((bytes(size),), {}, size)
    assert [str(warning.message).split(",")[0] for warning in told] == [
        "Argument 1 of this call (a bytes) takes 0.0 MiB"
    ]
