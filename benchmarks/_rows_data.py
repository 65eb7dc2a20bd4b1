"""Rows about data sets: tables to tensors, memory, images, small data, pools, training, sorting."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import GIB, MIB, Engine, Figure, row
from _processes import cluster_processes, pss, settled
from _sizes import SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: How many times the data of a short run.
SCALE = 10 if os.environ.get(SIZE) == "full" else 1
COLUMNS = 10


def start(engine: Engine, cpus: int = 2, **options: Any) -> Any:
    """Start a cluster and return the engine's data package, which prints no progress."""
    engine.api.init(address="local", num_cpus=cpus, **options)
    data = engine.module("data")
    data.DataContext.get_current().enable_progress_bars = False
    return data


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder for the files of a row."""
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as found:
        yield found


def tables(path: str, rows: int, files: int = 16) -> None:
    """Write Parquet files of ten columns of numbers and a label."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(1)
    each = rows // files
    for number in range(files):
        columns = {f"x{c}": random.random(each, dtype=np.float32) for c in range(COLUMNS)}
        columns["y"] = np.arange(each * number, each * (number + 1))
        name = f"{path}/{number:03d}.parquet"
        pq.write_table(pa.table(columns), name, compression="lz4", row_group_size=1 << 18)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Change a column, as preparing data does."""
    return {**batch, "x0": batch["x0"] * 2}


def timed(work: Callable[[], Any]) -> float:
    """Return how many seconds it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def drain(batches: Any) -> int:
    """Read all batches; return the rows."""
    return sum(len(next(iter(batch.values()))) for batch in batches)


@row("tensors", Figure("Parquet, map_batches, iter_torch_batches: rows", "/s"), limit=600)
def tensors(engine: Engine) -> float:
    rows = 4_000_000 * SCALE
    with folder() as path:
        tables(path, rows)
        data = start(engine)
        dataset = data.read_parquet(path).map_batches(doubled, batch_size=4096)
        drain(dataset.limit(10_000).iter_torch_batches(batch_size=4096))  # processes are there
        return rows / timed(lambda: drain(dataset.iter_torch_batches(batch_size=4096)))


def idle() -> int:
    """Return the bytes that all processes have before there is work."""
    return pss(settled() | {os.getpid()})


def peak(work: Callable[[], Any], before: int) -> float:
    """Return the most MiB that all processes have at a time beyond what they had before."""
    most = before
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.2):
            most = max(most, pss(cluster_processes() | {os.getpid()}))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
    return (most - before) / MIB


@row(
    "memory",
    Figure("iter_batches: peak memory", "MiB"),
    Figure("of four times the data", "MiB"),
    limit=600,
)
def memory(engine: Engine) -> list[float]:
    found = []
    with folder() as path:
        data = start(engine, object_store_memory=2 * GIB)
        before = idle()
        for times in (1, 4):
            part = f"{path}/{times}"
            Path(part).mkdir()
            tables(part, 6_250_000 * times * (4 if SCALE > 1 else 1))
            batches = data.read_parquet(part).iter_batches
            found.append(peak(lambda batches=batches: drain(batches(batch_size=4096)), before))
    return found


def cropped(row: dict[str, Any]) -> dict[str, Any]:
    """Cut a random part out of an image, as numbers."""
    import numpy as np

    top, left = np.random.randint(16, size=2)
    image = row["image"][top : top + 224, left : left + 224]
    return {"image": image.astype(np.float32) / 255}


def pictures(path: str, count: int) -> None:
    """Write JPEG files of 320 x 240 into a folder."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(1)
    for number in range(count):
        small = random.integers(256, size=(30, 40, 3), dtype=np.uint8)
        Image.fromarray(small).resize((320, 240)).save(f"{path}/{number:05d}.jpg")


@row("images", Figure("read_images, map, iter_torch_batches: images", "/s"), limit=600)
def images(engine: Engine) -> float:
    count = 800 * SCALE
    with folder() as path:
        pictures(path, count)
        data = start(engine)
        dataset = data.read_images(path).map(cropped)
        drain(dataset.limit(10).iter_torch_batches(batch_size=64))
        return count / timed(lambda: drain(dataset.iter_torch_batches(batch_size=64)))


def plus_one(row: dict[str, Any]) -> dict[str, Any]:
    """Change a row."""
    return {"item": row["item"] + 1}


@row(
    "small",
    Figure("1,000 items mapped and taken", "s", 0.03),
    Figure("group-by of 1 M rows", "s", 0.3),
    Figure("schema, count and 5 rows of a file", "s", 0.02),
    limit=300,
)
def small(engine: Engine) -> list[float]:
    import numpy as np
    import pyarrow as pa

    with folder() as path:
        tables(path, 100_000, files=1)
        data = start(engine)
        random = np.random.default_rng(1)
        million = pa.table({"k": random.integers(1000, size=10**6), "v": random.random(10**6)})

        def metadata() -> None:
            dataset = data.read_parquet(path)
            dataset.schema()
            dataset.count()
            dataset.take(5)

        works = (
            lambda: data.from_items(list(range(1000))).map(plus_one).take_all(),
            lambda: data.from_arrow(million).groupby("k").sum("v").take_all(),
            metadata,
        )
        for work in works:
            work()  # processes and modules are there
        return [min(timed(work) for _ in range(3)) for work in works]


class Slow:
    """A model that takes 20 ms for a batch."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return {"y": batch["image"].reshape(len(batch["image"]), -1).mean(axis=1)}


def floats(batch: dict[str, Any]) -> dict[str, Any]:
    """Make numbers of images."""
    import numpy as np

    return {"image": batch["image"].astype(np.float32) / 255}


@row(
    "pool",
    Figure("tasks, a pool of 2 halves of a GPU, write_parquet", "s"),
    Figure("of that, the pool was busy", "%"),
    limit=600,
)
def pool(engine: Engine) -> list[float]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 24_000 * SCALE
    random = np.random.default_rng(1)
    with folder() as path:
        for number in range(8):
            pixels = random.integers(256, size=rows // 8 * 3072, dtype=np.uint8)
            flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels), 3072)
            kind = pa.fixed_shape_tensor(pa.uint8(), (32, 32, 3))
            images = pa.ExtensionArray.from_storage(kind, flat)
            pq.write_table(pa.table({"image": images}), f"{path}/{number}.parquet")
        # Ray's actors of a pool hold a CPU each: with 2 in all, it would wait for ever to read.
        data = start(engine, cpus=4, num_gpus=1)
        dataset = (
            data.read_parquet(path)
            .map_batches(floats, batch_size=256)
            .map_batches(Slow, batch_size=256, num_gpus=0.5, concurrency=2)
        )
        with folder() as out:
            seconds = timed(lambda: dataset.write_parquet(out))
    return [seconds, 100 * (rows / 256 * 0.02 / 2) / seconds]


def train_loop(config: dict[str, Any]) -> None:
    """Read three epochs, and report how fast."""
    began = ended = time.perf_counter()
    train = importlib.import_module(config["package"] + ".train")
    shard = train.get_dataset_shard("train")
    batches = shard.iter_torch_batches(batch_size=4096, device="cpu", **config["options"])
    first = 0.0
    between = []
    rows = 0
    for _ in range(3):
        for number, batch in enumerate(batches):
            if not first:
                first = time.perf_counter() - began
            elif not number:
                between.append(time.perf_counter() - ended)
            rows += len(batch["y"])
        ended = time.perf_counter()
    if (
        train.get_context().get_world_rank() == 0
    ):  # Ray's result has no metrics without a checkpoint
        found = [rows / (ended - began), first, max(between)]
        Path(config["file"]).write_text(json.dumps(found))


@row(
    "train",
    Figure("two ranks, 3 epochs: rows of each rank", "/s"),
    Figure("first batch after the loop began", "s", 0.5),
    Figure("longest wait between epochs", "s", 0.1),
    limit=600,
)
def train(engine: Engine) -> list[float]:
    with folder() as path, folder() as runs:
        tables(path, 1_000_000 * SCALE)
        data = start(engine, cpus=4)
        package = engine.module("train")
        # Ray reorders rows in a buffer, if told to; here they are reordered in any case.
        options = {} if engine.name == "miniray" else {"local_shuffle_buffer_size": 200_000}
        file = f"{runs}/found.json"
        engine.module("train.torch").TorchTrainer(
            train_loop,
            train_loop_config={"package": engine.name, "options": options, "file": file},
            scaling_config=package.ScalingConfig(num_workers=2),
            run_config=package.RunConfig(storage_path=runs),
            datasets={"train": data.read_parquet(path)},
        ).fit()
        found: list[float] = json.loads(Path(file).read_text())
    return found


def resumed_loop(config: dict[str, Any]) -> None:
    """Read an epoch, from a state if there is one; note its first batch, its rows and its state."""
    began = time.perf_counter()
    train = importlib.import_module(config["package"] + ".train")
    shard = train.get_dataset_shard("train")
    if config["state"] is not None:
        shard.load_state_dict(config["state"])
    digest = hashlib.sha256()
    first, rows, state = 0.0, 0, None
    for batch in shard.iter_torch_batches(batch_size=4096, device="cpu"):
        first = first or time.perf_counter() - began
        rows += len(batch["y"])
        digest.update(batch["y"].numpy().tobytes())
        if state is None and rows >= 0.9 * config["rows"] / 2:
            state = shard.state_dict()
    if train.get_context().get_world_rank() == 0:
        found = {"first": first, "rows": rows, "state": state, "digest": digest.hexdigest()}
        Path(config["file"]).write_text(json.dumps(found))


@row(
    "resume",
    Figure("first batch of an epoch", "s", 0.5),
    Figure("first batch at 90 % of an epoch", "s"),
    Figure("that, in times of the first", "x", 1.2),
    limit=600,
)
def resume(engine: Engine) -> list[float]:
    if engine.name == "ray":
        raise NotImplementedError("Ray Data does not resume within an epoch")
    rows = 1_000_000 * SCALE
    with folder() as path, folder() as runs:
        tables(path, rows)
        file = f"{runs}/found.json"

        def run(state: Any = None) -> dict[str, Any]:
            package = engine.module("train")
            config = {"package": engine.name, "file": file, "rows": rows, "state": state}
            engine.module("train.torch").TorchTrainer(
                resumed_loop,
                train_loop_config=config,
                scaling_config=package.ScalingConfig(num_workers=2),
                run_config=package.RunConfig(storage_path=runs),
                datasets={"train": engine.module("data").read_parquet(path)},
            ).fit()
            found: dict[str, Any] = json.loads(Path(file).read_text())
            return found

        digests = []
        for cpus in (2, 4):  # with two, the ranks read without tasks
            start(engine, cpus=cpus)
            digests.append(run()["digest"])
            if cpus == 2:
                engine.api.shutdown()
        assert digests[0] == digests[1], "the batches depend on the number of CPUs"
        whole = run()
        rest = run(whole["state"])
        assert rest["rows"] < 0.11 * whole["rows"]
    return [whole["first"], rest["first"], rest["first"] / whole["first"]]


@row(
    "exchange",
    Figure("sort of 100-byte rows into files: rows", "/s"),
    Figure("its peak memory", "MiB", 2500),
    Figure("random_shuffle into files: rows", "/s"),
    Figure("its peak memory", "MiB", 2500),
    limit=1200,
)
def exchange(engine: Engine) -> list[float]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 2_000_000 * SCALE
    random = np.random.default_rng(1)
    found: list[float] = []
    with folder() as path:
        for number in range(16):
            count = rows // 16
            text = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(92), count, [None, pa.py_buffer(random.bytes(92 * count))]
            )
            table = pa.table({"k": random.integers(1 << 62, size=count), "text": text})
            pq.write_table(table, f"{path}/{number:02d}.parquet", compression="none")
        data = start(engine, object_store_memory=(GIB if SCALE > 1 else 256 * MIB))
        before = idle()
        for change in (lambda d: d.sort("k"), lambda d: d.random_shuffle(seed=1)):
            with folder() as out:
                seconds: list[float] = []

                def work(change: Any = change, out: str = out, seconds: Any = seconds) -> None:
                    seconds.append(
                        timed(lambda: change(data.read_parquet(path)).write_parquet(out))
                    )

                memory = peak(work, before)
                found += [rows / seconds[0], memory]
                written = pq.ParquetDataset(out).fragments
                assert sum(piece.metadata.num_rows for piece in written) == rows
    return found
