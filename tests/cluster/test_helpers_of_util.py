"""Small helpers of ``miniray.util``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.util import debug

if TYPE_CHECKING:
    import pytest


def test_a_key_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    debug.reset_log_once()
    assert [debug.log_once(key) for key in ("a", "a", "b", "a")] == [True, False, True, False]
    debug.reset_log_once("a")
    assert [debug.log_once(key) for key in ("a", "b")] == [True, False]
    debug.reset_log_once()
    monkeypatch.setattr(debug, "_disabled", False)
    debug.disable_log_once_globally()
    assert not debug.log_once("b")
