"""Key-values of the cluster: code and packages of jobs, and what libraries keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Key = str | bytes


class KeyValues:
    """Values by namespace and key.

    Args:
        on_change: Called with each new value, or None for a removed one.
    """

    def __init__(self, on_change: Callable[[str, Key, bytes | None], None]) -> None:
        self._values: dict[str, dict[Key, bytes]] = {}
        self._on_change = on_change

    def restore(self, namespace: str, key: Key, value: bytes) -> None:
        """Enter a value of before a restart of the head."""
        self._values.setdefault(namespace, {})[key] = value

    def put(self, namespace: str, key: Key, value: bytes, overwrite: bool = True) -> bool:
        """Set a value; whether it was set, which it is not if there is one to be kept."""
        values = self._values.setdefault(namespace, {})
        if not overwrite and key in values:
            return False
        values[key] = value
        self._on_change(namespace, key, value)
        return True

    def get(self, namespace: str, key: Key) -> bytes | None:
        """A value, or None."""
        return self._values.get(namespace, {}).get(key)

    def delete(self, namespace: str, key: Key) -> bool:
        """Remove a value; whether there was one."""
        if self._values.get(namespace, {}).pop(key, None) is None:
            return False
        self._on_change(namespace, key, None)
        return True

    def keys(self, namespace: str, prefix: Key) -> list[Key]:
        """Keys that begin with a prefix of their own type, sorted."""
        found = [
            key
            for key in self._values.get(namespace, {})
            if type(key) is type(prefix) and key[: len(prefix)] == prefix
        ]
        return sorted(found)

    def exists(self, namespace: str, key: Key) -> bool:
        """Whether there is a value."""
        return key in self._values.get(namespace, {})
