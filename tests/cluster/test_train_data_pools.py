"""Pools of datasets in a trainer: actors that all ranks of an attempt use."""

from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until

import miniray
from miniray import train
from miniray.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from miniray.util.state import list_actors

if TYPE_CHECKING:
    from collections.abc import Callable

np = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")

ALIVE = [("state", "=", "ALIVE"), ("class_name", "=", "PoolWorker")]


class Adds:
    """Leaves a file for each object that is made of it, and adds one to the numbers of rows."""

    def __init__(self, folder: str) -> None:
        Path(folder, f"made-{secrets.token_hex(8)}").touch()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"] + 1}


def epochs(config: dict[str, Any]) -> None:
    """Read two epochs, in step with the other ranks, and note the batches."""
    shard = train.get_dataset_shard("train")
    rank = train.get_context().get_world_rank()
    state = Path(config["folder"], f"state-{rank}")
    if config.get("resumes"):
        shard.load_state_dict(json.loads(state.read_text()))
    seen = []
    for _ in range(2):
        batches = []
        seen.append(batches)
        for batch in shard.iter_batches(batch_size=config.get("batch_size", 7)):
            batches.append({name: values.tolist() for name, values in batch.items()})
            train.collective.barrier()
            if len(batches) == config.get("stops_after"):
                state.write_text(json.dumps(shard.state_dict()))
                break
        if "stops_after" in config:
            break
    Path(config["folder"], f"seen-{rank}").write_text(json.dumps(seen))


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., list[Any]]:
    """Runs a train loop on ranks with a dataset; returns what these have seen, by epoch."""

    def run(
        dataset: Any,
        loop: Any = epochs,
        *,
        workers: int = 2,
        cpus: int = 1,
        failures: int = 0,
        **config: Any,
    ) -> list[Any]:
        DataParallelTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path), **config},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
            run_config=RunConfig(
                storage_path=tmp_path / "results",
                failure_config=FailureConfig(max_failures=failures),
            ),
            datasets={"train": dataset},
        ).fit()
        ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("seen-*"))]
        return list(zip(*ranks, strict=True))

    return run


def rows_of(epoch: Any) -> list[int]:
    return sorted(n for rank in epoch for batch in rank for n in batch["id"])


def through(function: type, folder: Path, rows: int = 300, **options: Any) -> Any:
    given = {"concurrency": 2, "batch_size": 10, "fn_constructor_args": (str(folder),)}
    return miniray.data.range(rows).map_batches(function, **{**given, **options})


def made(folder: Path) -> int:
    return len(list(folder.glob("made-*")))


@pytest.mark.parametrize(("workers", "options"), [(2, {"num_cpus": 0.5}), (3, {})])
def test_ranks_and_epochs_share_the_actors_of_a_pool(
    fit: Any, tmp_path: Path, workers: int, options: dict[str, Any]
) -> None:
    seen = fit(through(Adds, tmp_path, **options), workers=workers)
    assert [rows_of(epoch) for epoch in seen] == [list(range(1, 301))] * 2
    assert made(tmp_path) == 2
    wait_until(lambda: not list_actors(filters=ALIVE))


def test_ranks_that_wait_for_each_other_do_not_keep_a_shared_actor(
    fit: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from miniray.train.data import datasets

    class Grows:
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"], "wide": np.zeros((len(batch["id"]), 4096))}

    def loop(config: dict[str, str]) -> None:
        # Rank 1 takes ten batches for each one of rank 0, which waits for it meanwhile and reads
        # nothing of what its own calls make.
        shard = train.get_dataset_shard("train")
        rank = train.get_context().get_world_rank()
        read = 0
        for batch in shard.iter_batches(batch_size=1 if rank else 10, prefetch_batches=0):
            read += len(batch["id"])
            if read % 10 == 0:
                train.collective.barrier()
        assert read == 160
        Path(config["folder"], f"seen-{rank}").write_text("[]")

    # Units of 32 rows, each of which becomes eight blocks: more than may be unread elsewhere.
    monkeypatch.setattr(datasets, "_UNITS", 10)
    context = miniray.data.DataContext.get_current()
    monkeypatch.setattr(context, "target_max_block_size", 2**17)
    options = {"concurrency": 1, "batch_size": 4}
    dataset = miniray.data.range(320).map_batches(Grows, **options)
    fit(dataset, loop)


def test_a_failed_attempt_leaves_no_actor_and_the_next_one_has_its_own(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        batches = iter(train.get_dataset_shard("train").iter_batches(batch_size=7))
        next(batches)
        once = Path(config["folder"], "failed")
        train.collective.barrier()
        if train.get_context().get_world_rank() == 0 and not once.exists():
            once.touch()
            raise RuntimeError("once")
        for _ in batches:
            pass
        alive = {each.actor_id for each in list_actors(filters=ALIVE)}
        rank = train.get_context().get_world_rank()
        Path(config["folder"], f"seen-{rank}").write_text(json.dumps([sorted(alive)]))
        train.collective.barrier()

    [(first, second)] = fit(through(Adds, tmp_path), loop, failures=1)
    assert first == second
    assert len(first) == 2
    assert made(tmp_path) == 4
    wait_until(lambda: not list_actors(filters=ALIVE))


def test_an_actor_that_dies_in_the_middle_of_an_epoch_loses_and_doubles_no_row(
    fit: Any, tmp_path: Path
) -> None:
    class Dies(Adds):
        def __init__(self, folder: str) -> None:
            super().__init__(folder)
            self.once = Path(folder, "died")

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            if 150 in batch["id"] and not self.once.exists():
                self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    seen = fit(through(Dies, tmp_path))
    assert [rows_of(epoch) for epoch in seen] == [list(range(1, 301))] * 2
    assert made(tmp_path) == 3


class Draws(Adds):
    """Adds a column of random numbers."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "drawn": np.random.rand(len(batch["id"]))}


def test_whichever_actor_runs_a_call_the_batches_and_their_random_numbers_are_the_same(
    fit: Any, tmp_path: Path
) -> None:
    runs = [fit(through(Draws, tmp_path), cpus=cpus) for cpus in (1, 1, 2)]
    assert runs[0] == runs[1] == runs[2]  # with the last, ranks hold all CPUs, and have no pool


def test_a_run_that_goes_on_in_mid_epoch_has_the_same_batches_as_an_unbroken_one(
    fit: Any, tmp_path: Path
) -> None:
    dataset = through(Adds, tmp_path)
    unbroken = fit(dataset)
    [first] = fit(dataset, stops_after=9)
    rest, second = fit(dataset, resumes=True)
    whole = tuple([*begun, *left] for begun, left in zip(first, rest, strict=True))
    assert [whole, second] == unbroken
    assert made(tmp_path) == 6


def test_a_rank_that_stops_reading_leaves_the_actors_to_the_others(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, str]) -> None:
        shard = train.get_dataset_shard("train")
        rank = train.get_context().get_world_rank()
        seen = []
        for batch in shard.iter_batches(batch_size=10):
            seen.append({"id": batch["id"].tolist()})
            if rank == 0:
                break
        Path(config["folder"], f"seen-{rank}").write_text(json.dumps([seen]))

    [(first, second)] = fit(through(Adds, tmp_path), loop)
    assert [len(first), len(second)] == [1, 15]
    assert made(tmp_path) == 2


def test_a_function_that_never_ends_fails_when_it_has_given_too_many_rows(
    fit: Any, tmp_path: Path
) -> None:
    class Endless(Adds):
        def __call__(self, batch: dict[str, Any]) -> Any:
            while True:
                yield batch

    told = r"MapBatches\(Endless\) returned 2 rows for the 1 "
    with pytest.raises(train.TrainingFailedError, match=told):
        fit(through(Endless, tmp_path, rows=100))
