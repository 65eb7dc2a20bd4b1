"""Expressions over columns, such as ``col("a") * 2 > lit(5)``, by calls of pyarrow.compute."""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Functions of pyarrow.compute by the operator that users write.
_BINARY = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "/": "divide",
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "&": "and_kleene",
    "|": "or_kleene",
}


def _operator(sign: str, *, swapped: bool = False) -> Callable[[Expr, Any], Expr]:
    """Return the method for an operator; ``swapped`` is for expressions on its right."""

    def method(self: Expr, other: Any) -> Expr:
        pair = (wrapped(other), self) if swapped else (self, wrapped(other))
        return FunctionCall(_BINARY[sign], pair)

    return method


class Expr:
    """What is computed of the columns of a table. Made by ``col`` and ``lit``."""

    def evaluate(self, table: Any) -> Any:
        """Return the values for the rows of a table."""
        raise NotImplementedError

    def columns(self) -> set[str]:
        """Return the names of the columns that are used."""
        return set()

    def alias(self, name: str) -> Expr:
        """Return the expression: what uses it names the result, as ``with_column(name, expr)``."""
        del name
        return self

    def is_null(self) -> Expr:
        """Whether a value is null."""
        return FunctionCall("is_null", (self,))

    def is_not_null(self) -> Expr:
        """Whether a value is not null."""
        return FunctionCall("is_valid", (self,))

    def is_in(self, values: Any) -> Expr:
        """Whether a value is one of these."""
        return FunctionCall("is_in", (self,), values=tuple(values))

    def cast(self, kind: Any) -> Expr:
        """Convert to a type of Arrow, or to the one of this name."""
        return FunctionCall("cast", (self,), values=(kind,))

    __add__, __radd__ = _operator("+"), _operator("+", swapped=True)
    __sub__, __rsub__ = _operator("-"), _operator("-", swapped=True)
    __mul__, __rmul__ = _operator("*"), _operator("*", swapped=True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", swapped=True)
    __lt__, __le__ = _operator("<"), _operator("<=")
    __gt__, __ge__ = _operator(">"), _operator(">=")
    __eq__ = _operator("==")  # type: ignore[assignment]
    __ne__ = _operator("!=")  # type: ignore[assignment]
    __and__, __or__ = _operator("&"), _operator("|")

    def __invert__(self) -> Expr:
        return FunctionCall("invert", (self,))

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "An expression has no value before it is computed. Combine expressions with & and |, "
            "and negate one with ~."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Column(Expr):
    """The values of a column."""

    name: str

    def evaluate(self, table: Any) -> Any:
        if self.name not in table.column_names:
            raise KeyError(
                f"There is no column {self.name!r}, but {', '.join(table.column_names) or 'none'}."
            )
        return table.column(self.name)

    def columns(self) -> set[str]:
        return {self.name}

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Literal(Expr):
    """One value for all rows."""

    value: Any

    def evaluate(self, table: Any) -> Any:
        return pa.scalar(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionCall(Expr):
    """A function of pyarrow.compute over other expressions."""

    function: str
    operands: tuple[Expr, ...]
    values: tuple[Any, ...] = ()

    def evaluate(self, table: Any) -> Any:
        operands = [operand.evaluate(table) for operand in self.operands]
        if self.function == "is_in":
            return pc.is_in(operands[0], value_set=pa.array(self.values))
        if self.function == "cast":
            return pc.cast(operands[0], self.values[0])
        return pc.call_function(self.function, operands)

    def columns(self) -> set[str]:
        return {name for operand in self.operands for name in operand.columns()}

    def __repr__(self) -> str:
        signs = {function: sign for sign, function in _BINARY.items()}
        if self.function in signs:
            left, right = self.operands
            return f"({left!r} {signs[self.function]} {right!r})"
        return f"{self.function}({', '.join(map(repr, (*self.operands, *self.values)))})"


def col(name: str) -> Expr:
    """Return the values of a column."""
    return Column(name)


def lit(value: Any) -> Expr:
    """Return one value for all rows."""
    return Literal(value)


def wrapped(value: Any) -> Expr:
    """Return an expression as it is, and any other value as a literal."""
    return value if isinstance(value, Expr) else Literal(value)


def full(values: Any, rows: int) -> Any:
    """Return what an expression gave as a column: a scalar for each row."""
    if isinstance(values, pa.Scalar):
        return pa.repeat(values, rows)
    return values


def comparisons(expr: Expr) -> Iterator[tuple[str, str, Any]]:
    """Yield (column, function, value) of the comparisons that all rows kept must fulfil."""
    if not isinstance(expr, FunctionCall) or len(expr.operands) != 2:
        return
    left, right = expr.operands
    if expr.function == "and_kleene":
        yield from comparisons(left)
        yield from comparisons(right)
    elif isinstance(left, Column) and isinstance(right, Literal):
        yield left.name, expr.function, right.value


#: Functions of pyarrow.compute by the operator in a text.
_PARSED: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.And: "and_kleene",
    ast.Or: "or_kleene",
    ast.BitAnd: "and_kleene",
    ast.BitOr: "or_kleene",
}


def parsed(text: str) -> Expr:
    """Return the expression of a text such as ``"a > 5 and b == 'x'"``.

    Raises:
        ValueError: The text has something else than columns, values and their operators.
    """
    try:
        return _parse(ast.parse(text, mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not an expression: {error.msg}.") from error


def _parse(node: Any, text: str) -> Expr:
    def inner(each: Any) -> Expr:
        return _parse(each, text)

    match node:
        case ast.Name(id=name):
            return Column(name)
        case ast.Constant(value=value):
            return Literal(value)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return ~inner(operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return Literal(-value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _PARSED:
            return FunctionCall(_PARSED[type(op)], (inner(left), inner(right)))
        case ast.BoolOp(op=op, values=values):
            return _joined(_PARSED[type(op)], map(inner, values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared(left, ops, others, inner, text)
    raise ValueError(
        f"{text!r} has {ast.unparse(node)!r}. Use columns, values, + - * /, comparisons, "
        f"in, and, or, not."
    )


def _compared(
    left: Any, ops: list[Any], others: list[Any], inner: Callable[[Any], Expr], text: str
) -> Expr:
    found = []
    for op, other in zip(ops, others, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            expr = inner(left).is_in(ast.literal_eval(other))
            found.append(~expr if isinstance(op, ast.NotIn) else expr)
        elif type(op) in _PARSED:
            found.append(FunctionCall(_PARSED[type(op)], (inner(left), inner(other))))
        else:
            raise ValueError(f"{text!r} has an operator that is not known.")
        left = other
    return _joined("and_kleene", found)


def _joined(function: str, parts: Iterable[Expr]) -> Expr:
    return functools.reduce(lambda left, right: FunctionCall(function, (left, right)), parts)
