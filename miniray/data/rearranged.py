"""The methods of a dataset that bring rows into other places, or several datasets together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from miniray.data.aggregate import Unique
from miniray.data.batches import check_whole
from miniray.data.consumption import Consumption
from miniray.data.exchange import Aligned, Numbered
from miniray.data.grouped import Aggregating, GroupedData, key_names, known_columns
from miniray.data.ordered import JOINS, Join, Ordered
from miniray.data.plan import Exchange, PlanNode, Regroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.data.aggregate import AggregateFn
    from miniray.data.exchange import How


class Rearranging(Consumption, Aggregating):
    """The methods of a dataset that need all rows before they give the first."""

    def _of(self, plan: PlanNode) -> Any:
        """Return a dataset of a plan."""
        raise NotImplementedError

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        strict: bool = False,
        shuffle: bool = False,
        keys: Sequence[str] | None = None,
    ) -> Any:
        """Make other blocks of the rows.

        Args:
            num_blocks: How many, of about as many rows each. All rows are made before.
            target_num_rows_per_block: Rows of a block, at least; blocks are made as rows come.
            strict: Exactly so many in each block but the last.
            shuffle: Take the rows in turns: each block has some of all.
            keys: Rows whose values of these columns are equal come into the same block, sorted.
        """
        if (num_blocks is None) == (target_num_rows_per_block is None):
            raise ValueError(
                "repartition() takes num_blocks or target_num_rows_per_block, one of them."
            )
        if num_blocks is None:
            if shuffle or keys is not None:
                raise ValueError(
                    "repartition(target_num_rows_per_block=...) takes no shuffle and no keys."
                )
            check_whole("repartition", "target_num_rows_per_block", target_num_rows_per_block, 1)
            assert target_num_rows_per_block is not None
            return self._of(Regroup((self._plan,), target_num_rows_per_block, strict))
        check_whole("repartition", "num_blocks", num_blocks, 1)
        if keys is not None:
            how: How = self._ordered("repartition", keys, False, name="Repartition")
        else:
            how = Numbered(None, name="Repartition") if shuffle else Aligned()
        return self._of(Exchange((self._plan,), how, num_blocks))

    def random_shuffle(self, *, seed: int | None = None, num_blocks: int | None = None) -> Any:
        """Bring all rows into another order, in which each is as likely at any place.

        Before a trainer that reorders the rows in each epoch it is left out, with a warning: that
        mixes the units of the data, and the rows within each. ``materialize()`` keeps it.

        Args:
            seed: From which the order is drawn; rows of the same order get the same one, whatever
                blocks they are in. Default: a new one, now.
            num_blocks: Of how many parts it is made. Default: by their bytes.
        """
        seed = random.randrange(2**31) if seed is None else seed  # noqa: S311 -- no secret
        return self._of(Exchange((self._plan,), Numbered(seed), num_blocks))

    def sort(
        self,
        key: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        boundaries: Sequence[int | float] | None = None,
    ) -> Any:
        """Sort the rows; those of equal keys keep their order, null comes last.

        Args:
            key: A column, or several, of which later ones decide where earlier ones are equal.
            descending: Large values first, for all keys or for each.
            boundaries: Values of the first key at which blocks begin. Default: as rows are.

        Raises:
            ValueError: There is no such column, or arguments do not go together.
        """
        if key is None:
            raise ValueError("The 'key' parameter cannot be None for sorting.")
        given = tuple(sorted(set(boundaries or ())))
        if not all(isinstance(each, int | float) for each in given):
            raise ValueError("The type of items in boundaries must be int or float.")
        how = self._ordered("sort", key, descending, given=given)
        return self._of(Exchange((self._plan,), how, len(given) + 1 if given else None))

    def _ordered(self, caller: str, key: Any, descending: Any, **options: Any) -> Ordered:
        names = key_names(caller, key, known_columns(self._plan))
        down = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(down) != len(names) or not names:
            raise ValueError(
                f"Length of `descending` does not match the length of the key: {down} for "
                f"{list(names)}."
            )
        return Ordered(names, tuple(down), **options)

    # --- groups and other datasets ------------------------------------------------------

    def groupby(
        self, key: str | Sequence[str] | None, num_partitions: int | None = None
    ) -> GroupedData:
        """Group rows by columns.

        Args:
            key: The columns; None: all rows are one group.
            num_partitions: Of how many parts results are made. Default: by their bytes.
        """
        return GroupedData(self, key, num_partitions)

    def aggregate(self, *aggs: AggregateFn) -> dict[str, Any] | None:
        """Return aggregations of all rows by name; None if there are no rows."""
        found: dict[str, Any] | None = self._one(self.groupby(None).aggregate(*aggs))
        return found

    def _one(self, dataset: Any) -> Any:
        rows = dataset.take(1)
        self._stats = dataset._stats
        return rows[0] if rows else None

    def _over(self, kind: type[Any], on: Any, **options: Any) -> Any:
        found = self._one(self.groupby(None)._over(kind, on, **options))
        return next(iter(found.values())) if found is not None and len(found) == 1 else found

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:
        """Return the different values of a column, in the order in which they come."""
        return self._over(Unique, column, ignore_nulls=ignore_nulls) or []

    def join(
        self,
        ds: Rearranging,
        join_type: str,
        num_partitions: int | None = None,
        on: Sequence[str] = ("id",),
        right_on: Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
    ) -> Any:
        """Join with another dataset, by equal values of columns. Null equals nothing.

        Args:
            ds: The other one, on the right.
            join_type: "inner", "left_outer", "right_outer", "full_outer", "left_semi",
                "right_semi", "left_anti" or "right_anti".
            num_partitions: Of how many parts it is made. Default: by their bytes.
            on: The columns of this one.
            right_on: Those of the other one. Default: the same names.
            left_suffix: Behind names of this one that both have.
            right_suffix: Behind those of the other one.

        Raises:
            ValueError: There is no such join or column, or both have a column of a name.
        """
        kind = str(getattr(join_type, "value", join_type))
        if kind not in JOINS:
            raise ValueError(f"join(join_type={join_type!r}) must be one of {', '.join(JOINS)}.")
        for name, value in (("on", on), ("right_on", right_on)):
            if value is not None and not isinstance(value, tuple | list):
                raise ValueError(f"Expected tuple or list as `{name}` (got {type(value).__name__})")
        right_on = right_on or on
        if len(right_on) != len(on) or not on:
            raise ValueError(f"join(on={list(on)}, right_on={list(right_on)}) differ in length.")
        left, right = known_columns(self._plan), known_columns(ds._plan)
        how = Join(
            key_names("join", on, left),
            (False,) * len(on),
            right_keys=key_names("join", right_on, right),
            kind=kind,
            suffixes=(left_suffix, right_suffix),
        )
        if left is not None and right is not None:
            how.outgoing(left, right)
        return self._of(Exchange((self._plan, ds._plan), how, num_partitions))

    def zip(self, *other: Rearranging) -> Any:
        """Add the columns of other datasets with as many rows.

        Args:
            *other: The datasets. A column whose name is taken gets "_1" behind it, and so on.

        Raises:
            ValueError: When it is executed, the numbers of rows differ.
        """
        plans = (self._plan, *(each._plan for each in other))
        return self._of(Exchange(plans, Aligned("Zip")))
