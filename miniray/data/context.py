"""``DataContext``: how datasets are executed, for the whole process."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, ClassVar

MiB = 2**20


@dataclasses.dataclass
class ExecutionResources:
    """The most that executions may use; None is no limit.

    Args:
        cpu: CPUs for the tasks of an execution.
        gpu: GPUs for its actors.
        object_store_memory: Bytes of the object store.
    """

    cpu: float | None = None
    gpu: float | None = None
    object_store_memory: int | None = None


@dataclasses.dataclass
class ExecutionOptions:
    """How a dataset is executed.

    Args:
        resource_limits: The most that is used.
        preserve_order: Keep the order of rows. Default: True, other than in Ray.
        verbose_progress: Accepted as in Ray, without effect: ``stats()`` tells what was done.
        label_selector: Labels that the nodes must have.
    """

    resource_limits: ExecutionResources = dataclasses.field(default_factory=ExecutionResources)
    preserve_order: bool = True
    verbose_progress: bool = True
    label_selector: dict[str, str] | None = None


@dataclasses.dataclass
class DataContext:
    """Settings of all datasets of this process.

    Attributes:
        target_max_block_size: Bytes of a block.
        target_min_block_size: Accepted as in Ray, without effect: small files are read together.
        read_op_min_num_blocks: Units of work for each CPU, if a function follows.
        execution_options: How datasets are executed.
        enable_progress_bars: Show rows at the terminal, from the first second on.
        max_errored_blocks: Units that may fail and are left out; -1: any number.
        retried_io_errors: Texts of errors after which a file is read again.
        max_task_retries: Repeats of a task whose worker has died.
        max_actor_restarts: Restarts of an actor of a pool; -1 is without end.
        print_on_execution_start: Print the plan when it begins.
    """

    target_max_block_size: int = 32 * MiB
    target_min_block_size: int = 1 * MiB
    read_op_min_num_blocks: int = 4
    execution_options: ExecutionOptions = dataclasses.field(default_factory=ExecutionOptions)
    enable_progress_bars: bool = True
    max_errored_blocks: int = 0
    retried_io_errors: list[str] = dataclasses.field(
        default_factory=lambda: ["AWS Error NETWORK_CONNECTION", "AWS Error SLOW_DOWN"]
    )
    max_task_retries: int = 3
    max_actor_restarts: int = -1
    print_on_execution_start: bool = False

    _current: ClassVar[DataContext | None] = None

    @classmethod
    def get_current(cls) -> DataContext:
        """Return the settings of this process; changes hold for executions that begin later."""
        if DataContext._current is None:
            DataContext._current = cls()
        return DataContext._current

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise AttributeError(
                f"DataContext has no {name!r}.{meant} Its fields are {', '.join(known)}."
            )
        object.__setattr__(self, name, value)
