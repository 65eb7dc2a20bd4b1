"""Lazy plans: what a dataset is made of, and the stages in which it is executed."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.data.transforms import Columns, FilterExpr, Transform

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from miniray.data.exchange import How
    from miniray.data.sources import CutWish, Datasource, ReadUnit


class PoolSize(NamedTuple):
    """How many actors a pool has."""

    least: int
    #: 0: as many as the cluster can run.
    most: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """What a step runs on.

    Attributes:
        pool: The actors; None: tasks.
        initial: Actors at the beginning.
        options: Options of tasks or actors: num_cpus, num_gpus and so on.
        most: Tasks at once, at most; None: as many as there are CPUs.
    """

    pool: PoolSize | None = None
    initial: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    most: int | None = None

    def actors(self, share: int = 1) -> int:
        """Return how many actors a pool begins with that is divided among so many executions."""
        assert self.pool is not None
        return max(1, (self.initial or self.pool.least) // share)

    @property
    def demand(self) -> dict[str, float]:
        """The resources that one actor holds."""
        names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        found = {name: self.options.get(option) or 0 for name, option in names.items()}
        return {**found, **(self.options.get("resources") or {})}


TASKS = Compute()


@dataclasses.dataclass(frozen=True)
class PlanNode:
    """A node of a plan."""

    inputs: tuple[PlanNode, ...]

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Read(PlanNode):
    """Reads a source."""

    inputs: tuple[PlanNode, ...] = dataclasses.field(default=(), init=False)
    source: Datasource
    shuffle: int | None = None

    @property
    def name(self) -> str:
        return self.source.name

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        if self.shuffle is None:
            return self.source.units(wish)
        units = list(self.source.units(wish))
        random.Random(self.shuffle).shuffle(units)  # noqa: S311 -- no secret
        return iter(units)


@dataclasses.dataclass(frozen=True)
class Limit(PlanNode):
    """Keeps the first rows."""

    rows: int

    @property
    def name(self) -> str:
        return f"Limit({self.rows})"


class Union(PlanNode):
    """The rows of several plans, one after another."""


@dataclasses.dataclass(frozen=True)
class Regroup(PlanNode):
    """Blocks of so many rows.

    Attributes:
        rows: Rows of each block, or at least so many.
        strict: Exactly so many, other than in the last one.
    """

    rows: int
    strict: bool = False

    @property
    def name(self) -> str:
        return f"Repartition({self.rows} rows)"


@dataclasses.dataclass(frozen=True)
class Exchange(PlanNode):
    """Brings rows that belong together into one partition.

    Attributes:
        how: Which rows, and what is made of them.
        partitions: How many; None: by the bytes of the input.
    """

    how: How
    partitions: int | None = None

    @property
    def name(self) -> str:
        return self.how.name


# --- stages -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stage(PlanNode):
    """Steps that run together: in one task, or in the actors of a pool.

    Datasets have a stage for each step; ``optimised`` puts those together that can run together.
    """

    steps: tuple[Transform, ...]
    compute: Compute = TASKS

    @property
    def name(self) -> str:
        """The names of what is in it, as Ray joins them."""
        names = [step.name for step in self.steps]
        names[:0] = [each.name for each in self.inputs if isinstance(each, Read | Exchange)]
        return "->".join(names) or self.inputs[0].name

    @property
    def least(self) -> int:
        """Rows that its steps want at once."""
        return max([step.least for step in self.steps], default=1)

    @property
    def keeps_count(self) -> bool:
        return all(step.keeps_count for step in self.steps)

    @property
    def user(self) -> bool:
        return any(step.user for step in self.steps) or any(
            isinstance(each, Read) and each.source.user for each in self.inputs
        )


def optimised(node: PlanNode) -> PlanNode:
    """Return the plan in stages, with columns, filters and limits moved to where rows are read."""
    inputs = tuple(optimised(each) for each in node.inputs)
    if inputs != node.inputs:
        node = dataclasses.replace(node, inputs=inputs)
    if isinstance(node, Limit):
        return _limited(node)
    if not isinstance(node, Stage):
        return node
    (below,) = inputs
    if isinstance(below, Read) and (pushed := _pushed(below, node.steps)) is not None:
        return pushed
    if isinstance(below, Stage) and (compute := _together(below, node)) is not None:
        return Stage(below.inputs, (*below.steps, *node.steps), compute)
    return node


def _together(below: Stage, above: Stage) -> Compute | None:
    """Return what one stage of both runs on; None: they are two."""
    if not above.user or (below.compute == above.compute and above.compute.pool is None):
        return below.compute
    return above.compute if not below.user and above.compute.pool is None else None


def _pushed(read: Read, steps: Sequence[Transform]) -> PlanNode | None:
    """Return a read that does what a step would do; None if it can't."""
    source = None
    match steps:
        case [Columns(method="select", names=names)]:
            source = read.source.selected(list(names))
        case [FilterExpr(expr=expr)]:
            source = read.source.filtered(expr)
    return None if source is None else dataclasses.replace(read, source=source)


def _limited(node: Limit) -> PlanNode:
    """Move a limit below what keeps the count of rows."""
    below = node.inputs[0]
    if isinstance(below, Limit):
        return Limit(below.inputs, min(below.rows, node.rows))
    if isinstance(below, Stage) and below.keeps_count:
        return dataclasses.replace(below, inputs=(_limited(Limit(below.inputs, node.rows)),))
    return node


def walk(node: PlanNode) -> Iterator[PlanNode]:
    """Yield a node and all below it."""
    yield node
    for each in node.inputs:
        yield from walk(each)


def has_user_code(node: PlanNode) -> bool:
    """Return whether functions of the user are called."""
    return any(
        each.source.user if isinstance(each, Read) else isinstance(each, Stage) and each.user
        for each in walk(node)
    )


def chain(node: PlanNode) -> tuple[Read, tuple[Stage, ...]] | None:
    """Return the read and the stages above it; None if the plan has anything else."""
    stages: list[Stage] = []
    while isinstance(node, Stage):
        stages.insert(0, node)
        node = node.inputs[0]
    return (node, tuple(stages)) if isinstance(node, Read) else None


def counted(node: PlanNode) -> tuple[Read, tuple[Stage, ...]] | None:
    """Return what ``chain`` does if rows are known by number; None if they are not."""
    found = chain(node)
    if found is None:
        return None
    read, stages = found
    known = all(stage.keeps_count for stage in stages) and read.source.count() is not None
    return found if known else None


def stacked(node: PlanNode, stages: Sequence[Stage]) -> PlanNode:
    """Return a plan with stages on top, whatever they had below them."""
    for stage in stages:
        node = dataclasses.replace(stage, inputs=(node,))
    return node


def count_of(node: PlanNode) -> int | None:
    """Return the number of rows if it is known without executing the plan."""
    if isinstance(node, Read):
        return node.source.count()
    if isinstance(node, Stage) and not node.keeps_count:
        return None
    counts = [count_of(each) for each in node.inputs]
    if (isinstance(node, Exchange) and not node.how.keeps_count) or None in counts:
        return None
    if isinstance(node, Exchange):
        return check_lengths(counts)
    total = sum(filter(None, counts))
    return min(total, node.rows) if isinstance(node, Limit) else total


def check_lengths(counts: Sequence[int | None]) -> int | None:
    """Return how many rows datasets have that are put beside each other.

    Raises:
        ValueError: Not all have as many.
    """
    if len(set(counts)) > 1:
        raise ValueError(
            f"zip() needs datasets of the same length; these have "
            f"{', '.join(map(str, counts))} rows."
        )
    return counts[0]


def schema_of(node: PlanNode) -> Any:
    """Return the schema if it is known without executing the plan, else None."""
    if isinstance(node, Read):
        return node.source.schema()
    if isinstance(node, Exchange):
        schemas = [schema_of(each) for each in node.inputs]
        return None if None in schemas else node.how.schema(schemas)
    schema = schema_of(node.inputs[0])
    for step in node.steps if isinstance(node, Stage) else ():
        schema = None if schema is None else step.schema(schema)
    return schema


def explained(node: PlanNode, depth: int = 0, *, stages: bool = True) -> str:
    """Return a plan as text, of stages or of steps; the last node is first."""
    name, where, below = node.name, "", node.inputs
    if isinstance(node, Stage) and not stages:
        name = "->".join(step.name for step in node.steps)
    elif isinstance(node, Stage):
        pool, options = node.compute.pool, dict(node.compute.options)
        most = pool.most or "any number of" if pool is not None else 0
        runs = "tasks" if pool is None else f"pool of {pool.least} to {most} actors"
        where = f"  [{runs}] {options or ''}".rstrip()
        if isinstance(below[0], Read):
            below = ()  # in the name of the stage
    line = f"{'   ' * depth}{'+- ' if depth else ''}{name}{where}"
    inner = [explained(each, depth + 1, stages=stages) for each in below]
    return "\n".join([line, *inner])
