"""Rows about training steps: what one costs beside torchrun, and how long until the first."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import Engine, Figure, row
from _processes import cluster_processes, processor_seconds
from _program import engine_command, torchrun_command
from _rows_train import WORKERS, trainer
from _sizes import sizes
from _thread_times import TRAINS, UNNAMED
from _turns import Turns

if TYPE_CHECKING:
    from _step_turns import Turn
    from _turns import Round


def turns_loop(config: dict[str, Any]) -> None:
    """Train in turns with torchrun, and report as a user would."""
    import _vit
    from _step_turns import FIT, train_in_turns

    train = Engine(config["package"]).module("train")
    training = _vit.with_engine(config["package"], config["size"])
    rank = train.get_context().get_world_rank()
    address = config["address"]
    train_in_turns(training, config["size"], address, FIT, rank, train.report)


def own_threads(ours: Turn, known: set[str]) -> float:
    """Processor seconds of the threads that a rank of torchrun does not have."""
    return sum(seconds for label, seconds in ours.threads.items() if label not in known)


def step_figures(rounds: list[Round], others: float) -> tuple[float, float, float, float]:
    """The figures of row ``step``.

    Args:
        rounds: What the ranks have used in each round.
        others: Processor seconds of all processes that train nothing, in these rounds.
    """
    from _step_turns import FIT, TORCHRUN

    ratio = statistics.median(each[FIT][0].seconds / each[TORCHRUN][0].seconds for each in rounds)
    theirs = [turn for each in rounds for turn in each[TORCHRUN]]
    ours = [turn for each in rounds for turn in each[FIT]]
    # OpenMP's threads begin when they are first needed, and need not be there in each process.
    known = {TRAINS, UNNAMED}.union(*(turn.threads for turn in theirs))
    whole = sum(turn.processor for turn in ours) / 100
    own = sum(own_threads(turn, known) for turn in ours)
    reporting = sum(turn.reporting for turn in ours)
    return ratio, own / whole, reporting / whole, others / whole


@row(
    "step",
    Figure("step of a ViT under fit, in times of torchrun's", "x", 1.02),
    Figure("processor time of fit's threads in a rank, of the rank's", "%", 1.0),
    Figure("that of report() in the thread that trains", "%"),
    Figure("that of all processes that do not train", "%"),
    limit=900,
)
def step(engine: Engine) -> tuple[float, float, float, float]:
    size = sizes()
    used: dict[int, float] = {}
    agents: set[int] = set()

    def look(number: int) -> None:
        if number in (1, size.pairs + 1):  # the first round is to warm up
            others = (cluster_processes() | {os.getpid()}) - turns.pids - agents
            used[number] = processor_seconds(others)

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "turns"))
        groups = ["fit", "torchrun"]
        turns = Turns(path, groups, WORKERS, size.pairs + 1, look)
        engine.start()
        with subprocess.Popen(torchrun_command("turns", path)) as torchrun:
            agents.add(torchrun.pid)
            config = {"package": engine.name, "size": size, "address": path}
            try:
                trainer(engine, folder, turns_loop, config).fit()
                rounds = turns.result()
            except BaseException:
                torchrun.terminate()  # its ranks would wait for a turn for ever
                raise
        return step_figures(rounds[1:], used[size.pairs + 1] - used[1])


def seconds_to_first_step(command: list[str], file: Path) -> float:
    """Run a program; seconds from its start to the first step."""
    start = time.monotonic()
    subprocess.run(command, check=True, timeout=120)
    return float(file.read_text().split()[0]) - start


@row(
    "start",
    Figure("program with fit: first step after its start", "s", 3.5),
    Figure("torchrun: first step after its start", "s"),
    Figure("fit's, in times of torchrun's", "x", 1.0),
    Figure("fit again in that program: first step", "s", 1.0),
    limit=900,
)
def start(engine: Engine) -> list[float]:
    fit, torchrun, again = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times")
        for _ in range(sizes().starts):
            torchrun.append(seconds_to_first_step(torchrun_command("first-step", str(file)), file))
            fit.append(seconds_to_first_step(engine_command(engine.name, str(file)), file))
            again.append(float(file.read_text().split()[1]))
    pairs = zip(fit, torchrun, strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return [statistics.median(fit), statistics.median(torchrun), ratio, statistics.median(again)]
