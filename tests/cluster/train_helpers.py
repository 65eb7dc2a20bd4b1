"""Runs of train loops that several modules test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.train import Result


def fit_in(folder: Path) -> Callable[..., Result]:
    """Return what runs a train loop on two workers, or as many as it is told, and stores there."""

    def run(loop: Any, config: Any = None, workers: int = 2, **run_options: Any) -> Result:
        run_options.setdefault("storage_path", folder / "results")
        return DataParallelTrainer(
            loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(**run_options),
        ).fit()

    return run
