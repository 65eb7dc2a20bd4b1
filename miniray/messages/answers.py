"""Errors as the daemon and the head answer with them, to whoever asked."""

from __future__ import annotations

import pickle

from miniray.exceptions import MinirayError

#: Bytes of such an error: what it says of bad data must not be as large as that data.
_LARGEST = 1 << 20


def encode_error(error: BaseException) -> bytes:
    """An exception as it travels; one that cannot is told by class and text."""
    try:
        data = pickle.dumps(error, 5)
    except Exception:  # noqa: BLE001 - whatever the error holds; its text says what matters
        data = b""
    if not 0 < len(data) <= _LARGEST:
        data = pickle.dumps(MinirayError(f"{type(error).__name__}: {error!s:.2000}"), 5)
    return data
