"""Local mode in real processes: under torchrun with its ranks, under a debugger, under Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import wait_for_file

from miniray.train import Result
from miniray.train.worker.local_link import LinkClient

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
# Each process of torchrun loads PyTorch for itself, which takes long where others do the same.
pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import json, os, shutil, sys, tempfile, time
from pathlib import Path

import miniray
from miniray import train
from miniray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig, collective
from miniray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

folder, mode = Path(sys.argv[1]), sys.argv[2]


def train_func():
    import torch

    context = train.get_context()
    rank = context.get_world_rank()
    print(f"hello from rank {rank}\\n", end="")  # in one write: the ranks share the output
    if mode == "fail":
        files = folder / f"of-{rank}"
        files.mkdir()
        (files / f"rank{rank}").write_text("x")
        train.report(
            {"epoch": 0},
            Checkpoint.from_directory(files),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=slowly if rank == 1 else None,
        )
        collective.barrier()
        if rank == 1:
            raise ValueError("boom")
    if mode == f"leave-{rank}":
        os._exit(0)
    collective.barrier()
    told = collective.broadcast_from_rank_zero(f"from rank {rank}")
    batches = list(train.get_dataset_shard("numbers").iter_torch_batches(batch_size=10))
    numbers = collective_sum(sum(batch[0].sum().item() for batch in batches))
    model = prepare_model(torch.nn.Linear(1, 1))
    loader = prepare_data_loader(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2))
    for epoch in range(2):
        for batch in loader:
            model(batch.unsqueeze(1)).mean().backward()
        if rank == 0:
            train.report({"epoch": epoch, "rank": rank})
        else:
            train.report({"epoch": epoch})
        with tempfile.TemporaryDirectory() as files:
            Path(files, f"rank{rank}").write_text("x")
            train.report({"epoch": epoch, "rank": rank}, Checkpoint.from_directory(files))
    late = folder / f"late-{rank}-{context.get_experiment_name()}"
    late.mkdir()
    (late / f"late{rank}").write_text("x")
    way = CheckpointUploadMode.ASYNC
    checkpoint = Checkpoint.from_directory(late)
    train.report({"epoch": 2, "rank": rank}, checkpoint, checkpoint_upload_mode=way)
    kept = [each.metrics["epoch"] for each in train.get_all_reported_checkpoints()]
    if rank == 1:
        (folder / "seen-by-1").write_text(json.dumps([told, kept, late.exists()]))
    return [collective_sum(1), type(model).__name__, context.get_world_size(), rank, numbers]


def slowly(checkpoint, name):
    time.sleep(2)
    place = train.get_context().get_storage().build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, place, dirs_exist_ok=True)
    return Checkpoint(place)


def collective_sum(value):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(value)])
    dist.all_reduce(total)
    return total.item()


import torch

numbers = torch.utils.data.TensorDataset(torch.arange(7.0))


for name in ["first", "mine"] if mode == "twice" else ["mine"]:
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=0),
        datasets={"numbers": numbers},
        run_config=RunConfig(storage_path=folder / "runs", name=name),
    )
    result = trainer.fit()
told = [result.return_value, result.metrics, str(result.checkpoint), miniray.is_initialized()]
(folder / f"told-{os.environ.get('RANK', 'alone')}").write_text(json.dumps(told))
"""


def command(folder: Path, mode: str, *before: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return [sys.executable, *before, str(script), str(folder), mode]


def torchrun(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.run(
        command(folder, mode, *run),
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_processes_of_torchrun_are_the_ranks_of_one_run(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "twice")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    value, metrics, checkpoint, cluster = told[0]
    assert value[:4] == [2.0, "DistributedDataParallel", 2, 0]
    assert value[4] >= sum(range(7))  # the ranks share the rows; one may be there twice
    assert metrics == {"epoch": 2, "rank": 0}
    assert "checkpoint_000004" in checkpoint
    seen = json.loads((tmp_path / "seen-by-1").read_text())
    assert seen == ["from rank 0", [0, 1, 2], False]
    assert not cluster
    assert Result.from_path(tmp_path / "runs" / "first").metrics == metrics
    result = Result.from_path(tmp_path / "runs" / "mine")
    assert len(result.best_checkpoints) == 3
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as files:
        assert sorted(os.listdir(files)) == ["late0", "late1"]
    assert not (tmp_path / "runs" / "mine" / "logs").exists()  # torchrun has the output
    assert done.stdout.count("hello from rank 1") == 2


@pytest.mark.slow
def test_a_rank_of_torchrun_that_fails_ends_all_of_them_once_it_has_uploaded(
    tmp_path: Path,
) -> None:
    done = torchrun(tmp_path, "fail")
    assert done.returncode != 0
    assert "[Rank 1] ValueError: boom" in done.stderr
    assert not list(tmp_path.glob("told-*"))
    checkpoint = Result.from_path(tmp_path / "runs" / "mine").checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as files:
        assert sorted(os.listdir(files)) == ["rank0", "rank1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gone", "told"),
    [(1, "WorkerGroupError.*Rank 1 is gone"), (0, "ControllerError.*Rank 0.* is gone")],
)
def test_a_rank_that_is_gone_ends_the_waits_of_the_other(
    tmp_path: Path, gone: int, told: str
) -> None:
    done = torchrun(tmp_path, f"leave-{gone}")  # torchrun does not end the others of one that left
    assert done.returncode != 0
    assert re.search(told, done.stderr, re.DOTALL), done.stderr
    assert not list(tmp_path.glob("told-*"))


KILLED = """
import os, socket
from miniray.train.worker.local_link import LinkServer

listener = socket.create_server(("127.0.0.1", 0))
link = LinkServer(listener, b"secret", 60)
port = listener.getsockname()[1]
if os.fork() == 0:
    print(port, flush=True)
    os.read(0, 1)  # until the test ends
os._exit(0)
"""


def test_a_child_of_rank_0_that_outlives_it_does_not_keep_others_waiting() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        port = int(rank_0.stdout.readline())
        assert rank_0.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            LinkClient(("127.0.0.1", port), b"secret", 1, timeout=10)


@pytest.mark.slow
def test_a_debugger_stops_in_the_loop(tmp_path: Path) -> None:
    commands = "break train_func\ncontinue\nnext\nnext\nnext\nnext\np 'at', rank\ncontinue\n"
    done = subprocess.run(
        command(tmp_path, "train", "-m", "pdb"),
        input=commands,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "('at', 0)" in done.stdout, done.stdout + done.stderr
    told = json.loads((tmp_path / "told-alone").read_text())
    assert told[0] == [1.0, "Linear", 1, 0, sum(range(7))]


WAITS = """
import sys, time
from pathlib import Path
from miniray.train import DataParallelTrainer, RunConfig, ScalingConfig

folder = Path(sys.argv[1])


def train_func():
    (folder / "begun").touch()
    time.sleep(600)


DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(storage_path=folder / "runs", name="mine"),
).fit()
"""


def test_ctrl_c_ends_a_local_run(tmp_path: Path) -> None:
    process: Any = subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_file(tmp_path / "begun", timeout=120)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in errors
    assert json.loads((tmp_path / "runs" / "mine" / "run.json").read_text())["state"] == "ABORTED"
