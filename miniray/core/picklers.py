"""The class that pickles values: cloudpickle's, which leaves large arrays and tensors out."""

from __future__ import annotations

import functools
import sys

import cloudpickle

from miniray.core import arrays, tensors


def pickler() -> type[cloudpickle.Pickler]:
    """One that knows NumPy and torch once they are imported; it imports neither."""
    loaded = sys.modules.get
    # A module that is being imported may not have its class yet.
    return _pickler_for(
        getattr(loaded("numpy"), "ndarray", None), getattr(loaded("torch"), "Tensor", None)
    )


@functools.cache
def _pickler_for(array: type | None, tensor: type | None) -> type[cloudpickle.Pickler]:
    known = {array: arrays.reduce, tensor: tensors.reduce}
    known.pop(None, None)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Looks its table up when it is made: so it is in the class."""

        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(known)

    return Pickler
