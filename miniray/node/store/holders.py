"""Who holds the memory and the disk of a store, in words: for the error of a put that does not fit.

Pure: told from what the daemon itself knows of its segments, nobody is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.sizes import format_bytes
from miniray.node.store.memory_report import is_spilled, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miniray.node.store.segment import Segment

#: Holders that are named; the others are summed up.
_NAMED = 3


def describe_holders(segments: Iterable[Segment], name_of: Callable[[bytes], str]) -> str:
    """Who owns how much, and who still has mapped how much that its owner has freed.

    Args:
        segments: All of a store.
        name_of: What to call a process: its actor or task, and its pid or node.

    Returns:
        ``600 MiB by driver (pid 7), 200 MiB by Keeper (pid 8); mapped, so that it cannot leave
        memory: 100 MiB by driver (pid 7); freed but still mapped: 100 MiB by Reader (pid 9); on
        disk: 2 GiB by driver (pid 7)``; empty if nothing is held. What several processes have
        mapped counts for each of them, what is in memory and on disk counts twice.
    """
    owned: dict[bytes, int] = {}
    mapped: dict[bytes, int] = {}
    freed: dict[bytes, int] = {}
    on_disk: dict[bytes, int] = {}
    for segment in segments:
        if segment.place is not None:
            on_disk[segment.owner] = on_disk.get(segment.owner, 0) + segment.size
        if is_spilled(segment):
            continue
        size = segment.capacity
        mappers = freed if state_of(segment) == "FREED" else mapped
        if mappers is mapped:
            owned[segment.owner] = owned.get(segment.owner, 0) + size
        for process in segment.mappers:
            mappers[process] = mappers.get(process, 0) + size
    parts = []
    if owned:
        parts.append(_sums(owned, name_of))
    if mapped:
        parts.append(f"mapped, so that it cannot leave memory: {_sums(mapped, name_of)}")
    if freed:
        parts.append(f"freed but still mapped: {_sums(freed, name_of)}")
    if on_disk:
        parts.append(f"on disk: {_sums(on_disk, name_of)}")
    return "; ".join(parts)


def _sums(sizes: Mapping[bytes, int], name_of: Callable[[bytes], str]) -> str:
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    texts = [f"{format_bytes(size)} by {name_of(who)}" for who, size in largest[:_NAMED]]
    rest = largest[_NAMED:]
    if rest:
        others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        texts.append(f"{format_bytes(sum(size for _, size in rest))} by {others}")
    return ", ".join(texts)
