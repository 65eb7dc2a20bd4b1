"""Which collective calls of this process have not ended, as PyTorch's flight recorder knows.

It records the calls of all backends, and of those that go on in the background: that a thread waits
for the device, and so for a call of NCCL, is seen nowhere else.
"""

from __future__ import annotations

import logging
import pickle
import sys

logger = logging.getLogger(__name__)


def open_collective() -> str | None:
    """The first collective call that has not ended, such as ``nccl:all_reduce``; None if none is.

    None as well where PyTorch keeps no record: before version 2.5, or with
    ``TORCH_FR_BUFFER_SIZE=0``.
    """
    native = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(native, "_dump_fr_trace", None) or getattr(native, "_dump_nccl_trace", None)
    if dump is None:
        return None
    try:
        # Stacks would take long.
        record = pickle.loads(dump(True, False, False))
    except Exception:  # no part of PyTorch's public API
        logger.debug("PyTorch's flight recorder can't be read", exc_info=True)
        return None
    for entry in record.get("entries", ()):
        if not entry.get("retired", True):
            return str(entry["profiling_name"])
    return None
