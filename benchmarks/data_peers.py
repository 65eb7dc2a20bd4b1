"""A table of Parquet files to batches of tensors, by miniray, Ray Data and other loaders.

    PYTHON benchmarks/data_peers.py miniray|ray|loader|hf|daft FOLDER [--rows N] [--workers N]
        [--batch-size N] [--columns N] [--block MIB] [--images N]

Each is run by a Python that has it: ``loader`` is torch's DataLoader over the batches of
``ParquetFile``, ``hf`` Hugging Face datasets, streaming, ``daft`` its partitions. All change one
column and make tensors of all. With ``--images``, miniray, Ray and DataLoader read so many JPEG
files in place of the table, and cut a random part out of each. The files are written at the first
run. A small folder is read before the clock starts, so that modules and processes are there.
Prints rows per second, and the processor time of all processes, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

from _processes import TAG, cluster_processes
from _rows_data import COLUMNS, cropped, doubled, drain, pictures, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds of a clock tick of the kernel.
TICK = 1 / os.sysconf("SC_CLK_TCK")


def seconds_of_processors() -> float:
    """Return the processor time of this process, of those below it, and of those that ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)
    for pid in cluster_processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += sum(map(int, fields[11:15])) * TICK  # with its children that have ended
    return used


def engine(args: argparse.Namespace, folder: str) -> Iterator[Any]:
    """Read by the tasks of miniray or Ray."""
    package = importlib.import_module(args.loader)
    data = importlib.import_module(f"{args.loader}.data")
    if not package.is_initialized():
        package.init(address="local", num_cpus=max(1, args.workers))
        data.DataContext.get_current().enable_progress_bars = False
        if args.block:
            data.DataContext.get_current().target_max_block_size = args.block << 20
    if args.images:
        return iter(data.read_images(folder).map(cropped).iter_torch_batches(batch_size=64))
    dataset = data.read_parquet(folder, columns=args.names)
    dataset = dataset.map_batches(doubled, batch_size=args.batch_size)
    return iter(dataset.iter_torch_batches(batch_size=args.batch_size))


def changed(batch: Any) -> dict[str, Any]:
    """Make tensors of a table or a record batch of Arrow, after a change of a column."""
    import torch

    columns = zip(batch.schema.names, batch.columns, strict=True)
    found = doubled({name: each.to_numpy() for name, each in columns})
    return {name: torch.as_tensor(each.copy()) for name, each in found.items()}


class Pictures:
    """A dataset of PyTorch: the JPEG files of a folder, a random part of each."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        import numpy as np
        from PIL import Image

        return cropped({"image": np.asarray(Image.open(self._paths[number]))})


def loader(args: argparse.Namespace, folder: str) -> Iterator[Any]:
    """Read by DataLoader's workers, each its files."""
    import pyarrow.parquet as pq
    import torch

    if args.images:
        files = torch.utils.data.DataLoader(Pictures(folder), 64, num_workers=args.workers)
        return iter(files)

    class Files(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            own = torch.utils.data.get_worker_info()
            files = sorted(Path(folder).glob("*.parquet"))
            for path in files if own is None else files[own.id :: own.num_workers]:
                read = pq.ParquetFile(path).iter_batches
                yield from map(
                    changed, read(args.batch_size, columns=args.names, use_threads=False)
                )

    return iter(torch.utils.data.DataLoader(Files(), batch_size=None, num_workers=args.workers))


def hf(args: argparse.Namespace, folder: str) -> Iterator[Any]:
    """Read by Hugging Face datasets, in this process or DataLoader's workers."""
    import datasets
    import torch

    files = sorted(map(str, Path(folder).glob("*.parquet")))
    read: Any = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, columns=args.names
    )
    read = read.with_format("arrow")  # the others take Python's lists in between: 100 times slower

    class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            yield from map(changed, read.iter(args.batch_size))

    return iter(torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=args.workers))


def daft(args: argparse.Namespace, folder: str) -> Iterator[Any]:
    """Read by Daft, which uses all processors; tensors are made of its Arrow batches."""
    import daft as package
    import torch

    read = package.read_parquet(f"{folder}/*.parquet").select(*args.names)
    read = read.with_column("x0", package.col("x0") * 2).into_batches(args.batch_size)
    for part in read.iter_partitions():
        for batch in part.to_arrow().to_batches(max_chunksize=args.batch_size):
            columns = zip(batch.schema.names, batch.columns, strict=True)
            yield {name: torch.as_tensor(each.to_numpy().copy()) for name, each in columns}


LOADERS: dict[str, Callable[[argparse.Namespace, str], Iterator[Any]]] = {
    "miniray": engine,
    "ray": engine,
    **{each.__name__: each for each in (loader, hf, daft)},
}


def written(folder: Path, write: Callable[..., None], *sizes: int) -> str:
    """Return a folder with files, written there if there are none."""
    if not folder.exists():
        folder.mkdir(parents=True)
        write(str(folder), *sizes)
    return str(folder)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("loader", choices=LOADERS)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rows", type=int, default=4_000_000)
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--batch-size", type=int, default=4096)
    arguments.add_argument("--columns", type=int, default=COLUMNS)
    arguments.add_argument("--block", type=int, help="MiB of a block of miniray or Ray")
    arguments.add_argument("--images", type=int, default=0, help="how many, in place of a table")
    args = arguments.parse_args()
    os.environ[TAG] = uuid.uuid4().hex  # processes that are started from here have it
    args.names = [*(f"x{number}" for number in range(args.columns)), "y"]
    read = LOADERS[args.loader]
    if args.images:
        small = written(args.folder / "small images", pictures, 64)
        large = written(args.folder / f"{args.images} images", pictures, args.images)
    else:
        small = written(args.folder / "small", tables, 65_536, 1)
        large = written(args.folder / str(args.rows), tables, args.rows, 16)
    drain(read(args, small))
    before, began = seconds_of_processors(), time.perf_counter()
    rows = drain(read(args, large))
    seconds = time.perf_counter() - began
    used = seconds_of_processors() - before
    print(
        f"{args.loader}: {rows / seconds:,.0f} rows/s, {used * 1e6 / rows:.2f} s of processors per "
        f"million rows, load {os.getloadavg()[0]:.0f}"
    )


if __name__ == "__main__":
    main()
