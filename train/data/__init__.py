"""Feeds the data that a trainer is given to its workers.

What a user may give is turned into a source (``adapt.py``); an epoch's rows have an order, which is
split over the ranks (``order.py``) and read in batches (``iterator.py``). It reads; it neither
transforms rows nor starts processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy

if TYPE_CHECKING:
    from miniray.train.data.iterator import DataIterator
    from miniray.train.data.shards import DataConfig, get_dataset_shard

__all__ = ["DataConfig", "DataIterator", "get_dataset_shard"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "DataConfig": "miniray.train.data.shards",
        "DataIterator": "miniray.train.data.iterator",
        "get_dataset_shard": "miniray.train.data.shards",
    },
)
