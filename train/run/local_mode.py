"""Says whether a run is a local one: in the driver's process, without a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miniray.common.config import parse

if TYPE_CHECKING:
    from miniray.train.config import ScalingConfig

#: Variable that makes every run of a program a local one.
LOCAL_VARIABLE = "MINIRAY_TRAIN_LOCAL"


def is_local(config: ScalingConfig) -> bool:
    """Whether a run with this configuration happens in the driver's process.

    Raises:
        ValueError: ``MINIRAY_TRAIN_LOCAL`` is neither 0 nor 1.
    """
    text = os.environ.get(LOCAL_VARIABLE) or "0"
    return bool(parse("train_local", bool, text)) or config.num_workers == 0
