"""Arrays of NumPy that it would copy into the pickle: those with gaps between their elements.

They would be copied once more when they are read, and could be written to, unlike others. Left to
NumPy are objects, subclasses, and dates, which it gives to nobody as a buffer: pandas takes a
column of dates that cannot be written to for an error of its own.
"""

from __future__ import annotations

from typing import Any


def reduce(array: Any) -> Any:
    """What a pickler makes of an array, whose class is ``numpy.ndarray`` itself."""
    dtype = array.dtype
    if not (array.flags.forc or dtype.hasobject or dtype.kind in "mM"):
        array = array.copy(order="C")
    return array.__reduce_ex__(5)
