"""PyTorch's store of a worker group, kept by the run's controller.

PyTorch's own ``TCPStore`` listens on the network and lets anybody read and set its keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

    from miniray.train.worker.controller_client import RankCalls


class GroupStore(dist.Store):  # type: ignore[misc]  # torch is Any to mypy here
    """A store for ``init_process_group``. Thread-safe, as the threads of NCCL use it too.

    Keep a reference beside the one given to PyTorch: C++ does not keep the Python part alive.
    """

    def __init__(self, controller: RankCalls, timeout: datetime.timedelta) -> None:
        super().__init__()
        self._controller = controller
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        encoded = map(_encoded, values)
        self._use("set", dict(zip(keys, encoded, strict=True)))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; wait for them."""
        timeout = self.timeout.total_seconds()
        values, absent = self._use("get", list(keys), timeout)
        _check(absent, timeout)
        return list(values)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys have a value.

        Raises:
            DistStoreError: One has none in time.
        """
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        _check(self._use("wait", list(keys), seconds), seconds)

    def check(self, keys: Sequence[str]) -> bool:
        return not self._use("absent", list(keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._use("add", key, amount))

    def append(self, key: str, value: str | bytes) -> None:
        self._use("append", key, _encoded(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; its value then."""
        value: bytes = self._use("compare_set", key, _encoded(expected), _encoded(desired))
        return value

    def delete_key(self, key: str) -> bool:
        return bool(self._use("delete", key))

    # The names by which C++ finds them.
    deleteKey = delete_key  # noqa: N815

    def num_keys(self) -> int:
        return int(self._use("count"))

    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return whether there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def clone(self) -> GroupStore:
        """Return this store: its calls do not wait for each other."""
        return self

    def _use(self, operation: str, *arguments: Any) -> Any:
        return self._controller.use_keys(operation, *arguments)()


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _check(absent: list[str], seconds: float) -> None:
    if absent:
        error: Any = dist.DistStoreError
        raise error(
            f"Waited {seconds:g} s in vain for {absent[0]!r} ({len(absent)} keys in all), which "
            f"another rank sets: it has not come that far. TorchConfig(timeout_s=...) is the limit."
        )
