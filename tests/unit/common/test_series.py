"""What a process counts."""

from __future__ import annotations

from miniray.common.series import MOST, OVERFLOW, SECONDS, Series, how_many, no_values, took

HISTOGRAM = ("histogram", "h", "", (1.0, 10.0))


def test_a_histogram_counts_up_to_each_boundary_and_adds_up() -> None:
    series = Series()
    for value in (0.5, 1.0, 5.0, 100.0):
        series.change(HISTOGRAM, (), value)
    assert series.rows() == [(*HISTOGRAM, (), [2, 1, 1, 106.5])]


def test_what_is_counted_often_is_counted_in_the_values_themselves() -> None:
    series = Series()
    values = series.values(("histogram", "h", "", SECONDS), ())
    for seconds in (0.0001, 0.5, 5000.0):
        took(values, seconds)
    assert how_many(values) == 3
    [(*_, told)] = series.rows()
    assert (told[0], told[3], told[-2], told[-1]) == (1, 1, 1, 5000.5001)
    assert len(told) == len(no_values())


def test_what_others_count_is_added_and_of_gauges_the_last_counts() -> None:
    series = Series()
    for value in (1.0, 2.0):
        series.add([("counter", "c", "", (), (), [value]), ("gauge", "g", "", (), (), [value])])
    assert [(name, values) for _, name, *_, values in series.rows()] == [("c", [3]), ("g", [2])]


def test_series_and_metrics_beyond_the_bound_are_one_or_none() -> None:
    series = Series()
    for number in range(MOST + 5):
        series.count("c", (("number", str(number)),))
    rows = {tags: values for *_, tags, values in series.rows()}
    assert len(rows) == MOST + 1
    assert rows[OVERFLOW] == [5]
    for number in range(MOST + 5):
        series.add([("gauge", f"g{number}", "", (), (), [1.0])])
    assert len(series.known) == MOST
    series.set("more", 1.0)
    series.set("g1", 2.0)
    assert len(series.known) == MOST
    assert ("gauge", "g1", "", (), (), [2.0]) in series.rows()
