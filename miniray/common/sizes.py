"""How amounts of memory are shown to a person."""

from __future__ import annotations

#: Each is 1,024 times the one before.
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(amount: float, unit: int | None = None) -> str:
    """``512 B``, ``1.5 GiB``.

    Args:
        amount: Bytes.
        unit: Which of ``UNITS``; None: the largest of which it is at least one.
    """
    chosen = 0
    while chosen != unit and chosen < len(UNITS) - 1 and (unit is not None or abs(amount) >= 1024):
        amount /= 1024
        chosen += 1
    text = f"{amount:.1f}".removesuffix(".0")
    return f"{text} {UNITS[chosen]}"
