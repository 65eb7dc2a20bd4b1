"""Tensors of PyTorch in values: out of band as NumPy arrays are, and without importing torch.

By itself, torch copies a tensor's whole storage into the pickle, and once more out of it. Here the
elements of a tensor on the CPU are a buffer beside the pickle, in the order in which they lie in
memory. PyTorch knows no read-only tensors, and an
operation in place must not be seen by the next reader: so each reader maps shared memory for
itself, copy-on-write, and what came in a message is copied.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import threading
from typing import Any

from miniray.values.mapped import address_of

#: A tensor whose storage is smaller is pickled as torch does it.
_MIN_BYTES = 1024


class _Thread(threading.local):
    """What this thread is pickling or unpickling."""

    #: It has met a tensor.
    met = False
    #: The buffers are the reader's own.
    own = False


thread = _Thread()


def reduce(tensor: Any) -> Any:
    """What a pickler makes of a tensor, whose class is ``torch.Tensor`` itself."""
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(5)
    stored = tensor.untyped_storage().nbytes()  # what torch would put into the pickle
    if stored < _MIN_BYTES:
        return tensor.__reduce_ex__(5)
    requires_grad = tensor.requires_grad
    if not tensor.numel():  # a part without elements of something large
        return tensor.detach().clone().requires_grad_(requires_grad).__reduce_ex__(5)
    span = _span(tensor)
    if not tensor.data_ptr() or tensor.storage_offset() * tensor.itemsize + span > stored:
        return tensor.__reduce_ex__(5)  # sharded training gives the storage back for a while
    if span > tensor.nbytes:  # what lies between its elements stays here
        tensor = tensor.detach().contiguous()
        span = tensor.nbytes
    octets: Any = (ctypes.c_char * span).from_address(tensor.data_ptr())
    octets.keeps = tensor
    thread.met = True
    dtype = str(tensor.dtype).removeprefix("torch.")
    facts = (dtype, tuple(tensor.shape), tensor.stride(), requires_grad)
    return rebuild, (pickle.PickleBuffer(octets), *facts)


def _is_plain(tensor: Any) -> bool:
    """Whether it is its elements in memory and nothing else."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is _strided()
        and not tensor.is_nested
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not tensor._backward_hooks
    )


@functools.cache
def _strided() -> Any:
    import torch

    return torch.strided


def _span(tensor: Any) -> int:
    """Bytes from its first element to its last: less than ``nbytes`` if elements share memory."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int((sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize)


#: Said each time, as the reader may have set another default.
_CPU = "cpu"


def rebuild(
    buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Any:
    """A tensor with the content of a buffer."""
    import torch

    view = memoryview(buffer)
    kind = getattr(torch, dtype)
    if thread.own:
        octets: Any = (ctypes.c_char * view.nbytes).from_address(address_of(view))
        octets.keeps = view
        flat = torch.frombuffer(octets, dtype=kind)
    else:
        flat = torch.empty(view.nbytes // kind.itemsize, dtype=kind, device=_CPU)
        ctypes.memmove(flat.data_ptr(), address_of(view), view.nbytes)
    # No view of it: one that is made under no_grad() may not be changed in place after that.
    tensor = torch.empty(0, dtype=kind, device=_CPU).set_(flat.untyped_storage(), 0, shape, strides)
    return tensor.requires_grad_(requires_grad)
