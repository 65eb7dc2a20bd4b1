"""What a run decides: how many workers to start, and whether to go on after a failure.

Policies are pure: they get the facts and return a decision; the controller acts
on it. A user replaces one by a subclass.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.config import FailureConfig, ScalingConfig


class FailureDecision(enum.Enum):
    """What the controller does after workers failed."""

    RETRY = "retry"  # start the workers again, from the newest checkpoint
    RAISE = "raise"  # end the run with the error


class FailurePolicy(abc.ABC):
    """Decides whether a run goes on after workers failed."""

    @abc.abstractmethod
    def decide(self, failures: int) -> FailureDecision:
        """Decide what follows.

        Args:
            failures: How many times the workers of this run have failed, this one included.
        """


class LimitedRetries(FailurePolicy):
    """Goes on until ``FailureConfig(max_failures)`` is used up."""

    def __init__(self, config: FailureConfig) -> None:
        self._limit = config.max_failures

    def decide(self, failures: int) -> FailureDecision:
        """Retry while the limit is not passed; -1 is no limit."""
        if self._limit < 0 or failures <= self._limit:
            return FailureDecision.RETRY
        return FailureDecision.RAISE


@dataclasses.dataclass(frozen=True)
class ScalingDecision:
    """The worker group to start."""

    num_workers: int
    resources_per_worker: Mapping[str, float]


class ScalingPolicy(abc.ABC):
    """Decides how many workers the next worker group has."""

    @abc.abstractmethod
    def next_group(self) -> ScalingDecision:
        """The group to start, at the beginning of a run and after each failure."""


class FixedScaling(ScalingPolicy):
    """Always the number of workers that ``ScalingConfig`` names."""

    def __init__(self, config: ScalingConfig) -> None:
        self._decision = ScalingDecision(config.max_workers, config.worker_resources)

    def next_group(self) -> ScalingDecision:
        """The group of the configuration."""
        return self._decision
