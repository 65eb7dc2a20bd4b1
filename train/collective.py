"""``barrier`` and ``broadcast_from_rank_zero``: small things that all ranks agree on.

Through the controller, so they need no process group. Tensors are better moved by
``torch.distributed``.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

from miniray.train.worker.context import current_session

__all__ = ["barrier", "broadcast_from_rank_zero"]

T = TypeVar("T")


def barrier() -> None:
    """Wait until every rank has called this.

    Raises:
        RuntimeError: Called outside a train loop.
        CollectiveError: A rank has returned, or called something else.
        CollectiveTimeoutError: Ranks did not come within ``MINIRAY_TRAIN_COLLECTIVE_TIMEOUT``
            seconds; the error names them.
    """
    current_session("collective.barrier").join("barrier()", b"")


def broadcast_from_rank_zero(data: T) -> T:
    """Give every rank what rank 0 has; all ranks have to call this.

    Args:
        data: On rank 0 what is handed out: anything that can be pickled, meant for small values.
            On the others it is ignored.

    Returns:
        A copy of rank 0's value; on rank 0 the value itself.

    Raises:
        RuntimeError: Called outside a train loop.
        TypeError, pickle.PicklingError: Rank 0's value can't be pickled.
        CollectiveError: A rank has returned, or called something else.
        CollectiveTimeoutError: Ranks did not come within ``MINIRAY_TRAIN_COLLECTIVE_TIMEOUT``
            seconds; the error names them.
    """
    import cloudpickle

    session = current_session("collective.broadcast_from_rank_zero")
    is_source = session.ranks.world_rank == 0
    value = cloudpickle.dumps(data) if is_source else b""
    received = session.join("broadcast_from_rank_zero()", value)
    if is_source:
        return data
    copy: T = pickle.loads(received)
    return copy
