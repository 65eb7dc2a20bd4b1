"""The key-value store by which the ranks of an attempt find each other.

Runs in the controller's event loop; ranks reach it by calls of the controller, so only
processes of the cluster can read or set a key. Its meaning is that of PyTorch's stores.
"""

from __future__ import annotations

import asyncio
import time

from miniray.train.base.exceptions import CollectiveError


class GroupKeys:
    """Keys of one attempt. Values are bytes; a counter is its decimal digits."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        #: Set when the key comes, or when it can't come any more.
        self._waited_for: dict[str, asyncio.Event] = {}
        self._closed = ""

    def close(self, why: str) -> None:
        """Fail all waits, with a sentence that says why."""
        self._closed = why
        for event in self._waited_for.values():
            event.set()

    async def wait(self, keys: list[str], timeout: float) -> list[str]:
        """Wait until all these keys have a value.

        Args:
            keys: The keys.
            timeout: Seconds.

        Returns:
            The keys that have none by then.

        Raises:
            CollectiveError: They can't come any more.
        """
        deadline = time.monotonic() + timeout
        for key in keys:
            if key in self._values:
                continue
            event = self._waited_for.setdefault(key, asyncio.Event())
            try:
                if not self._closed:
                    await asyncio.wait_for(event.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                break
            if key not in self._values and self._closed:
                raise CollectiveError(self._closed)
        return await self.absent(keys)

    async def absent(self, keys: list[str]) -> list[str]:
        """The keys that have no value now."""
        return [key for key in keys if key not in self._values]

    async def get(self, keys: list[str], timeout: float) -> tuple[list[bytes], list[str]]:
        """Wait for these keys; their values, and the keys that have none after ``timeout`` s."""
        absent = await self.wait(keys, timeout)
        return ([] if absent else [self._values[key] for key in keys]), absent

    async def set(self, values: dict[str, bytes]) -> None:
        """Give these keys their values."""
        self._values.update(values)
        for key in values:
            event = self._waited_for.pop(key, None)
            if event is not None:
                event.set()

    async def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; its value then."""
        count = int(self._values.get(key, b"0")) + amount
        await self.set({key: str(count).encode()})
        return count

    async def append(self, key: str, value: bytes) -> None:
        """Add to the end of a value, which begins empty."""
        await self.set({key: self._values.get(key, b"") + value})

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key that has the expected value, or none if that is empty.

        Returns:
            Its value then; the expected one if the key has none.
        """
        current = self._values.get(key, b"")
        if current != expected:
            return current or expected
        await self.set({key: desired})
        return desired

    async def delete(self, key: str) -> bool:
        """Take a key away; whether there was one."""
        return self._values.pop(key, None) is not None

    async def count(self) -> int:
        """The number of keys."""
        return len(self._values)
