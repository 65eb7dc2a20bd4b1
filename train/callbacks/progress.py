"""Says what the driver shows of a run's progress."""

from __future__ import annotations

import dataclasses

from miniray.system import option_checks as check
from miniray.train.config.checks import check_field
from miniray.train.config.run import Callback


@dataclasses.dataclass(eq=False)
class ProgressCallback(Callback):
    """Tells the driver's display how far a run is to go, so that it can say the time left.

    The display is there without it too: on a terminal a line that is kept up to date with epoch,
    steps per second, and the newest metrics, elsewhere plain lines. It is the driver that shows
    it, since the controller has no terminal.

    Args:
        total_steps: Steps that the run is going to make.
        total_epochs: Epochs that the run is going to make.
        step_key: The metric that counts steps. If it is not reported, each report is a step.
        epoch_key: The metric that counts epochs, from 0.

    Raises:
        ValueError: A total is not a whole number of 1 or more.
    """

    total_steps: int | None = None
    total_epochs: int | None = None
    _: dataclasses.KW_ONLY
    step_key: str = "step"
    epoch_key: str = "epoch"

    def __post_init__(self) -> None:
        for name in ("total_steps", "total_epochs"):
            check_field(self, name, check.whole(1), or_none="says that it is not known")
