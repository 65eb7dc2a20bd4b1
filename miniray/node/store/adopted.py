"""Objects of owners after a planned exit: the daemon answers under the old owner's id.

Pure: messages in, answers and consequences out. Values stay where they are; a value
is freed when its last borrower is gone.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from miniray.common.ids import owner_of
from miniray.exceptions import ObjectLostError, OwnerDiedError
from miniray.messages import protocol as p
from miniray.messages.value import is_shared, payload_of

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Borrows of one owner's objects that are told from repetitions: these come within a moment.
_REMEMBERED = 10_000


@dataclasses.dataclass
class _Adopted:
    value: Any
    borrowers: dict[bytes, int]
    #: Refs inside, of the same owner or of others: (object id, owner's node).
    contained: tuple[tuple[bytes, bytes], ...]
    #: Adopted values of the same owner that contain this one.
    holders: int = 0


@dataclasses.dataclass(frozen=True)
class Freed:
    """What an adopted value leaves: its memory, and refs of other owners to give back."""

    owner: bytes
    value: Any
    borrowed: tuple[tuple[bytes, bytes], ...]


class AdoptedObjects:
    """All objects that this daemon answers for.

    Args:
        node_id: As whom the daemon borrows what values contain that are not of their owner.
    """

    def __init__(self, node_id: bytes) -> None:
        self._node_id = node_id
        self._objects: dict[bytes, _Adopted] = {}
        self._owners: dict[bytes, int] = {}
        #: Those of them that have left only a part of what others held, and what they were.
        self._partly: dict[bytes, str] = {}
        #: By owner: the latest borrows that were counted, as (sender, number), oldest first.
        self._registered: dict[bytes, dict[tuple[bytes, int], None]] = {}
        self._held_by: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def speaks_for(self, owner: bytes) -> bool:
        """Return whether objects of this owner are here."""
        return owner in self._owners

    def held(self) -> list[tuple[bytes, Any, list[bytes], int]]:
        """Return of each object: id, value, borrowers, and how many others here contain it."""
        return [
            (id, each.value, list(each.borrowers), each.holders)
            for id, each in self._objects.items()
        ]

    def add(self, owner: bytes, legacy: Iterable[Any], partly: str = "") -> list[Freed]:
        """Take over what an owner hands over; returns what nobody holds any more.

        Args:
            owner: Whose objects they are.
            legacy: The objects.
            partly: What the owner was, if others hold more of it, which is lost.
        """
        legacy = list(legacy)
        if legacy and partly:
            self._partly[owner] = partly
        for id, value, borrowers, contained in legacy:
            counts = {process: count for process, _node, count in borrowers}
            self._objects[id] = _Adopted(value, counts, contained)
            self._owners[owner] = self._owners.get(owner, 0) + 1
            self._registered.setdefault(owner, {})
            for process in counts:
                self._held_by.setdefault(process, set()).add(id)
        for _id, _value, _borrowers, contained in legacy:
            for inner, _node in contained:
                if owner_of(inner) == owner and inner in self._objects:
                    self._objects[inner].holders += 1
        return [freed for id, *_ in legacy for freed in self._free_if_unused(id)]

    def handle(self, sender: bytes, message: tuple[Any, ...]) -> tuple[list[Any], list[Freed]]:
        """Handle a message to an owner that is gone; return (answers to the sender, freed)."""
        kind, first, *rest = message
        if kind == p.PEER_WANT:
            return [(p.PEER_VALUE, [(id, self._value(id)) for id in first])], []
        if kind == p.PEER_LOST:
            return [(p.PEER_VALUE, [self._after_loss(*lost) for lost in first])], []
        if kind == p.PEER_BORROW:
            return self._borrowed(sender, first, *rest)
        if kind == p.PEER_UNBORROW:
            freed = []
            for id in first:
                self._count(id, sender, -1)
                freed += self._free_if_unused(id)
            return [], freed
        return [], []

    def _borrowed(
        self, sender: bytes, number: int, entries: Iterable[tuple[bytes, bytes, bytes]]
    ) -> tuple[list[Any], list[Freed]]:
        freed: list[Freed] = []
        entries = list(entries)
        owner = owner_of(entries[0][0]) if entries else b""
        # What reached the owner in its last moments may come from there and again from its
        # sender, who has not heard that it is counted.
        fresh = self._is_new(owner, sender, number)
        for id, process, _node in entries if fresh else ():
            if owner not in self._owners:
                break  # nothing of this owner is here any more
            self._count(id, process, 1)
            # It may have made up for a release that came first, and nobody else holds it.
            freed += self._free_if_unused(id)
        return ([(p.PEER_ACK, number)] if number else []), freed

    def _is_new(self, owner: bytes, sender: bytes, number: int) -> bool:
        counted = self._registered.get(owner)
        if counted is None or not number:
            return True
        if (sender, number) in counted:
            return False
        counted[sender, number] = None
        if len(counted) > _REMEMBERED:
            del counted[next(iter(counted))]
        return True

    def process_died(self, process: bytes) -> list[Freed]:
        """Count off a borrower that ended; return what is freed."""
        freed: list[Freed] = []
        for id in self._held_by.pop(process, set()):
            adopted = self._objects.get(id)
            if adopted is not None:
                adopted.borrowers.pop(process, None)
                self._forget_unreported(id, adopted.borrowers)
                freed += self._free_if_unused(id)
        return freed

    def _forget_unreported(self, id: bytes, borrowers: dict[bytes, int]) -> None:
        """Drop releases that came before their borrows, once nobody holds the object."""
        if not any(count > 0 for count in borrowers.values()):
            for process, count in list(borrowers.items()):
                self._count(id, process, -count)

    def _after_loss(self, id: bytes, payload: Any) -> tuple[bytes, Any]:
        value = self._value(id)
        if is_shared(value) and payload_of(value) == payload:
            return id, _lost(id)
        return id, value  # it was made again meanwhile

    def _value(self, id: bytes) -> Any:
        adopted = self._objects.get(id)
        if adopted is not None:
            return adopted.value
        was = self._partly.get(owner_of(id))
        error = (
            ObjectLostError(id.hex(), "its owner had freed it, or ended before it was there")
            if was is None
            else OwnerDiedError(id.hex(), was)
        )
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
        """Free an object, and those that only it held: a loop, for chains can be long."""
        freed: list[Freed] = []
        more = [id]
        while more:
            id = more.pop()
            adopted = self._objects.get(id)
            if adopted is None or adopted.borrowers or adopted.holders:
                continue
            del self._objects[id]
            owner = owner_of(id)
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner], self._registered[owner]
                self._partly.pop(owner, None)
            borrowed = []
            for inner, node in adopted.contained:
                if inner not in self._objects:
                    if node:
                        borrowed.append((inner, node))
                    continue
                if owner_of(inner) == owner:
                    self._objects[inner].holders -= 1
                else:
                    self._count(inner, self._node_id, -1)
                more.append(inner)
            freed.append(Freed(owner, adopted.value, tuple(borrowed)))
        return freed


def _lost(id: bytes) -> Any:
    error = ObjectLostError(id.hex(), "its owner, which could have made it again, has ended")
    return (p.VALUE_ERROR, pickle.dumps(error, 5), ())
