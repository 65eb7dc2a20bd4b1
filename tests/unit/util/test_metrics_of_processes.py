"""``miniray.util.metrics`` in one process: what Ray refuses is refused, with its words."""

from __future__ import annotations

import pickle
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from miniray.common.series import Series
from miniray.metrics.text import text
from miniray.util import metrics
from miniray.util.metrics import Counter, Gauge, Histogram


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> Series:
    """What this process has counted of metrics of this test alone."""
    own = Series()
    monkeypatch.setattr(metrics, "COUNTED", own)
    return own


def told(values: Series) -> dict[tuple[str, Any], list[float]]:
    """By name and tags."""
    return {(name, dict(tags).get("k")): value for _, name, _, _, tags, value in values.rows()}


def test_counters_add_gauges_keep_the_last_and_histograms_count(values: Series) -> None:
    counter, gauge = Counter("c", tag_keys=("k",)), Gauge("g")
    sizes = Histogram("h", boundaries=[10, 1])
    counter.inc(tags={"k": "a"})
    counter.inc(2.5, tags={"k": "a"})
    counter.inc(tags={"k": "b"})
    for value in (3, 4, None):
        gauge.set(value)
    for value in (0, 1, 2, 11):
        sizes.observe(value)
    assert told(values) == {
        ("c", "a"): [3.5],
        ("c", "b"): [1],
        ("g", None): [4],
        ("h", None): [2, 1, 1, 14],
    }


def test_the_node_is_told_of_a_change_though_nobody_reads(
    values: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_of: queue.Queue[list[Any]] = queue.Queue()
    runtime = SimpleNamespace(tell_counts=lambda: told_of.put(values.rows()))
    monkeypatch.setattr(metrics, "runtime_or_none", lambda: runtime)
    monkeypatch.setattr(metrics, "_INTERVAL", 0.01)
    monkeypatch.setattr(metrics, "_timer", None)
    for count in (1.0, 2.0):
        Counter("c").inc()
        [(*_, value)] = told_of.get(timeout=20)
        assert value == [count]


def test_a_metric_is_pickled_with_its_default_tags() -> None:
    counter = Counter("c", "about", ("k",)).set_default_tags({"k": "a"})
    assert (
        pickle.loads(pickle.dumps(counter)).info
        == counter.info
        == {
            "name": "c",
            "description": "about",
            "tag_keys": ("k",),
            "default_tags": {"k": "a"},
        }
    )
    sizes = pickle.loads(pickle.dumps(Histogram("h", boundaries=[1.0])))
    assert sizes.info["boundaries"] == [1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Counter(""), "Empty name is not allowed"),
        (lambda: Counter("c").inc(0), "value must be >0, got 0"),
        (lambda: Counter("c", tag_keys=("k",)).inc(), r"Missing value for tag key\(s\): k"),
        (lambda: Gauge("g").set_default_tags({"k": "a"}), "Unrecognized tag key k"),
        (lambda: Histogram("h"), "boundaries argument should be provided"),
        (lambda: Histogram("h", boundaries=[1, 0]), "Invalid `boundaries` argument at index 1"),
    ],
)
def test_wrong_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Counter("c", tag_keys=["k"]), "tag_keys should be a tuple"),  # type: ignore[arg-type]
        (lambda: Counter("c", tag_keys=(1,)), "Tag keys must be str"),  # type: ignore[arg-type]
        (lambda: Counter("c").inc("1"), "value must be int or float"),  # type: ignore[arg-type]
        (
            lambda: Counter("c", tag_keys=("k",)).inc(1, {"k": 1}),  # type: ignore[dict-item]
            "Tag values must be str",
        ),
    ],
)
def test_wrong_types_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_a_metric_of_an_invalid_name_is_discarded_with_a_warning(values: Series) -> None:
    with pytest.warns(UserWarning, match="Invalid metric name: 1-bad"):
        counter = Counter("1-bad")
    counter.inc()
    assert told(values) == {}


def test_labels_are_such_as_the_format_allows_and_hide_none_of_miniray() -> None:
    rows: list[Any] = [
        ("counter", "c", "about", (), ((key, "a\udc80"),), [1.0])
        for key in ("node", "a-b", "1", "", "x\n} 1", "__name__")
    ]
    rows.append(("histogram", "h", "", (1.0,), (("le", "mine"),), [1.0, 0.0, 0.5]))

    class Cluster:
        def listing(self, what: str) -> list[Any]:
            node = dict.fromkeys(("hostname", "address", "state"), "")
            empty: dict[str, float] = {}
            row = {**node, "node_id": "ab", "total": empty, "used": empty}
            row |= {"labels": {}, "is_head": True}
            return [row] if what == "node_states" else []

        def ask_nodes(self, what: str, *_args: Any) -> list[tuple[bytes, Any, str]]:
            return [(b"\xab", (rows, []) if what == "metrics" else [], "")]

    cluster: Any = Cluster()
    families = {each.name: each for each in text_string_to_metric_families(text(cluster))}
    labels = [each.labels for each in families["miniray_c"].samples]
    assert all(each.pop("node") == "ab" for each in labels)
    assert [[*each] for each in labels] == [
        ["exported_node"],
        ["a_b"],
        ["_1"],
        ["_"],
        ["x___1"],
        ["exported___name__"],
    ]
    buckets = [each.labels.get("le") for each in families["miniray_h"].samples]
    assert buckets == ["1.0", "+Inf", None, None]
