"""Settings of the C library and of gRPC's core, for daemons and heads."""

from __future__ import annotations

import ctypes
import os

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 1024 * 1024
#: With gRPC's newer "event engine", a message on a stream passes three or four threads of its own
#: before it reaches the one that waits for it; without, that thread reads the socket itself. That
#: makes a call between nodes a third faster, and a transfer too.
_OFF = (
    "event_engine_client",
    "event_engine_listener",
    "event_engine_for_all_other_endpoints",
)


def keep_freed_buffers() -> None:
    """Reuse freed buffers of megabytes, instead of giving each one back to the kernel.

    Objects pass through a daemon in such buffers; taking fresh pages for each costs a quarter of
    the speed of a transfer. Does nothing where the C library is not glibc.
    """
    _set(_M_MMAP_THRESHOLD, 8 * _MIB)
    _set(_M_TRIM_THRESHOLD, 32 * _MIB)


def return_freed_buffers() -> None:
    """Give buffers of megabytes back to the kernel when they are freed, as the code of jobs is."""
    _set(_M_MMAP_THRESHOLD, _MIB)


def trim() -> None:
    """Give freed memory back to the kernel that the C library keeps, after much was freed."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


def set_up_core() -> None:
    """Have gRPC's core use only the threads that wait for it, and log nothing.

    Before gRPC is imported. Variables that the user has set stay.
    """
    # Strangers could fill the disk with lines about their handshakes, which name no address. A
    # failure of this cluster's own connections is an exception where they are used.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_EXPERIMENTS", ",".join(f"-{name}" for name in _OFF))
