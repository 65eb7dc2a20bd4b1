"""The checks of ``gpu_check.py`` that need no training: what workers see, share and leave behind.

Each takes what detection found, returns what it saw, and raises ``SkippedError`` where it cannot be
made. What is known of PyTorch here is asked in processes of their own: the driver is to have no
device.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import miniray
from miniray.accelerators.node_resources import NodeAccelerators

Check = Callable[[NodeAccelerators], str]

GIB = 1024**3
#: Device memory that must be free for a check: contexts of a few processes, and what they take.
_LEAST_FREE = 4 * GIB
#: Share of what is free that a check takes. What it leaves behind is told from what other users of
#: the GPU take meanwhile, as long as that is less than half of it.
_TAKEN = 0.5
#: Seconds that a check's tasks may take: the first import of PyTorch from a cold disk is slow.
LIMIT = 180.0
#: Takes much of a GPU's memory and keeps it.
_HOLD = f"""
import torch, time
kept = torch.empty(int(torch.cuda.mem_get_info()[0] * {_TAKEN}), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(3600)
"""
#: What PyTorch is and can do here, as JSON.
_ABOUT_TORCH = """
import json, torch
told = {
    "version": torch.__version__,
    "platform": torch.version.cuda or torch.version.hip,
    "devices": torch.cuda.device_count(),
    "free": 0,
    "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
    "problem": "",
}
if told["platform"] is not None:
    try:
        assert torch.ones(8, device="cuda").sum().item() == 8, "it computes wrong sums"
        told["free"] = torch.cuda.mem_get_info()[0]
    except Exception as error:
        told["problem"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
print(json.dumps(told))
"""
#: Whether a process that has imported the compiler's front end can have children with a device.
_AFTER_FRONT_END = """
import os, torch, torch._dynamo
child = os.fork()
if child == 0:
    works = False
    try:
        works = torch.ones(8, device="cuda").sum().item() == 8
    finally:
        os._exit(0 if works else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class SkippedError(Exception):
    """A check can't be made here; the text says why."""


class Torch(NamedTuple):
    """The PyTorch of this environment."""

    version: str
    #: Version of CUDA or ROCm that it is made for; None if for neither.
    platform: str | None
    devices: int
    #: Bytes of the first device.
    free: int
    #: Whether it has NCCL, or what stands for it.
    nccl: bool
    #: Why it can't use a device here; empty if it can.
    problem: str


@functools.cache
def ask_torch() -> Torch | str:
    """Ask PyTorch in a process of its own; why it has no answer, if it has none."""
    if find_spec("torch") is None:
        return "PyTorch is not installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ABOUT_TORCH],
            check=False,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"PyTorch gave no answer within {LIMIT:g} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return f"PyTorch can't be imported: {said[-1] if said else f'exit {done.returncode}'}"
    return Torch(**json.loads(done.stdout.splitlines()[-1]))


def torch_here() -> Torch:
    """The PyTorch of this environment.

    Raises:
        SkippedError: it is not there, is not made for GPUs, or can't use those of this machine.
    """
    torch = ask_torch()
    if isinstance(torch, str):
        raise SkippedError(torch)
    if torch.platform is None:
        raise SkippedError(f"PyTorch {torch.version} is not made for GPUs")
    if torch.problem:
        made_for = f"PyTorch {torch.version} for {torch.platform}"
        raise SkippedError(f"{made_for} can't use the GPU: {torch.problem}")
    return torch


def need(gpus: int, found: NodeAccelerators) -> Torch:
    """Skip a check that needs PyTorch, so many of its GPUs, and room on them."""
    torch = torch_here()
    if found.devices["GPU"].family == "intel":
        raise SkippedError("it is for GPUs of NVIDIA and AMD")
    if len(found.devices["GPU"].ids) < gpus:
        raise SkippedError("there is one GPU")
    if torch.free < _LEAST_FREE:
        free, least = torch.free / GIB, _LEAST_FREE / GIB
        raise SkippedError(
            f"only {free:.1f} GiB of the GPU are free, {least:g} are needed: choose another one "
            "with its variable, such as CUDA_VISIBLE_DEVICES, or end what uses it"
        )
    return torch


def get(refs: Any) -> Any:
    """What tasks return, in the time that they may take."""
    return miniray.get(refs, timeout=LIMIT)


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
        readable = Path("/proc/driver/nvidia/gpus").is_dir()
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
    need(1, found)
    group = found.devices["GPU"]
    variable = group.variable
    assert variable is not None

    def seen() -> tuple[str | None, list[str], int, bool]:
        import torch

        ids = miniray.get_runtime_context().get_accelerator_ids()["GPU"]
        count = torch.cuda.device_count()
        works = count > 0 and torch.ones(8, device="cuda").sum().item() == 8
        return os.environ.get(variable), ids, count, works

    value, ids, count, works = get(miniray.remote(num_gpus=1)(seen).remote())
    # With one GPU in the machine only the variable tells whether it was shown on purpose.
    told = (value, ids, count, works)
    assert told == (group.ids[0], [group.ids[0]], 1, True), told
    inherited = miniray.remote(lambda: os.environ.get(variable))
    assert get(inherited.remote()) == os.environ.get(variable)
    return f"{variable}={value}"


def sharing_of_a_gpu_by_two_halves(found: NodeAccelerators) -> str:
    """Two actors with half a GPU each compute on the same one at the same time."""
    need(1, found)

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
    try:
        first, second = get([half.place.remote() for half in halves])
    except miniray.exceptions.RayError as error:
        if "busy or unavailable" in str(error):
            raise SkippedError("the GPU is set to serve one process at a time") from None
        raise
    assert first == second, (first, second)
    assert get([half.add.remote(n) for n, half in enumerate(halves, 1)]) == [101.0, 201.0]
    return f"both on device {first[0][0]}, {first[1]}"


# In the following, whoever has the memory asks for all GPUs of the machine, though it uses the
# first only: so the next one has to wait until the first is gone.


def device_memory_is_free_after_a_task(found: NodeAccelerators) -> str:
    """Three tasks in turn take much of a GPU's memory, and each finds it free."""
    need(1, found)

    @miniray.remote(num_gpus=len(found.devices["GPU"].ids))
    def fill() -> tuple[int, int]:
        return os.getpid(), take_much()

    told = [get(fill.remote()) for _ in range(3)]
    pids = [pid for pid, _ in told]
    assert len(set(pids)) == 3, f"a worker was used again: {pids}"
    return all_free([free for _, free in told])


def device_memory_is_used_again_with_max_calls_of_zero(found: NodeAccelerators) -> str:
    """Where the user asks for it, a worker keeps its process, and what it has on the device."""
    need(1, found)

    @miniray.remote(num_gpus=len(found.devices["GPU"].ids), max_calls=0)
    def fill() -> tuple[int, int]:
        import torch

        kept = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
        del kept
        return os.getpid(), torch.cuda.memory_reserved()

    first, second = (get(fill.remote()) for _ in range(2))
    assert first == second, f"another process, or its memory was taken anew: {first}, {second}"
    return f"{second[1] / GIB:.2f} GiB stayed with process {second[0]}"


class Hoarder:
    """Takes much of a GPU, by itself or by a child of its own."""

    def fill(self) -> int:
        """Free memory before."""
        return take_much()

    def fill_by_a_child(self) -> None:
        """Returns when the child holds it."""
        self.child = subprocess.Popen(
            [sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "held\n", "the child could not fill the GPU"


def device_memory_is_free_after_a_kill(found: NodeAccelerators) -> str:
    """An actor that is killed while it holds memory leaves none of it to the next."""
    need(1, found)
    all_gpus = miniray.remote(num_gpus=len(found.devices["GPU"].ids))(Hoarder)
    free = []
    for _ in range(3):
        hoarder = all_gpus.remote()
        free.append(get(hoarder.fill.remote()))
        miniray.kill(hoarder)
    return all_free(free)


def device_memory_of_a_child_is_free_after_a_kill(found: NodeAccelerators) -> str:
    """A process that an actor has started ends with it, and its device memory is free then."""
    need(1, found)
    all_gpus = miniray.remote(num_gpus=len(found.devices["GPU"].ids))(Hoarder)
    free = []
    for _ in range(2):
        hoarder = all_gpus.remote()
        free.append(get(hoarder.fill.remote()))
        miniray.kill(hoarder)
        parent = all_gpus.remote()
        get(parent.fill_by_a_child.remote())
        miniray.kill(parent)
    return all_free(free)


def take_much() -> int:
    """Take device memory and keep it until the process ends; what was free before, in bytes."""
    import torch

    free: int = torch.cuda.mem_get_info()[0]
    kept = torch.empty(int(free * _TAKEN), dtype=torch.uint8, device="cuda")
    torch._miniray_gpu_check_kept = kept
    return free


def all_free(free: list[int]) -> str:
    """Whether whoever took memory found that of those before it free."""
    assert min(free) > max(free) * (1 - _TAKEN / 2), f"free at the start of each: {free}"
    return f"{min(free) / GIB:.1f} to {max(free) / GIB:.1f} GiB free at each start"


def the_compilers_front_end_before_a_fork(found: NodeAccelerators) -> str:
    """Whether the process that ranks are forked of could have ``torch._dynamo`` loaded for them."""
    need(1, found)
    done = subprocess.run(
        [sys.executable, "-c", _AFTER_FRONT_END],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode != 0:
        raise SkippedError(f"torch._dynamo can't be imported: {done.stderr.splitlines()[-1:]}")
    if done.stdout.split()[-1] == "0":
        return "it leaves devices alone: a fork after its import can use one"
    return "it takes a device: who forks must not have imported it"


CHECKS: tuple[Check, ...] = (
    detection,
    visibility,
    sharing_of_a_gpu_by_two_halves,
    device_memory_is_free_after_a_task,
    device_memory_is_used_again_with_max_calls_of_zero,
    device_memory_is_free_after_a_kill,
    device_memory_of_a_child_is_free_after_a_kill,
    the_compilers_front_end_before_a_fork,
)
