"""``torch.distributed.checkpoint`` through reports, loaded by another number of workers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from miniray import train
from miniray.train import Checkpoint
from miniray.train.torch import TorchTrainer

pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]


def sharded_state() -> dict[str, Any]:
    """The state of a model and its optimizer, each rank with its shards."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 5))
    mesh = init_device_mesh("cpu", (train.get_context().get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 12)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def whole(state: dict[str, Any]) -> dict[str, list[float]]:
    """All numbers of the model and of Adam's first moments, gathered from all ranks."""
    gathered = {name: value.full_tensor() for name, value in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        gathered[f"{name}.exp_avg"] = moments["exp_avg"].full_tensor()
    return {name: value.flatten().tolist() for name, value in gathered.items()}


def save_or_load(config: dict[str, str]) -> dict[str, list[float]]:
    """Save at first; go on from a checkpoint if there is one."""
    import torch.distributed.checkpoint as dcp

    state = sharded_state()
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        # A folder for each rank, as on machines of their own.
        folder = tempfile.mkdtemp(dir=config["folder"])
        dcp.save(state, checkpoint_id=folder)
        train.report({}, Checkpoint.from_directory(folder))
        shutil.rmtree(folder)
        return whole(state)
    for tensor in state["model"].values():
        tensor.zero_()
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"].zero_()
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    return whole(state)


@pytest.mark.timeout(180)
def test_a_sharded_checkpoint_is_loaded_by_another_number_of_workers(
    fit: Any, tmp_path: Path
) -> None:
    def run(workers: int) -> Any:
        config = {"folder": str(tmp_path)}
        return fit(save_or_load, config, workers, trainer=TorchTrainer, name="sharded")

    saved = run(2)
    with saved.checkpoint.as_directory() as stored:
        names = {path.name for path in Path(stored).iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for workers in (3, 1):
        loaded = run(workers).return_value
        assert loaded.keys() == saved.return_value.keys()
        for name, values in saved.return_value.items():
            assert loaded[name] == pytest.approx(values), name
