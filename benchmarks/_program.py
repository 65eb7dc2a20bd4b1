"""The training as a whole program: what a user starts with an engine, or with torchrun.

    python _program.py ENGINE FILE
    torchrun --nproc-per-node 2 _program.py first-step FILE
    torchrun --nproc-per-node 2 _program.py turns ADDRESS

The first two write to the file when rank 0 had done its first step, in seconds of the clock that
all processes of a machine share. With an engine there is a second line: of a further run of the
same program, the seconds from ``fit()`` to that.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import Engine
from _rows_train import WORKERS, trainer
from _sizes import sizes

if TYPE_CHECKING:
    from _vit import Training


def torchrun_command(*arguments: str) -> list[str]:
    """The command that runs this program under torchrun, on as many ranks as an engine has."""
    ranks = ["--standalone", "--nproc-per-node", str(WORKERS)]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, __file__, *arguments]


def engine_command(engine: str, *arguments: str) -> list[str]:
    """The command that runs this program with an engine."""
    return [sys.executable, __file__, engine, *arguments]


def first_step(training: Training, rank: int, file: Path) -> None:
    """Train for a step; rank 0 writes down when it was done."""
    training.step()
    if rank == 0:
        file.write_text(str(time.monotonic()))


def first_step_loop(config: dict[str, Any]) -> None:
    """The train loop of an engine."""
    import _vit

    train = Engine(config["package"]).module("train")
    training = _vit.with_engine(config["package"], config["size"])
    first_step(training, train.get_context().get_world_rank(), Path(config["file"]))


def run_with_engine(name: str, file: Path) -> None:
    """Train with an engine, twice."""
    engine = Engine(name)
    engine.start()
    config = {"package": name, "size": sizes(), "file": str(file)}
    with tempfile.TemporaryDirectory() as folder:
        trainer(engine, folder, first_step_loop, config).fit()
        first = file.read_text()
        start = time.monotonic()
        trainer(engine, folder, first_step_loop, config).fit()
        again = float(file.read_text()) - start
    file.write_text(f"{first}\n{again}\n")
    engine.stop()


def run_with_torchrun(what: str, where: str) -> None:
    """Train as a rank of torchrun."""
    import _vit
    from _step_turns import TORCHRUN, train_in_turns

    with _vit.with_torchrun(sizes()) as (training, rank):
        if what == "turns":
            train_in_turns(training, sizes(), where, TORCHRUN, rank)
        else:
            first_step(training, rank, Path(where))


if __name__ == "__main__":
    if sys.argv[1] in {"turns", "first-step"}:
        run_with_torchrun(*sys.argv[1:])
    else:
        run_with_engine(sys.argv[1], Path(sys.argv[2]))
