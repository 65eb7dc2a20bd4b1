"""``benchmarks/gpu_check.py`` on machines without a GPU: who says what, and what is skipped."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miniray.accelerators.node_resources import DeviceGroup, NodeAccelerators

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAM = BENCHMARKS / "gpu_check.py"


def environment(**variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **variables,
    }


def test_a_machine_without_a_gpu_is_told_and_is_no_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environment(MINIRAY_DEVICE_ROOT=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "no GPU\n", "")


# --- what becomes of checks --------------------------------------------------------------------


def program(*lines: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the program with other checks, on a machine that seems to have a GPU."""
    source = [
        "import os, signal, sys, time",
        f"sys.path.insert(0, {str(BENCHMARKS)!r})",
        "import gpu_check as program",
        "from miniray.accelerators.node_resources import NodeAccelerators",
        "program.miniray.init = program.miniray.shutdown = lambda **options: None",
        "found = NodeAccelerators({'GPU': None})",
        "program.resolve_node_accelerators = lambda *given: found",
        "program.ask_torch = lambda: None",
        *lines,
        f"sys.exit(program.main({list(words)!r}, checks))",
    ]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(source)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_each_check_gets_a_verdict_and_a_failure_is_the_exit_code() -> None:
    done = program(
        "def first(found): return 'as it should be'",
        "def second_one(found): raise program.SkippedError('there is no such thing')",
        "def third(found): assert 1 == 2, 'not equal'",
        "checks = (first, second_one, third)",
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok       first: as it should be (")
    assert lines[1] == "skipped  second one: there is no such thing"
    assert lines[2] == "FAILED   third: Traceback (most recent call last):"
    assert lines[-1] == "3 checks: 1 ok, 1 FAILED, 1 skipped"
    assert done.returncode == 1


def test_without_a_failure_the_exit_code_is_0() -> None:
    done = program(
        "def first(found): return 'fine'",
        "def second(found): raise program.SkippedError('no')",
        "checks = (first, second)",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_that_does_not_end_is_a_failure_and_the_next_one_is_made() -> None:
    done = program(
        "def hang(found): time.sleep(1000)",
        "def stand_still(found): os.kill(os.getpid(), signal.SIGSTOP)",
        "def last(found): return 'fine'",
        "checks = (hang, stand_still, last)",
        "program._CHECK_LIMIT = program._GRACE = 0.3",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "FAILED   hang: not done within 0.3 s"
    assert lines[1] == "FAILED   stand still: its process ended with exit code -9"
    assert lines[2].startswith("ok       last: fine")
    assert lines[3] == "3 checks: 1 ok, 2 FAILED, 0 skipped"
    assert "in hang" in done.stderr
    assert done.returncode == 1


def test_checks_are_chosen_by_words_of_their_names() -> None:
    checks = (
        "def first(found): return 'fine'",
        "def second_one(found): return 'fine'",
        "checks = (first, second_one)",
    )
    done = program(*checks, words=("second", "third"))
    assert done.stdout.splitlines()[-1] == "1 checks: 1 ok, 0 FAILED, 0 skipped"
    done = program(*checks, words=("third",))
    assert done.returncode == 2
    assert "there are first, second one" in done.stdout


# --- what can't be checked here ----------------------------------------------------------------

GIB = 1024**3


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("_gpu_checks")
    module.ask_torch.cache_clear()
    return module


def gpus(count: int = 1, family: str = "nvidia") -> NodeAccelerators:
    ids = tuple(map(str, range(count)))
    return NodeAccelerators({"GPU": DeviceGroup(ids, family, "CUDA_VISIBLE_DEVICES", True, count)})


def put_torch(
    path: Path, monkeypatch: pytest.MonkeyPatch, text: str = "", package: str = "torch"
) -> None:
    """A module of this name, before any other."""
    (path / f"{package}.py").write_text(text)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def why_skipped(checks: Any, found: NodeAccelerators, gpus: int = 1) -> str:
    with pytest.raises(checks.SkippedError) as skipped:
        checks.need(gpus, found)
    return str(skipped.value)


def test_without_pytorch_the_checks_are_skipped(
    checks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert why_skipped(checks, gpus()) == "PyTorch is not installed"


def test_a_pytorch_that_cannot_be_imported_is_told_with_its_last_words(
    checks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_torch(tmp_path, monkeypatch, "raise OSError('libcudart.so.13: cannot open')")
    said = "PyTorch can't be imported: OSError: libcudart.so.13: cannot open"
    assert why_skipped(checks, gpus()) == said


TORCH = """
import types
__version__ = "2.9"
class Tensor:
    def sum(self): return self
    def item(self): return 8
def ones(count, device):
    {fault}
    return Tensor()
version = types.SimpleNamespace(cuda={platform}, hip=None)
cuda = types.SimpleNamespace(device_count=lambda: 1, mem_get_info=lambda: ({free}, 1 << 37))
distributed = types.SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
"""


@pytest.mark.parametrize(
    ("platform", "fault", "free", "said"),
    [
        ("None", "pass", 1 << 36, "PyTorch 2.9 is not made for GPUs"),
        (
            "'13.0'",
            "raise RuntimeError('The NVIDIA driver on your system is too old')",
            1 << 36,
            "PyTorch 2.9 for 13.0 can't use the GPU: RuntimeError: The NVIDIA driver",
        ),
        ("'13.0'", "pass", 1 << 30, "only 1.0 GiB of the GPU are free, 4 are needed"),
    ],
    ids=["of a processor", "for another driver", "on a full device"],
)
def test_a_pytorch_that_can_use_no_gpu_here_is_told(
    checks: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    fault: str,
    free: int,
    said: str,
) -> None:
    put_torch(tmp_path, monkeypatch, TORCH.format(platform=platform, fault=fault, free=free))
    assert why_skipped(checks, gpus()).startswith(said)


def test_what_needs_two_gpus_or_another_family_is_skipped(
    checks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_torch(tmp_path, monkeypatch, TORCH.format(platform="'12.8'", fault="pass", free=1 << 36))
    assert checks.need(1, gpus()).nccl
    assert checks.need(2, gpus(2)).devices == 1
    assert why_skipped(checks, gpus(), gpus=2) == "there is one GPU"
    assert why_skipped(checks, gpus(family="intel")) == "it is for GPUs of NVIDIA and AMD"


def test_memory_that_others_take_meanwhile_is_no_leak(checks: Any) -> None:
    assert checks.all_free([100 * GIB, 80 * GIB]) == "80.0 to 100.0 GiB free at each start"
    with pytest.raises(AssertionError, match="free at the start of each"):
        checks.all_free([100 * GIB, 50 * GIB])  # half of it stayed with the first
