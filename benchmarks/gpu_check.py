"""Checks on a machine with real GPUs what the tests can only check on logical ones.

    python benchmarks/gpu_check.py

Detection, visibility, two workers that share a GPU, device memory that is free again after a
task and after a kill, NCCL, mixed precision, copies ahead of use, and what Ray's pages on training
assert of ``torch.cuda``. Prints a line for each check and exits with 1 if one failed; one that does
not end in time is a failure too, and ends the program. Says "no GPU" and exits with 0 on a machine
without; a check that cannot be made (no PyTorch, only one GPU) is told as skipped.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import miniray
from miniray.accelerators import NodeAccelerators, resolve_node_accelerators, this_host

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1024**3
#: Device memory that may be missing after a task: contexts of others, rounding.
_SLACK = GIB // 2
#: Seconds that a check's tasks may take: the first import of PyTorch from a cold disk is slow.
_LIMIT = 180.0
#: Seconds that a check may take altogether; a driver that hangs makes it take longer.
_CHECK_LIMIT = 600.0
#: Takes most of a GPU's memory and keeps it.
_HOLD = """
import torch, time
kept = torch.empty(int(torch.cuda.mem_get_info()[0] * 0.8), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(3600)
"""
#: What PyTorch is, and how many devices it counts, as JSON.
_ABOUT_TORCH = """
import json, torch
told = [torch.__version__, torch.version.cuda or torch.version.hip, torch.cuda.device_count()]
print(json.dumps(told))
"""


class SkippedError(Exception):
    """A check can't be made here; the text says why."""


def main() -> int:
    """Run all checks; the exit code."""
    found = resolve_node_accelerators(None, {}, this_host())
    if "GPU" not in found.devices:
        print("no GPU")
        return 0
    miniray.init(address="local", log_to_driver=False)
    try:
        verdicts = [_verdict(check, found) for check in CHECKS]
    finally:
        miniray.shutdown()
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in ("ok", "skipped", "FAILED"))
    print(f"{len(CHECKS)} checks: {counts}")
    return int("FAILED" in verdicts)


def _verdict(check: Callable[[NodeAccelerators], str], found: NodeAccelerators) -> str:
    """Make a check and print what came of it."""
    name = check.__name__.replace("_", " ")
    start = time.monotonic()
    watch = threading.Timer(_CHECK_LIMIT, _give_up, (name,))
    watch.daemon = True
    watch.start()
    try:
        verdict, text = "ok", f"{check(found)} ({time.monotonic() - start:.1f} s)"
    except SkippedError as reason:
        verdict, text = "skipped", str(reason)
    except Exception:  # noqa: BLE001 - whatever a check ends in is its result
        verdict, text = "FAILED", traceback.format_exc()
    finally:
        watch.cancel()
    print(f"{verdict:<8} {name}: {text}", flush=True)
    return verdict


def _give_up(name: str) -> None:
    """A check does not end: say where it is, and end; the cluster ends with this process."""
    print(f"FAILED   {name}: not done within {_CHECK_LIMIT:g} s", flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


class Torch(NamedTuple):
    """The PyTorch of this environment."""

    version: str
    #: Version of CUDA or ROCm that it is made for; None if for neither.
    platform: str | None
    devices: int


@functools.cache
def _ask_torch() -> Torch:
    """Ask in a process of its own: this one is to have no device."""
    told = subprocess.run(
        [sys.executable, "-c", _ABOUT_TORCH],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT,
    ).stdout
    return Torch(*json.loads(told.splitlines()[-1]))


def torch_here() -> Torch:
    """The PyTorch of this environment.

    Raises:
        SkippedError: it is not installed, or not made for GPUs.
    """
    if find_spec("torch") is None:
        raise SkippedError("PyTorch is not installed")
    torch = _ask_torch()
    if torch.platform is None:
        raise SkippedError(f"PyTorch {torch.version} is not made for GPUs")
    return torch


def _need(gpus: int, found: NodeAccelerators) -> None:
    """Skip a check that needs PyTorch and so many of its GPUs."""
    torch_here()
    if found.devices["GPU"].family == "intel":
        raise SkippedError("it is for GPUs of NVIDIA and AMD")
    if len(found.devices["GPU"].ids) < gpus:
        raise SkippedError("there is one GPU")


def _get(refs: Any) -> Any:
    return miniray.get(refs, timeout=_LIMIT)


# --- the checks ------------------------------------------------------------------------------


def detection(found: NodeAccelerators) -> str:
    """What miniray counts is what PyTorch counts, and the node announces it."""
    group = found.devices["GPU"]
    assert miniray.cluster_resources()["GPU"] == len(group.ids)
    types = [name for name in found.resources if name.startswith("accelerator_type:")]
    told = f"{len(group.ids)} of family {group.family}, {types[0] if types else 'model unknown'}"
    if types:
        assert types[0] in miniray.cluster_resources()
    elif group.family == "nvidia":
        readable = find_spec("pynvml") is not None or Path("/proc/driver/nvidia/gpus").is_dir()
        assert not readable, "the model is not known, though the driver tells it"
    try:
        torch = torch_here()
    except SkippedError as reason:
        return f"{told}; not compared with PyTorch: {reason}"
    if group.family == "intel":
        return told
    assert torch.devices == len(group.ids), f"PyTorch counts {torch.devices}"
    return f"{told}; so counts PyTorch {torch.version} for {torch.platform}"


def visibility(found: NodeAccelerators) -> str:
    """A worker with one GPU sees that one; a worker without has no variable of ours."""
    _need(1, found)
    group = found.devices["GPU"]
    variable = group.variable
    assert variable is not None

    def seen() -> tuple[str | None, list[str], int, bool]:
        import torch

        ids = miniray.get_runtime_context().get_accelerator_ids()["GPU"]
        count = torch.cuda.device_count()
        works = count > 0 and torch.ones(8, device="cuda").sum().item() == 8
        return os.environ.get(variable), ids, count, works

    value, ids, count, works = _get(miniray.remote(num_gpus=1)(seen).remote())
    assert (ids, count, works) == ([group.ids[0]], 1, True), (value, ids, count, works)
    inherited = miniray.remote(lambda: os.environ.get(variable))
    assert _get(inherited.remote()) == os.environ.get(variable)
    return f"{variable}={value}"


def sharing_of_a_gpu_by_two_halves(found: NodeAccelerators) -> str:
    """Two actors with half a GPU each compute on the same one at the same time."""
    _need(1, found)

    class Half:
        def __init__(self) -> None:
            import torch

            self.values = torch.ones(64 * 1024 * 1024, device="cuda")  # 256 MiB

        def place(self) -> tuple[list[str], str]:
            import torch

            ids = miniray.get_runtime_context().get_accelerator_ids()["GPU"]
            properties = torch.cuda.get_device_properties(0)
            return ids, str(getattr(properties, "uuid", properties.name))

        def add(self, amount: float) -> float:
            for _ in range(100):
                self.values += amount
            return float(self.values[0].item())

    half_of_a_gpu = miniray.remote(num_cpus=0, num_gpus=0.5)(Half)
    halves = [half_of_a_gpu.remote() for _ in range(2)]
    first, second = _get([half.place.remote() for half in halves])
    assert first == second, (first, second)
    assert _get([half.add.remote(n) for n, half in enumerate(halves, 1)]) == [101.0, 201.0]
    for half in halves:
        miniray.kill(half)
    return f"both on device {first[0][0]}, {first[1]}"


def device_memory_is_free_after_a_task(found: NodeAccelerators) -> str:
    """Three tasks in turn take most of a GPU's memory, and each finds it free."""
    _need(1, found)

    @miniray.remote(num_gpus=1)
    def fill() -> tuple[int, int, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        kept = torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda")
        torch._miniray_gpu_check_kept = kept
        return os.getpid(), free, total

    told = [_get(fill.remote()) for _ in range(3)]
    pids = [pid for pid, _, _ in told]
    assert len(set(pids)) == 3, f"a worker was used again: {pids}"
    return _all_free([free for _, free, _ in told], told[0][2])


def device_memory_is_used_again_with_max_calls_of_zero(found: NodeAccelerators) -> str:
    """Where the user asks for it, a worker keeps its process, and what it has on the device."""
    _need(1, found)

    @miniray.remote(num_gpus=1, max_calls=0)
    def fill() -> tuple[int, int]:
        import torch

        kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del kept
        return os.getpid(), torch.cuda.memory_reserved()

    first, second = (_get(fill.remote()) for _ in range(2))
    assert first == second, f"another process, or its memory was taken anew: {first}, {second}"
    return f"{second[1] / GIB:.1f} GiB stayed with process {second[0]}"


class Hoarder:
    """Fills a GPU, by itself or by a child of its own."""

    def fill(self) -> tuple[int, int]:
        """Free and total memory before."""
        import torch

        free, total = torch.cuda.mem_get_info()
        self.kept = torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda")
        return free, total

    def fill_by_a_child(self) -> None:
        """Returns when the child holds it."""
        self.child = subprocess.Popen(
            [sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "held\n", "the child could not fill the GPU"


def device_memory_is_free_after_a_kill(found: NodeAccelerators) -> str:
    """An actor that is killed while it holds memory leaves none of it to the next."""
    _need(1, found)
    whole_gpu = miniray.remote(num_gpus=1)(Hoarder)
    told = []
    for _ in range(3):
        hoarder = whole_gpu.remote()
        told.append(_get(hoarder.fill.remote()))
        miniray.kill(hoarder)
    return _all_free([free for free, _ in told], told[0][1])


def device_memory_of_a_child_is_free_after_a_kill(found: NodeAccelerators) -> str:
    """A process that an actor has started ends with it, and its device memory is free then."""
    _need(1, found)
    whole_gpu = miniray.remote(num_gpus=1)(Hoarder)
    told = []
    for _ in range(2):
        hoarder = whole_gpu.remote()
        told.append(_get(hoarder.fill.remote()))
        miniray.kill(hoarder)
        parent = whole_gpu.remote()
        _get(parent.fill_by_a_child.remote())
        miniray.kill(parent)
    return _all_free([free for free, _ in told], told[0][1])


def _all_free(free: list[int], total: int) -> str:
    """Whether there was as much free device memory each time."""
    assert min(free) > max(free) - _SLACK, f"free at the start of each: {free}"
    return f"{min(free) / GIB:.1f} of {total / GIB:.1f} GiB free at each start"


def training_with_one_rank(found: NodeAccelerators) -> str:
    """NCCL works, and the device is the one that the pages on training name."""
    _need(1, found)

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


def training_in_mixed_precision(found: NodeAccelerators) -> str:
    """Forward passes are in float16, losses are scaled, and the model learns."""
    _need(1, found)

    def loop() -> dict[str, Any]:
        import torch

        from miniray.train import torch as train

        train.accelerate(amp=True)
        model = train.prepare_model(torch.nn.Linear(8, 1))
        optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        inputs = torch.randn(256, 8, device=train.get_device())
        wanted = inputs.sum(dim=1, keepdim=True)
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs.float(), wanted)
            train.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return {"type": str(outputs.dtype), "first": losses[0], "last": losses[-1]}

    told = _fit(loop, {"GPU": 1})
    assert told["type"] == "torch.float16", told
    assert told["last"] < told["first"] / 10, told
    return f"{told['type']}, loss {told['first']:.2f} to {told['last']:.4f}"


def batches_that_are_copied_ahead(found: NodeAccelerators) -> str:
    """Batches come on the device, in order and whole, though the next one is copied meanwhile."""
    _need(1, found)

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
    _need(2, found)

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
    _need(2, found)

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
                placement_timeout_s=_LIMIT,
            ),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    return result.return_value


CHECKS = (
    detection,
    visibility,
    sharing_of_a_gpu_by_two_halves,
    device_memory_is_free_after_a_task,
    device_memory_is_used_again_with_max_calls_of_zero,
    device_memory_is_free_after_a_kill,
    device_memory_of_a_child_is_free_after_a_kill,
    training_with_one_rank,
    training_in_mixed_precision,
    batches_that_are_copied_ahead,
    training_with_two_gpus_in_a_worker,
    training_with_two_ranks,
)


if __name__ == "__main__":
    sys.exit(main())
