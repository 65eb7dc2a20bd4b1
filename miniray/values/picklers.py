"""The class that pickles code and values: cloudpickle's, with more for tracebacks and arrays."""

from __future__ import annotations

import functools
import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

import cloudpickle

from miniray.values import arrays, arrow_arrays, tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def pickler() -> type[cloudpickle.Pickler]:
    """One that knows NumPy, torch and Arrow once they are imported; it imports none of them."""
    loaded = sys.modules.get
    # A module that is being imported may not have its class yet.
    return pickler_for(
        getattr(loaded("numpy"), "ndarray", None),
        getattr(loaded("torch"), "Tensor", None),
        # The package has this one when the module with all of its classes is loaded.
        getattr(loaded("pyarrow"), "Table", None) and loaded("pyarrow.lib"),
    )


@functools.cache
def pickler_for(
    array: type | None = None, tensor: type | None = None, arrow: ModuleType | None = None
) -> type[cloudpickle.Pickler]:
    """One that writes values of these classes as buffers; of none, the one for code."""
    known: dict[type, Callable[[Any], Any]] = {CodeType: _reduce_code}
    if array is not None:
        known[array] = arrays.reduce
    if tensor is not None:
        known[tensor] = tensors.reduce
    if arrow is not None:
        known.update(dict.fromkeys(arrow_arrays.classes(arrow), arrow_arrays.reduce))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Looks its table up when it is made: so it is in the class."""

        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(known)

    return Pickler


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Keep the name of the file, which cloudpickle 3.1.3 drops: tracebacks show its lines."""
    made_by, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return made_by, (*arguments[:10], code.co_filename, *arguments[11:])
