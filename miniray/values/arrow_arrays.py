"""Arrays of Arrow that are parts of larger ones: without the rest.

Arrow pickles the buffers of an array whole, however little of them it shows, so each slice of a
table would take as much memory as the table. Tables, record batches and chunked arrays consist of
arrays, which are pickled one by one.
"""

from __future__ import annotations

from typing import Any

#: Bytes, and part of what the array shows, that its buffers may hold beside it: less is not worth
#: a copy.
_SPARE_BYTES, _SPARE_PART = 1024, 1 / 8


def classes(lib: Any) -> list[type]:
    """The classes of arrays in ``pyarrow.lib``; those of users may have a way of their own."""
    found: list[type] = []
    pending = [lib.Array]
    while pending:
        cls = pending.pop()
        if cls.__module__ == lib.__name__:
            found.append(cls)
            pending += cls.__subclasses__()
    return found


def reduce(array: Any) -> Any:
    """What a pickler makes of an array."""
    shown = array.nbytes
    if array.get_total_buffer_size() - shown > _SPARE_BYTES + shown * _SPARE_PART:
        import pyarrow as pa

        array = pa.concat_arrays([array])  # always a copy, of what the array shows
    return array.__reduce_ex__(5)
