"""Actors: state in a process of its own, handles that are passed on, names.

python examples/actors.py
"""

from __future__ import annotations

import miniray
from miniray import ActorHandle


@miniray.remote
class Counter:
    """Counts, in a process of its own."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int = 1) -> int:
        """Add to the count and return it."""
        self.value += amount
        return self.value


@miniray.remote
def add_ten_times(counter: ActorHandle[Counter]) -> None:
    """A task that calls the actor whose handle it was given."""
    miniray.get([counter.add.remote() for _ in range(10)])


def main() -> None:
    miniray.init("local", num_cpus=4)

    # Calls of one caller run in the order in which they were made.
    counter = Counter.remote()
    print("three calls:", miniray.get([counter.add.remote(2) for _ in range(3)]))

    # Whoever has the handle can call the actor.
    miniray.get([add_ten_times.remote(counter) for _ in range(4)])
    print("after four tasks:", miniray.get(counter.add.remote(0)))

    # A name makes an actor known to every program of the same namespace.
    kept = Counter.options(name="visits", get_if_exists=True).remote(100)
    miniray.get(kept.add.remote())
    found = miniray.get_actor("visits")
    print("found by name:", miniray.get(found.add.remote()))

    # An actor ends with its last handle, or when it is killed.
    miniray.kill(counter)
    try:
        miniray.get(counter.add.remote())
    except miniray.exceptions.ActorDiedError as error:
        print("after kill:", type(error).__name__)

    miniray.shutdown()


if __name__ == "__main__":
    main()
