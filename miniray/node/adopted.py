"""Objects whose owners ended by rule: the daemon answers for them under the old owner's id.

Pure: messages in, answers and consequences out. Values stay where they are; a value
is freed when its last borrower is gone.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from miniray.core import protocol as p
from miniray.exceptions import ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclasses.dataclass
class _Adopted:
    value: Any
    borrowers: dict[bytes, int]
    #: Refs inside, of the same owner or of others: (object id, owner's node).
    contained: tuple[tuple[bytes, bytes], ...]
    #: Adopted values that contain this one.
    holders: int = 0


@dataclasses.dataclass(frozen=True)
class Freed:
    """What an adopted value leaves: its memory, and refs of other owners to give back."""

    value: Any
    borrowed: tuple[tuple[bytes, bytes], ...]


class AdoptedObjects:
    """All objects that this daemon answers for."""

    def __init__(self) -> None:
        self._objects: dict[bytes, _Adopted] = {}
        self._owners: dict[bytes, int] = {}
        self._held_by: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def speaks_for(self, owner: bytes) -> bool:
        """Whether objects of this owner are here."""
        return owner in self._owners

    def borrowers(self) -> set[bytes]:
        """The processes that hold objects of the daemon."""
        return set(self._held_by)

    def held(self) -> list[tuple[bytes, Any, list[bytes], int]]:
        """Each object: id, value, who has borrowed it, and how many others here contain it."""
        return [
            (id, each.value, list(each.borrowers), each.holders)
            for id, each in self._objects.items()
        ]

    def add(self, owner: bytes, legacy: Iterable[Any]) -> None:
        """Take over what an owner hands over."""
        legacy = list(legacy)
        for id, value, borrowers, contained in legacy:
            counts = {process: count for process, _node, count in borrowers}
            self._objects[id] = _Adopted(value, counts, contained)
            self._owners[owner] = self._owners.get(owner, 0) + 1
            for process in counts:
                self._held_by.setdefault(process, set()).add(id)
        for _id, _value, _borrowers, contained in legacy:
            for inner, _node in contained:
                if inner in self._objects:
                    self._objects[inner].holders += 1

    def handle(self, sender: bytes, message: tuple[Any, ...]) -> tuple[list[Any], list[Freed]]:
        """A message to an owner that is gone: (answers to the sender, what was freed)."""
        kind = message[0]
        if kind == p.PEER_WANT:
            return [(p.PEER_VALUE, [(id, self._value(id)) for id in message[1]])], []
        if kind == p.PEER_LOST:
            return [(p.PEER_VALUE, [(id, _lost(id)) for id, _ in message[1]])], []
        if kind == p.PEER_BORROW:
            for id, process, _node in message[2]:
                self._count(id, process, 1)
            return ([(p.PEER_ACK, message[1])] if message[1] else []), []
        if kind == p.PEER_UNBORROW:
            freed: list[Freed] = []
            for id in message[1]:
                self._count(id, sender, -1)
                freed += self._free_if_unused(id)
            return [], freed
        return [], []

    def process_died(self, process: bytes) -> list[Freed]:
        """A borrower ended."""
        freed: list[Freed] = []
        for id in self._held_by.pop(process, set()):
            adopted = self._objects.get(id)
            if adopted is not None:
                adopted.borrowers.pop(process, None)
                freed += self._free_if_unused(id)
        return freed

    def _value(self, id: bytes) -> Any:
        adopted = self._objects.get(id)
        if adopted is not None:
            return adopted.value
        error = ObjectLostError(id.hex(), "its owner had freed it, or ended before it was there")
        return (p.VALUE_ERROR, pickle.dumps(error, 5), ())

    def _count(self, id: bytes, process: bytes, step: int) -> None:
        adopted = self._objects.get(id)
        if adopted is None:
            return
        count = adopted.borrowers.get(process, 0) + step
        held = self._held_by.setdefault(process, set())
        if count:
            adopted.borrowers[process] = count
            held.add(id)
        else:
            adopted.borrowers.pop(process, None)
            held.discard(id)
        if not held:
            del self._held_by[process]

    def _free_if_unused(self, id: bytes) -> list[Freed]:
        adopted = self._objects.get(id)
        if adopted is None or adopted.borrowers or adopted.holders:
            return []
        del self._objects[id]
        owner = id[: len(id) // 2]
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
        freed: list[Freed] = []
        borrowed = []
        for inner, node in adopted.contained:
            if inner in self._objects:
                self._objects[inner].holders -= 1
                freed += self._free_if_unused(inner)
            else:
                borrowed.append((inner, node))
        return [Freed(adopted.value, tuple(borrowed)), *freed]


def _lost(id: bytes) -> Any:
    error = ObjectLostError(id.hex(), "its owner, which could have made it again, has ended")
    return (p.VALUE_ERROR, pickle.dumps(error, 5), ())
