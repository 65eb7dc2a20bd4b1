"""Tasks: functions that run in other processes, on values, refs and streams of them.

python examples/tasks.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import miniray

if TYPE_CHECKING:
    from collections.abc import Iterator


@miniray.remote
def square(number: int) -> int:
    return number * number


@miniray.remote
def add(*numbers: int) -> int:
    return sum(numbers)


@miniray.remote
def count_down(start: int) -> Iterator[int]:
    yield from range(start, 0, -1)


@miniray.remote
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def main() -> None:
    miniray.init("local", num_cpus=4)

    # A call returns a ref at once; get() waits for the value.
    squares = [square.remote(number) for number in range(5)]
    print("squares:", miniray.get(squares))

    # Refs given as arguments arrive as their values, once they are there.
    print("their sum:", miniray.get(add.remote(*squares)))

    # A generator's values can be read while it runs.
    print("counting down:", [miniray.get(ref) for ref in count_down.remote(3)])

    # wait() tells which values are there: the short nap ends first.
    naps = [sleep.remote(seconds) for seconds in (1.0, 0.1)]
    ready, rest = miniray.wait(naps)
    print("first awake:", miniray.get(ready[0]), "still asleep:", len(rest))

    miniray.shutdown()


if __name__ == "__main__":
    main()
