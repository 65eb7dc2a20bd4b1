"""How datasets are executed: settings of the process, and resources of users' functions."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

from miniray.data.transforms import Udf
from miniray.decorator import remote
from miniray.system.option_checks import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MiB = 2**20
#: Options that calls of a stage, or the actors of a pool, can't have.
_REFUSED = ("num_returns", "name", "lifetime", "max_pending_calls")


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

    def copy(self, **changes: Any) -> ExecutionResources:
        """Return the same with other values for some."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass
class ExecutionOptions:
    """How a dataset is executed.

    Args:
        resource_limits: The most that is used.
        preserve_order: Keep the order of rows. Default: True, other than in Ray.
        verbose_progress: Accepted as in Ray, without effect: ``stats()`` shows what was done.
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

    @staticmethod
    @functools.cache
    def get_current() -> DataContext:
        """Return the settings of this process; changes hold for executions that begin later."""
        return DataContext()

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in dataclasses.fields(self)]
        if name not in known:
            hint = suggestion(name, known)
            raise AttributeError(f"DataContext has no {name!r}.{hint} It has {', '.join(known)}.")
        object.__setattr__(self, name, value)


# --- what functions run on --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TaskPoolStrategy:
    """Run a function in tasks: ``size`` at once, at most. Default: as many as there are CPUs."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise ValueError(f"TaskPoolStrategy(size={self.size!r}) must be 1 or more.")


@dataclasses.dataclass(frozen=True)
class ActorPoolStrategy:
    """Run a class in the actors of a pool.

    Args:
        size: How many actors. Not with the others.
        min_size: Least actors. Default: 1.
        max_size: Most actors. Default: as many as the cluster can run.
        initial_size: Actors at the beginning. Default: ``min_size``.
        max_tasks_in_flight_per_actor: Accepted as in Ray, without effect: it is four at most.
    """

    size: int | None = None
    min_size: int | None = None
    max_size: int | None = None
    initial_size: int | None = None
    max_tasks_in_flight_per_actor: int | None = None

    def __post_init__(self) -> None:
        given = [self.size, self.min_size, self.initial_size, self.max_size]
        numbers = [each for each in given if each is not None]
        whole = all(isinstance(each, int) and each > 0 for each in numbers)
        alone = self.size is None or len(numbers) == 1
        if not whole or not alone or numbers != sorted(numbers):
            raise ValueError(f"{self!r}: size alone, or 1 <= min_size <= initial_size <= max_size.")

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most actors; 0: as many as the cluster can run."""
        return self.size or self.min_size or 1, self.size or self.max_size or 0


@dataclasses.dataclass(frozen=True)
class Compute:
    """What a step runs on.

    Attributes:
        least: Actors of its pool, at least; 0: it runs in tasks.
        most: Actors or tasks at once, at most; 0: as many as the cluster can run.
        initial: Actors at the beginning.
        options: Options of tasks or actors: num_cpus, num_gpus and so on.
        given: The actors, if others have made them, and end them. Several executions may use them.
    """

    least: int = 0
    most: int = 0
    initial: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: Sequence[Any] = ()

    @property
    def is_pool(self) -> bool:
        return self.least > 0

    @property
    def demand(self) -> dict[str, float]:
        """The resources that one actor or task holds."""
        names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        found = {name: self.options.get(option) for name, option in names.items()}
        if kind := self.options.get("accelerator_type"):
            found[f"accelerator_type:{kind}"] = 0.001
        found |= self.options.get("resources") or {}
        return {name: amount for name, amount in found.items() if amount}

    @property
    def accelerated(self) -> bool:
        """Whether it holds more than CPUs and memory, and should not read files meanwhile."""
        return not self.demand.keys() <= {"CPU", "memory"}

    def actors(self, share: int = 1) -> int:
        """Return how many actors a pool first makes that is divided among ``share`` executions."""
        makes = self.is_pool and not self.given
        return max(1, (self.initial or self.least) // share) if makes else 0

    def held(self, share: int = 1) -> collections.Counter[str]:
        """Return the resources that these actors hold."""
        held: Any = {name: self.actors(share) * each for name, each in self.demand.items()}
        return collections.Counter(held)


TASKS = Compute()


def called_with(caller: str, function: Any, options: dict[str, Any]) -> tuple[Udf, Compute]:
    """Return a function with its arguments, and its resources.

    Raises:
        TypeError: It can't be called, or can't have an option.
        ValueError: There are arguments of a constructor, but no class; or there is no such option,
            or its value makes no sense.
    """
    is_class = isinstance(function, type)
    if not callable(function) or (is_class and "__call__" not in dir(function)):
        raise TypeError(f"{caller}() takes a function or a callable class, not {function!r:.80}.")
    called = vars(function).get("__call__") if is_class else function
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(f"{caller}({function.__name__}) is async: call it by asyncio.run().")
    udf = Udf(
        function,
        tuple(options.pop("fn_args", None) or ()),
        options.pop("fn_kwargs", None) or {},
        tuple(options.pop("fn_constructor_args", None) or ()),
        options.pop("fn_constructor_kwargs", None) or {},
    )
    if not is_class and (udf.init_args or udf.init_kwargs):
        raise ValueError(f"{caller}(fn_constructor_args=) is for classes: {udf.name} is none.")
    return udf, _compute_of(caller, udf, options)


def _compute_of(caller: str, udf: Udf, given: Mapping[str, Any]) -> Compute:
    options = {key: value for key, value in given.items() if value is not None}
    strategy = options.pop("compute", None)
    concurrency = options.pop("concurrency", None)
    for name in options.keys() & _REFUSED:
        raise TypeError(f"{caller}() has no argument {name!r}.")
    if strategy is not None and concurrency is not None:
        raise ValueError(f"{caller}() takes compute or concurrency, not both.")
    several = isinstance(concurrency, tuple) and len(concurrency) > 1
    sizes = (None, *concurrency) if several else (concurrency,)
    kind: Any = ActorPoolStrategy if udf.is_class else TaskPoolStrategy
    try:
        strategy = strategy or kind(*sizes)
    except (TypeError, ValueError):
        raise ValueError(
            f"{caller}(concurrency={concurrency!r}) must be a number, or for a class (least, most)."
        ) from None
    if isinstance(strategy, ActorPoolStrategy):
        remote(**options)(Compute)  # it raises what is wrong with the options
        return Compute(*strategy.bounds, strategy.initial_size or 0, options)
    if not isinstance(strategy, TaskPoolStrategy) or udf.is_class:
        raise ValueError(
            f"{caller}({udf.name}, compute={strategy!r}) must be an ActorPoolStrategy, or for a "
            f"function a TaskPoolStrategy."
        )
    remote(**options)(called_with)
    return Compute(most=strategy.size or 0, options=options)
