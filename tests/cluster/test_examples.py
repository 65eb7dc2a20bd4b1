"""The programs of ``examples/`` run as a reader would run them, and print what they should."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from cluster_helpers import processes_with, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"

EXPECTED = {
    "data_batch_inference.py": [
        "columns: id, image rows: 20000",
        "scored: 20000 bright: 10000",
        "odd ids are bright: True",
    ],
    "actors.py": [
        "three calls: [2, 4, 6]",
        "after four tasks: 46",
        "found by name: 102",
        "after kill: ActorDiedError",
    ],
    "tasks.py": [
        "squares: [0, 1, 4, 9, 16]",
        "their sum: 30",
        "counting down: [3, 2, 1]",
        "first awake: 0.1 still asleep: 1",
    ],
    "gpus.py": [
        "GPU 0: 4 actors",
        "GPU 1: 4 actors",
        "free: 0",
        "waiting for two whole GPUs: True",
        "got GPUs: [0, 1]",
    ],
    "several_nodes.py": [
        "nodes: 2 CPUs: 4.0",
        "on the second node: True",
        "tasks ran on nodes: 2 stored MiB: 2",
    ],
}


class Training(NamedTuple):
    """How an example of training is run, and what it prints.

    Attributes:
        arguments: For the program, besides where it stores results.
        needs: The packages that it trains with, of the extras.
        prints: Patterns of lines, in this order; other lines may be between them.
    """

    arguments: str
    needs: str
    prints: list[str]


#: At least 0.90 of what is classified is right.
GOOD = r"(0\.9\d|1\.00)"

TRAINING = {
    "train_digits.py": Training(
        "--epochs 6",
        "torch sklearn",
        [r"test accuracy (0\.9[5-9]|1\.00)", r"best checkpoint .*/checkpoint_\d+"],
    ),
    "train_data.py": Training(
        "--epochs 2",
        "torch pyarrow",
        [
            "columns: x, label rows: 8000",
            "epoch 1: 4000 rows of each worker",
            rf"accuracy {GOOD}",
        ],
    ),
    "train_vit.py": Training(
        "--epochs 8",
        "torch sklearn",
        [
            r"trained epochs 0 to 3, accuracy 0\.\d\d",
            rf"trained epochs 4 to 7, accuracy {GOOD}",
            "Result of a training run",
            r"  path: .*/vit-\w{8}",
            "    epoch: 7",
            r"  checkpoint: .*/checkpoint_000007 \(the latest\)",
        ],
    ),
    "train_fsdp2.py": Training(
        "--epochs 2",
        "torch sklearn",
        [
            "2 workers, rank 0 holds 50% of the weights",
            r"  epochs 0 to 1, loss (?P<loss>\d\.\d{4})",
            r"  saved \.metadata __0_0\.distcp __1_0\.distcp",
            "3 workers, rank 0 holds 3[34]% of the weights",
            "  loss when loaded (?P=loss)",
            r"  epochs 2 to 3, loss \d\.\d{4}",
            r"  saved \.metadata __0_0\.distcp __1_0\.distcp __2_0\.distcp",
        ],
    ),
    "train_elastic.py": Training(
        "--epochs 2",
        "torch",
        [
            "killing a node",
            "two nodes join",
            r"epochs 0 to \d+: a group of 2",
            r"epochs \d+ to \d+: a group of 1",
            r"epochs \d+ to \d+: a group of 3",
            "no epoch is missing or done twice: True",
            "each row once in every epoch: True",
        ],
    ),
    "train_lightning.py": Training(
        "--epochs 6",
        "lightning sklearn",
        [rf"test accuracy {GOOD}", r"best checkpoint .*/checkpoint_\d+"],
    ),
    "train_transformers.py": Training(
        "--epochs 3",
        "transformers accelerate",
        [
            "1 2 1 1 2 1 1 2 1: more of 1",
            "2 2 1 2 1 2 2 1 2: more of 2",
            rf"accuracy {GOOD}",
            r"best checkpoint .*/checkpoint_\d+",
        ],
    ),
    "train_jax.py": Training(
        "",
        "jax sklearn",
        [rf"accuracy of the last batch {GOOD}"],
    ),
}
#: Short enough for the first tier.
QUICK = {"train_digits.py", "train_data.py"}


@pytest.fixture
def on_ray(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("engine") == "ray")


@pytest.fixture
def run(on_ray: bool) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs an example with a folder for session files of its own; nothing may stay of it."""
    # Not tmp_path: a socket's path has at most 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="mr-test-", dir="/tmp"))
    environment = {**os.environ, "MINIRAY_TMPDIR": str(base)}
    if on_ray:
        environment |= {"MINIRAY_ENGINE": "ray", "RAY_TMPDIR": str(base)}
    patience = 60 if on_ray else 10
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )

    def run_example(
        name: str, *arguments: str, timeout: float = 80
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, EXAMPLES / name, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    try:
        yield run_example
        wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(base)), timeout=patience)
        sockets = list(base.glob("mr-*"))
    finally:
        shutil.rmtree(base, ignore_errors=True)
    assert not sockets, f"sockets are left on disk: {sockets}"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_example_prints_what_it_should(
    name: str, run: Callable[..., subprocess.CompletedProcess[str]], on_ray: bool
) -> None:
    result = run(name)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == EXPECTED[name], result.stderr
    assert on_ray or result.stderr == ""  # Ray says there what it does


def in_order(patterns: list[str]) -> str:
    """A pattern of texts of which each matches one of these, with any others between them.

    Output that is not buffered comes in pieces: a line of progress may follow a text before its
    line ends.
    """
    return r"[\s\S]*?".join(patterns)


def tiered(name: str) -> object:
    needs = TRAINING[name].needs
    missing = any(importlib.util.find_spec(package) is None for package in needs.split())
    marks = [
        pytest.mark.skipif(missing, reason=f"{name} needs {needs}: see its docstring"),
        pytest.mark.timeout(600),
    ]
    return pytest.param(name, marks=marks if name in QUICK else [*marks, pytest.mark.slow])


@pytest.mark.parametrize("name", [tiered(name) for name in sorted(TRAINING)])
def test_the_example_of_training_proves_what_it_should(
    name: str, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    training = TRAINING[name]
    result = run(name, *training.arguments.split(), "--storage-path", str(tmp_path), timeout=560)
    assert result.returncode == 0, result.stderr
    assert re.search("^" + in_order(training.prints), result.stdout, re.MULTILINE), result.stdout
    assert "Traceback" not in result.stderr
    assert any(tmp_path.iterdir())


def test_every_example_is_tested() -> None:
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert there == EXPECTED.keys() | TRAINING.keys()
