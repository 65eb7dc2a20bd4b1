"""What a plan's pools hold beside each other, and what is too much; what feeds give, and when."""

import dataclasses
import itertools
import math

import pytest

from miniray import data
from miniray.data.blocks import rows_to_table
from miniray.data.context import TASKS, Compute
from miniray.data.executor import check_pools, pools_hold
from miniray.data.feeds import Setting, group_feed, limit_feed, union_feed
from miniray.data.plan import optimised
from miniray.data.sources import BlockRows
from miniray.data.stages import StageCalls, pool_worker
from miniray.data.stats import StageStats
from miniray.data.work import StageWork


class Same:
    def __call__(self, batch):
        return batch


def plan(*pools):
    dataset = data.range(10)
    for options in pools:
        dataset = dataset.map_batches(Same, **{"concurrency": 1, **options})
    return optimised(dataset._plan)


def test_pools_that_do_not_fit_beside_each_other_are_told():
    chip = {"resources": {"chip": 1}}
    with pytest.raises(data.DataError, match="hold 2 chip together, of 1"):
        check_pools(plan(chip, chip), {"chip": 1})
    check_pools(plan(chip, chip), {"chip": 2})
    with pytest.raises(data.DataError, match=r"each of 2 workers .* hold 2 chip together, of 1"):
        check_pools(plan(chip), {"chip": 1}, share=2)
    with pytest.raises(data.DataError, match=r"hold 1 CPU together, of 1 .* need one"):
        check_pools(plan({"num_cpus": 1}), {"CPU": 1})
    check_pools(plan({"num_cpus": 1}), {"CPU": 2})


def test_one_pool_alone_waits_for_a_node_to_join():
    check_pools(plan({"num_gpus": 1, "batch_size": 1, "concurrency": 4}), {})


def test_parts_of_a_device_that_fit_are_not_refused():
    tenth = {"num_gpus": 0.1, "batch_size": 1}
    check_pools(plan(tenth), {"GPU": 0.3}, share=3)
    check_pools(plan(tenth, tenth), {"GPU": 1 - 0.8})


def test_calls_run_at_once_as_far_as_there_are_cpus_and_memory_for_what_each_has_held():
    setting = Setting(data.DataContext(), resources={"CPU": 8, "memory": 4 * 2**30})
    assert setting.slots(TASKS) == (8, math.inf)
    assert setting.slots(TASKS, heap=2**30)[0] == 4
    assert setting.slots(TASKS, heap=2**40)[0] == 1
    assert setting.slots(Compute(options={"num_cpus": 2}))[0] == 4
    assert setting.slots(Compute(most=3)) == (3, 3)
    assert setting.slots(Compute(options={"num_gpus": 1}))[0] == 1


def test_calls_run_at_once_as_far_as_resource_limits_allow():
    limits = data.ExecutionResources(cpu=3, gpu=1)
    options = data.ExecutionOptions(resource_limits=limits.copy(gpu=2))
    setting = Setting(data.DataContext(execution_options=options), resources={"CPU": 8, "GPU": 8})
    assert setting.slots(TASKS) == (3, 3)
    assert setting.slots(Compute(options={"num_cpus": 0.25, "num_gpus": 0.5})) == (4, 4)


def test_a_stage_has_fewer_calls_where_blocks_or_processes_take_more_memory_than_there_is():
    resources = {"CPU": 8, "memory": 4 * 2**30, "object_store_memory": 2**30}
    stage = optimised(data.range(10).map(lambda row: row)._plan)
    calls = StageCalls(
        stage, StageWork(stage.steps, 0), Setting(data.DataContext(), resources=resources)
    )
    assert calls._window() == 16
    calls._stats = StageStats("Map", heap=2**30)
    assert calls._window() == 8
    calls._stats = StageStats("Map", calls=1, blocks=2, size=2**27)  # a half of the quarter
    assert calls._window() == 2


def test_tasks_and_actors_run_on_nodes_with_the_labels_of_the_context(monkeypatch):
    monkeypatch.setattr("miniray.data.stages.remote", lambda **options: lambda target: options)
    options = data.ExecutionOptions(label_selector={"zone": "a"})
    context = data.DataContext(execution_options=options)
    assert pool_worker(TASKS, context)["label_selector"] == {"zone": "a"}
    assert pool_worker(TASKS, context)["scheduling_strategy"] == "DEFAULT"  # in no group
    other = Compute(options={"label_selector": {"zone": "b"}})
    assert pool_worker(other, context)["label_selector"] == {"zone": "b"}


def test_what_is_in_flight_fits_into_a_quarter_of_the_store_or_what_is_allowed():
    context = data.DataContext()
    assert Setting(context, resources={"object_store_memory": 2**30}).bytes_in_flight == 2**28
    limits = data.ExecutionResources(object_store_memory=2**20)
    context.execution_options = data.ExecutionOptions(resource_limits=limits)
    assert Setting(context, resources={"object_store_memory": 2**30}).bytes_in_flight == 2**20


def test_actors_that_others_have_made_hold_nothing_of_their_own():
    stage = plan({"num_gpus": 1, "batch_size": 1, "concurrency": 2})
    assert pools_hold(stage)["GPU"] == 2
    given = dataclasses.replace(stage.compute, given=["an actor"])
    assert not pools_hold(dataclasses.replace(stage, compute=given))


class Watched:
    """A feed of numbers of rows that tells what was asked for, and whether it was closed."""

    def __init__(self, *items):
        self.items = items
        self.given = 0
        self.closed = False

    def feed(self):
        try:
            for item in self.items:
                self.given += 1
                yield item if item == WAITS else BlockRows.unit(rows_to_table([{"n": 1}] * item))
            while True:
                yield None
        finally:
            self.closed = True


WAITS = ["a call"]


def rows_of(feed):
    """What a feed gives up to its end, units as their rows."""
    items = itertools.takewhile(lambda item: item is not None, feed)
    return [item if isinstance(item, list) else item.rows for item in items]


def test_a_limit_takes_no_more_units_than_it_needs_and_closes_what_gives_them():
    below = Watched(3, WAITS, 3, 3)
    assert rows_of(limit_feed(below.feed(), 5)) == [3, WAITS, 2]
    assert (below.given, below.closed) == (3, True)


def test_datasets_in_a_union_are_read_one_after_another():
    first, second = Watched(1, WAITS, 2), Watched(3)
    feed = union_feed(each.feed() for each in (first, second))
    assert [next(feed).rows, next(feed), next(feed).rows] == [1, WAITS, 2]
    assert (first.closed, second.given) == (False, 0)
    assert rows_of(feed) == [3]
    assert (first.closed, second.closed) == (True, True)


def test_units_are_put_together_until_there_are_enough_rows_or_no_more():
    assert rows_of(group_feed(Watched(1, WAITS, 1, 3, 1).feed(), 2)) == [WAITS, 2, 3, 1]
    assert rows_of(group_feed(Watched(1, 4, WAITS, 1).feed(), 2, strict=True)) == [2, 2, WAITS, 2]


def test_a_feed_that_is_closed_closes_those_below_it():
    below = Watched(1, 1)
    feed = limit_feed(group_feed(below.feed(), 1), 9)
    next(feed)
    feed.close()
    assert below.closed
