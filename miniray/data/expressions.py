"""Expressions over columns, such as ``col("a") * 2 > lit(5)``, by calls of pyarrow.compute."""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: By the operator in a text: its sign in Python, and the function of pyarrow.compute.
_OPERATORS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "add"),
    ast.Sub: ("-", "subtract"),
    ast.Mult: ("*", "multiply"),
    ast.Div: ("/", "divide"),
    ast.Eq: ("==", "equal"),
    ast.NotEq: ("!=", "not_equal"),
    ast.Lt: ("<", "less"),
    ast.LtE: ("<=", "less_equal"),
    ast.Gt: (">", "greater"),
    ast.GtE: (">=", "greater_equal"),
    ast.And: ("&", "and_kleene"),
    ast.Or: ("|", "or_kleene"),
    ast.BitAnd: ("&", "and_kleene"),
    ast.BitOr: ("|", "or_kleene"),
}
_FUNCTIONS = dict(_OPERATORS.values())
_SIGNS = {function: sign for sign, function in _FUNCTIONS.items()}


def _operator(sign: str, *, swapped: bool = False) -> Callable[[Expr, Any], Expr]:
    """Return the method for an operator; ``swapped`` is for expressions on its right."""

    def method(self: Expr, other: Any) -> Expr:
        pair = (wrapped(other), self) if swapped else (self, wrapped(other))
        return FunctionCall(_FUNCTIONS[sign], pair)

    return method


class Expr:
    """What is computed of the columns of a table. Made by ``col`` and ``lit``."""

    def evaluate(self, table: Any) -> Any:
        """Return the values for the rows of a table: a column, or one scalar for all."""
        raise NotImplementedError

    def values(self, table: Any) -> Any:
        """Return a value for each row of a table."""
        found = self.evaluate(table)
        return pa.repeat(found, table.num_rows) if isinstance(found, pa.Scalar) else found

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
        return FunctionCall("is_in", (self,), arguments=tuple(values))

    def cast(self, kind: Any) -> Expr:
        """Convert to a type of Arrow, or to the one of this name."""
        return FunctionCall("cast", (self,), arguments=(kind,))

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
    arguments: tuple[Any, ...] = ()

    def evaluate(self, table: Any) -> Any:
        operands = [operand.evaluate(table) for operand in self.operands]
        if self.function == "is_in":
            return pc.is_in(operands[0], value_set=pa.array(self.arguments))
        if self.function == "cast":
            return pc.cast(operands[0], self.arguments[0])
        return pc.call_function(self.function, operands)

    def columns(self) -> set[str]:
        return {name for operand in self.operands for name in operand.columns()}

    def __repr__(self) -> str:
        if self.function in _SIGNS:
            left, right = self.operands
            return f"({left!r} {_SIGNS[self.function]} {right!r})"
        return f"{self.function}({', '.join(map(repr, (*self.operands, *self.arguments)))})"


def col(name: str) -> Expr:
    """Return the values of a column."""
    return Column(name)


def lit(value: Any) -> Expr:
    """Return one value for all rows."""
    return Literal(value)


def wrapped(value: Any) -> Expr:
    """Return an expression as it is, and any other value as a literal."""
    return value if isinstance(value, Expr) else Literal(value)


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
    inner = functools.partial(_parse, text=text)
    match node:
        case ast.Name(id=name):
            return Column(name)
        case ast.Constant(value=value):
            return Literal(value)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return ~inner(operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return Literal(-value)
        case ast.BoolOp(op=op, values=values):
            return functools.reduce(functools.partial(_applied, op), map(inner, values))
        case ast.Compare(left=left, ops=[ast.In()], comparators=[values]):
            return inner(left).is_in(ast.literal_eval(values))
        case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[values]):
            return ~inner(left).is_in(ast.literal_eval(values))
        case (
            ast.Compare(left=left, ops=[op], comparators=[right])
            | ast.BinOp(left=left, op=op, right=right)
        ) if type(op) in _OPERATORS:
            return _applied(op, inner(left), inner(right))
        case ast.Compare(left=left, ops=[op, *ops], comparators=[middle, *others]) if ops:
            first = ast.Compare(left, [op], [middle])
            return inner(first) & inner(ast.Compare(middle, ops, others))
    raise ValueError(
        f"{text!r} has {ast.unparse(node)!r}. Use columns, values, + - * /, comparisons, "
        f"in, and, or, not."
    )


def _applied(op: ast.AST, left: Expr, right: Expr) -> Expr:
    return FunctionCall(_OPERATORS[type(op)][1], (left, right))
