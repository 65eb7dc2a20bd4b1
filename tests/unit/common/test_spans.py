"""What a process remembers of its calls."""

from __future__ import annotations

from miniray.common.spans import RING_BYTES, Ring


def test_a_call_whose_name_is_no_unicode_is_remembered() -> None:
    ring = Ring(memoryview(bytearray(RING_BYTES)))
    ring.write("f\udcff", 1.0, 2.0, True)
    [(kind, name, *_)] = ring.read()
    assert (kind, name) == ("call", "f?")
