"""Checks on a machine with real GPUs what the tests can only check on logical ones.

    python benchmarks/gpu_check.py

Detection, visibility, two workers that share a GPU, device memory that is free again after a
task, NCCL with one rank, and what Ray's pages on training assert of ``torch.cuda``. Prints a
line for each check and exits with 1 if one failed. Says "no GPU" and exits with 0 on a machine
without; a check that cannot be made (no PyTorch, only one GPU) is told as skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import miniray
from miniray.accelerators import NodeAccelerators, resolve_node_accelerators, this_host

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1024**3
#: Device memory that may be missing after a task: contexts of others, rounding.
_SLACK = GIB // 2
#: Seconds that a check's tasks may take: the first import of PyTorch from a cold disk is slow.
_LIMIT = 180.0


class SkippedError(Exception):
    """A check can't be made here; the text says why."""


def main() -> int:
    """Run all checks; the exit code."""
    found = resolve_node_accelerators(None, {}, this_host())
    if "GPU" not in found.devices:
        print("no GPU")
        return 0
    failed = 0
    miniray.init(address="local", log_to_driver=False)
    try:
        for check in CHECKS:
            failed += not _report(check, found)
    finally:
        miniray.shutdown()
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks without a failure")
    return int(failed > 0)


def _report(check: Callable[[NodeAccelerators], str], found: NodeAccelerators) -> bool:
    name = check.__name__.replace("_", " ")
    start = time.monotonic()
    try:
        said = check(found)
    except SkippedError as reason:
        print(f"skipped  {name}: {reason}")
        return True
    except Exception:  # noqa: BLE001 - whatever a check ends in is its result
        print(f"FAILED   {name}\n{traceback.format_exc()}")
        return False
    print(f"ok       {name}: {said} ({time.monotonic() - start:.1f} s)")
    return True


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise SkippedError("PyTorch is not installed")


def _get(refs: Any) -> Any:
    return miniray.get(refs, timeout=_LIMIT)


# --- the checks ------------------------------------------------------------------------------


def detection(found: NodeAccelerators) -> str:
    """What miniray counts is what PyTorch counts, and the node announces it."""
    group = found.devices["GPU"]
    assert miniray.cluster_resources()["GPU"] == len(group.ids)
    types = [name for name in found.resources if name.startswith("accelerator_type:")]
    assert types, "the model is not known"
    assert types[0] in miniray.cluster_resources()
    told = f"{len(group.ids)} of family {group.family}, {types[0]}"
    if find_spec("torch") is None:
        return f"{told}; not compared with PyTorch, which is not installed"
    program = "import torch; print(torch.cuda.device_count())"
    count = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert int(count) == len(group.ids), f"PyTorch counts {count.strip()}"
    return told


def visibility(found: NodeAccelerators) -> str:
    """A worker with one GPU sees that one; a worker without has no variable of ours."""
    _need_torch()
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
    _need_torch()

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
    _need_torch()

    @miniray.remote(num_gpus=1)
    def fill() -> tuple[int, int, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        kept = torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda")
        torch._miniray_gpu_check_kept = kept
        return os.getpid(), free, total

    told = [_get(fill.remote()) for _ in range(3)]
    pids, free = [pid for pid, _, _ in told], [free for _, free, _ in told]
    assert len(set(pids)) == 3, f"a worker was used again: {pids}"
    assert min(free) > max(free) - _SLACK, f"free at the start of each: {free}"
    return f"{min(free) / GIB:.1f} of {told[0][2] / GIB:.1f} GiB free at each start"


def device_memory_is_free_after_a_kill(found: NodeAccelerators) -> str:
    """An actor that is killed while it holds memory leaves none of it to the next."""
    _need_torch()

    class Hoarder:
        def fill(self) -> int:
            import torch

            free = int(torch.cuda.mem_get_info()[0])
            self.kept = torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda")
            return free

    whole_gpu = miniray.remote(num_gpus=1)(Hoarder)
    free = []
    for _ in range(2):
        hoarder = whole_gpu.remote()
        free.append(_get(hoarder.fill.remote()))
        miniray.kill(hoarder)
    assert min(free) > max(free) - _SLACK, f"free at the start of each: {free}"
    return f"{min(free) / GIB:.1f} GiB free at each start"


def training_with_one_rank(found: NodeAccelerators) -> str:
    """NCCL works, and the device is the one that the pages on training name."""
    _need_torch()

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


def training_with_two_gpus_in_a_worker(found: NodeAccelerators) -> str:
    """A worker with two GPUs has both, numbered from 0."""
    _need_torch()
    if len(found.devices["GPU"].ids) < 2:
        raise SkippedError("there is one GPU")

    def loop() -> list[str]:
        import torch

        from miniray.train.torch import get_device, get_devices

        assert get_device() == torch.device("cuda:0")
        return [str(device) for device in get_devices()]

    told = _fit(loop, {"GPU": 2})
    assert told == ["cuda:0", "cuda:1"], told
    return ", ".join(told)


def _fit(loop: Callable[[], Any], resources: dict[str, float]) -> Any:
    """What the one rank of a training run returns."""
    from miniray.train import RunConfig, ScalingConfig
    from miniray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as storage:
        result = TorchTrainer(
            loop,
            scaling_config=ScalingConfig(
                num_workers=1, use_gpu=True, resources_per_worker=resources
            ),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    return result.return_value


CHECKS = (
    detection,
    visibility,
    sharing_of_a_gpu_by_two_halves,
    device_memory_is_free_after_a_task,
    device_memory_is_free_after_a_kill,
    training_with_one_rank,
    training_with_two_gpus_in_a_worker,
)


if __name__ == "__main__":
    sys.exit(main())
