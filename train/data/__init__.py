"""Feeds the data that a trainer is given to its workers.

What a user may give is turned into a source (``adapt.py``); an epoch's rows have an
order (``order.py``), which is split over the ranks (``position.py``) and read in batches
(``iterator.py``). It reads; it transforms nothing and starts no processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.train.data.config import DataConfig

if TYPE_CHECKING:
    from miniray.train.data.iterator import DataIterator
    from miniray.train.data.shards import get_dataset_shard

_HOMES = {"DataIterator": "iterator", "get_dataset_shard": "shards"}

__all__ = ["DataConfig", "DataIterator", "get_dataset_shard"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"miniray.train.data.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
