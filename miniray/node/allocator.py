"""How the C library keeps memory that a daemon or a head has freed."""

from __future__ import annotations

import ctypes

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MIB = 1024 * 1024


def keep_freed_buffers() -> None:
    """Let buffers of megabytes be used again, instead of giving each one back to the kernel.

    Objects pass through a daemon in such buffers; taking fresh pages for each costs a quarter of
    the speed of a transfer. Where the C library is not glibc nothing happens.
    """
    _set(_M_MMAP_THRESHOLD, 8 * _MIB)
    _set(_M_TRIM_THRESHOLD, 32 * _MIB)


def return_freed_buffers() -> None:
    """Give buffers of megabytes back to the kernel when they are freed, as the code of jobs is."""
    _set(_M_MMAP_THRESHOLD, _MIB)


def trim() -> None:
    """Give back what is freed in between, which the C library keeps: much was freed at once."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
