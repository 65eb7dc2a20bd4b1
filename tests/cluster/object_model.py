"""What should exist: a model of the objects of a cluster, of who holds them and who owns them.

Plain bookkeeping over labels; the programs that it is compared with are in
``test_object_model.py``.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Owner of what a process that ended by rule has left to the daemon of its node.
DAEMON = "daemon"
DRIVER = "driver"


@dataclasses.dataclass
class Item:
    """One value."""

    label: int
    id: bytes
    large: bool
    #: Key of the process that owns it.
    owner: str
    #: Labels of the refs inside it.
    children: tuple[int, ...]
    #: Its owner was killed.
    lost: bool = False


class Holder:
    """What a process holds; slots are names."""

    def __init__(self) -> None:
        #: Refs.
        self.refs: dict[int, int] = {}
        #: Values that were read, with the refs inside them.
        self.views: dict[int, int] = {}
        #: Refs that it has pickled by itself: held as long as it lives.
        self.pinned: set[int] = set()
        #: What it has read, and so may go on reading when the owner is gone.
        self.known: set[int] = set()


class Model:
    """All values, holders and children of holders."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self.holders: dict[str, Holder] = collections.defaultdict(Holder)
        #: Processes that others have forked, by pid: their parents. They hold nothing, and what
        #: they look at is counted nowhere.
        self.children: dict[int, str] = {}

    def add(self, id: bytes, large: bool, owner: str, children: Iterable[int]) -> int:
        """A new value; returns its label."""
        label = len(self.items)
        self.items[label] = Item(label, id, large, owner, tuple(children))
        return label

    def forked(self, process: str, child: int) -> None:
        """A process has a child that lives on."""
        self.children[child] = process

    # --- ends ---------------------------------------------------------------------
    def _gone(self, process: str) -> None:
        self.holders.pop(process, None)
        for pid in [pid for pid, parent in self.children.items() if parent == process]:
            del self.children[pid]  # children of workers end with them

    def killed(self, process: str) -> None:
        """A process was killed: it holds nothing, and what it owned is lost."""
        self._gone(process)
        for item in self.items.values():
            item.lost = item.lost or item.owner == process

    def left(self, process: str) -> None:
        """A process ended by rule."""
        self._gone(process)
        for item in self.items.values():
            if item.owner == process:
                item.owner = DAEMON

    # --- what follows ----------------------------------------------------------------
    def _roots(self) -> set[int]:
        found: set[int] = set()
        for holder in self.holders.values():
            found |= set(holder.refs.values()) | holder.pinned
            for label in holder.views.values():
                found.update(self.items[label].children)
        return found

    def _reachable(self, *, through_lost: bool) -> set[int]:
        found: set[int] = set()
        more = list(self._roots())
        while more:
            label = more.pop()
            if label in found:
                continue
            found.add(label)
            if through_lost or not self.items[label].lost:
                more.extend(self.items[label].children)
        return found

    def must_exist(self) -> set[int]:
        """What somebody can come by."""
        return {n for n in self._reachable(through_lost=False) if not self.items[n].lost}

    def may_exist(self) -> set[int]:
        """The same, and what is inside lost values: who read one of them holds that on."""
        return {n for n in self._reachable(through_lost=True) if not self.items[n].lost}

    def viewed(self) -> set[int]:
        """Values that somebody looks at, freed or not."""
        return {label for holder in self.holders.values() for label in holder.views.values()}

    def held(self) -> set[int]:
        """Values of which somebody has a ref, lost or not."""
        return self._reachable(through_lost=True)

    def owned(self, labels: set[int], owner: str) -> set[bytes]:
        """The ids of those that a process owns."""
        return {self.items[n].id for n in labels if self.items[n].owner == owner}

    def large(self, labels: Iterable[int]) -> set[int]:
        """Those in shared memory."""
        return {n for n in labels if self.items[n].large}


def difference(what: str, must: set[Any], actual: set[Any], may: set[Any]) -> list[str]:
    """How something differs from what it must be, at least and at most; empty if it does not."""
    found = []
    if must - actual:
        found.append(f"{what}: {sorted(must - actual)} missing")
    if actual - may:
        found.append(f"{what}: {sorted(actual - may)} left over")
    return found
