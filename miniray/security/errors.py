"""The error that every check of this package raises. It imports nothing."""

from __future__ import annotations


class AuthenticationError(ConnectionError):
    """A peer could not prove that it belongs to the cluster, or refused this process.

    A ``ConnectionError``, so that code which treats a peer as gone on any socket error
    does the same here. Its text never contains a secret.
    """
