from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miniray.common.config import Config, config, parse

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fresh_config() -> Iterator[None]:
    config.cache_clear()
    yield
    config.cache_clear()


def test_every_tunable_has_a_default_of_a_plain_type() -> None:
    assert Config._field_defaults.keys() == set(Config._fields)
    for name, default in Config._field_defaults.items():
        assert type(default) in {int, float, bool, str}, name


def test_variables_override_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRAY_LEASE_IDLE", "1.25")
    monkeypatch.setenv("MINIRAY_INLINE_LIMIT", "4096")
    monkeypatch.setenv("MINIRAY_DEDUP_LOGS", "off")
    found = config()
    assert (found.lease_idle, found.inline_limit, found.dedup_logs) == (1.25, 4096, False)
    assert found.head_grace == Config().head_grace


def test_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = config()
    monkeypatch.setenv("MINIRAY_LEASE_IDLE", "9")
    assert config() is first


@pytest.mark.parametrize(
    ("kind", "text"),
    [(int, "1.5"), (int, "many"), (float, "fast"), (float, ""), (bool, "maybe"), (bool, "2")],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(kind: type, text: str) -> None:
    with pytest.raises(ValueError, match="MINIRAY_LEASE_IDLE must be") as caught:
        parse("lease_idle", kind, text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("0", False), ("OFF", False)]
)
def test_switches_take_the_usual_words(text: str, value: bool) -> None:
    assert parse("dedup_logs", bool, text) is value


def test_tunables_cannot_be_changed_by_accident() -> None:
    with pytest.raises(AttributeError):
        config().lease_idle = 1.0  # type: ignore[misc]
