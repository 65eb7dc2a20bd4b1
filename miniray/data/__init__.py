"""``miniray.data``: datasets that are read, transformed and handed out as streams of blocks.

Needs pyarrow, which is loaded at the first use of a name. Blocks are Arrow tables in the object
store, made by tasks and actors that run ahead of the reader; see docs/data.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy

if TYPE_CHECKING:
    from miniray.data.context import (
        ActorPoolStrategy,
        DataContext,
        ExecutionOptions,
        ExecutionResources,
        TaskPoolStrategy,
    )
    from miniray.data.dataset import Dataset, MaterializedDataset
    from miniray.data.read_api import (
        from_arrow,
        from_arrow_refs,
        from_blocks,
        from_huggingface,
        from_items,
        from_numpy,
        from_numpy_refs,
        from_pandas,
        from_pandas_refs,
        from_torch,
        range,  # noqa: A004 -- Ray's name
        range_tensor,
        read_binary_files,
        read_csv,
        read_images,
        read_json,
        read_numpy,
        read_parquet,
        read_text,
    )
    from miniray.data.transforms import DataError

__all__ = [
    "ActorPoolStrategy",
    "DataContext",
    "DataError",
    "Dataset",
    "ExecutionOptions",
    "ExecutionResources",
    "MaterializedDataset",
    "TaskPoolStrategy",
    "from_arrow",
    "from_arrow_refs",
    "from_blocks",
    "from_huggingface",
    "from_items",
    "from_numpy",
    "from_numpy_refs",
    "from_pandas",
    "from_pandas_refs",
    "from_torch",
    "range",
    "range_tensor",
    "read_binary_files",
    "read_csv",
    "read_images",
    "read_json",
    "read_numpy",
    "read_parquet",
    "read_text",
]

_HOMES = {
    "ActorPoolStrategy": "context",
    "DataContext": "context",
    "DataError": "transforms",
    "Dataset": "dataset",
    "ExecutionOptions": "context",
    "ExecutionResources": "context",
    "MaterializedDataset": "dataset",
    "TaskPoolStrategy": "context",
}

_READ = "read it in a function given to from_items(paths or queries).flat_map()"
_HERE = "import from miniray.data itself what is public"

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    "DataIterator": "Dataset.iterator() gives what reads a dataset",
    "Datasource": _READ,
    **dict.fromkeys(("DataType", "datatype"), "expressions cast to types of pyarrow"),
    "Datasink": "write files in a function given to map_batches()",
    "from_*": "from_pandas(), from_arrow(), from_numpy() or from_items() take its parts",
    "llm": "call the model in a class given to map_batches()",
    "FileShuffleConfig": 'give shuffle="files"',
    **dict.fromkeys(("SaveMode", "SinkMode"), 'give mode="append" or another as text'),
    "RandomSeedConfig": "give seed= a number",
    "Schema": "Dataset.schema() has names and types",
    **dict.fromkeys(("Preprocessor", "preprocessor*"), "write it as a function for map_batches()"),
    **dict.fromkeys(("_internal", "block", "datasource", "grouped_data", "iterator"), _HERE),
    "read_*": _READ,
}

_load, __dir__ = lazy(
    __name__,
    {name: f"miniray.data.{_HOMES.get(name, 'read_api')}" for name in __all__},
    ("aggregate", "collate_fn", "expressions"),
    _ABSENT,
)

if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

    def __getattr__(name):
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if error.name not in ("pyarrow", "numpy", "fsspec"):
                raise
            raise ImportError(
                f"miniray.data needs {error.name}, which is not installed. "
                f"Run `pip install 'miniray[data]'`."
            ) from error
