"""What a worker process is told when it starts, as plain data.

Responsible for the form, and for whether the process is a fork or a new interpreter; starts
nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from miniray.accelerators import assigned_environment, needs_fresh_interpreter
from miniray.node.workers.template import WORKER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.accelerators import NodeAccelerators
    from miniray.node.workers.worker import NodeLease, Worker


def pool_key(lease: NodeLease) -> tuple[Any, ...]:
    """What workers must have in common to be used for each other's leases."""
    # Calls are counted per function.
    counted = (lease.max_calls, lease.name) if lease.max_calls else None
    return (lease.job_id, lease.spec.runtime_env, lease.allocation.devices, counted)


def interpreter(lease: NodeLease, worker: Worker, accelerators: NodeAccelerators) -> str | None:
    """The Python that a worker runs in; None: a fork of the template will do."""
    environment = worker.environment
    if environment is not None and environment.fresh_interpreter:
        return environment.python
    return sys.executable if needs_fresh_interpreter(lease.devices, accelerators) else None


def process_spec(
    lease: NodeLease,
    worker: Worker,
    python: str | None,
    base: Mapping[str, Any],
    accelerators: NodeAccelerators,
) -> dict[str, Any]:
    """Everything that a process is told.

    Args:
        lease: what it is started for.
        worker: it.
        python: as from ``interpreter``.
        base: what all processes of the node are told.
        accelerators: what the node announced.
    """
    environment = worker.environment
    variables = {WORKER_VARIABLE: worker.process_id.hex()}
    if environment is not None:
        variables.update(environment.env_vars)
    if lease.devices:
        variables.update(assigned_environment(lease.devices, accelerators, os.environ))
    job = lease.job
    paths = list(environment.sys_path) if environment is not None else []
    cwd = environment.cwd if environment is not None else None
    if job.machine == base["machine"]:
        paths += job.sys_path
        cwd = cwd or job.cwd
    return {
        **base,
        "process_id": worker.process_id,
        "environment": variables,
        "python": python,
        "sys_path": paths,
        "cwd": cwd,
        "lease": lease.to_wire(),
    }


def preload(lease: NodeLease, python: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules that a worker begins with, and those that it has if they are loaded by then.

    What a template has imported is of no use to a new interpreter.
    """
    if python is not None:
        return (), ()
    actor = lease.actor
    return (tuple(actor.preload), tuple(actor.preload_later)) if actor is not None else ((), ())
