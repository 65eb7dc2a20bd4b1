"""How many files may be open: raising the limit, and the error when there is no room."""

from __future__ import annotations

import errno
import resource

import pytest

from miniray.common import process_state


@pytest.mark.parametrize(
    ("soft", "hard", "enough", "expected"),
    [
        (64, 4096, None, 4096),
        (64, 4096, 1000, 1000),
        (64, 512, 1000, 512),
        (2000, 4096, 1000, 2000),  # never lowered
        (64, resource.RLIM_INFINITY, 1000, 1000),
        (64, resource.RLIM_INFINITY, None, resource.RLIM_INFINITY),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1000, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_allowed_and_wanted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, enough: int | None, expected: int
) -> None:
    held = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: held.append(pair))
    process_state.raise_limit(enough)
    assert held[-1] == (expected, hard)


def test_no_limit_is_more_than_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: infinite)
    assert process_state.limit() > 1 << 40


def test_where_there_is_room_nothing_is_said() -> None:
    process_state.require_room(1, "a test")


def test_the_error_names_both_numbers_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "limit", lambda: 5)
    with pytest.raises(OSError, match=r"at most 5 .* no room for a test.*ulimit -n") as info:
        process_state.require_room(10, "a test")
    assert info.value.errno == errno.EMFILE
