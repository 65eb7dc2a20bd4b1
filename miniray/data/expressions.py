"""Expressions over columns, such as ``col("a") * 2 > lit(5)``, by calls of pyarrow.compute."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Expr:
    """What is computed of the columns of a table. Made by ``col`` and ``lit``."""

    def evaluate(self, table: Any) -> Any:
        """Return the values for the rows of a table."""
        raise NotImplementedError

    def columns(self) -> set[str]:
        """Return the names of the columns that are used."""
        return set()

    def alias(self, name: str) -> Expr:
        """Name the result."""
        return Named(self, name)

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

    def _with(self, sign: str, other: Any, *, swapped: bool = False) -> Expr:
        pair = (wrapped(other), self) if swapped else (self, wrapped(other))
        return FunctionCall(_BINARY[sign], pair)

    def __add__(self, other: Any) -> Expr:
        return self._with("+", other)

    def __radd__(self, other: Any) -> Expr:
        return self._with("+", other, swapped=True)

    def __sub__(self, other: Any) -> Expr:
        return self._with("-", other)

    def __rsub__(self, other: Any) -> Expr:
        return self._with("-", other, swapped=True)

    def __mul__(self, other: Any) -> Expr:
        return self._with("*", other)

    def __rmul__(self, other: Any) -> Expr:
        return self._with("*", other, swapped=True)

    def __truediv__(self, other: Any) -> Expr:
        return self._with("/", other)

    def __rtruediv__(self, other: Any) -> Expr:
        return self._with("/", other, swapped=True)

    def __lt__(self, other: Any) -> Expr:
        return self._with("<", other)

    def __le__(self, other: Any) -> Expr:
        return self._with("<=", other)

    def __gt__(self, other: Any) -> Expr:
        return self._with(">", other)

    def __ge__(self, other: Any) -> Expr:
        return self._with(">=", other)

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return self._with("==", other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return self._with("!=", other)

    def __and__(self, other: Any) -> Expr:
        return self._with("&", other)

    def __or__(self, other: Any) -> Expr:
        return self._with("|", other)

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
        """Return the column."""
        if self.name not in table.column_names:
            raise KeyError(
                f"There is no column {self.name!r}, but {', '.join(table.column_names) or 'none'}."
            )
        return table.column(self.name)

    def columns(self) -> set[str]:
        """Return its name."""
        return {self.name}

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, eq=False)
class Literal(Expr):
    """One value for all rows."""

    value: Any

    def evaluate(self, table: Any) -> Any:
        """Return the value."""
        return pa.scalar(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Named(Expr):
    """An expression with a name."""

    inner: Expr
    name: str

    def evaluate(self, table: Any) -> Any:
        """Return the values of the inner expression."""
        return self.inner.evaluate(table)

    def columns(self) -> set[str]:
        """Return the columns of the inner expression."""
        return self.inner.columns()


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionCall(Expr):
    """A function of pyarrow.compute over other expressions."""

    function: str
    operands: tuple[Expr, ...]
    values: tuple[Any, ...] = ()

    def evaluate(self, table: Any) -> Any:
        """Compute the values."""
        operands = [operand.evaluate(table) for operand in self.operands]
        if self.function == "is_in":
            return pc.is_in(operands[0], value_set=pa.array(self.values))
        if self.function == "cast":
            return pc.cast(operands[0], self.values[0])
        return pc.call_function(self.function, operands)

    def columns(self) -> set[str]:
        """Return the columns of all operands."""
        return {name for operand in self.operands for name in operand.columns()}

    def __repr__(self) -> str:
        signs = {function: sign for sign, function in _BINARY.items()}
        if self.function in signs:
            return f"({self.operands[0]!r} {signs[self.function]} {self.operands[1]!r})"
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
        return pa.array([values.as_py()] * rows, values.type)
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


_OPERATORS: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "&",
    ast.Or: "|",
    ast.BitAnd: "&",
    ast.BitOr: "|",
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
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return inner(left)._with(_OPERATORS[type(op)], inner(right))
        case ast.BoolOp(op=op, values=values):
            return _joined(_OPERATORS[type(op)], [inner(value) for value in values])
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
        elif type(op) in _OPERATORS:
            found.append(inner(left)._with(_OPERATORS[type(op)], inner(other)))
        else:
            raise ValueError(f"{text!r} has an operator that is not known.")
        left = other
    return _joined("&", found)


def _joined(sign: str, parts: list[Expr]) -> Expr:
    result = parts[0]
    for part in parts[1:]:
        result = result._with(sign, part)
    return result
