"""Groups that grow and shrink with the cluster, and what their callbacks and data see of it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster

from miniray import train
from miniray.train import (
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from miniray.train.torch import TorchTrainer
from miniray.util.state import list_placement_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.cluster_utils import Cluster

pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.timeout(600)  # a machine that does much else starts nodes slowly

#: So many that two ranks and three have equal shares.
ROWS = 12


@pytest.fixture
def cluster(session_root: Path) -> Iterator[Cluster]:
    """A head without slots for workers; other nodes have some."""
    with running_cluster({"num_cpus": 1}) as cluster:
        yield cluster


class Listener(train.Callback):
    """Writes what it is told into files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _add(self, name: str, entry: Any) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        places = [each["place"] for each in metrics]
        rows = [each["rows"] for each in metrics]
        self._add("reports", [run_context.report_number, metrics[0]["epoch"], places, rows])

    def after_resize(self, run_context: Any, old_size: int, new_size: int) -> None:
        self._add("resizes", [old_size, new_size])


def lines(path: Path) -> list[Any]:
    """The entries of a file that somebody may be writing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def epochs_until_stopped(config: dict[str, str], read: Callable[[int], list[int]]) -> int:
    """Read the rows of one epoch after the other, from the newest checkpoint on."""
    context = train.get_context()
    older = train.get_checkpoint()
    epoch = 0
    if older is not None:
        with older.as_directory() as folder:
            epoch = int(Path(folder, "epoch").read_text()) + 1
    while True:
        rows = read(epoch)
        over = train.collective.broadcast_from_rank_zero(Path(config["folder"], "stop").exists())
        metrics = {
            "epoch": epoch,
            "rows": rows,
            "place": [context.get_world_rank(), context.get_world_size()],
        }
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if context.get_world_rank() == 0:
                Path(folder, "epoch").write_text(str(epoch))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
        if over:
            return epoch
        epoch += 1
        time.sleep(0.1)  # nodes that start meanwhile have the processors


def shard_loop(config: dict[str, str]) -> int:
    shard = train.get_dataset_shard("train")

    def read(epoch: int) -> list[int]:
        return [row for batch in shard.iter_batches(batch_size=3) for row in batch["x"].tolist()]

    return epochs_until_stopped(config, read)


def loader_loop(config: dict[str, str]) -> int:
    from torch.utils.data import DataLoader

    loader = train.torch.prepare_data_loader(DataLoader(range(ROWS), batch_size=3, shuffle=True))

    def read(epoch: int) -> list[int]:
        loader.sampler.set_epoch(epoch)
        return [row for batch in loader for row in batch.tolist()]

    return epochs_until_stopped(config, read)


class Run:
    """A run in a thread."""

    def __init__(
        self,
        folder: Path,
        workers: tuple[int, int],
        kind: type[DataParallelTrainer] = DataParallelTrainer,
        loop: Any = None,
    ) -> None:
        self.folder = folder
        self.result: Any = None
        self.error: BaseException | None = None
        trainer = kind(
            loop or shard_loop,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(
                num_workers=workers,
                resources_per_worker={"slot": 1},
                elastic_resize_monitor_interval_s=0,
            ),
            run_config=RunConfig(
                name="elastic",
                storage_path=folder / "results",
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                callbacks=[Listener(folder)],
            ),
            datasets={"train": pa.table({"x": list(range(ROWS))})},
        )
        self._thread = threading.Thread(target=self._fit, args=[trainer], daemon=True)
        self._thread.start()

    def _fit(self, trainer: DataParallelTrainer) -> None:
        try:
            self.result = trainer.fit()
        except BaseException as error:
            self.error = error

    def wait_for_size(self, size: int) -> None:
        """Wait for a report of a group of this size that is made from now on."""
        before = len(lines(self.folder / "reports"))

        def trains() -> bool:
            assert self.error is None, self.error
            reports = lines(self.folder / "reports")
            return len(reports) > before + 1 and len(reports[-1][2]) == size

        wait_until(trains, 150, told=lambda: str(lines(self.folder / "reports")[-3:]))

    def stop(self) -> None:
        (self.folder / "stop").touch()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None


def check_reports(folder: Path) -> list[Any]:
    """Every epoch is there once, every rank had its place, and all rows were read; the reports."""
    reports = lines(folder / "reports")
    numbers = [number for number, _, _, _ in reports]
    assert numbers == sorted(set(numbers))
    assert [epoch for _, epoch, _, _ in reports] == list(range(len(reports)))
    for _, _, places, rows in reports:
        assert places == [[rank, len(places)] for rank in range(len(places))]
        assert sorted(itertools.chain(*rows)) == list(range(ROWS))
    return reports


def test_a_group_follows_the_nodes_that_come_and_go(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1, resources={"slot": 2})
    run = Run(tmp_path, (1, 3))
    run.wait_for_size(2)
    node = cluster.add_node(num_cpus=1, resources={"slot": 1})
    run.wait_for_size(3)
    cluster.remove_node(node, allow_graceful=False)
    run.wait_for_size(2)
    run.stop()
    assert lines(tmp_path / "resizes") == [[2, 3], [3, 2]]
    check_reports(tmp_path)
    assert run.result.return_value is not None


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch comes with the extra 'train'"
)
def test_a_loader_shares_its_rows_out_anew_for_each_group(cluster: Cluster, tmp_path: Path) -> None:
    from torch.utils.data import DistributedSampler

    first = cluster.add_node(num_cpus=1, resources={"slot": 2})
    run = Run(tmp_path, (2, 3), TorchTrainer, loader_loop)
    run.wait_for_size(2)
    second = cluster.add_node(num_cpus=1, resources={"slot": 1})
    run.wait_for_size(3)
    cluster.remove_node(second, allow_graceful=False)
    run.wait_for_size(2)
    run.stop()
    assert first.is_alive()
    assert lines(tmp_path / "resizes") == [[2, 3], [3, 2]]
    for _, epoch, places, rows in check_reports(tmp_path):
        for rank, size in places:
            sampler = DistributedSampler(range(ROWS), size, rank)
            sampler.set_epoch(epoch)
            assert rows[rank] == list(sampler)


def test_a_group_waits_below_its_least_and_says_why(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = cluster.add_node(num_cpus=1, resources={"slot": 1})
    second = cluster.add_node(num_cpus=1, resources={"slot": 1})
    run = Run(tmp_path, (2, 4))
    run.wait_for_size(2)
    cluster.remove_node(second, allow_graceful=False)
    printed = []

    def told() -> bool:
        printed.append(capfd.readouterr().out)
        return "slot is short by 1" in "".join(printed)

    wait_until(told, 30, told=lambda: "".join(printed))
    cluster.add_node(num_cpus=1, resources={"slot": 1})
    run.wait_for_size(2)
    run.stop()
    assert first.is_alive()
    assert not lines(tmp_path / "resizes")
    assert {len(places) for _, _, places, _ in lines(tmp_path / "reports")} == {2}


def test_a_node_that_dies_before_its_worker_starts_is_not_waited_for(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, resources={"slot": 1})
    frozen = cluster.add_node(num_cpus=1, resources={"slot": 1})
    os.kill(frozen.pids["node"], signal.SIGSTOP)
    run = Run(tmp_path, (1, 2))

    def placed() -> bool:
        groups = list_placement_groups()
        return any(group.state == "CREATED" and len(group.bundles) == 2 for group in groups)

    try:
        wait_until(placed, 30)
    finally:
        os.kill(frozen.pids["node"], signal.SIGKILL)
    run.wait_for_size(1)
    run.stop()
    assert run.error is None
