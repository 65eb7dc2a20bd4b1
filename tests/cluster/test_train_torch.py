"""``TorchTrainer`` with real process groups, on the CPU."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, takes_less_than, wait_for_text, wait_until

import miniray
from miniray import train
from miniray.train import FailureConfig, WorkerGroupError
from miniray.train.controller.worker_group import MODULES
from miniray.train.torch import TorchConfig, TorchTrainer, prepare_model

if TYPE_CHECKING:
    from collections.abc import Callable


pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def fit(fit: Any) -> Any:
    """Runs a train loop on two workers with a process group."""
    return functools.partial(fit, trainer=TorchTrainer)


@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_the_process_group_is_ready_when_the_loop_begins(fit: Any, init_method: str) -> None:
    def loop() -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        return {
            "total": total.item(),
            "backend": dist.get_backend(),
            "device": str(train.torch.get_device()),
            "threads": torch.get_num_threads(),
            "variables": [os.environ[name] for name in names],
        }

    assert fit(loop, given={"torch_config": TorchConfig(init_method=init_method)}).return_value == {
        "total": 3,
        "backend": "gloo",
        "device": "cpu",
        "threads": 1,  # as many as a worker has CPUs
        "variables": ["0", "2", "0", "2", "0"],
    }


def test_a_rank_begins_with_all_that_it_needs_loaded(fit: Any) -> None:
    class Forked:
        def modules(self) -> set[str]:
            return set(sys.modules)

    def loop() -> list[str]:
        return sorted(sys.modules)

    backend = TorchConfig().make_backend()
    actor: Any = miniray.remote(Forked)
    forked = actor.options(
        _preload=[*MODULES, *backend.preload({})], _preload_later=[*backend.preload_later({})]
    )
    of_rank = set(fit(loop).return_value)
    assert not of_rank - miniray.get(forked.remote().modules.remote())


@pytest.mark.timeout(180)
def test_the_first_step_of_a_rank_does_not_wait_for_modules_once_a_run_had_them_loaded(
    fit: Any,
) -> None:
    def loop() -> list[str]:
        import torch

        from miniray.train.torch import prepare_model

        before = set(sys.modules)
        model = prepare_model(torch.nn.Linear(1, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        return sorted(set(sys.modules) - before)

    # By itself the compiler's front end, with what it needs, is 800 modules. The first ranks do
    # not wait for it; those that start after it is loaded begin with it.
    wait_until(lambda: len(fit(loop).return_value) < 50, 150)


def test_workers_train_one_model_on_different_data(fit: Any) -> None:
    def loop() -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from miniray.train.torch import prepare_data_loader, prepare_model

        data = torch.utils.data.TensorDataset(torch.arange(8.0).unsqueeze(1))
        loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4))
        model = prepare_model(torch.nn.Linear(1, 1))
        (batch,) = next(iter(loader))
        model(batch).sum().backward()
        gathered: list[Any] = [None, None]
        parameters = [p.grad.tolist() for p in model.parameters()]
        dist.all_gather_object(gathered, (batch.flatten().tolist(), parameters))
        return {
            "shares": [share for share, _ in gathered],
            "same": gathered[0][1] == gathered[1][1],
        }

    value = fit(loop).return_value
    assert sorted(value["shares"][0] + value["shares"][1]) == list(range(8))
    assert value["same"]


def test_a_rank_that_returns_while_another_waits_for_it_ends_the_run(fit: Any) -> None:
    def loop() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(WorkerGroupError, match="already returned on: rank 1"):
        fit(loop)
    assert time.monotonic() - start < 60  # PyTorch's own limit is half an hour


def new_group(rank: int) -> None:
    import torch.distributed as dist

    if rank == 0:
        dist.new_group(backend="gloo")


def uneven_steps(rank: int) -> None:
    import torch

    model = prepare_model(torch.nn.Linear(4, 1))
    for _ in range(3 if rank == 0 else 1):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("loop", [uneven_steps, new_group])
def test_a_rank_that_returns_ends_also_waits_that_no_closed_connection_ends(
    fit: Any, loop: Callable[[int], None]
) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerGroupError) as caught:
        fit(lambda: loop(train.get_context().get_world_rank()))
    assert time.monotonic() - start < 60  # PyTorch's own limit is half an hour
    assert "already returned on: rank 1" in str(caught.value)
    if loop is new_group:  # it waits for a key of rank 1, and not for its connection
        assert "Rank 1 has returned from the train loop, while rank 0" in str(caught.value)
        assert "new_group" in str(caught.value)


def test_a_rank_that_works_on_after_another_has_returned_is_left_alone(
    fit: Any, tmp_path: Path
) -> None:
    def loop(config: dict[str, Path]) -> str:
        if train.get_context().get_world_rank() == 0:
            other = int(wait_for_text(config["pid"]))
            wait_until(lambda: not is_alive(other))
        else:
            config["pid"].write_text(str(os.getpid()))
        return "done"

    assert fit(loop, {"pid": tmp_path / "pid"}).return_value == "done"


def test_a_rank_that_dies_while_another_waits_for_it_is_named(fit: Any) -> None:
    def loop() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            os._exit(7)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerGroupError) as caught:
        fit(loop)
    assert 1 in caught.value.worker_failures


def test_a_tensor_as_a_metric_is_refused(fit: Any) -> None:
    def loop() -> None:
        import torch

        train.report({"loss": torch.ones(1)})

    with pytest.raises(WorkerGroupError, match=r"loss\.item\(\)"):
        fit(loop)


def test_a_second_run_starts_fast(fit: Any) -> None:
    def loop() -> None:
        pass

    def run_again() -> float:
        start = time.monotonic()
        fit(loop)
        return time.monotonic() - start

    fit(loop)
    takes_less_than(5, run_again)


def test_a_pytorch_dataset_is_read_as_tensors_on_the_workers_device(
    fit: Any, tmp_path: Path
) -> None:
    import torch

    def loop(config: dict[str, str]) -> None:
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=4)
        pairs = [(x.tolist(), y.tolist(), str(x.device)) for x, y in batches]
        rank = train.get_context().get_world_rank()
        Path(config["folder"], f"pairs{rank}").write_text(json.dumps(pairs))

    rows = torch.utils.data.TensorDataset(torch.arange(10) * 2, torch.arange(10))
    fit(loop, {"folder": str(tmp_path)}, given={"datasets": {"train": rows}})
    pairs = [
        pair for path in sorted(tmp_path.glob("pairs*")) for pair in json.loads(path.read_text())
    ]
    assert {device for _, _, device in pairs} == {"cpu"}
    assert sorted(label for _, labels, _ in pairs for label in labels) == list(range(10))
    assert all(x == [2 * n for n in y] for x, y, _ in pairs)


@pytest.mark.slow
def test_a_collective_that_a_rank_never_joins_ends_with_the_stacks_of_all_ranks(
    fit: Any, tmp_path: Path
) -> None:
    def loop() -> str:
        import torch
        import torch.distributed as dist

        if train.get_checkpoint() is not None:
            return "went on"
        with tempfile.TemporaryDirectory() as folder:
            train.report({}, train.Checkpoint.from_directory(folder))
        train.get_all_reported_checkpoints()
        if dist.get_rank() == 0:
            signal.pause()
        dist.all_reduce(torch.ones(1))
        return "hung"

    failures = FailureConfig(max_failures=1, hang_timeout_s=5)
    result = fit(loop, name="hang", storage_path=tmp_path, failure_config=failures)
    assert result.return_value == "went on"
    first, second = (tmp_path / "hang" / "stacks_attempt_1.txt").read_text().split("=== rank 1")
    assert "loop (test_train_torch.py" in first
    assert "all_reduce" not in first
    assert "all_reduce" in second
