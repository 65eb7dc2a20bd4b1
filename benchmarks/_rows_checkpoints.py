"""Rows about checkpoints: storing one, storing it while training goes on, going on from one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import MIB, Engine, Figure, row
from _rows_train import trainer
from _sizes import sizes

if TYPE_CHECKING:
    from collections.abc import Callable

#: A checkpoint has so many files.
FILES = 4

#: What happens in the blocks of steps that are compared: no upload, one by a copy to the storage,
#: one of files that are to be deleted after it.
NONE, COPIED, MOVED = "none", "copied", "moved"


def make_files(folder: Path, mebibytes: int) -> None:
    """Write files of this size altogether."""
    folder.mkdir()
    pieces = [os.urandom(MIB // FILES)] * mebibytes
    for number in range(FILES):
        with Path(folder, f"shard_{number}.pt").open("wb") as file:
            file.writelines(pieces)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that something takes, and processor seconds of this process."""
    os.sync()  # what was written before is not written to the disk meanwhile
    start, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - processor


def copies_loop(config: dict[str, Any]) -> None:
    """Store a checkpoint and have ``copytree`` copy the same folder, again and again."""
    train = Engine(config["package"]).module("train")
    files, copied = Path(config["folder"], "files"), Path(config["folder"], "copied")
    make_files(files, config["size"].checkpoint)

    def copy() -> None:
        shutil.copytree(files, copied)

    def report(folder: Path, *, delete: bool) -> None:
        checkpoint = train.Checkpoint.from_directory(folder)
        train.report({}, checkpoint, delete_local_checkpoint_after_upload=delete)

    def warm_memory() -> None:
        # A deletion frees the cache's memory, and memory that was used before is cheaper to fill.
        scratch = Path(config["folder"], "scratch")
        shutil.copytree(files, scratch)
        shutil.rmtree(scratch)

    rounds = []
    for number in range(config["size"].copies + 1):
        seconds = {}
        for which in ("copy", "report")[:: 1 if number % 2 else -1]:
            warm_memory()
            seconds[which] = timed(copy if which == "copy" else lambda: report(files, delete=False))
            train.get_all_reported_checkpoints()  # waits until it is stored, and an older one gone
        seconds["move"] = timed(lambda: report(copied, delete=True))
        train.get_all_reported_checkpoints()
        rounds.append(seconds)
    Path(config["file"]).write_text(json.dumps(rounds[1:]))


@row(
    "checkpoint",
    Figure("report() of a checkpoint of 1 GiB, in times of copytree's", "x", 1.2),
    Figure("its processor time, in times of copytree's", "x"),
    Figure("its time", "s"),
    Figure("the same with files that are deleted after it", "s"),
    limit=600,
)
def checkpoint(engine: Engine) -> list[float]:
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        rounds = run_and_read(engine, folder, copies_loop, workers=1)
    return [
        statistics.median(each["report"][0] / each["copy"][0] for each in rounds),
        statistics.median(each["report"][1] / each["copy"][1] for each in rounds),
        statistics.median(each["report"][0] for each in rounds),
        statistics.median(each["move"][0] for each in rounds),
    ]


def run_and_read(engine: Engine, folder: str, loop: Any, **options: Any) -> Any:
    """Run a train loop that keeps one checkpoint; what it has written to ``config["file"]``."""
    file = Path(folder, "found")
    config = {"package": engine.name, "size": sizes(), "file": str(file), "folder": folder}
    keep_one = engine.module("train").CheckpointConfig(num_to_keep=1)
    trainer(engine, f"{folder}/runs", loop, config, checkpoint_config=keep_one, **options).fit()
    return json.loads(file.read_text())


def uploads_loop(config: dict[str, Any]) -> None:
    """Train for a while, again and again, with an upload in the background or without."""
    import _vit
    import torch.distributed as dist

    train, size = Engine(config["package"]).module("train"), config["size"]
    training = _vit.with_engine(config["package"], size)
    is_first = train.get_context().get_world_rank() == 0

    def block(kind: str) -> dict[str, float]:
        files = Path(config["folder"], f"files-{kind}")
        if is_first and kind != NONE and not files.exists():
            make_files(files, size.upload)
        if is_first:
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        processor = time.process_time() - time.thread_time()
        if kind != NONE:
            train.report(
                {},
                train.Checkpoint.from_directory(files) if is_first else None,
                checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=kind == MOVED,
            )
        _vit.run_steps(training, size.upload_steps, size.upload_steps, None)
        trained = time.perf_counter()
        train.get_all_reported_checkpoints()
        return {
            "steps": trained - start,
            "wait": time.perf_counter() - trained,
            "others": time.process_time() - time.thread_time() - processor,
        }

    kinds = [NONE, COPIED, MOVED]
    orders = [kinds[:: 1 if number % 2 else -1] for number in range(size.uploads + 1)]
    rounds = [{kind: block(kind) for kind in order} for order in orders]
    if is_first:
        Path(config["file"]).write_text(json.dumps(rounds[1:]))


@row(
    "upload",
    Figure("steps with an upload of 160 MiB behind them, in times of steps without", "x", 1.02),
    Figure("the same with files that are deleted after it", "x", 1.02),
    Figure("left to wait for after those steps", "s"),
    Figure("processor time of the upload's threads, of the steps' time", "%"),
    limit=900,
)
def upload(engine: Engine) -> list[float]:
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        rounds = run_and_read(engine, folder, uploads_loop)

    def longer(kind: str) -> float:
        return statistics.median(each[kind]["steps"] / each[NONE]["steps"] for each in rounds)

    others = [
        (each[COPIED]["others"] - each[NONE]["others"]) / each[NONE]["steps"] for each in rounds
    ]
    wait = statistics.median(each[COPIED]["wait"] for each in rounds)
    return [longer(COPIED), longer(MOVED), wait, statistics.median(others) * 100]


def note(config: dict[str, Any], what: str) -> None:
    """Add a line with the time, by the clock that all processes of a machine share."""
    with Path(config["file"]).open("a") as file:
        file.write(f"{json.dumps([what, time.monotonic()])}\n")


def deaths_loop(config: dict[str, Any]) -> None:
    """Train from the newest checkpoint, store one, and have a rank killed."""
    import _vit
    import torch

    train = Engine(config["package"]).module("train")
    training = _vit.with_engine(config["package"], config["size"])
    rank = train.get_context().get_world_rank()
    deaths = 0
    if (older := train.get_checkpoint()) is not None:
        with older.as_directory() as folder:
            state = torch.load(Path(folder, "model.pt"), weights_only=True)
        training.model.load_state_dict(state["model"])
        deaths = state["deaths"]
    training.step()
    note(config, "step")
    if deaths == config["size"].kills:
        return
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            state = {"model": training.model.state_dict(), "deaths": deaths + 1}
            torch.save(state, Path(folder, "model.pt"))
        train.report({}, train.Checkpoint.from_directory(folder) if rank == 0 else None)
    train.get_all_reported_checkpoints()  # waits until it is complete
    if rank == 1:
        note(config, "death")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        training.step()


@row(
    "recovery",
    Figure("rank killed until all ranks have done a step again", "s", 3.0),
    Figure("the slowest of these", "s", 3.0),
    limit=900,
)
def recovery(engine: Engine) -> tuple[float, float]:
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times")
        config = {"package": engine.name, "size": sizes(), "file": str(file)}
        retries = engine.module("train").FailureConfig(max_failures=-1)
        trainer(engine, f"{folder}/runs", deaths_loop, config, failure_config=retries).fit()
        found = times_to_recover([json.loads(line) for line in file.read_text().splitlines()])
    return statistics.median(found), max(found)


def times_to_recover(lines: list[tuple[str, float]]) -> list[float]:
    """Seconds from each death until the last rank's next step."""
    found = []
    death = None
    steps: list[float] = []
    for what, at in [*lines, ("death", 0.0)]:
        if what == "step":
            steps.append(at)
            continue
        if death is not None:
            found.append(max(steps) - death)
        death, steps = at, []
    return found
