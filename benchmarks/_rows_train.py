"""Rows about training: how long an empty fit takes, how fast reports are."""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Engine, Figure, row

WORKERS = 2


def empty_loop() -> None:
    """A loop that only checks that the process group is there."""
    import torch.distributed

    assert torch.distributed.get_world_size() == WORKERS


def report_loop(config: dict[str, Any]) -> None:
    """Report for about three seconds; rank 0 writes down the rate."""
    import torch
    import torch.distributed

    train = importlib.import_module(config["package"] + ".train")
    train.report({"step": -1})
    start = time.perf_counter()
    train.report({"step": 0})
    count = torch.tensor([max(2, min(10_000, int(3 / (time.perf_counter() - start))))])
    torch.distributed.broadcast(count, 0)  # every rank must report as often
    start = time.perf_counter()
    for step in range(int(count)):
        train.report({"step": step})
    if train.get_context().get_world_rank() == 0:
        elapsed = time.perf_counter() - start
        Path(config["file"]).write_text(str(int(count) / elapsed))


def trainer(
    engine: Engine,
    folder: str,
    loop: Any,
    config: dict[str, Any] | None = None,
    workers: int = WORKERS,
    **run: Any,
) -> Any:
    """A trainer of some workers on CPUs; further arguments are those of its RunConfig."""
    train = engine.module("train")
    return engine.module("train.torch").TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(storage_path=folder, **run),
    )


@row(
    "fit",
    Figure("TorchTrainer.fit, empty loop, first", "s", 3.0),
    Figure("TorchTrainer.fit, empty loop, again", "s", 1.0),
    limit=180,
)
def fit(engine: Engine) -> list[float]:
    engine.start()
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            start = time.perf_counter()
            trainer(engine, folder, empty_loop).fit()
            times.append(time.perf_counter() - start)
    return times


@row("report", Figure("train.report without a checkpoint", "/s", 2_000), limit=180)
def report(engine: Engine) -> float:
    engine.start()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rate")
        config = {"package": engine.name, "file": str(file)}
        trainer(engine, folder, report_loop, config).fit()
        return float(file.read_text())
