"""Mapping memory, and copying into it and out of it, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from miniray.wire.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    _Reference = weakref.ref[ctypes.Array[ctypes.c_char]]

_MAP_FAILED = ctypes.c_void_p(-1).value
#: Children that user code forks do not get such mappings.
_MADV_DONTFORK = 10
#: The kernel may use pages of 2 MiB.
_MADV_HUGEPAGE = 14
#: Bytes from which on they are copied without the interpreter's lock: this takes some 0.1 ms.
_LONG = 1024 * 1024
#: Bytes from which on an allocation is a mapping of its own, whatever was freed before: glibc's
#: ``DEFAULT_MMAP_THRESHOLD_MAX`` (mallopt(3), M_MMAP_THRESHOLD).
_OWN_MAPPING = 32 * 1024 * 1024
_PAGE = mmap.PAGESIZE


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
    libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, size]
    return libc


@functools.cache
def _mmap() -> Callable[[None, int, int, int, int, int], int | None]:
    number = ctypes.c_int
    arguments = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long)
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *arguments, use_errno=True)
    return kind(("mmap", _libc()))


@functools.cache
def _new_bytes() -> Callable[[None, int], bytes]:
    """Return what makes a bytes object of some length, to be filled before others see it."""
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
    return kind(("PyBytes_FromStringAndSize", ctypes.pythonapi))


def map_memory(
    fd: int, size: int, *, shared: bool, offset: int = 0, gone: Callable[[], Any] | None = None
) -> ctypes.Array[ctypes.c_char]:
    """Map a descriptor; it is unmapped when the block and all views of it are gone.

    Args:
        fd: What to map.
        size: Bytes.
        shared: To write into it, with all pages there from the beginning. Else what is written
            stays in this process (copy-on-write).
        offset: Where to begin: whole pages.
        gone: Called after it was unmapped, in any thread.

    Raises:
        OSError: it cannot be mapped.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE if shared else mmap.MAP_PRIVATE
    address = _mmap()(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == _MAP_FAILED or address is None:
        code = ctypes.get_errno()
        many = f" (with {len(_mapped)} values mapped; vm.max_map_count limits them)"
        raise OSError(
            code, f"could not map {size} bytes: {os.strerror(code)}{many * (code == errno.ENOMEM)}"
        )
    if shared:
        _libc().madvise(address, size, _MADV_DONTFORK)
    block = (ctypes.c_char * size).from_address(address)
    # In a child that user code forks, something else may be at the address by then.
    owner = os.getpid() if shared else 0
    reference = weakref.ref(block, unmap)
    _mapped[id(reference)] = reference, address, size, owner, gone
    return block


#: All blocks, by the id of the reference (a block has no hash): that one, its address, its size,
#: the process that unmaps it (0: any), and what to call then.
_mapped: dict[int, tuple[_Reference, int, int, int, Callable[[], Any] | None]] = {}


def unmap(reference: _Reference) -> None:
    """Unmap a block: it and all views of it are gone.

    If a signal's handler raises before the step has begun, Python ignores that, and the block stays
    mapped: call ``unmap_again`` then.
    """
    if sys.is_finalizing():
        return  # the memory goes with this process
    interrupts = Interrupts.begin()
    try:
        mapped = _mapped.pop(id(reference), None)
        if mapped is None:
            return
        _, address, size, owner, gone = mapped
        if owner in (0, os.getpid()):
            _libc().munmap(address, size)
        if gone is not None:
            gone()
    finally:
        if interrupts is not None:
            interrupts.end()


def unmap_again() -> None:
    """Unmap blocks whose callback was interrupted."""
    for reference, *_ in list(_mapped.values()):
        if reference() is None:
            unmap(reference)


def copy_into(block: ctypes.Array[ctypes.c_char], offset: int, source: bytes | memoryview) -> None:
    """Copy bytes to a place in a block, without the interpreter's lock.

    Raises:
        OSError: they do not fit.
    """
    if offset + len(source) > len(block):
        raise OSError(errno.ENOSPC, f"{len(source)} bytes at {offset} exceed {len(block)}")
    view = _Buffer()
    # Held until the end: others could resize it while the lock is free.
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(view), 0)
    try:
        _libc().memcpy(ctypes.addressof(block) + offset, view.buf, len(source))
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def bytes_of(source: memoryview) -> bytes:
    """Copy a buffer. Other threads go on while a large one is copied.

    Pages of memory that was just allocated cost several times what copying into them does, so
    large ones are requested from the kernel.
    """
    size = source.nbytes
    if size < _LONG:
        return bytes(source)
    made = _new_bytes()(None, size)
    target = address_of(made)
    if size >= _OWN_MAPPING:
        begin, end = -(-target // _PAGE) * _PAGE, (target + size) // _PAGE * _PAGE
        _libc().madvise(begin, end - begin, _MADV_HUGEPAGE)  # no effect where that is turned off
    _libc().memcpy(target, address_of(source), size)
    return made


def address_of(source: bytes | memoryview) -> int:
    """Return where a buffer, read-only or not, begins; valid as long as it is kept."""
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(source), ctypes.byref(view), 0)
    address: int = view.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address
