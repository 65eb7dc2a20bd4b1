"""A look at what the daemons and processes of a cluster keep for objects."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psutil

from miniray.common.object_ref import hooks
from miniray.common.runtime import current_runtime

if TYPE_CHECKING:
    from miniray.cluster_utils import Node


def movers_of(node: Node) -> list[psutil.Process]:
    """The processes of a node that carry its large values: others run before them."""
    template = psutil.Process(node.pids["template"])
    found = []
    for process in template.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker that has ended meanwhile
            if process.nice() > template.nice():
                found.append(process)
    return found


def inventory() -> dict[str, Any]:
    """What the daemon of this process's node keeps: ``OwnMemory`` in ``common/state_types.py``."""
    found, _ = current_runtime().link.node_request("own_memory", ())  # type: ignore[attr-defined]
    return dict(found)


def known_objects() -> list[str]:
    """Every object in the table of this process, actors left out, and what keeps it there."""
    table = current_runtime().table  # type: ignore[attr-defined]
    found = []
    for entry in table.snapshot():
        if table.is_actor(entry.id):
            continue
        borrowers = {id.hex(): count for id, count in (entry.borrowers or {}).items()}
        found.append(
            f"{entry.id.hex()}: {entry.local} here, borrowers {borrowers}, "
            f"{'owned' if table.is_owned(entry.id) else 'borrowed'}, "
            f"registered {entry.registered}, wanted {entry.wanted}, value {entry.value!r:.80}"
        )
    return found


def process_tables() -> dict[str, int]:
    """How many entries the tables of this process have that are about objects and calls."""
    runtime: Any = current_runtime()
    table, borrowing, memory = runtime.table, runtime.borrowing, runtime.shared_memory
    return {
        "objects": len(table),
        "watchers": len(table._watchers),
        "borrowers": len(table._held_by),
        "registrations": len(borrowing._open),
        "deferred": len(borrowing._deferred),
        "asked for": sum(map(len, borrowing._asked.values())),
        "owners asked again": len(borrowing._asked_again),
        "calls": len(runtime.call_table.open),
        "lineage": len(runtime.call_table.lineage),
        "results by origin": len(runtime.call_table.lineage._by_result),
        "dropped refs": len(hooks.dropped),
        "unmapped segments": len(memory.unmapped),
        "kept segments": len(memory._kept),
        "lists of unclaimed results": len(runtime._unclaimed._early),
    }


def node_tables() -> dict[str, int]:
    """The same of this node's daemon."""
    kept = inventory()
    return {
        "segments": len(kept["segments"]),
        "adopted": len(kept["adopted"]),
        **kept["tables"],
    }
