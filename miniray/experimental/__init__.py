"""What Ray has under ``ray.experimental`` and miniray has too: ``tqdm_ray``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.absent import lazy

__all__ = ["tqdm_ray"]

#: Names of Ray that are not here, and what to do instead.
_ABSENT = {
    "channel": "return values, or put them with miniray.put()",
    "collective": "miniray.train.collective has collectives of training runs",
    "get_object_locations": "miniray.util.state.list_objects() shows the nodes of each object",
    "internal_kv": "keep values in a named actor",
    "state": "import from miniray.util.state",
    "shuffle": "pass the refs of one stage's tasks to the next one's",
}

if not TYPE_CHECKING:  # else a type checker takes any name for one that is there
    __getattr__, __dir__ = lazy(__name__, {}, __all__, _ABSENT)
