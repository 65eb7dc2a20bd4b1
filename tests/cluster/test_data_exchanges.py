"""Exchanges in tasks: more than the store holds, processes that die, errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from miniray import data

if TYPE_CHECKING:
    from collections.abc import Iterator

np = pytest.importorskip("numpy")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("cluster")
CLUSTER = {"num_cpus": 2, "object_store_memory": 50 * 2**20}


@pytest.fixture(autouse=True)
def _blocks_of_a_mebibyte() -> Iterator[None]:
    context = data.DataContext.get_current()
    before, context.target_max_block_size = context.target_max_block_size, 2**20
    yield
    context.target_max_block_size = before


def keyed(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows with a key that is in no order, one of 10 groups, and 1,000 bytes."""
    ids = batch["id"]
    return {
        "id": ids,
        "k": ids * 7919 % 100_003,
        "group": ids % 10,
        "data": np.repeat(ids[:, None], 125, axis=1),
    }


def rows(count: int) -> Any:
    return data.range(count).map_batches(keyed, batch_size=1000)


def test_more_is_sorted_than_the_store_holds() -> None:
    seen = 0
    last = -1
    for batch in rows(60_000).sort("k", descending=True).iter_batches(batch_size=None):
        assert (batch["data"] == batch["id"][:, None]).all()
        found = -batch["k"]
        assert (np.diff(found) >= 0).all()
        assert seen == 0 or found[0] >= last
        last = found[-1]
        seen += len(found)
    assert seen == 60_000


def test_a_shuffle_is_the_same_in_every_run_and_mixes_all_rows() -> None:
    def ids(dataset: Any) -> Any:
        return np.concatenate([batch["id"] for batch in dataset.iter_batches(batch_size=None)])

    one = ids(rows(20_000).random_shuffle(seed=5))
    other = ids(rows(20_000).materialize().random_shuffle(seed=5, num_blocks=3))
    assert (one == other).all()
    assert (np.sort(one) == np.arange(20_000)).all()
    assert abs(np.corrcoef(one, np.arange(20_000))[0, 1]) < 0.05


def test_groups_are_aggregated_and_mapped_across_tasks() -> None:
    grouped = rows(20_000).groupby("group")
    counted = [{"group": n, "count()": 2000} for n in range(10)]
    assert grouped.count().take_all() == counted

    class Size:
        def __call__(self, group: dict[str, Any], key: str) -> dict[str, Any]:
            return {key: group[key][:1], "count()": [len(group[key])]}

    assert grouped.map_groups(Size, fn_args=("group",), concurrency=1).take_all() == counted


def test_a_step_of_nothing_that_was_kept_has_no_columns_yet() -> None:
    nothing = data.from_items([{"k": 1}]).flat_map(lambda _: []).materialize()
    later = nothing.filter(expr="k > 1").with_column("j", data.expressions.col("k"))
    assert (later.columns(), later.take_all()) == (None, [])


def test_a_join_brings_rows_of_two_datasets_together() -> None:
    left, right = rows(20_000), data.range(10_000, override_num_blocks=5)
    joined = left.join(right, "inner", on=("id",)).sort("id")
    found = [batch["id"] for batch in joined.iter_batches(batch_size=None)]
    assert (np.concatenate(found) == np.arange(10_000)).all()


def test_a_stratified_split_has_a_share_of_every_class() -> None:
    train, test = rows(1000).train_test_split(0.2, stratify="group")
    assert train.groupby("group").count().take_all() == [
        {"group": n, "count()": 80} for n in range(10)
    ]
    assert test.groupby("group").count().take_all() == [
        {"group": n, "count()": 20} for n in range(10)
    ]


def test_a_shuffled_split_draws_rows_of_both_parts_from_all() -> None:
    train, test = data.range(1000).train_test_split(0.3, shuffle=True, seed=1)
    ids = [[row["id"] for row in part.take_all()] for part in (train, test)]
    assert list(map(len, ids)) == [700, 300]
    assert sorted(ids[0] + ids[1]) == list(range(1000))
    assert min(ids[1]) < 100
    assert max(ids[0]) > 900


class DiesOnce:
    """Kills its process where a row is, the first time."""

    def __init__(self, folder: Path, column: str, value: int) -> None:
        self.marker = str(folder / "died")
        self.column = column
        self.value = value

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.value in batch[self.column] and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


@pytest.mark.parametrize("before", [True, False])
def test_a_worker_that_dies_in_the_middle_of_a_sort_is_made_up_for(
    tmp_path: Path, before: bool
) -> None:
    dies = DiesOnce(tmp_path, "id", 15_000)
    kwargs = {"batch_size": 500, "fn_args": ()}

    def step(batch: dict[str, Any]) -> dict[str, Any]:
        return dies(batch)

    dataset = rows(20_000)
    dataset = dataset.map_batches(step, **kwargs).sort("k") if before else dataset.sort("k")
    if not before:
        dataset = dataset.map_batches(step, **kwargs)
    found = [batch["k"] for batch in dataset.iter_batches(batch_size=None)]
    assert (np.concatenate(found) == np.sort(np.arange(20_000) * 7919 % 100_003)).all()
    assert (tmp_path / "died").exists()


def test_a_function_that_fails_on_a_group_tells_operator_and_rows() -> None:
    def fails(group: dict[str, Any]) -> dict[str, Any]:
        if group["group"][0] == 3:
            raise ValueError("no good")
        return group

    told = r"MapGroups\(fails\) failed on rows \d+ to \d+ of partition \d of \d of GroupBy"
    with pytest.raises(data.DataError, match=told) as caught:
        rows(5000).groupby("group").map_groups(fails).count()
    assert "ValueError: no good" in str(caught.value)


def test_a_column_that_is_missing_after_a_function_is_named_with_the_others() -> None:
    with pytest.raises(
        data.DataError, match=r"Sort: the data has no column 'x', but id, k, group, data"
    ):
        rows(5000).sort("x").take(1)


def test_what_follows_an_exchange_runs_where_its_rows_are_made() -> None:
    dataset = rows(5000).random_shuffle(seed=1).map(lambda row: {"id": row["id"] + 1})
    assert sorted(row["id"] for row in dataset.take_all()) == list(range(1, 5001))
    assert "RandomShuffle->Map(<lambda>)" in dataset.stats()
    assert dataset.stats().index("RandomShuffleMap") < dataset.stats().index("RandomShuffle->Map")


def test_pools_of_two_inputs_that_leave_no_cpu_to_what_brings_them_together_are_refused() -> None:
    class Same:
        def __call__(self, batch: Any) -> Any:
            return batch

    one, other = (data.range(10).map_batches(Same, num_cpus=1, concurrency=1) for _ in range(2))
    with pytest.raises(data.DataError, match="hold 2 CPU together, of 2 that there are"):
        one.zip(other).take_all()
    both = one.map_batches(lambda batch: batch).zip(other)  # the first pool has ended by then
    assert [row["id_1"] for row in both.take_all()] == list(range(10))


def test_pools_of_two_inputs_that_hold_more_than_there_is_are_refused() -> None:
    class Same:
        def __call__(self, batch: Any) -> Any:
            return batch

    one, other = (
        data.range(10).map_batches(Same, resources={"chip": 1}, concurrency=1) for _ in range(2)
    )
    with pytest.raises(data.DataError, match=r"pools of Zip hold 2 chip together, of 0"):
        one.zip(other).take_all()
