"""The policies that a run has unless its user gives others: they follow from configurations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from miniray.train.base.policies import (
    FailureDecision,
    FailurePolicy,
    ScalingDecision,
    ScalingPolicy,
)

if TYPE_CHECKING:
    from miniray.train.base.policies import GroupFailure
    from miniray.train.config.rules import FailureConfig
    from miniray.train.config.scaling import ScalingConfig


class LimitedRetries(FailurePolicy):
    """Goes on until ``max_failures`` or ``controller_failure_limit`` is used up."""

    def __init__(self, config: FailureConfig) -> None:
        self._config = config

    def decide(self, failure: GroupFailure) -> FailureDecision:
        """Retry while the limit of this kind of failure is not passed; -1 is no limit."""
        if failure.at_start:
            limit, count = self._config.controller_failure_limit, failure.start_failures
        else:
            limit, count = self._config.max_failures, failure.worker_failures
        return FailureDecision.RETRY if limit < 0 or count <= limit else FailureDecision.RAISE


class FixedScaling(ScalingPolicy):
    """Always the number of workers that ``ScalingConfig`` names."""

    def __init__(self, config: ScalingConfig) -> None:
        self._decision = ScalingDecision(config.max_workers, config.worker_resources)

    def next_group(self) -> ScalingDecision:
        """The group of the configuration."""
        return self._decision


class ElasticScaling(ScalingPolicy):
    """As many workers as there is room for, between the bounds of ``ScalingConfig``.

    Args:
        config: With a pair as ``num_workers``.
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._group = ScalingDecision(
            config.max_workers, config.worker_resources, config.min_workers, config.workers_step
        )

    def next_group(self) -> ScalingDecision:
        """The largest that there is room for."""
        return self._group

    def wanted(self, size: int) -> int:
        """What is missing to the most."""
        return max(0, self._group.num_workers - size)

    def grow(self, size: int, room: int) -> ScalingDecision | None:
        """Take all the room that makes whole steps."""
        step = self._group.step
        larger = min(self._group.num_workers, size + room // step * step)
        return dataclasses.replace(self._group, num_workers=larger) if larger > size else None


def default_scaling(config: ScalingConfig) -> ScalingPolicy:
    """The policy of a configuration."""
    return ElasticScaling(config) if config.elasticity_enabled else FixedScaling(config)
