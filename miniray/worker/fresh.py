"""Entry of a worker that is a new interpreter: reads what it is from a descriptor, then runs."""

from __future__ import annotations

import marshal
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Be the worker that the descriptor in the first argument describes."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        spec = marshal.loads(file.read())
    from miniray.worker.main import run_worker

    run_worker(spec)
