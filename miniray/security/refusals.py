"""Tells of those who were refused at a port: at most once per minute and address."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

#: Seconds for which an address that was told of is only counted.
_EVERY = 60.0
#: So many addresses are told apart; those of more in the same time are only counted.
_ADDRESSES = 32
#: What these are called; an entry of the table like any other.
_OTHERS = "one of many further addresses"


class Refusals:
    """Refused connections by address; for one thread.

    Args:
        logger: Where to tell of them.
        port: What they came to, for people.
    """

    def __init__(self, logger: logging.Logger, port: str) -> None:
        self._logger = logger
        self._port = port
        #: When each was told of, the earliest first, and how many came since.
        self._told: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._told)

    def add(self, host: str, why: str) -> None:
        """Count a connection that was refused, and tell of it if this address was not of late."""
        now = time.monotonic()
        if host not in self._told:
            while len(self._told) >= _ADDRESSES and now - self._earliest() >= _EVERY:
                self._told.popitem(last=False)
            if len(self._told) >= _ADDRESSES:
                host = _OTHERS
        told, since = self._told.get(host, (-_EVERY, 0))
        if now - told < _EVERY:
            self._told[host] = (told, since + 1)
            return
        more = f" ({since} more connections since this was last told)" if since else ""
        self._logger.warning("%s refused %s: %s%s", self._port, host, why, more)
        self._told[host] = (now, 0)
        self._told.move_to_end(host)

    def _earliest(self) -> float:
        return next(iter(self._told.values()))[0]
