"""Why this process holds some of its objects, told from what is known to hold refs.

A ref is one Python object: the user, a call in flight and a value that contains it may all
hold the same one. So who else holds it shows in its reference count only.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from miniray.common.memory_types import PICKLED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from miniray.common.memory_types import Hold, ReferenceType
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import Entry

#: Names that are listed for one reason.
_MAX_NAMES = 3


class _Seen:
    """One ref that something known holds, and how often."""

    __slots__ = ("count", "ref")

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = weakref.ref(ref)
        self.count = 0


class Holds:
    """What holds the objects of these ids."""

    def __init__(self, ids: Collection[bytes]) -> None:
        self._reasons: dict[bytes, dict[ReferenceType, Hold]] = {id: {} for id in ids}
        #: By object, and then by the identity of the ref.
        self._seen: dict[bytes, dict[int, _Seen]] = {id: {} for id in ids}

    def see(self, kind: ReferenceType, name: str, refs: Iterable[ObjectRef[Any]]) -> None:
        """Something holds these refs: a call, or a value that contains them.

        Args:
            kind: Which of the two, in Ray's words.
            name: Of the call, or the id of the value.
            refs: What it holds, in one list.
        """
        for ref in refs:
            seen = self._seen.get(ref.binary())
            if seen is None:
                continue
            self._add(ref.binary(), kind, name)
            mine = seen.get(id(ref))
            if mine is None:
                mine = seen[id(ref)] = _Seen(ref)
            mine.count += 1

    def of(self, entry: Entry, pickled: int) -> list[Hold]:
        """All reasons for an object; what nothing known holds is held by user code.

        Args:
            entry: Of the object.
            pickled: How many copies of its refs were pickled by the user.
        """
        seen = self._seen[entry.id]
        held_by_others = sum(not _only_held(mine) for mine in seen.values())
        known = sum(mine.ref() is not None for mine in seen.values())
        local = max(0, entry.local - pickled - known) + held_by_others
        reasons = dict(self._reasons[entry.id])
        holds: list[Hold] = []
        if local:
            holds.append({"kind": "LOCAL_REFERENCE", "count": local, "names": []})
        if pickled:
            holds.append({"kind": "LOCAL_REFERENCE", "count": pickled, "names": [PICKLED]})
        return [*holds, *reasons.values()]

    def _add(self, id: bytes, kind: ReferenceType, name: str) -> None:
        reason = self._reasons[id].setdefault(kind, {"kind": kind, "count": 0, "names": []})
        reason["count"] += 1
        if name not in reason["names"] and len(reason["names"]) < _MAX_NAMES:
            reason["names"].append(name)


def _references(reference: weakref.ref[Any]) -> int:
    """How many references there are to an object, and a few that this takes."""
    target = reference()
    return 0 if target is None else sys.getrefcount(target)


class _Probe:
    """Something that can be referred to weakly."""


_PROBES = [_Probe()]
#: What `_references` tells of an object that nothing holds.
_OWN = _references(weakref.ref(_PROBES[0])) - 1


def _only_held(seen: _Seen) -> bool:
    """Whether nothing but what was seen holds a ref."""
    return _references(seen.ref) - _OWN <= seen.count
