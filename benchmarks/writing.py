"""How fast a value gets into shared memory, by its size and by the way it is written.

Shows what `objects/shared_memory.py` rests on: memory that nobody has written yet is best written
through its descriptor; at the second value it is mapped, so that the third and later ones are only
copied. One process, no cluster; the ways take turns, and each figure is the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING

from miniray.objects.shared_memory import write_all
from miniray.values.mapped import copy_into, map_memory

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"128 KiB": 1 << 17, "1 MiB": 1 << 20, "10 MiB": 10 << 20, "100 MiB": 100 << 20}


def fresh(size: int) -> int:
    """Descriptor of memory that has no pages yet."""
    fd = os.memfd_create("writing")
    os.ftruncate(fd, size)
    return fd


def with_fresh(write: Callable[[int, memoryview], None], value: memoryview) -> float:
    """Seconds that it takes to write into new memory."""
    fd = fresh(len(value))
    try:
        return seconds(write, fd, value)
    finally:
        os.close(fd)


def seconds(write: Callable[[int, memoryview], None], fd: int, value: memoryview) -> float:
    """Seconds of one write."""
    start = time.perf_counter()
    write(fd, value)
    return time.perf_counter() - start


def through_descriptor(fd: int, value: memoryview) -> None:
    """As a value is written first."""
    write_all(fd, [value])


def mapped_for_it(fd: int, value: memoryview) -> None:
    """As a value is written that finds its memory written once."""
    copy_into(map_memory(fd, len(value), shared=True), 0, value)


def measure(size: int, repeats: int) -> dict[str, float]:
    """GiB/s of each way to write ``size`` bytes."""
    value = memoryview(os.urandom(1 << 17) * (size >> 17))
    warm = fresh(size)
    kept = map_memory(warm, size, shared=True)
    ways: dict[str, Callable[[], float]] = {
        "new memory, written": lambda: with_fresh(through_descriptor, value),
        "new memory, mapped": lambda: with_fresh(mapped_for_it, value),
        "used memory, written": lambda: seconds(through_descriptor, warm, value),
        "used memory, mapped": lambda: seconds(mapped_for_it, warm, value),
        "mapped memory, copied": lambda: seconds(lambda _, it: copy_into(kept, 0, it), warm, value),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            taken[way].append(run())
    os.close(warm)
    return {way: size / statistics.median(times) / (1 << 30) for way, times in taken.items()}


def main() -> None:
    """Print a table of GiB/s."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=4 << 30, help="to write per size and way")
    total = parser.parse_args().bytes
    rates = {name: measure(size, max(3, min(2000, total // size))) for name, size in SIZES.items()}
    print(f"{'GiB/s':24}" + "".join(f"{name:>10}" for name in rates))
    for way in next(iter(rates.values())):
        print(f"{way:24}" + "".join(f"{each[way]:10.1f}" for each in rates.values()))


if __name__ == "__main__":
    main()
