"""Blocks: Arrow tables, made of rows and batches, and turned into them.

Tensors are columns of ``arrow.fixed_shape_tensor``, or of ``Ragged`` if their shapes differ. What
Arrow can't hold is pickled into a column of ``Pickled``, between processes only: the type is not
registered, so a column of a file is never one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Bytes below which a table is copied together with others: each costs time.
SMALL = 1 << 20
#: Types of NumPy that become columns without a look at their values.
_NUMBERS = frozenset(map(np.dtype, "?bBhHiIlLqQefd"))
BATCH_FORMATS = ("default", "numpy", "pandas", "pyarrow")


class _Stored(pa.ExtensionType):  # type: ignore[misc]
    """A type that is fully described by its storage."""

    __hash__ = pa.DataType.__hash__
    called: str

    def __init__(self, storage_type: Any) -> None:
        super().__init__(storage_type, self.called)

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> _Stored:
        return cls(storage_type)


class Ragged(_Stored):
    """Arrays of different shapes: a struct of their values and their shapes."""

    called = "miniray.ragged_tensor"

    @classmethod
    def of(cls, value_type: Any) -> Ragged:
        """Return the type of arrays of these values."""
        shape = pa.list_(pa.int64())
        return cls(pa.struct([("data", pa.large_list(value_type)), ("shape", shape)]))

    @property
    def value_type(self) -> Any:
        return self.storage_type.field("data").type.value_type


class Pickled(_Stored):
    """Python objects, pickled. Never registered with Arrow: files have no such columns."""

    called = "miniray.pickled"


# --- into tables ------------------------------------------------------------------------


def rows_to_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a table; a value that a row lacks is null."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    columns = {name: [row.get(name) for row in rows] for name in names}
    return batch_to_table(columns) if columns else no_columns(len(rows))


def batch_to_table(batch: Any) -> Any:
    """Return a batch of any format as a table.

    Raises:
        TypeError: The batch is of no known format.
        ValueError: Its columns have different lengths.
    """
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.Table.from_batches([batch])
    if not hasattr(batch, "keys") or getattr(batch, "ndim", 2) < 2:  # a Series has keys, too
        kind = type(batch).__name__
        raise TypeError(f"a batch is a dictionary of arrays, a DataFrame or a table, not {kind}")
    names = [str(name) for name in batch]
    if len(set(names)) < len(names):
        raise ValueError(f"a batch has two columns of the same name: {', '.join(names)}")
    columns = {str(name): column(batch[name]) for name in batch}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch differ in length: {lengths}")
    table = pa.table(columns) if columns else no_columns(len(batch))
    kinds = batch.dtypes.items() if hasattr(batch, "dtypes") else ()
    # Arrow makes numbers of pandas again by their names, such as Int64, which may be null.
    kept = [name for name, kind in kinds if hasattr(kind, "numpy_dtype") and kind.kind in "biuf"]
    if kept:
        described = pa.Schema.from_pandas(batch[kept].rename(columns=str), preserve_index=False)
        table = table.replace_schema_metadata(described.metadata)
    return table


class Arrays(NamedTuple):
    """A small batch of arrays of numbers, which becomes a table with others of the same kinds."""

    #: Name, type and shape of each.
    kinds: list[Any]
    num_rows: int
    nbytes: int
    arrays: dict[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Arrays | None:
        """Return a batch as one; None if it is anything else, or large."""
        if type(batch) is not dict or {type(each) for each in batch.values()} != {np.ndarray}:
            return None
        kinds = [(name, each.dtype, each.shape[1:]) for name, each in batch.items()]
        lengths = {len(each) if each.ndim else -1 for each in batch.values()}
        size = sum(each.nbytes for each in batch.values())
        plain = all(kind in _NUMBERS for _, kind, _ in kinds)
        if size >= SMALL or not plain or len(lengths) > 1 or -1 in lengths:
            return None
        return cls(kinds, lengths.pop(), size, batch)


def column(values: Any) -> Any:
    """Return values as an Arrow array: an array, a tensor, a Series, or a list of anything."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, _tensor_class()):
        values = values.detach().cpu().numpy()
    typed = getattr(values, "dtype", np.object_) != np.object_
    pandas = sys.modules.get("pandas")
    if typed and isinstance(values, np.ndarray) and values.ndim:
        return _of_array(values)
    if typed and pandas is not None and isinstance(values, pandas.Series):
        found = pa.array(values.copy(), from_pandas=True)  # as _kept() does
        if pa.types.is_dictionary(kind := found.type):  # of other batches there may be more
            found = found.cast(pa.dictionary(pa.int32(), kind.value_type, kind.ordered))
        return found
    if isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0:
        return _of_values(list(values))
    raise TypeError(f"a column is an array or a list, not {type(values).__name__}")


def _tensor_class() -> Any:
    """Return PyTorch's class of tensors; no class before PyTorch is loaded."""
    return getattr(sys.modules.get("torch"), "Tensor", ())


def _kept(values: Any) -> Any:
    """Return an array, contiguous, as one that is not written to: a function may fill its again."""
    if values.flags.writeable or not values.flags.c_contiguous:
        values = np.array(values, order="C", subok=True)  # with its mask
        values.setflags(write=False)
    return values


def _of_array(values: Any) -> Any:
    kind = values.dtype.kind
    if values.ndim == 1 and kind not in "cV":
        if type(values) is np.ndarray and values.dtype in _NUMBERS and kind != "b":
            # By its function array(), Arrow would import pandas.
            buffers = [None, pa.py_buffer(_kept(values))]
            return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)
        # Arrow ends texts of NumPy at a zero.
        return pa.array(values.tolist() if kind in "US" else _kept(values))
    if kind not in "biuf":
        # By tolist(), masked values are None.
        return _of_values(values.tolist() if values.ndim == 1 and kind == "c" else list(values))
    if 0 in values.shape[1:]:
        return ragged(list(values), values.dtype)
    flat = _of_array(np.ravel(_kept(values)))
    tensor = pa.fixed_shape_tensor(flat.type, values.shape[1:])
    storage = pa.FixedSizeListArray.from_arrays(flat, type=tensor.storage_type)
    return pa.ExtensionArray.from_storage(tensor, storage)


def _of_values(values: list[Any]) -> Any:
    tensor = _tensor_class()
    if any(issubclass(kind, tensor) for kind in set(map(type, values))):
        values = [v.detach().cpu().numpy() if isinstance(v, tensor) else v for v in values]
    first = next((value for value in values if value is not None), None)
    if isinstance(first, np.ndarray):
        return _of_arrays(values)
    if isinstance(first, np.void) and first.dtype.names:  # item() has no names
        return pickled(values)
    kinds = set(map(type, values))
    converting = kinds & {np.str_, np.bytes_, np.bool_, np.float16}
    if converting and len(kinds - {type(None)}) > 1:  # Arrow would convert what is beside them
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
        kinds = set(map(type, values))
    if {str, bytes} <= kinds or kinds & {set, frozenset}:  # Arrow would make others of them
        return pickled(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError, ValueError):
        # Arrow takes some of NumPy's and of pandas' values as those of Python only.
        pandas = sys.modules.get("pandas")
        missing = set() if pandas is None else {id(pandas.NaT), id(pandas.NA)}
        plain = [None if id(value) in missing else value for value in values]
        plain = [value.item() if isinstance(value, np.generic) else value for value in plain]
        return pickled(values) if set(map(type, plain)) == kinds else _of_values(plain)


def _of_arrays(values: list[Any]) -> Any:
    there = [value for value in values if value is not None]
    if not all(isinstance(value, np.ndarray) and value.dtype.kind in "biuf" for value in there):
        if all(isinstance(v, np.ndarray) and v.ndim == 1 and v.dtype == np.object_ for v in there):
            # Lists of Arrow come so, as of texts.
            made = _of_values([value if value is None else list(value) for value in values])
            return pickled(values) if isinstance(made.type, Pickled) else made
        return pickled(values)
    alike = len({value.shape for value in there}) == 1
    if alike and len(there) == len(values) and there[0].size:
        made = np.stack(there)
        made.setflags(write=False)
        return _of_array(made)
    return ragged(values, np.result_type(*(value.dtype for value in there)))


def ragged(values: list[Any], dtype: Any) -> Any:
    """Return arrays as a column of tensors of different shapes, with values of a dtype of NumPy."""

    def stored(value: Any) -> dict[str, Any]:
        return {"data": value.astype(dtype).reshape(-1), "shape": list(value.shape)}

    return _encoded(Ragged.of(pa.from_numpy_dtype(dtype)), values, stored)


def pickled(values: list[Any]) -> Any:
    """Return values as a column of pickled objects, which no file can have."""
    from miniray.cloudpickle import dumps

    return _encoded(Pickled(pa.large_binary()), values, dumps)


def _encoded(kind: Any, values: list[Any], encode: Callable[[Any], Any]) -> Any:
    """Return values as a column of a type, each encoded as it is stored."""
    stored = [None if value is None else encode(value) for value in values]
    return pa.ExtensionArray.from_storage(kind, pa.array(stored, kind.storage_type))


def no_rows(schema: Any) -> Any:
    """Return a table without rows. For its method empty_table(), Arrow imports pandas."""
    return pa.table([pa.nulls(0, kind) for kind in schema.types], schema=schema)


def no_columns(rows: int) -> Any:
    """Return a table of ``rows`` rows and no column; Arrow makes one only by selecting none."""
    return pa.table({"_": pa.nulls(rows)}).select([])


# --- out of tables ----------------------------------------------------------------------


def table_to_batch(table: Any, batch_format: str | None) -> Any:
    """Return a table as a batch; None is the format "pyarrow"."""
    if batch_format in (None, "pyarrow"):
        return table
    if batch_format == "pandas":
        return _to_pandas(table)
    return {name: to_numpy(table.column(name)) for name in table.column_names}


def check_format(caller: str, batch_format: Any) -> None:
    """Raise ValueError if there is no such format."""
    if batch_format not in (None, *BATCH_FORMATS):
        known = ", ".join(BATCH_FORMATS)
        raise ValueError(f"{caller}(batch_format={batch_format!r}) must be one of {known} or None.")


def _to_pandas(table: Any) -> Any:
    special = [field.name for field in table.schema if isinstance(field.type, pa.BaseExtensionType)]
    plain = table.drop_columns(special)
    try:
        frame = plain.to_pandas()
    except (TypeError, NotImplementedError, pa.ArrowInvalid):  # a column changed its type since
        frame = plain.to_pandas(ignore_metadata=True)
    for name in special:
        frame.insert(table.column_names.index(name), name, values_of(table.column(name)))
    return frame


def to_numpy(values: Any) -> Any:
    """Return a column as an array.

    Lists become further axes where all are of one length, tensors keep their shape, null becomes
    NaN in columns of numbers, and text is of dtype object.
    """
    if isinstance(values, pa.ChunkedArray):
        chunks = [chunk for chunk in values.chunks if len(chunk)] or [values.combine_chunks()]
        parts = list(map(to_numpy, chunks))
        if len({part.shape[1:] for part in parts}) > 1:
            return np.fromiter(itertools.chain(*parts), object)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType) and not values.null_count:
        return to_numpy(values.storage.flatten()).reshape(len(values), *kind.shape)
    if isinstance(kind, Pickled | Ragged | pa.FixedShapeTensorType):
        return np.fromiter(values_of(values), object)
    if isinstance(kind, pa.BaseExtensionType):
        return to_numpy(values.storage)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.unique(pc.list_value_length(values)).to_pylist()
        if len(lengths) == 1 and None not in lengths:
            inner = to_numpy(values.flatten())
            return inner.reshape(len(values), *lengths, *inner.shape[1:])
    if not values.null_count and _is_number(kind):
        return np.from_dlpack(values)  # read-only; for its method to_numpy(), Arrow imports pandas
    return values.to_numpy(zero_copy_only=False)


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_plain(values: Any) -> bool:
    """Return whether a column has numbers only: the array of some rows is a part of its array."""
    if isinstance(values.type, pa.FixedShapeTensorType) and not values.null_count:
        return all(is_plain(chunk.storage.flatten()) for chunk in values.chunks)
    return not values.null_count and (_is_number(values.type) or values.type == pa.bool_())


def values_of(values: Any) -> list[Any]:
    """Return a column as a list of its values per row."""
    if isinstance(values, pa.ChunkedArray):
        return [value for chunk in values.chunks for value in values_of(chunk)]
    kind = values.type
    if not isinstance(kind, Pickled | Ragged | pa.FixedShapeTensorType):
        plain = not values.null_count and _is_number(kind)
        cells: list[Any] = to_numpy(values).tolist() if plain else values.to_pylist()
        return cells
    there = values.drop_null()
    found: Iterator[Any]
    if isinstance(kind, Pickled):
        found = map(pickle.loads, there.storage.to_pylist())
    elif isinstance(kind, pa.FixedShapeTensorType):
        found = iter(to_numpy(there))
    else:
        data, shapes = there.storage.field("data"), there.storage.field("shape").to_pylist()
        pairs = zip(data, shapes, strict=True)
        found = (to_numpy(flat.values).reshape(shape) for flat, shape in pairs)
    return [next(found) if valid else None for valid in values.is_valid().to_pylist()]


def table_to_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries; a cell of a tensor is an array, maybe a read-only view."""
    names = table.column_names
    columns = [values_of(table.column(name)) for name in names]  # KeyError if two have one name
    for cells in zip(*columns, strict=True) if names else [()] * table.num_rows:
        yield dict(zip(names, cells, strict=True))


# --- columns of files -------------------------------------------------------------------


def from_file(table: Any) -> Any:
    """Return a table that was read from a file with its tensors in their shape.

    Ray's tensors (``ray.data.arrow_tensor``, also version 2) become Arrow's own: a view. Types
    unknown to pyarrow stay as they are stored; nothing is unpickled.
    """
    for index, field in enumerate(table.schema):
        if kind := _ray_type(field):
            with contextlib.suppress(pa.ArrowInvalid):  # cells of another size
                values = table.column(index).cast(kind.storage_type).cast(kind)
                table = table.set_column(index, field.name, values)
    return table


def _ray_type(field: Any) -> Any:
    """Return the type of Ray's tensors in a column of a file; None if it has none."""
    metadata = field.metadata or {}
    name = metadata.get(b"ARROW:extension:name", b"").decode()
    if name.startswith("ray.data.arrow_variable_shaped_tensor"):
        return Ragged.of(field.type.field("data").type.value_type)
    if not name.startswith("ray.data.arrow_tensor"):
        return None
    described = json.loads(metadata.get(b"ARROW:extension:metadata", b"[]"))
    shape = described["shape"] if isinstance(described, dict) else described
    return None if 0 in shape else pa.fixed_shape_tensor(field.type.value_type, shape)


def shown_type(kind: Any) -> str:
    """Return a type as users read it."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"tensor({', '.join(map(str, kind.shape))})[{kind.value_type}]"
    if isinstance(kind, Ragged):
        return f"tensor(...)[{kind.value_type}]"
    return "object" if isinstance(kind, Pickled) else str(kind)


with contextlib.suppress(pa.ArrowKeyError):  # tables have it that are read from Arrow's own formats
    pa.register_extension_type(Ragged.of(pa.int64()))
