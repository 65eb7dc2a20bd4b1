"""Steps of a training that takes turns with another one, and what each turn has cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from _thread_times import Account, Times
from _turns import take_turns
from _vit import run_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from _sizes import Sizes
    from _vit import Training

#: The groups that take turns.
FIT, TORCHRUN = "fit", "torchrun"


class Turn(NamedTuple):
    """What a rank has used in a turn, and while it waited for it.

    Attributes:
        seconds: Of the steps alone.
        processor: Processor seconds of the process.
        threads: Those of its threads, by label.
        reporting: Those of ``report()`` in the thread that trains.
    """

    seconds: float
    processor: float
    threads: Times
    reporting: float


def train_in_turns(
    training: Training,
    size: Sizes,
    address: str,
    group: str,
    rank: int,
    report: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Train whenever it is the turn of this group."""
    reporting = 0.0

    def timed_report(metrics: dict[str, float]) -> None:
        nonlocal reporting
        if report is not None:
            start = time.thread_time()
            report(metrics)
            reporting += time.thread_time() - start

    account = Account()

    def work() -> Turn:
        nonlocal reporting
        reporting = 0.0
        start = time.perf_counter()
        run_steps(training, size.steps, size.report_every, timed_report)
        seconds = time.perf_counter() - start
        return Turn(seconds, *account.take(), reporting)

    take_turns(address, group, rank, work)
