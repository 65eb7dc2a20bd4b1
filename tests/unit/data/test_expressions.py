"""Expressions over columns, and texts that say the same; no cluster."""

from __future__ import annotations

from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

from miniray.data.expressions import col, comparisons, lit, parsed  # noqa: E402

TABLE = pa.table({"a": [1, 2, 3, None], "b": ["x", "y", "x", "z"]})


@pytest.mark.parametrize(
    ("expr", "text", "values"),
    [
        (col("a") * 2 + 1, "a * 2 + 1", [3, 5, 7, None]),
        (col("a") > 1, "a > 1", [False, True, True, None]),
        ((col("a") > 1) & (col("b") == "x"), "a > 1 and b == 'x'", [False, False, True, False]),
        ((col("a") < 2) | (col("b") == "z"), "a < 2 or b == 'z'", [True, False, False, True]),
        (~(col("b") == "x"), "not b == 'x'", [False, True, False, True]),
        (col("b").is_in(["y", "z"]), "b in ['y', 'z']", [False, True, False, True]),
        (5 - col("a"), "5 - a", [4, 3, 2, None]),
        (col("a") % 2 == 0, "a % 2 == 0", [False, True, False, None]),
        (-7 % col("a") + (col("a") - 4) // 2, "-7 % a + (a - 4) // 2", [-2, 0, 1, None]),
        (col("a") / 2.0 // 1.0, "a / 2.0 // 1.0", [0.0, 1.0, 1.0, None]),
        ("<" + col("b") + ">", "'<' + b + '>'", ["<x>", "<y>", "<x>", "<z>"]),
        (0 - col("a"), "-a", [-1, -2, -3, None]),
        (col("a").is_null(), "is_null(a)", [False, False, False, True]),
        (col("a").is_not_null(), "is_valid(a)", [True, True, True, False]),
        (col("b").not_in(["y", "z"]), "b not in ['y', 'z']", [True, False, True, False]),
    ],
)
def test_an_expression_and_its_text_give_the_same(expr: Any, text: str, values: list[Any]) -> None:
    assert expr.evaluate(TABLE).to_pylist() == values
    assert parsed(text).evaluate(TABLE).to_pylist() == values


def test_null_cast_and_alias() -> None:
    assert col("a").is_null().evaluate(TABLE).to_pylist() == [False, False, False, True]
    assert col("a").cast("string").alias("c").evaluate(TABLE).to_pylist()[0] == "1"
    assert (col("a") > lit(2)).columns() == {"a"}


def test_rows_of_which_none_has_a_value_are_compared_with_values_of_any_type() -> None:
    table = pa.table({"a": pa.nulls(2)})
    for expr in (col("a").is_in(["x"]), col("a").is_in([1]), col("a").is_in([])):
        assert expr.evaluate(table).to_pylist() == [False, False]
    assert (~col("a").is_in(["x"])).evaluate(table).to_pylist() == [True, True]


@pytest.mark.parametrize("text", ["__import__('os')", "a.b > 1", "a >", "f(a)", "[x for x in a]"])
def test_a_text_with_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expression|Use columns"):
        parsed(text)


def test_python_operators_that_need_a_value_say_what_to_write() -> None:
    with pytest.raises(TypeError, match="Combine expressions with &"):
        bool(col("a") > 1)


def test_comparisons_that_all_rows_fulfil_are_found() -> None:
    found = list(comparisons(parsed("a > 5 and b == 'x' and (a < 9 or b == 'y')")))
    assert found == [("a", "greater", 5), ("b", "equal", "x")]


def test_what_expressions_lack_is_refused_with_what_to_do() -> None:
    with pytest.raises(AttributeError, match=r"no 'str': compute it .* add_column\(\)"):
        col("b").str.upper()


def test_texts_of_pandas_are_joined_with_others() -> None:
    table = pa.table({"a": ["x"], "b": pa.array(["y"], pa.large_string())})
    assert (col("a") + col("b") + "z").evaluate(table).to_pylist() == ["xyz"]


def test_one_value_for_all_rows_may_be_for_none() -> None:
    for count in (0, 2):
        assert lit([1]).values(TABLE.slice(0, count)).to_pylist() == [[1]] * count
