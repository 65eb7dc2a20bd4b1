"""Expressions over columns, such as ``col("a") * 2 > lit(5)``, by calls of pyarrow.compute."""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: By the operator in a text: its sign in Python, and its function, mostly of pyarrow.compute.
_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "add"),
    ast.Sub: ("-", "subtract"),
    ast.Mult: ("*", "multiply"),
    ast.Div: ("/", "divide"),
    ast.FloorDiv: ("//", "floor_divide"),
    ast.Mod: ("%", "modulo"),
    ast.Eq: ("==", "equal"),
    ast.NotEq: ("!=", "not_equal"),
    ast.Lt: ("<", "less"),
    ast.LtE: ("<=", "less_equal"),
    ast.Gt: (">", "greater"),
    ast.GtE: (">=", "greater_equal"),
    ast.BitAnd: ("&", "and_kleene"),
    ast.BitOr: ("|", "or_kleene"),
}
_TEXTS = {pa.string(), pa.large_string()}
_SIGNS = {function: sign for sign, function in _OPERATORS.values()}


def _operator(function: str, *, swapped: bool = False) -> Callable[[Expr, Any], Expr]:
    """Return the method for an operator; ``swapped`` is for expressions on its right."""

    def method(self: Expr, other: Any) -> Expr:
        other = other if isinstance(other, Expr) else lit(other)
        return Expr(function, (other, self) if swapped else (self, other))

    return method


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """What is computed of the columns of a table. Made by ``col`` and ``lit``.

    Attributes:
        function: Of pyarrow.compute, or "column" or "literal".
        operands: The expressions that it is called with.
        argument: The name of a column, a value, a type to cast to, or values to look among.
    """

    function: str
    operands: tuple[Expr, ...] = ()
    argument: Any = None

    def evaluate(self, table: Any) -> Any:
        """Return the values for the rows of a table: a column, or one scalar for all."""
        operands = [operand.evaluate(table) for operand in self.operands]
        match self.function:
            case "column":
                if self.argument not in table.column_names:
                    there = ", ".join(table.column_names) or "none"
                    raise KeyError(f"There is no column {self.argument!r}, but {there}.")
                return table.column(self.argument)
            case "literal":
                return pa.scalar(self.argument)
            case "is_in":
                known = pa.array(self.argument)
                (values,) = operands
                if pa.types.is_null(values.type):  # of rows of which none has a value
                    values = pc.cast(values, known.type)
                return pc.is_in(values, value_set=known)
            case "cast":
                return pc.cast(*operands, self.argument)
            case "floor_divide" | "modulo":
                return _divided(*operands)[self.function == "modulo"]
            case "add" if (kinds := {each.type for each in operands}) <= _TEXTS:
                kind = max(kinds, key=pa.types.is_large_string)
                texts = [pc.cast(each, kind) for each in [*operands, pa.scalar("")]]
                return pc.binary_join_element_wise(*texts)
        return pc.call_function(self.function, operands)

    def values(self, table: Any) -> Any:
        """Return a value for each row of a table."""
        found = self.evaluate(table)
        if not isinstance(found, pa.Scalar):
            return found
        return pa.repeat(found, max(1, table.num_rows)).slice(0, table.num_rows)

    def columns(self) -> set[str]:
        own = {self.argument} if self.function == "column" else set()
        return own.union(*(operand.columns() for operand in self.operands))

    def alias(self, name: str) -> Expr:
        """Return the expression itself: ``with_column(name, expr)`` names the result."""
        return self

    def is_null(self) -> Expr:
        return Expr("is_null", (self,))

    def is_not_null(self) -> Expr:
        return Expr("is_valid", (self,))

    def is_in(self, values: Any) -> Expr:
        """Return whether a value is one of these."""
        return Expr("is_in", (self,), tuple(values))

    def not_in(self, values: Any) -> Expr:
        """Return whether a value is none of these."""
        return ~self.is_in(values)

    def cast(self, kind: Any) -> Expr:
        """Convert to a type of Arrow, or to the one of this name."""
        return Expr("cast", (self,), kind)

    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", swapped=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", swapped=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", swapped=True)
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _operator("floor_divide", swapped=True)
    __mod__, __rmod__ = _operator("modulo"), _operator("modulo", swapped=True)
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__ = _operator("equal")  # type: ignore[assignment]
    __ne__ = _operator("not_equal")  # type: ignore[assignment]
    __and__, __or__ = _operator("and_kleene"), _operator("or_kleene")
    __hash__ = object.__hash__

    def __invert__(self) -> Expr:
        return Expr("invert", (self,))

    if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

        def __getattr__(self, name):
            told = f"Expressions have no {name!r}: compute it in a function given to add_column()."
            raise AttributeError(told, name=name, obj=self)

    def __bool__(self) -> bool:
        raise TypeError("Combine expressions with & and |, and negate one with ~.")

    def __repr__(self) -> str:
        if not self.operands:
            return str(self.argument) if self.function == "column" else repr(self.argument)
        if self.function in _SIGNS:
            left, right = self.operands
            return f"({left!r} {_SIGNS[self.function]} {right!r})"
        shown = [*self.operands, *([] if self.argument is None else [self.argument])]
        return f"{self.function}({', '.join(map(repr, shown))})"


def _divided(left: Any, right: Any) -> tuple[Any, Any]:
    """Return quotients, rounded down as in Python, and remainders."""
    whole = pc.divide(left, right)
    whole = pc.floor(whole) if pa.types.is_floating(whole.type) else whole
    rest = pc.subtract(left, pc.multiply(whole, right))
    above = pc.and_(pc.not_equal(rest, 0), pc.not_equal(pc.less(rest, 0), pc.less(right, 0)))
    above = pc.cast(above, whole.type)
    return pc.subtract(whole, above), pc.add(rest, pc.multiply(above, right))


def col(name: str) -> Expr:
    """Return the values of a column."""
    return Expr("column", argument=name)


def lit(value: Any) -> Expr:
    """Return one value for all rows."""
    return Expr("literal", argument=value)


def comparisons(expr: Expr) -> Iterator[tuple[str, str, Any]]:
    """Yield (column, function, value) of the comparisons that all rows kept must fulfil."""
    match expr:
        case Expr("and_kleene", (left, right)):
            yield from comparisons(left)
            yield from comparisons(right)
        case Expr(function, (Expr("column", (), name), Expr("literal", (), value))):
            yield name, function, value


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
            return col(name)
        case ast.Constant(value=value):
            return lit(value)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return ~inner(operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return lit(-value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return 0 - inner(operand)
        case ast.Call(func=ast.Name(id="is_null" | "is_valid" | "is_nan" as name), args=[operand]):
            return Expr(name, (inner(operand),))
        case ast.BoolOp(op=op, values=values):
            both = operator.and_ if isinstance(op, ast.And) else operator.or_
            return functools.reduce(both, map(inner, values))
        case ast.Compare(left=left, ops=[ast.In()], comparators=[values]):
            return inner(left).is_in(ast.literal_eval(values))
        case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[values]):
            return ~inner(ast.Compare(left, [ast.In()], [values]))
        case (
            ast.Compare(left=left, ops=[op], comparators=[right])
            | ast.BinOp(left=left, op=op, right=right)
        ) if type(op) in _OPERATORS:
            return Expr(_OPERATORS[type(op)][1], (inner(left), inner(right)))
    raise ValueError(
        f"{text!r} has {ast.unparse(node)!r}. Use columns, values, + - * / // %, comparisons "
        f"of two, in, and, or, not."
    )
