"""What a plan's pools hold beside each other, and what is too much."""

from miniray import data
from miniray.data.executor import unfitting
from miniray.data.plan import optimised


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
    assert unfitting(plan(chip, chip), {"chip": 1}) == {"chip": 2}
    assert unfitting(plan(chip, chip), {"chip": 2}) == {}
    assert unfitting(plan(chip), {"chip": 1}, share=2) == {"chip": 2}
    assert unfitting(plan({"num_cpus": 1}), {"CPU": 0}) == {"CPU": 1}


def test_one_pool_alone_waits_for_a_node_to_join():
    assert unfitting(plan({"num_gpus": 1, "batch_size": 1, "concurrency": 4}), {}) == {}


def test_parts_of_a_device_that_fit_are_not_refused():
    tenth = {"num_gpus": 0.1, "batch_size": 1}
    assert unfitting(plan(tenth), {"GPU": 0.3}, share=3) == {}
    assert unfitting(plan(tenth, tenth), {"GPU": 1 - 0.8}) == {}
