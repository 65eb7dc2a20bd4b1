"""Entry of a worker that is a new interpreter: reads what it is from a descriptor, then runs."""

from __future__ import annotations

import sys
from typing import NoReturn

from miniray.worker import worker_file


def main() -> NoReturn:
    """Be the worker that the descriptor in the first argument describes."""
    fd = int(sys.argv[1])
    spec = worker_file.read_spec(fd) | {"file": fd}
    from miniray.worker.main import run_worker

    run_worker(spec)
