from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from miniray.train import CheckpointConfig
from miniray.train.controller.recorder import CheckpointBook, lookup
from miniray.train.storage.storage import CheckpointRecord


def record(number, **metrics):
    return CheckpointRecord(f"checkpoint_{number:06d}", number, metrics)


def numbers(records):
    return [entry.number for entry in records]


def test_without_a_limit_every_checkpoint_is_kept():
    book = CheckpointBook(CheckpointConfig())
    assert [book.add(record(number)) for number in range(5)] == [[]] * 5
    assert numbers(book.records) == [0, 1, 2, 3, 4]


def test_without_a_score_the_newest_are_kept():
    book = CheckpointBook(CheckpointConfig(num_to_keep=2))
    deleted = [numbers(book.add(record(number))) for number in range(4)]
    assert deleted == [[], [], [0], [1]]
    assert numbers(book.records) == [2, 3]


def test_a_name_is_there_once_when_a_new_checkpoint_takes_it():
    book = CheckpointBook(CheckpointConfig(num_to_keep=2))
    for number in range(2):
        book.add(CheckpointRecord(f"epoch_{number}", number, {}))
    book.remove("epoch_0")
    assert [entry.name for entry in book.records] == ["epoch_1"]
    for number in (2, 3):
        assert book.add(CheckpointRecord("epoch_0", number, {})) == []
        assert numbers(book.records) == [1, number]


def test_the_best_are_kept_and_the_latest_too():
    book = CheckpointBook(CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy"))
    for number, accuracy in enumerate([0.9, 0.8, 0.1]):
        book.add(record(number, accuracy=accuracy))
    assert numbers(book.records) == [2, 1, 0]
    assert book.latest.number == 2
    assert numbers(book.add(record(3, accuracy=0.5))) == [2]
    assert numbers(book.records) == [3, 1, 0]


def test_a_lower_score_is_better_in_the_order_min():
    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    book = CheckpointBook(config)
    book.add(record(0, loss=1.0))
    assert numbers(book.add(record(1, loss=0.5))) == [0]


def test_a_checkpoint_without_the_score_is_the_worst():
    book = CheckpointBook(CheckpointConfig(checkpoint_score_attribute="accuracy"))
    for entry in (record(0, accuracy=-5.0), record(1), record(2, accuracy=math.nan)):
        book.add(entry)
    assert numbers(book.records) == [1, 2, 0]


def test_of_equal_scores_the_later_is_the_better():
    book = CheckpointBook(CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="a"))
    book.add(record(0, a=1))
    assert numbers(book.add(record(1, a=1))) == [0]


def test_nested_metrics_are_found_by_a_path():
    assert lookup({"eval": {"loss": 2}}, "eval/loss") == 2
    assert lookup({"eval/loss": 1, "eval": {"loss": 2}}, "eval/loss") == 1
    assert lookup({"eval": 3}, "eval/loss") is None


def test_restored_checkpoints_count_towards_the_limit():
    book = CheckpointBook(CheckpointConfig(num_to_keep=2))
    book.restore([record(0), record(1)])
    assert numbers(book.add(record(2))) == [0]


@given(scores=st.lists(st.integers(-3, 3), min_size=1, max_size=20), keep=st.integers(1, 5))
def test_what_is_kept_is_the_best_and_the_latest(scores, keep):
    book = CheckpointBook(CheckpointConfig(num_to_keep=keep, checkpoint_score_attribute="s"))
    deleted = []
    for number, value in enumerate(scores):
        deleted += book.add(record(number, s=value))
        kept = book.records
        assert book.latest.number == number
        assert keep <= len(kept) <= keep + 1 or len(kept) == number + 1
        worst_kept = min((entry.metrics["s"], entry.number) for entry in kept[-keep:])
        assert all((entry.metrics["s"], entry.number) < worst_kept for entry in deleted)
    assert len(deleted) + len(book.records) == len(scores)
