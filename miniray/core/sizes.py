"""How amounts of memory are shown to a person."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(amount: float) -> str:
    """``512 B``, ``1.5 GiB``: in the largest unit of which it is at least one."""
    unit = 0
    while abs(amount) >= 1024 and unit < len(_UNITS) - 1:
        amount /= 1024
        unit += 1
    text = f"{amount:.1f}".removesuffix(".0")
    return f"{text} {_UNITS[unit]}"
