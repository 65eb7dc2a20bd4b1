"""Who reads which rows: pure functions, and properties that hold for all sizes."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("numpy")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miniray.train.data.order import (
    EpochOrder,
    Permutation,
    Position,
    derive_key,
    enough_for,
    left_over,
    part,
    plan_batches,
    position_of,
    size_of,
    split,
    state_of,
)

sizes = st.integers(0, 300)
worlds = st.integers(1, 9)
seeds = st.integers(0, 2**70)


@st.composite
def ranges_of(draw):
    most = draw(st.sampled_from((12, 400)))  # less and more than there are ranks
    cuts = sorted(draw(st.lists(st.integers(0, most), max_size=8, unique=True)))
    return list(itertools.pairwise(cuts))[::2]


def numbers(ranges):
    return [number for start, stop in ranges for number in range(start, stop)]


@given(ranges_of(), worlds)
def test_parts_hold_every_position_once_and_differ_by_at_most_one(ranges, world):
    parts = split(ranges, world)
    assert [number for each in parts for number in numbers(each)] == numbers(ranges)
    assert max(map(size_of, parts)) - min(map(size_of, parts)) <= 1


@given(ranges_of(), st.integers(0, 400), st.integers(0, 400))
def test_a_part_of_ranges_is_a_slice_of_their_positions(ranges, start, stop):
    assert numbers(part(ranges, start, stop)) == numbers(ranges)[start:stop]


@given(ranges_of(), worlds, st.integers(0, 100))
def test_what_is_left_over_is_what_no_rank_has_taken(ranges, world, taken):
    seen = [number for each in split(ranges, world) for number in numbers(each)[:taken]]
    left = numbers(left_over(ranges, world, taken))
    assert sorted(seen + left) == numbers(ranges)


@given(st.integers(1, 500), worlds, st.integers(1, 40), st.booleans())
def test_every_rank_has_the_same_number_of_batches(total, world, batch_size, drop_last):
    total = max(total, world)
    own = [size_of(each) for each in split([(0, total)], world)]
    plans = [plan_batches(n, min(own), batch_size, drop_last=drop_last) for n in own]
    assert len({plan.count for plan in plans}) == 1
    for rows, plan in zip(own, plans, strict=True):
        bounds = list(plan.bounds())
        lengths = [stop - start for start, stop in bounds]
        assert all(length == batch_size for length in lengths[:-1])
        if drop_last:
            assert all(length == batch_size for length in lengths)
            assert sum(lengths) > min(own) - batch_size
        else:
            assert sum(lengths) == rows
            assert 1 <= lengths[-1] <= batch_size + 1
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))


@given(st.integers(1, 3000), seeds)
def test_a_permutation_holds_each_number_once(size, seed):
    order = Permutation(size, derive_key(seed)).take(np.arange(size))
    assert sorted(order) == list(range(size))


@pytest.mark.parametrize("size", [2**16 + 1, 100_003, 2**18])
def test_a_large_permutation_is_computed_in_any_pieces(size):
    permutation = Permutation(size, derive_key(7))
    whole = permutation.take(np.arange(size))
    assert np.array_equal(np.sort(whole), np.arange(size))
    assert np.array_equal(permutation.take(np.arange(500, 900)), whole[500:900])
    # Where a number goes says nothing of where it was.
    assert abs(np.corrcoef(whole, np.arange(size))[0, 1]) < 0.02
    assert 0.4 < np.mean(whole[: size // 2] < size / 2) < 0.6


def test_orders_do_not_change_between_versions():
    small = Permutation(10, derive_key(1, 2))
    assert small.take(np.arange(10)).tolist() == [
        3,
        9,
        8,
        4,
        2,
        6,
        7,
        0,
        1,
        5,
    ]
    large = Permutation(10**12, derive_key(1, 2))
    assert large.take(np.arange(3)).tolist() == [
        244792613617,
        983511952621,
        128651554197,
    ]


def rows_of(order, start, stop, together=100):
    """The rows at these positions, each with its block."""
    parts = [(b, part) for b, span in order.spans(start, stop) for part in span.parts(together)]
    return [(block, int(row)) for block, part in parts for row in part.numbers()]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), seeds, st.integers(0, 5))
def test_an_epoch_has_every_row_of_every_block_once(blocks, seed, epoch):
    order = EpochOrder(blocks, seed, epoch)
    total = sum(blocks)
    rows = rows_of(order, 0, total)
    assert sorted(rows) == [(block, row) for block, n in enumerate(blocks) for row in range(n)]
    middle = total // 2
    assert rows_of(order, 0, middle) + rows_of(order, middle, total) == rows
    assert rows_of(EpochOrder(blocks, seed, epoch), 0, total, together=3) == rows


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    def order(seed, epoch):
        return tuple(rows_of(EpochOrder([50, 50], seed, epoch), 0, 100))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_blocks_have_another_order_in_each_epoch_and_rows_in_each_block():
    first, second = (
        [block for block, _ in EpochOrder([1] * 20, 5, epoch).spans(0, 20)] for epoch in (0, 1)
    )
    assert first != second
    rows = [span.numbers().tolist() for _, span in EpochOrder([50, 50], 5, 0).spans(0, 100)]
    assert rows[0] != rows[1]


def test_without_a_seed_rows_keep_their_order():
    spans = EpochOrder([3, 2], None, 4).spans(1, 5)
    assert [(block, span.numbers()) for block, span in spans] == [(0, range(1, 3)), (1, range(2))]


IDENTITY = {"name": "train", "rows": 100, "seed": 0}


@given(st.integers(1, 200), worlds, worlds, st.data())
def test_a_state_leaves_what_was_not_seen_to_any_number_of_ranks(total, world, other, data):
    total = max(total, world)
    taken = data.draw(st.integers(0, total // world))
    position = Position(3, [(0, total)], world, taken)
    seen = [number for each in split([(0, total)], world) for number in numbers(each)[:taken]]
    if taken == total // world and total % world:
        return  # the last batch has all of a rank's rows, so no rank stops here
    state = state_of(position, 0, IDENTITY)
    resumed = position_of(state, IDENTITY, other)
    left = [
        number for rank in range(other) for number in numbers(resumed.own(rank))[resumed.taken :]
    ]
    assert sorted(seen + left) == list(range(total)) or len(left) == other
    assert set(seen + left) == set(range(total))


@given(ranges_of(), worlds)
def test_each_rank_has_a_position_if_there_is_one(ranges, world):
    enough = enough_for(world, ranges)
    assert set(numbers(enough)) == set(numbers(ranges))
    assert size_of(enough) == (max(size_of(ranges), world) if ranges else 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_has_read_all_says_so_to_ranks_with_one_row_more(rank):
    position = Position(0, [(0, 7)], 3)
    position.taken = size_of(position.own(rank))
    state = state_of(position, rank, IDENTITY)
    assert position_of(state, IDENTITY, 2).ranges == []


def test_a_state_of_an_older_version_which_says_nothing_of_blocks_is_taken_up():
    state = state_of(Position(0, [(0, 7)], 3), 0, IDENTITY)
    assert position_of(state, {**IDENTITY, "blocks": 1}, 3).ranges == [(0, 7)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "is not what state_dict"),
        ({"extra": 1}, "is not what state_dict"),
        ({"dataset": {**IDENTITY, "rows": 99}}, "state of other data"),
        ({"dataset": {**IDENTITY, "blocks": 1}}, "state of other data"),
        ({"taken": 5, "local_shuffle": [10, 0]}, "2 workers read with a local shuffle"),
    ],
)
def test_a_state_that_can_not_be_taken_up_is_refused(change, message):
    state = {**state_of(Position(0, [(0, 100)], 2), 0, IDENTITY), **change}
    with pytest.raises(ValueError, match=message):
        position_of(state, IDENTITY, 3)
    with pytest.raises(ValueError, match="is not what state_dict"):
        position_of(5, IDENTITY, 3)
