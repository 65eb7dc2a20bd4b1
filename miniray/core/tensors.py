"""Tensors of PyTorch in values: out of band as NumPy arrays are, and without importing torch.

By itself, torch copies a tensor's whole storage into the pickle. Here a dense tensor on the CPU
is a buffer, which readers use where it lies. PyTorch knows no read-only tensors: those in shared
memory are of copy-on-write pages, so that an operation in place changes the tensor of this
process and no other one's.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import sys
from typing import Any

import cloudpickle

from miniray.core.mapped import address_of

#: Below this many bytes a tensor is pickled as torch does it.
_MIN_BYTES = 1024


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
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.nbytes >= _MIN_BYTES
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
    if not dense:
        return tensor.__reduce_ex__(5)
    octets: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    octets.keeps = tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    facts = (dtype, tuple(tensor.shape), tensor.requires_grad)
    return rebuild, (pickle.PickleBuffer(octets), *facts)


def rebuild(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    """A tensor over a buffer, or over a copy if others hold the same bytes."""
    import torch

    view = memoryview(buffer)
    if isinstance(view.obj, ctypes.Array):  # a mapped segment: its pages are this process's own
        block: Any = (ctypes.c_char * view.nbytes).from_address(address_of(view))
        block.keeps = view
    else:
        block = bytearray(view)
    tensor = torch.frombuffer(block, dtype=getattr(torch, dtype)).view(shape)
    return tensor.requires_grad_(requires_grad)
