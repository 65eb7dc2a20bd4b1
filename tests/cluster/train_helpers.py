"""Runs of train loops that several modules test."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from miniray.train import Result


def fit_in(folder: Path) -> Callable[..., Result]:
    """Return what runs a train loop on two workers, or as many as it is told, and stores there.

    ``scaling`` and ``given`` are further arguments of ScalingConfig and of the trainer.
    """

    def run(
        loop: Any,
        config: Any = None,
        workers: int = 2,
        *,
        trainer: Any = DataParallelTrainer,
        scaling: Mapping[str, Any] = MappingProxyType({}),
        given: Mapping[str, Any] = MappingProxyType({}),
        **run_options: Any,
    ) -> Result:
        run_options.setdefault("storage_path", folder / "results")
        result: Result = trainer(
            loop,
            train_loop_config=config,
            scaling_config=ScalingConfig(**{"num_workers": workers, **scaling}),
            run_config=RunConfig(**run_options),
            **given,
        ).fit()
        return result

    return run


def printed(log: Path) -> str:
    """Return what a log file of a rank holds, without the times and names of its lines."""
    lines = log.read_text().splitlines()
    return "".join(line.partition("] ")[2] + "\n" for line in lines)
