"""``log_once``: what a program logs the first time only."""

from __future__ import annotations

_logged: set[object] = set()
_disabled = False


def log_once(key: object) -> bool:
    """Return whether this is the first call with this key in this process.

    Args:
        key: Anything hashable, such as a name for what is logged.
    """
    if _disabled or key in _logged:
        return False
    _logged.add(key)
    return True


def reset_log_once(key: object = None) -> None:
    """Let the next ``log_once`` be the first again.

    Args:
        key: What that was called with; None for all.
    """
    if key is None:
        _logged.clear()
    else:
        _logged.discard(key)


def disable_log_once_globally() -> None:
    """Make ``log_once`` return False everywhere in this process."""
    global _disabled
    _disabled = True
