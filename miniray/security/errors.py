"""The errors of this package that callers tell apart. It imports nothing."""

from __future__ import annotations


class AuthenticationError(ConnectionError):
    """A peer could not prove that it belongs to the cluster, or refused this process.

    A ``ConnectionError``, so that code which treats a peer as gone on any socket error
    does the same here. Its text never contains a secret.
    """


class AddressInUseError(OSError):
    """A server cannot listen because another process has the port; the text names it."""
