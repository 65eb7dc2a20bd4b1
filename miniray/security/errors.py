"""The errors of this package that callers tell apart."""

from __future__ import annotations

from miniray.exceptions import AuthenticationError

__all__ = ["AddressInUseError", "AuthenticationError"]


class AddressInUseError(OSError):
    """A server cannot listen because another process has the port; the text names it."""
