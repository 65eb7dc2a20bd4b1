"""Tensors of PyTorch in values: out of band as NumPy arrays are, and without importing torch.

By itself, torch copies a tensor's whole storage into the pickle, and once more out of it. Here a
dense tensor on the CPU is a buffer beside the pickle. PyTorch knows no read-only tensors, and an
operation in place must not be seen by the next reader: so each reader maps shared memory for
itself, copy-on-write, and what came in a message is copied.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import sys
import threading
from typing import Any

import cloudpickle

from miniray.core.mapped import address_of

#: Below this many bytes a tensor is pickled as torch does it.
_MIN_BYTES = 1024


class _Thread(threading.local):
    """What this thread is pickling or unpickling."""

    #: It has met a tensor.
    met = False
    #: The buffers are the reader's own.
    own = False


thread = _Thread()


def pickler() -> type[cloudpickle.Pickler]:
    """The class that pickles values: one that knows tensors, once torch is imported."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # absent during the import
    return cloudpickle.Pickler if tensor is None else _pickler_for(tensor)


@functools.cache
def _pickler_for(tensor: type) -> type[cloudpickle.Pickler]:
    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Looks its table up when it is made: so it is in the class."""

        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({tensor: _reduce})

    return Pickler


def _reduce(tensor: Any) -> Any:
    import torch

    dense = (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.nbytes >= _MIN_BYTES
        and _has_memory(tensor)
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
    if not dense:
        return tensor.__reduce_ex__(5)
    octets: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    octets.keeps = tensor
    thread.met = True
    dtype = str(tensor.dtype).removeprefix("torch.")
    facts = (dtype, tuple(tensor.shape), tensor.requires_grad)
    return rebuild, (pickle.PickleBuffer(octets), *facts)


def _has_memory(tensor: Any) -> bool:
    """Whether its storage is there: sharded training gives that back for a while."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return bool(tensor.data_ptr()) and tensor.untyped_storage().nbytes() >= end


def rebuild(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """A tensor with the content of a buffer."""
    import torch

    view = memoryview(buffer)
    kind = getattr(torch, dtype)
    if thread.own:
        octets: Any = (ctypes.c_char * view.nbytes).from_address(address_of(view))
        octets.keeps = view
        tensor = torch.frombuffer(octets, dtype=kind).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=kind)
        ctypes.memmove(tensor.data_ptr(), address_of(view), view.nbytes)
    return tensor.requires_grad_(requires_grad)
