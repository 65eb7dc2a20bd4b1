"""What a viewer is sent of a table."""

from __future__ import annotations

from miniray.web.tables import Table, View, Window


def table_of(count: int) -> Table:
    table = Table()
    table.update({f"k{number}": {"n": number, "state": "ALIVE"} for number in range(count)})
    return table


def test_nothing_is_sent_before_the_first_rows() -> None:
    table = Table()
    view = View(table, "t", Window())
    assert view.news() is None
    table.update({})
    assert view.news() == {
        "topic": "t",
        "total": 0,
        "summary": {"total": 0},
        "order": [],
        "changed": {},
    }
    assert view.news() is None


def test_a_window_is_sent_whole_and_then_what_changed_in_it() -> None:
    table = table_of(100)
    view = View(table, "t", Window(10, 5))
    first = view.news()
    assert first is not None
    assert first["order"] == list(first["changed"]) == [f"k{number}" for number in range(10, 15)]
    assert (first["total"], first["summary"]["state"]) == (100, {"ALIVE": 100})
    table.update({"k12": {"n": 12, "state": "DEAD"}, "k50": {"n": 50, "state": "DEAD"}})
    second = view.news()
    assert second is not None
    assert list(second["changed"]) == ["k12"]
    assert second["summary"]["state"] == {"ALIVE": 98, "DEAD": 2}


def test_a_change_elsewhere_that_changes_no_count_is_not_sent() -> None:
    table = table_of(100)
    view = View(table, "t", Window(0, 5))
    view.news()
    table.update({"k50": {"n": -1, "state": "ALIVE"}})
    assert view.news() is None


def test_a_row_that_comes_into_the_window_is_sent_with_it() -> None:
    table = table_of(10)
    view = View(table, "t", Window(0, 3))
    view.news()
    table.update({}, ["k1"])
    news = view.news()
    assert news is not None
    assert news["order"] == ["k0", "k2", "k3"]
    assert list(news["changed"]) == ["k3"]


def test_rows_are_sorted_by_numbers_texts_and_nothing_alike() -> None:
    table = Table()
    values = {"a": 2, "b": "x", "c": None, "d": 10.5, "e": "A", "f": {"y": 1}}
    table.update({key: {"v": value} for key, value in values.items()})
    up = View(table, "t", Window(sort="v")).news()
    down = View(table, "t", Window(sort="-v")).news()
    assert up is not None
    assert down is not None
    assert up["order"][:3] == ["c", "a", "d"]
    assert down["order"] == up["order"][::-1]


def test_all_words_of_a_search_are_in_a_row() -> None:
    table = Table()
    table.update({"a": {"x": "Red car", "y": 7}, "b": {"x": "red", "y": 8}})
    found = View(table, "t", Window(search="RED 7")).news()
    assert found is not None
    assert (found["order"], found["total"]) == (["a"], 1)
    assert found["summary"]["total"] == 2


def test_an_error_is_sent_once_and_the_rows_when_it_is_over() -> None:
    table = table_of(2)
    view = View(table, "t", Window())
    view.news()
    table.fail("it is gone")
    assert view.news() == {"topic": "t", "error": "it is gone"}
    table.update({"k1": {"n": 5, "state": "DEAD"}})
    assert view.news() is None
    table.fail("")
    news = view.news()
    assert news is not None
    assert news["changed"]["k1"] == {"n": 5, "state": "DEAD"}


def test_the_end_of_an_error_is_told_where_nothing_else_has_changed() -> None:
    for rows in (0, 2):
        table = table_of(rows)
        view = View(table, "t", Window())
        view.news()
        table.fail("it is gone")
        view.news()
        table.fail("")
        news = view.news()
        assert news is not None
        assert "error" not in news
        assert len(news["changed"]) == rows
        assert view.news() is None


def test_what_was_forgotten_is_not_shown_as_nothing() -> None:
    table = table_of(2)
    view = View(table, "t", Window())
    view.news()
    table.forget()
    assert view.news() is None
    table.update({"k1": {"n": 1, "state": "ALIVE"}})
    news = view.news()
    assert news is not None
    assert (news["order"], list(news["changed"])) == (["k1"], ["k1"])


def test_rows_that_are_as_before_have_not_changed() -> None:
    table = table_of(2)
    view = View(table, "t", Window())
    view.news()
    revision = table.revision
    table.replace({"k0": {"n": 0, "state": "ALIVE"}, "k1": {"n": 1, "state": "ALIVE"}}, {})
    assert table.revision == revision
    table.replace({"k1": {"n": 1, "state": "DEAD"}}, {})
    news = view.news()
    assert news is not None
    assert (news["order"], list(news["changed"])) == (["k1"], ["k1"])
