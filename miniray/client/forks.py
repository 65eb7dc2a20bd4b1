"""Keeping processes that user code forks away from what their parent has open.

The child of a driver or a worker closes the sockets that it inherited, counts no refs,
runs none of our exit functions, and is refused the API until it calls ``init()`` itself. It may
read the arrays that its parent had: nobody writes into that memory again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.client.attach import Attachment

_guarded: Attachment | None = None
_in_child: Callable[[], None] | None = None
_hook_installed = False
#: Clears what the API keeps of the parent.
_forget: Callable[[], None] | None = None


def forget_with(forget: Callable[[], None]) -> None:
    """Set what clears the API's own state in a forked child."""
    global _forget
    _forget = forget


def guard(attachment: Attachment, in_child: Callable[[], None] | None = None) -> None:
    """Keep the children that this process forks from now on away from its attachment.

    Args:
        attachment: What this process has open.
        in_child: Called in each child, after the rest.
    """
    global _guarded, _in_child, _hook_installed
    _guarded, _in_child = attachment, in_child
    if not _hook_installed:
        _hook_installed = True
        os.register_at_fork(before=_tell_of_child, after_in_child=_leave_parent)


def unguard() -> None:
    """Undo ``guard``: this process is not attached any more."""
    global _guarded, _in_child
    _guarded = _in_child = None


def _tell_of_child() -> None:
    """Run in the parent before each fork: the child inherits its mappings."""
    if _guarded is not None:
        _guarded.runtime.shared_memory.before_fork()


def _leave_parent() -> None:
    """Run in the child before anything else: takes no lock, another thread may have held it."""
    if _guarded is None:
        return
    from miniray.common.runtime import refuse_runtime

    parent = os.getppid()
    in_child = _in_child
    _guarded.runtime.abandon()
    unguard()
    if _forget is not None:
        _forget()
    refuse_runtime(
        f"This process ({os.getpid()}) was forked from process {parent}, which is attached to a "
        f"cluster, and shares nothing with it. Use miniray in the parent, and pass plain values "
        f"to the child; or call miniray.init() here, to attach this process as a driver of its "
        f"own."
    )
    if in_child is not None:
        in_child()
