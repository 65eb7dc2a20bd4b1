"""How many threads numerical libraries of a worker start: as many as its task or actor has CPUs.

That is Ray's rule: one where ``num_cpus`` is not given, as else each of many workers would start
one for every processor of the machine. Whoever sets ``OMP_NUM_THREADS``, for the node or in a
``runtime_env``, decides it instead.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "OMP_NUM_THREADS"

#: What this process has set the variable to; None if it has not.
_set_here: str | None = None


def limit(cpus: float) -> None:
    """This process runs a task or an actor with so many CPUs; less than one counts as one."""
    global _set_here
    if given():
        return
    count = max(1, int(cpus))
    # Libraries read it when they are loaded; this one may be loaded already.
    _set_here = os.environ[_VARIABLE] = str(count)
    # User code may be loading it just now, in a thread of its own: it has no such function yet.
    set_number = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if set_number is not None:
        set_number(count)


def given() -> bool:
    """Whether somebody else than ``limit`` has said how many."""
    return os.environ.get(_VARIABLE) != _set_here
