"""What is done with the rows of a unit: the steps of a stage, run one after another as streams."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from miniray.common.read_ahead import read_ahead
from miniray.data.blocks import Arrays, batch_to_table, rows_to_table, table_to_rows
from miniray.data.tables import Rows, batched, gathered, resized, tabulated
from miniray.exceptions import MinirayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from miniray.data.expressions import Expr

#: Bytes of a batch with batch_size="auto", and of batches that become a table together.
_AUTO = 4 * 2**20
#: Rows that become a table together, at most, and as long as their size is not known.
_TOGETHER = 4096
_FIRST = 16
#: Where code is that is no user's, as stacks name it: here, and in what is called from here.
_INSIDE = ("/miniray/data/", "pyarrow/", "/fsspec/", "/cloudpickle/")
#: Signs of an error's text that are shown.
_SAID = 4000
#: What a function may fill again for its next row.
_FILLED = frozenset({np.ndarray, list})


class DataError(MinirayError, RuntimeError):
    """A function of the user, or a file, has failed; the text names it, and the rows."""


@dataclasses.dataclass(frozen=True)
class Where:
    """What is being read, for messages and seeds."""

    #: The unit: a file and rows.
    label: str
    #: Which call of its stage this is, or the key of the unit: random numbers are drawn from it.
    index: int = 0


class Transform:
    """One step of a stage.

    Attributes:
        name: As plans, errors and statistics name it, such as "Map(f)".
        keeps_count: Whether as many rows come out as went in.
        user: Whether it calls a function of the user.
        spreads: Whether it takes so long that small data are cut for all CPUs.
        least: Rows that it wants at once.
    """

    name: str
    keeps_count: bool = True
    user: bool = False
    spreads: bool = False
    least: int = 1

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        """Yield the tables that it makes of others."""
        raise NotImplementedError

    def schema(self, schema: Any) -> Any:
        """Return the schema of the result; None if only running it shows it."""
        return None

    def prepared(self) -> Transform:
        """Return the step as it is run in a process: an object is made of a class."""
        return self


@dataclasses.dataclass(frozen=True)
class Udf:
    """A function of the user, or a class, made with ``init_args``, whose object is called.

    Attributes:
        is_object: Whether the function is such an object.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    init_args: tuple[Any, ...] = ()
    init_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_object: bool = False

    @property
    def name(self) -> str:
        """Its name, for plans."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def is_class(self) -> bool:
        """Whether an object has to be made first, which an actor keeps."""
        return isinstance(self.function, type)

    def made(self, step: str) -> Udf:
        """Return this function of a step, with an object in place of the class.

        Raises:
            DataError: The constructor of the class has failed.
        """
        if not self.is_class:
            return self
        try:
            made = self.function(*self.init_args, **self.init_kwargs)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - its text and stack are shown
            raise _error_of(f"{step}: {self.name}() failed", error) from None
        return Udf(made, self.args, self.kwargs, is_object=True)

    def __call__(self, value: Any) -> Any:
        """Call the function with a row or a batch."""
        return self.function(value, *self.args, **self.kwargs)


def _error_of(what: str, error: BaseException) -> DataError:
    """Return the error of the user's code, with the stack of that only."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _INSIDE)]
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if len(said) > _SAID:  # it may have a value of the data, of any size
        said = f"{said[:_SAID]} ..."
    return DataError("\n".join([f"{what}: {said}", "".join(traceback.format_list(own))]).rstrip())


@contextlib.contextmanager
def told(step: str, where: Where, rows: str | Callable[[], str] = "rows") -> Iterator[None]:
    """Raise what fails as the error of a step on these rows; one that says all stays as it is."""
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - its text and stack are shown
        rows = rows if isinstance(rows, str) else rows()
        # A StopIteration as the cause would be raised in its place.
        raise _error_of(f"{step} failed on {rows} of {where.label}", error) from None


def check_columns(who: str, names: Iterable[str], table: Any) -> None:
    """Raise DataError if a table lacks one of these columns."""
    for name in names:
        if name not in table.column_names:
            there = ", ".join(table.column_names) or "none"
            raise DataError(f"{who} has no column {name!r}, but {there}.")


def _rows_text(start: int, count: int) -> str:
    return f"row {start}" if count == 1 else f"rows {start} to {start + count - 1}"


@dataclasses.dataclass(frozen=True)
class UserStep(Transform):
    """Calls a function of the user: the base of such steps."""

    name: str
    udf: Udf
    user = spreads = True

    def prepared(self) -> Transform:
        return dataclasses.replace(self, udf=self.udf.made(self.name))


def _own(row: Any) -> Any:
    """Copy a row that a function may fill again: its dictionary, arrays and lists."""
    if type(row) is not dict:
        if isinstance(row, Mapping):  # a Series of pandas, which has keys, is none
            return row
        raise TypeError(f"a row is a dictionary, such as {{'item': 1}}, not {type(row).__name__}")
    return {n: value.copy() if type(value) in _FILLED else value for n, value in row.items()}


@dataclasses.dataclass(frozen=True)
class MapRows(UserStep):
    """Calls a function for each row: the kind is "Map", "FlatMap" or "Filter"."""

    kind: str

    @property
    def keeps_count(self) -> bool:  # type: ignore[override]
        return self.kind == "Map"

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        at, step = 0, _FIRST
        for whole in tables:
            if not whole.num_rows and self.kind == "Filter":
                yield whole  # others make columns, which only a row tells
            start = 0
            while start < whole.num_rows:
                table = whole.slice(start, min(step, whole.num_rows - start))
                made = self._made(table, at, where)
                yield made
                start += table.num_rows
                at += table.num_rows
                size = max(made.nbytes, table.nbytes) // table.num_rows
                step = min(_TOGETHER, max(1, _AUTO // max(size, 1)))

    def _made(self, table: Any, at: int, where: Where) -> Any:
        number = at
        made: list[Any] = []
        with told(self.name, where, lambda: f"row {number}"):
            for number, row in enumerate(table_to_rows(table), at):  # noqa: B007 - of an error
                result = self.udf(row)
                if self.kind == "Filter":
                    made.append(bool(result))
                elif self.kind == "Map":
                    made.append(_own(result))
                else:
                    made.extend(map(_own, result))
        if self.kind == "Filter":
            return table.filter(np.asarray(made, dtype=bool))
        with told(self.name, where, _rows_text(at, table.num_rows)):
            return rows_to_table(made)


@dataclasses.dataclass(frozen=True)
class MapBatches(UserStep):
    """Calls a function for each batch.

    Attributes:
        changes_count: Whether other numbers of rows come out; False is checked, None is not.
    """

    batch_size: int | str | None = None
    batch_format: str | None = "default"
    zero_copy: bool = False
    changes_count: bool | None = None

    def batches(self, tables: Iterator[Any]) -> Iterator[Rows]:
        """Yield the rows, some each time, for which the function is called."""
        if isinstance(self.batch_size, int):
            return batched(tables, self.batch_size)
        whole = resized if self.batch_size == "auto" else gathered  # small files are a table each
        return batched(whole(tables, _AUTO), None)

    @property
    def keeps_count(self) -> bool:  # type: ignore[override]
        return self.changes_count is False

    @property
    def least(self) -> int:  # type: ignore[override]
        return self.batch_size if isinstance(self.batch_size, int) else 1

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        ahead = int(self.udf.is_object)  # one, as of a model, may keep a GPU busy meanwhile
        batches = read_ahead(self._batches(tables, where), ahead, "miniray-batches")
        return tabulated(self._results(batches, where), _AUTO)

    def _results(self, batches: Iterator[tuple[int, str, Any]], where: Where) -> Iterator[Any]:
        """Yield what the function returns for batches, as ``tabulated`` takes it."""
        for count, rows, batch in batches:
            made = 0
            for result in self._call(batch, rows, where):
                made += result.num_rows
                if self.keeps_count and made > count:
                    break  # there may be no end
                yield result
                del result  # before the function is called again
            if self.keeps_count and made != count:
                raise DataError(
                    f"{self.name} returned {made} rows for the {count} ({rows}) of {where.label}. "
                    f"If it changes their number, pass udf_modifying_row_count=True."
                )

    def _batches(self, tables: Iterator[Any], where: Where) -> Iterator[tuple[int, str, Any]]:
        """Yield a batch's number of rows, their name in errors, and the batch."""
        at = 0
        for rows in self.batches(tables):
            named = _rows_text(at, rows.num_rows)
            at += rows.num_rows
            with told(self.name, where, named):
                batch = rows.batch(self.batch_format, writable=not self.zero_copy)
            yield rows.num_rows, named, batch
            del batch  # before the next one is made

    def _call(self, batch: Any, rows: str, where: Where) -> Iterator[Any]:
        with told(self.name, where, rows):
            result = self.udf(batch)
            for each in result if hasattr(result, "__next__") else (result,):
                yield Arrays.of(each) or batch_to_table(each)


class TableStep(Transform):
    """A step that changes each table by itself."""

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        for table in tables:  # one without columns was empty before anything was known
            yield self.changed(table, where) if table.num_columns or table.num_rows else table

    def changed(self, table: Any, where: Where) -> Any:
        """Return what becomes of a table."""
        raise NotImplementedError

    def schema(self, schema: Any) -> Any:
        # Without columns: what it is of was empty before anything was known.
        return self.changed(schema.empty_table(), Where("the data")).schema if schema else None


@dataclasses.dataclass(frozen=True)
class FilterExpr(TableStep):
    """Keeps the rows for which an expression is true."""

    name: str
    expr: Expr
    keeps_count = False

    def changed(self, table: Any, where: Where) -> Any:
        with told(self.name, where):
            return table.filter(self.expr.values(table))


@dataclasses.dataclass(frozen=True)
class WithColumns(TableStep):
    """Adds columns, or replaces some, by expressions."""

    name: str
    exprs: Mapping[str, Expr]

    def changed(self, table: Any, where: Where) -> Any:
        with told(self.name, where):
            made = {name: expr.values(table) for name, expr in self.exprs.items()}
        return pa.table({**dict(zip(table.column_names, table.columns, strict=True)), **made})


@dataclasses.dataclass(frozen=True)
class Columns(TableStep):
    """Selects, drops or renames columns, by a method of tables."""

    name: str
    method: str
    names: list[str] | Mapping[str, str]

    def changed(self, table: Any, where: Where) -> Any:
        check_columns(f"{self.name}: {where.label}", self.names, table)
        found = getattr(table, self.method)(self.names)
        if len(set(found.column_names)) < found.num_columns:
            raise DataError(f"{self.name}: {where.label} would have two columns of the same name.")
        return found


@dataclasses.dataclass(frozen=True)
class Sample(Transform):
    """Keeps each row with a probability."""

    fraction: float
    seed: int
    name = "RandomSample"
    keeps_count = False

    def run(self, tables: Iterator[Any], where: Where) -> Iterator[Any]:
        """Yield the rows that are drawn, the same ones each time."""
        random = np.random.default_rng((self.seed, where.index))
        for table in tables:
            yield table.filter(random.random(table.num_rows) < self.fraction)

    def schema(self, schema: Any) -> Any:
        return schema
