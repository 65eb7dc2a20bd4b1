"""``RunSpec``: everything that a controller is told of its run, made by the trainer."""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.base.policies import FailurePolicy, ScalingPolicy
    from miniray.train.config import RunConfig, ScalingConfig
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import Backend


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """Everything that the controller needs to know of a run."""

    name: str
    storage: RunStorage
    run_config: RunConfig
    scaling_config: ScalingConfig
    backend: Backend
    failure_policy: FailurePolicy
    scaling_policy: ScalingPolicy
    #: Seconds that ranks wait for each other in a collective; 0 is no limit.
    collective_timeout: float = 0
    #: Seconds without progress after which the workers count as hung; None is no limit.
    hang_timeout: float | None = None
    #: What the user configured, as JSON values for a person to read.
    configuration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Tells it from other runs of the same name; a controller that was started again keeps it.
    run_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
