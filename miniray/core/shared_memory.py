"""Large values: written once into memory that the daemon holds, read without a copy.

A segment lies in a memfd of the node daemon. Writers write it through its descriptor or, where
they have it mapped already, copy into it (``warm_memory.py``). Readers map it copy-on-write, so
that no writer can disturb another reader. The daemon is told when the last view in this process
is gone; what is read again and again stays mapped until its owner frees it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from miniray.config import config
from miniray.core.mapped import map_memory
from miniray.core.protocol import VALUE_SHARED
from miniray.core.warm_memory import WarmMemory
from miniray.exceptions import ObjectStoreFullError
from miniray.object_ref import hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from miniray.core.node_link import NodeLink
    from miniray.core.objects import Value
    from miniray.core.serialization import Serialized

#: Segments that stay mapped although nobody uses them, and those known to have been read once.
_KEPT = 16
_REMEMBERED = 256


def _nothing() -> None:
    """Nobody counts."""


class Mapping:
    """A mapped segment: ``view`` is valid as long as the mapping or a view of it lives."""

    __slots__ = ("__weakref__", "form", "segment", "view")

    def __init__(self, view: memoryview, form: int, segment: int) -> None:
        self.view = view
        self.form = form
        self.segment = segment


class SharedMemory:
    """This process's side of the node's object store. Thread-safe."""

    def __init__(
        self, link: NodeLink, node_id: bytes, make_room: Callable[[], object] = _nothing
    ) -> None:
        """Start with nothing mapped.

        Args:
            link: To the daemon.
            node_id: Of this node.
            make_room: Lets go of all that this process needs no more.
        """
        tunables = config()
        #: Bytes up to which a value is put into no shared memory, and no record made of where.
        self.plain_limit = -1 if tunables.record_call_sites else tunables.inline_limit
        self._link = link
        self._make_room = make_room
        self._node_id = node_id
        #: Segments whose last view went away; reported in batches.
        self._unmapped: collections.deque[int] = collections.deque()
        self.warm = WarmMemory(link)
        # Reentrant: a garbage collection may run user code, which may get, in any section.
        self._lock = threading.RLock()
        #: By node and segment there: what stays mapped, and what was read once.
        self._kept: collections.OrderedDict[tuple[bytes, int], Mapping] = collections.OrderedDict()
        self._read: collections.OrderedDict[tuple[bytes, int], None] = collections.OrderedDict()
        #: Where to find what is kept by the number of its segment on this node.
        self._kept_as: dict[int, tuple[bytes, int]] = {}

    # --- writing -----------------------------------------------------------------
    def write(self, value: Serialized, owner: bytes, owner_node: bytes, made: str = "") -> Value:
        """Store a value on this node for an owner on any; returns what others need to read it.

        Args:
            value: What to store.
            owner: The process that owns it.
            owner_node: That process's node.
            made: Where in user code it was made, for reports.

        Raises:
            ObjectStoreFullError: the store has no room for it.
        """
        segment, memory, fd = self._room_for(value, owner, owner_node)
        try:
            self.warm.write(memory, fd, value.size, value.pieces())
        except BaseException:
            self._discard(segment)
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        self._link.node_notice("seal_segment", segment, made)
        contained = tuple((ref.binary(), ref._owner_node) for ref in value.refs)
        return (VALUE_SHARED, (self._node_id, segment, value.size), contained)

    def _room_for(self, value: Serialized, owner: bytes, owner_node: bytes) -> tuple[int, int, int]:
        """As ``_create``; before it fails, what this process has dropped is really gone."""
        try:
            return self._create(value, owner, owner_node)
        except ObjectStoreFullError:
            pass
        self._make_room()  # another thread may have been about to free what this one dropped
        return self._create(value, owner, owner_node)

    def _create(self, value: Serialized, owner: bytes, owner_node: bytes) -> tuple[int, int, int]:
        """Room for a value: segment, memory and its descriptor, or -1 if that is mapped here."""
        self.report_unmapped()
        (segment, memory), fd = self._link.node_request(
            "create_segment",
            (value.size, value.form, owner, owner_node),
            undo=lambda made: self._discard(made[0]),
        )
        return segment, memory, fd

    def _discard(self, segment: int) -> None:
        """A segment of this node does not get its value."""
        self._link.node_notice("seal_segment", segment)
        self._link.node_notice("free_segment", self._node_id, segment)

    # --- reading -----------------------------------------------------------------
    def map(self, payload: Any) -> Mapping:
        """Map a value, fetched from its node first if it is on another.

        Raises:
            ObjectLostError: its node, or the segment, is gone.
        """
        node_id, segment, size = payload
        key = (node_id, segment)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        self.report_unmapped()
        (local, form), fd = self._link.node_request(
            "map_segment", (node_id, segment, size), undo=lambda got: self._gone(got[0])
        )
        try:
            block = map_memory(fd, size, shared=False, gone=lambda: self._gone(local))
        except OSError:
            self._unmapped.append(local)
            raise
        finally:
            os.close(fd)
        mapping = Mapping(memoryview(block).cast("B"), form, local)
        self._remember(key, mapping)
        return mapping

    def _gone(self, segment: int) -> None:
        """The last view of a segment went away. May run in a garbage collection anywhere."""
        self._unmapped.append(segment)
        # An id that nobody has makes the runtime look at its queues, and so report.
        hooks.dropped.append(b"")
        hooks.call()

    def _remember(self, key: tuple[bytes, int], mapping: Mapping) -> None:
        """What is read a second time stays mapped: it may be read a third time."""
        old: list[Mapping] = []
        with self._lock:
            if key not in self._read:
                self._read[key] = None
                if len(self._read) > _REMEMBERED:
                    self._read.popitem(last=False)
                return
            self._kept[key] = mapping
            self._kept_as[mapping.segment] = key
            if len(self._kept) > _KEPT:
                _, dropped = self._kept.popitem(last=False)
                self._kept_as.pop(dropped.segment, None)
                old.append(dropped)
        self._link.node_notice("keep_segment", mapping.segment)

    def forget(self, segments: Iterable[int]) -> None:
        """The owner of these segments, by their numbers on this node, has freed them."""
        dropped = []
        with self._lock:
            for segment in segments:
                key = self._kept_as.pop(segment, None)
                if key is not None:
                    dropped.append(self._kept.pop(key))

    def report_unmapped(self) -> None:
        """Tell the daemon which segments this process reads no more."""
        if not self._unmapped:
            return
        gone = []
        with contextlib.suppress(IndexError):  # another thread may take some of them
            while True:
                gone.append(self._unmapped.popleft())
        self._link.node_notice("unmapped", gone)

    def forked(self) -> None:
        """User code has forked: what is mapped here is mapped in the child too."""
        self._link.node_notice("forked")

    def close(self) -> None:
        """This process leaves its cluster: unmap what nobody looks at."""
        self.warm.close()
        with self._lock:
            self._kept.clear()
            self._kept_as.clear()

    # --- freeing -----------------------------------------------------------------
    def free(self, value: Value) -> None:
        """The owner has no use for a value any more."""
        node_id, segment, _size = value[1]
        self._link.node_notice("free_segment", node_id, segment)
