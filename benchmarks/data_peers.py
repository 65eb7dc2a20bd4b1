"""A table of Parquet files to batches of tensors, by other loaders than Ray Data.

    PYTHON benchmarks/data_peers.py miniray|loader|hf|daft FOLDER [--rows N] [--workers N]

Each is run by a Python that has it: ``loader`` is torch's DataLoader over the batches of
``ParquetFile``, ``hf`` Hugging Face datasets, streaming, ``daft`` its partitions. All change one
column of batches of 4,096 rows and make tensors of all. The files are written at the first run.
Prints rows per second, and the processor time of all processes, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from _rows_data import doubled, drain, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 4096


def seconds_of_processors() -> float:
    """Return the processor time of this process and of its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def miniray(folder: str, workers: int) -> Iterator[Any]:
    """Read by tasks."""
    import miniray as package

    package.init(address="local", num_cpus=max(1, workers))
    dataset = package.data.read_parquet(folder).map_batches(doubled, batch_size=SIZE)
    yield from dataset.iter_torch_batches(batch_size=SIZE)
    package.shutdown()


def loader(folder: str, workers: int) -> Iterator[Any]:
    """Read by DataLoader's workers, each its files."""
    import pyarrow.parquet as pq
    import torch

    class Files(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            own = torch.utils.data.get_worker_info()
            files = sorted(Path(folder).glob("*.parquet"))
            for path in files if own is None else files[own.id :: own.num_workers]:
                for batch in pq.ParquetFile(path).iter_batches(SIZE, use_threads=False):
                    names = batch.schema.names
                    columns = zip(names, batch.columns, strict=True)
                    changed = doubled({name: each.to_numpy() for name, each in columns})
                    yield {name: torch.as_tensor(each.copy()) for name, each in changed.items()}

    yield from torch.utils.data.DataLoader(Files(), batch_size=None, num_workers=workers)


def hf(folder: str, workers: int) -> Iterator[Any]:
    """Read by Hugging Face datasets, in this process or DataLoader's workers."""
    import datasets
    import torch

    files = sorted(map(str, Path(folder).glob("*.parquet")))
    read: Any = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    read = read.with_format("arrow")  # the others take Python's lists in between: 100 times slower

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for table in read.iter(SIZE):
                columns = zip(table.column_names, table.columns, strict=True)
                changed = doubled({name: each.to_numpy() for name, each in columns})
                yield {name: torch.as_tensor(each.copy()) for name, each in changed.items()}

    yield from torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=workers)


def daft(folder: str, workers: int) -> Iterator[Any]:
    """Read by Daft, which uses all processors; tensors are made of its Arrow batches."""
    del workers
    import daft as package
    import torch

    read = package.read_parquet(f"{folder}/*.parquet")
    read = read.with_column("x0", package.col("x0") * 2).into_batches(SIZE)
    for part in read.iter_partitions():
        table = part.to_arrow()
        for batch in table.to_batches(max_chunksize=SIZE):
            columns = zip(batch.schema.names, batch.columns, strict=True)
            yield {name: torch.as_tensor(each.to_numpy().copy()) for name, each in columns}


LOADERS: dict[str, Callable[[str, int], Iterator[Any]]] = {
    each.__name__: each for each in (miniray, loader, hf, daft)
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("loader", choices=LOADERS)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rows", type=int, default=4_000_000)
    arguments.add_argument("--workers", type=int, default=2)
    args = arguments.parse_args()
    if not any(args.folder.glob("*.parquet")):
        args.folder.mkdir(parents=True, exist_ok=True)
        tables(str(args.folder), args.rows)
    before, began = seconds_of_processors(), time.perf_counter()
    rows = drain(LOADERS[args.loader](str(args.folder), args.workers))
    seconds = time.perf_counter() - began
    used = seconds_of_processors() - before
    print(
        f"{args.loader}: {rows / seconds:,.0f} rows/s, {used * 1e6 / rows:.2f} s of processors per "
        f"million rows, load {os.getloadavg()[0]:.0f}"
    )


if __name__ == "__main__":
    main()
