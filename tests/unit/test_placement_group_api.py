"""Placement groups as users ask for them."""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fake_runtime import FakeRuntime, fake_runtime

import miniray
from miniray.exceptions import PlacementGroupRemovedError
from miniray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with fake_runtime() as fake:
        yield fake


def test_what_is_asked_for_is_plain_numbers_and_texts(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``marshal`` writes others as bytes, or refuses them."""
    asked: list[Any] = []
    monkeypatch.setattr(
        runtime,
        "create_placement_group",
        lambda *given, **named: asked.append((*given, *named.values())),
    )
    placement_group(
        [{np.str_("CPU"): np.float64(0.5)}],  # type: ignore[dict-item]
        np.str_("PACK"),
        np.str_("it"),
        bundle_label_selector=[{np.str_("zone"): np.str_("a")}],
    )
    placement_group([{"CPU": 1}], topology_strategy={np.str_("rack"): np.str_("STRICT_PACK")})

    assert [marshal.loads(marshal.dumps(given)) for given in asked] == [
        ([{"CPU": 0.5}], "PACK", "it", None, [{"zone": "a"}]),
        ([{"CPU": 1}], "PACK", "", None, [{"rack": "same(all)"}]),
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bundles": []}, "non-empty list"),
        ({"bundles": {"CPU": 1}}, "non-empty list"),
        ({"bundles": [{"CPU": 1}] * 10_001}, "at most 10,000, not 10,001"),
        ({"bundles": [{}]}, r"bundles\[0\] asks for nothing"),
        ({"bundles": [{"CPU": 1}, {"CPU": 0}]}, r"bundles\[1\] asks for nothing"),
        ({"bundles": [3]}, r"bundles\[0\] must be a dict"),
        ({"bundles": [{3: 1}]}, "resource names are strings"),
        ({"bundles": [{"": 1}]}, "has the key ''"),
        ({"bundles": [{"CPU": "1"}]}, r"bundles\[0\]\['CPU'\] must be a number"),
        ({"bundles": [{"CPU": -1}]}, "at least 0"),
        ({"bundles": [{"GPU": 1.5}]}, "Use 1 or 2"),
        ({"bundles": [{"CPU": 1}], "strategy": "PAK"}, "Did you mean 'PACK'"),
        ({"bundles": [{"CPU": 1}], "lifetime": "long"}, "lifetime"),
        ({"bundles": [{"CPU": 1}], "bundle_label_selector": []}, "one per bundle"),
        (
            {"bundles": [{"CPU": 1}] * 2, "bundle_label_selector": [{"rack": "same(a)"}, {}]},
            "can't be met: the condition .* in the selector of every bundle",
        ),
        ({"bundles": [{"CPU": 1}], "bundle_label_selector": [{"rack": "same()"}]}, "not 'same"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(
    runtime: FakeRuntime, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        placement_group(**given)
    assert runtime.asked == []


def test_wait_says_when_the_group_is_not_placed_in_time(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = placement_group([{"CPU": 1}])
    monkeypatch.setattr(runtime, "placement_group_ready", lambda *_: runtime.ref(ready=False))

    assert not group.wait(0)


@pytest.mark.parametrize(
    ("timeout", "error"), [("long", TypeError), (-1, ValueError), (float("nan"), ValueError)]
)
def test_a_time_that_is_none_is_refused(
    runtime: FakeRuntime, timeout: Any, error: type[Exception]
) -> None:
    group = placement_group([{"CPU": 1}])
    with pytest.raises(error, match="The timeout of wait"):
        group.wait(timeout)
    assert group.wait(float("inf"))


def test_a_handle_of_a_group_that_is_forgotten_says_so(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "placement_group_table", lambda _id: {})
    with pytest.raises(PlacementGroupRemovedError, match="6964"):
        _ = PlacementGroup(b"id").bundle_count


def test_a_name_is_a_string(runtime: FakeRuntime) -> None:
    with pytest.raises(TypeError, match="placement_group_name must be a string, not 5"):
        get_placement_group(5)  # type: ignore[arg-type]


def test_the_function_has_its_name_whatever_was_imported() -> None:
    import miniray.util.placement_group

    assert miniray.util.placement_group is placement_group  # type: ignore[comparison-overlap]


def test_the_empty_group_is_ready(runtime: FakeRuntime) -> None:
    empty = PlacementGroup.empty()

    assert empty.is_empty
    assert miniray.get(empty.ready()) == empty
    assert empty.bundle_count == 0


def test_a_driver_is_in_no_group(runtime: FakeRuntime) -> None:
    assert get_current_placement_group() is None


def test_only_groups_can_be_removed(runtime: FakeRuntime) -> None:
    with pytest.raises(TypeError, match="a PlacementGroup"):
        remove_placement_group("it")  # type: ignore[arg-type]
