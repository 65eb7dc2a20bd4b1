from __future__ import annotations

import pytest

from miniray.common.labels import describe, matches, parse_selector


@pytest.mark.parametrize(
    ("condition", "label", "accepted"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("in(a,b)", None, False),
        ("!in(a,b)", "c", True),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", None, True),
        ("", "", True),
        ("", "a", False),
        ("", None, False),
    ],
)
def test_a_condition_accepts_what_ray_accepts(
    condition: str, label: str | None, accepted: bool
) -> None:
    labels = {} if label is None else {"zone": label}

    assert matches(parse_selector({"zone": condition}), labels) is accepted


def test_all_conditions_must_hold() -> None:
    selector = parse_selector({"zone": "a", "example.com/tier": "!spot"})

    assert matches(selector, {"zone": "a"})
    assert not matches(selector, {"zone": "a", "example.com/tier": "spot"})
    assert describe(selector) == "example.com/tier=!spot, zone=a"


def test_equal_selectors_compare_equal_however_they_are_written() -> None:
    assert parse_selector({"a": "in(y,x)", "b": "1"}) == parse_selector({"b": "1", "a": "in(x,y)"})


@pytest.mark.parametrize("condition", ["in()", "in(a", "!!a", "!", "in(a,!b)", "-a", "a b"])
def test_a_malformed_condition_is_refused(condition: str) -> None:
    with pytest.raises(ValueError, match="zone"):
        parse_selector({"zone": condition})


@pytest.mark.parametrize("key", ["", "/a", "a/", "-a", "a b", "_p/a"])
def test_a_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="label key"):
        parse_selector({key: "a"})
