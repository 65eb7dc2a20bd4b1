"""Why a worker group is not placed yet, in words and numbers.

What is missing is computed from what the cluster has; the question which single
bundle has no room is answered by the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def explain(
    workers: int,
    resources: Mapping[str, float],
    total: Mapping[str, float],
    free: Mapping[str, float],
    reason: str = "",
) -> str:
    """A sentence for each resource that is short, then the head's reason.

    Args:
        workers: Number of workers.
        resources: What each holds, by resource name.
        total: What the cluster has, by resource name.
        free: What of it is free.
        reason: Why the head has not placed the group; empty if it says nothing.
    """
    each = f" with {dict(resources)} each" if resources else ""
    sentences = [f"Waiting for the resources of {workers} workers{each}."]
    for name, amount in resources.items():
        if name.startswith("accelerator_type:"):
            if not total.get(name):
                kind = name.partition(":")[2]
                sentences.append(f"No node has the accelerator type {kind}.")
            continue
        needed = amount * workers
        missing = needed - free.get(name, 0)
        if missing > 0:
            sentences.append(
                f"{name} is short by {_amount(missing)}: {_amount(needed)} are needed, "
                f"{_amount(free.get(name, 0))} of the cluster's {_amount(total.get(name, 0))} are "
                f"free."
            )
    if reason:
        sentences.append(f"The scheduler says: {reason}.")
    return " ".join(sentences)


def _amount(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")
