"""The checks of ``gpu_check.py`` that train: NCCL, mixed precision, copies ahead, several GPUs."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from _gpu_checks import LIMIT, SkippedError, need

if TYPE_CHECKING:
    from collections.abc import Callable

    from _gpu_checks import Check

    from miniray.accelerators.node_resources import NodeAccelerators


def _need_training(gpus: int, found: NodeAccelerators) -> None:
    """Skip a check that needs the train layer with NCCL, and so many GPUs with room."""
    torch = need(gpus, found)
    if not torch.nccl:
        raise SkippedError(f"PyTorch {torch.version} has no NCCL")
    missing = [name for name in ("fsspec", "pyarrow", "numpy") if find_spec(name) is None]
    if missing:
        raise SkippedError(f"training needs {', '.join(missing)}: install miniray[train]")


def nccl_with_one_rank(found: NodeAccelerators) -> str:
    """NCCL works, and the device is the one that the pages on training name."""
    _need_training(1, found)

    def loop() -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from miniray.train.torch import get_device, get_devices

        assert torch.cuda.is_available()
        assert get_device() == torch.device("cuda:0")
        assert get_devices() == [torch.device("cuda:0")]
        total = torch.ones(4, device=get_device()) * 3
        dist.all_reduce(total)
        return {"backend": dist.get_backend(), "total": total.sum().item()}

    told = _fit(loop, {"GPU": 1})
    assert told == {"backend": "nccl", "total": 12.0}, told
    return "nccl, all_reduce"


def batches_that_are_copied_ahead(found: NodeAccelerators) -> str:
    """Batches come on the device, in order and whole, though the next one is copied meanwhile."""
    _need_training(1, found)

    def loop() -> bool:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from miniray.train import torch as train

        rows = torch.arange(64 * 1024, dtype=torch.float32).reshape(64, 1024)
        loader = train.prepare_data_loader(DataLoader(TensorDataset(rows), batch_size=8))
        seen = []
        for (batch,) in loader:
            assert batch.device == train.get_device()
            seen.append(batch * 2)  # work on the device while the next batch is copied
        return torch.equal(torch.cat(seen).cpu(), rows * 2)

    assert _fit(loop, {"GPU": 1}) is True
    return "8 batches"


def training_with_two_gpus_in_a_worker(found: NodeAccelerators) -> str:
    """A worker with two GPUs has both, numbered from 0."""
    _need_training(2, found)

    def loop() -> list[str]:
        import torch

        from miniray.train.torch import get_device, get_devices

        assert get_device() == torch.device("cuda:0")
        return [str(device) for device in get_devices()]

    told = _fit(loop, {"GPU": 2})
    assert told == ["cuda:0", "cuda:1"], told
    return ", ".join(told)


def training_with_two_ranks(found: NodeAccelerators) -> str:
    """Two ranks with a GPU each agree on gradients, with DDP and sharded (FSDP2), over NCCL."""
    _need_training(2, found)

    def loop() -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from miniray.train import torch as train

        told: dict[str, Any] = {"backend": dist.get_backend(), "device": str(train.get_device())}
        for strategy in ("ddp", "fsdp2"):
            torch.manual_seed(0)
            model = train.prepare_model(torch.nn.Linear(8, 2), parallel_strategy=strategy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            inputs = torch.full((4, 8), 1.0 + dist.get_rank(), device=train.get_device())
            model(inputs).sum().backward()
            optimizer.step()
            weight = next(iter(model.parameters())).detach()
            told[strategy] = float((weight.full_tensor() if strategy == "fsdp2" else weight).sum())
        return told

    told = _fit(loop, {"GPU": 1}, num_workers=2)
    assert told["backend"] == "nccl", told
    assert abs(told["ddp"] - told["fsdp2"]) < 1e-3, told
    return f"nccl, {told['device']} on rank 0, equal weights with ddp and fsdp2"


def _fit(loop: Callable[[], Any], resources: dict[str, float], num_workers: int = 1) -> Any:
    """What rank 0 of a training run returns."""
    from miniray.train import RunConfig, ScalingConfig
    from miniray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as storage:
        result = TorchTrainer(
            loop,
            scaling_config=ScalingConfig(
                num_workers=num_workers,
                use_gpu=True,
                resources_per_worker=resources,
                placement_timeout_s=LIMIT,
            ),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    return result.return_value


TRAIN_CHECKS: tuple[Check, ...] = (
    nccl_with_one_rank,
    batches_that_are_copied_ahead,
    training_with_two_gpus_in_a_worker,
    training_with_two_ranks,
)
