"""Turns what a user gives as a dataset into a source, or says what can be given."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.data.context import ExecutionOptions
    from miniray.train.data.shards import DataConfig
    from miniray.train.data.sources import Source, StreamSource

_ALLOWED = (
    "a dataset of miniray.data, a PyTorch dataset (with __len__ and __getitem__, or with "
    "__iter__), a pyarrow.Table, paths of Parquet files, a pyarrow.dataset.Dataset, a "
    "pandas.DataFrame, a Hugging Face dataset, or a function that returns one"
)

#: Bytes of small row groups that are read together.
_TOGETHER = 4 * 2**20
#: A table that keeps this many times its size alive, as a slice of a larger one does, is copied.
_SLICE_FACTOR = 1.5


def adapt_all(
    datasets: Any, config: DataConfig, num_workers: int
) -> dict[str, Source | StreamSource]:
    """Return a source for each dataset of a trainer.

    Raises:
        TypeError: The datasets are no dictionary, or one is of an unsupported kind.
        ValueError: One can't be used; the message says why.
        FileNotFoundError: There are no files at a path.
        ImportError: pyarrow or numpy is missing.
    """
    if datasets is None:
        return {}
    if not hasattr(datasets, "items"):
        raise TypeError(
            f'datasets={_short(datasets)} must be a dictionary, such as {{"train": dataset}}.'
        )
    sources = {
        name: adapt(name, dataset, shuffled=config.shuffles(name), options=config.options(name))
        for name, dataset in datasets.items()
    }
    config.check_names(sources)
    for name, source in sources.items():
        check_rows(name, source, num_workers if config.splits(name) else 1)
    return sources


def check_rows(name: str, source: Source | StreamSource, parts: int) -> None:
    """Raise ValueError if there is not a row for each part: its rank would have no batch."""
    if source.num_rows < max(1, parts):
        raise ValueError(
            f"datasets[{name!r}] has {source.num_rows} rows, less than one for each of "
            f"{max(1, parts)} workers."
        )


def adapt(
    name: Any, dataset: Any, *, shuffled: bool = False, options: ExecutionOptions | None = None
) -> Source | StreamSource:
    """Return the source of one dataset, or of a function's result; see ``adapt_all``.

    Args:
        name: Its name.
        dataset: The dataset, or the function.
        shuffled: Whether each epoch gets an order of its own.
        options: How a dataset of ``miniray.data`` is executed. Default: as its context says.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"datasets has the key {name!r}; names of datasets are non-empty strings.")
    if inspect.isroutine(dataset) or isinstance(dataset, functools.partial):
        dataset = dataset()
    try:
        source = _source_of(name, dataset, shuffled, options)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"datasets[{name!r}]: {error}") from error
    except ImportError as error:
        raise ImportError(
            f"datasets[{name!r}] needs {error.name}, which is not installed. "
            f"Run `pip install 'miniray[train]'`."
        ) from error
    return source


def _source_of(
    name: str, dataset: Any, shuffled: bool, options: ExecutionOptions | None
) -> Source | StreamSource:
    paths = dataset if isinstance(dataset, list | tuple) else [dataset]
    if paths and all(isinstance(path, str | os.PathLike) for path in paths):
        return _from_paths(paths)
    if type(dataset).__module__.startswith("miniray.data."):
        from miniray.train.data.datasets import DatasetSource

        return DatasetSource(dataset, shuffled=shuffled, options=options)
    library = type(dataset).__module__.partition(".")[0]
    if library in _BY_LIBRARY:
        source: Source | StreamSource | None = _BY_LIBRARY[library](dataset)
        if source is not None:
            return source
    return _items_of(name, dataset)


def _items_of(name: str, dataset: Any) -> Source | StreamSource:
    from miniray.train.data.sources import MapSource, StreamSource

    refusal = _refusal(dataset)
    if refusal is not None:
        raise TypeError(f"datasets[{name!r}] is {_short(dataset)}. {refusal}")
    kind = type(dataset)
    torch = sys.modules.get("torch")
    iterable = torch is not None and isinstance(dataset, torch.utils.data.IterableDataset)
    if not iterable and hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return MapSource(dataset)
    if hasattr(kind, "__iter__"):
        return StreamSource(dataset)
    raise TypeError(
        f"datasets[{name!r}] is {_short(dataset)}, which is no dataset. Give {_ALLOWED}."
    )


def _refusal(dataset: Any) -> str | None:
    """Return why something that looks like items is none, or None."""
    if isinstance(dataset, type):
        return f"That is a class; give an object of it. Possible are {_ALLOWED}."
    if isinstance(dataset, dict | set | frozenset | bytes | bytearray):
        return f"Give {_ALLOWED}."
    if hasattr(type(dataset), "__next__"):
        return "It can be read only once, and each epoch begins anew. Give what it iterates over."
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.DataLoader):
        return (
            "Give the dataset that it loads, or make the loader in the train loop and pass it to "
            "miniray.train.torch.prepare_data_loader()."
        )
    return None


def _from_paths(paths: Sequence[str | os.PathLike[str]]) -> Source:
    """Return the row groups of Parquet files, which must all have the same columns.

    Small ones are read together: each read parses the footer of its file.
    """
    from miniray.data.files import find_files
    from miniray.data.parquet import PARQUET, ParquetDatasource
    from miniray.data.sources import CutWish
    from miniray.data.transforms import DataError
    from miniray.train.data.units import UnitsSource

    filesystem, found = find_files(paths, None, [".parquet"], "Parquet")
    files = ParquetDatasource(PARQUET, filesystem, {}, (), found, PARQUET.name)
    try:
        schemas = files.schemas(found)
    except DataError as error:
        raise ValueError(f"Not each of them is a Parquet file: {error}") from error
    first, known = schemas[0]
    for path, schema in schemas:
        if not schema.equals(known):
            raise ValueError(
                f"The Parquet files have different columns: {first} has {_columns(known)}, and "
                f"{path} has {_columns(schema)}."
            )
    return UnitsSource(files.units(CutWish(_TOGETHER)))


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _from_arrow(dataset: Any) -> Source | None:
    import pyarrow
    import pyarrow.dataset

    from miniray.train.data.units import FragmentRows, UnitsSource

    if isinstance(dataset, pyarrow.dataset.InMemoryDataset):
        dataset = dataset.to_table()
    if isinstance(dataset, pyarrow.dataset.Dataset):
        return UnitsSource(FragmentRows.units(dataset))
    rows = isinstance(dataset, pyarrow.Table | pyarrow.RecordBatch)
    return _from_rows(dataset) if rows else None


def _from_pandas(dataset: Any) -> Source | None:
    return _from_rows(dataset) if type(dataset).__name__ == "DataFrame" else None


def _from_rows(rows: Any) -> Source:
    """Return the source of a table or a DataFrame.

    It has one chunk per column, without the larger table that it is a slice of: taking rows out of
    many chunks puts these together each time.
    """
    import pyarrow

    from miniray.data.blocks import batch_to_table
    from miniray.data.sources import BlockRows
    from miniray.train.data.units import UnitsSource

    table = batch_to_table(rows)
    if table.get_total_buffer_size() > _SLICE_FACTOR * table.nbytes:  # two parts are copied
        table = pyarrow.concat_tables([table, table.slice(0, 0)])
    chunked = any(column.num_chunks > 1 for column in table.columns)
    return UnitsSource([BlockRows.unit(table.combine_chunks() if chunked else table)])


def _from_hugging_face(dataset: Any) -> Source | StreamSource | None:
    import datasets

    from miniray.data.read_api import must_be_decoded
    from miniray.data.sources import ReadUnit
    from miniray.train.data.sources import MapSource, StreamSource
    from miniray.train.data.units import HubRows, UnitsSource

    if isinstance(dataset, datasets.IterableDataset):
        return StreamSource(dataset)
    if not isinstance(dataset, datasets.Dataset):
        if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
            raise ValueError(
                f"it holds several datasets ({', '.join(dataset)}); give them by name: "
                f"datasets=dict(dataset)"
            )
        return None
    if dataset.format["type"] == "custom" or must_be_decoded(dict(dataset.features)):
        return MapSource(dataset)
    tables = dataset.with_format("arrow")
    size = tables.data.nbytes * len(tables) // max(1, tables.data.num_rows)
    return UnitsSource([ReadUnit(HubRows(tables), len(tables), size)])


_BY_LIBRARY: Mapping[str, Any] = {
    "pyarrow": _from_arrow,
    "pandas": _from_pandas,
    "datasets": _from_hugging_face,
}


def _short(value: Any) -> str:
    kind = type(value)
    return f"{value!r:.80} of type {kind.__module__}.{kind.__qualname__}"
