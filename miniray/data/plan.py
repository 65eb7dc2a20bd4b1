"""Lazy plans: the nodes of a dataset, and the stages in which it is executed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import TYPE_CHECKING, Any

from miniray.data.blocks import no_rows
from miniray.data.context import TASKS, Compute
from miniray.data.sources import ENDLESS
from miniray.data.tables import concat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from miniray.data.exchange import How
    from miniray.data.sources import CutWish, Datasource, ReadUnit
    from miniray.data.transforms import Transform


@dataclasses.dataclass(frozen=True)
class PlanNode:
    """A node of a plan."""

    inputs: tuple[PlanNode, ...]
    compute = TASKS

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Read(PlanNode):
    """Reads a source.

    Attributes:
        shuffle: From which an order of the units is drawn; None: as they come.
        head: Rows of each unit, at most.
    """

    inputs: tuple[PlanNode, ...] = dataclasses.field(default=(), init=False)
    source: Datasource
    shuffle: int | None = None
    head: int = ENDLESS

    @property
    def name(self) -> str:
        return self.source.name

    def units(self, wish: CutWish) -> Iterator[ReadUnit]:
        if self.shuffle is None:
            units = self.source.units(dataclasses.replace(wish, most=self.head))
        else:  # an order of the same units, however many rows are wanted
            found = list(self.source.units(wish))
            random.Random(self.shuffle).shuffle(found)  # noqa: S311 -- no secret
            units = iter(found)
        return (unit.part(0, self.head) for unit in units)


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
    """Blocks with a given number of rows.

    Attributes:
        rows: Rows of each block, or the least number of them.
        strict: Exactly this many, except in the last one.
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
        how: The distribution of rows, and what is made of them.
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
        """The names of its steps, as Ray joins them."""
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
        return any(step.user for step in self.steps)


def optimised(node: PlanNode) -> PlanNode:
    """Return the plan in stages, with columns, filters and limits moved to where rows are read."""
    inputs = tuple(map(optimised, node.inputs))
    if inputs != node.inputs:
        node = dataclasses.replace(node, inputs=inputs)
    match node:
        case Limit(inputs=(Stage(keeps_count=True) as below,)):
            return dataclasses.replace(below, inputs=(optimised(Limit(below.inputs, node.rows)),))
        case Limit(inputs=(Read() as read,)):
            return Limit((dataclasses.replace(read, head=node.rows),), node.rows)
        case Stage(inputs=(Read() as read,), steps=[step]) if source := read.source.pushed(step):
            return dataclasses.replace(read, source=source)
        case Stage(inputs=(Read() as read,), compute=Compute(accelerated=True)) if (
            not read.source.made
        ):
            return dataclasses.replace(node, inputs=(Stage((read,), ()),))
        case Stage(inputs=(Stage() as below,)) if compute := _together(below, node):
            return Stage(below.inputs, (*below.steps, *node.steps), compute)
    return node


def _together(below: Stage, above: Stage) -> Compute | None:
    """Return what one stage of both runs on; None: they are two."""
    if not above.user or (below.compute == above.compute and not above.compute.is_pool):
        return below.compute
    apart = below.user or above.compute.is_pool or above.compute.accelerated
    return None if apart else above.compute


def walk(node: PlanNode) -> Iterator[PlanNode]:
    """Yield a node and all below it."""
    yield node
    for each in node.inputs:
        yield from walk(each)


def has_user_code(node: PlanNode) -> bool:
    """Return whether functions of the user are called."""
    return any(isinstance(each, Stage) and each.user for each in walk(node))


def chain(node: PlanNode) -> tuple[Read, tuple[Stage, ...]] | None:
    """Return the read and the stages above it; None if the plan has anything else."""
    stages: list[Stage] = []
    while isinstance(node, Stage):
        stages.insert(0, node)
        node = node.inputs[0]
    return (node, tuple(stages)) if isinstance(node, Read) else None


def stacked(node: PlanNode, stages: Sequence[Stage]) -> PlanNode:
    """Return a plan with stages on top, in place of their former inputs."""
    for stage in stages:
        node = dataclasses.replace(stage, inputs=(node,))
    return node


def is_numbered(node: PlanNode) -> bool:
    """Return whether rows are known by number: without looking into files."""
    if isinstance(node, Read):
        return node.source.counted
    if isinstance(node, Stage) and not node.keeps_count:
        return False
    if isinstance(node, Exchange) and not node.how.keeps_count:
        return False
    return all(map(is_numbered, node.inputs))


def count_of(node: PlanNode) -> int | None:
    """Return the number of rows if it is known without executing the plan."""
    if not is_numbered(node):
        return None
    if isinstance(node, Read):
        return node.source.count()
    counts = list(map(count_of, node.inputs))
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
        rows = ", ".join(map(str, counts))
        raise ValueError(f"zip() needs datasets of the same length; these have {rows} rows.")
    return counts[0]


def schema_of(node: PlanNode) -> Any:
    """Return the schema if it is known without executing the plan, else None."""
    if isinstance(node, Read):
        return node.source.schema()
    schemas = list(map(schema_of, node.inputs))
    if None in schemas:
        return None
    if isinstance(node, Exchange):
        return node.how.schema(schemas)
    schema = schemas[0]
    with contextlib.suppress(ValueError):  # only a reader of all rows needs one for all
        schema = concat(list(map(no_rows, schemas))).schema
    for step in node.steps if isinstance(node, Stage) else ():
        schema = None if schema is None else step.schema(schema)
    return schema


def explained(node: PlanNode, depth: int = 0, *, stages: bool = True) -> str:
    """Return a plan as text, of stages or of steps; the last node is first."""
    name, where, below = node.name, "", node.inputs
    if isinstance(node, Stage) and not stages:
        name = "->".join(step.name for step in node.steps)
    elif isinstance(node, Stage):
        compute = node.compute
        most = compute.most or "any number of"
        actors = most if most == compute.least else f"{compute.least} to {most}"
        runs = f"pool of {actors} actors" if compute.is_pool else "tasks"
        where = f"  [{runs}] {dict(compute.options) or ''}".rstrip()
        if isinstance(below[0], Read):
            below = ()  # in the name of the stage
    line = f"{'   ' * depth}{'+- ' if depth else ''}{name}{where}"
    inner = [explained(each, depth + 1, stages=stages) for each in below]
    return "\n".join([line, *inner])
