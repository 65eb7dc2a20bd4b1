"""Every tunable of the runtime, typed, in one place.

Each field can be overridden by an environment variable ``MINIRAY_<NAME>``. The
values are read once per process, on first use; daemons and workers inherit the
variables of the process that started them.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


class Config(NamedTuple):
    """Tunables with their defaults. Times are seconds, sizes are bytes."""

    # --- starting and stopping -------------------------------------------------
    #: How long a driver waits for an embedded cluster, or a command for a daemon, to be ready.
    start_timeout: float = 30.0
    #: How long a worker that starts waits for its daemon to let it in.
    worker_start_timeout: float = 60.0
    #: How long the daemons of a started cluster wait for a lost head to come back.
    head_grace: float = 60.0
    #: How long the page's process stays after its last client.
    dashboard_idle: float = 300.0
    #: Prefix of the names of metrics; "ray" for dashboards that were made for Ray.
    metrics_prefix: str = "miniray"
    #: Whether metrics have a series per named actor of a class.
    metrics_per_actor: bool = False
    #: How long a process may take to end on request before it is killed.
    stop_grace: float = 5.0
    #: A worker that is not gone so long after it was killed, or that leaves something which is not,
    #: keeps its devices out of service until it is.
    quarantine_after: float = 10.0
    #: A connection that has not proved itself within this time is closed.
    auth_timeout: float = 10.0
    #: Tells machines apart: nodes of one machine use Unix sockets between them, others TLS.
    #: Empty: the host's name, its boot, the mount namespace and the user. Nodes of one machine
    #: that are started with different values treat each other as if they were on two.
    machine_id: str = ""
    #: Folder that /dev, /proc and /sys are below when accelerators are looked for: a container
    #: may be given those of its machine elsewhere.
    device_root: str = "/"

    # --- calls -----------------------------------------------------------------
    #: Serialized values up to this size travel inside messages: 100 KiB and their pickle's frame.
    inline_limit: int = 104 * 1024
    #: A function, a class, or an argument that is not data, that drags in more than this is named
    #: in a warning.
    large_closure_warning: int = 10 * 1024 * 1024
    #: And one that drags in more than this is refused: the head keeps it, and workers load it.
    largest_closure: int = 100_000_000
    #: What the values of refs among an actor's constructor arguments may take together: they go
    #: through the head in one message.
    largest_actor_arguments: int = 48 * 1024 * 1024
    #: What the head may keep of functions, classes and packages (``working_dir``, ``py_modules``)
    #: for the jobs that run; more is refused.
    job_code_limit: int = 2 * 1024 * 1024 * 1024
    #: What a daemon may keep of functions and classes; it requests the rest from the head again.
    code_cache: int = 256 * 1024 * 1024
    #: Data that is passed as an argument and takes more than this is named in a warning.
    large_argument_warning: int = 100 * 1024 * 1024
    #: A task that runs (or blocks) longer than this hands back the tasks queued behind it.
    recall_after: float = 0.010
    #: A task or method that waits in ``get`` longer than this gives its CPU back.
    block_after: float = 0.010
    #: Time between two runs of a call whose exception is retried, or of a task
    #: whose process crashes, as resources that it needs may be out of reach for seconds. The second
    #: run comes after half of it, or at once after a crash, the third one of such a task after
    #: half.
    retry_delay: float = 1.0
    #: How long an owner keeps an idle lease before it returns it.
    lease_idle: float = 0.5
    #: At most this many tasks wait at one leased worker.
    lease_window: int = 256

    #: Bytes on their way to a process of another node that it has not taken yet.
    relay_window: int = 16 * 1024 * 1024
    #: A process that leaves this many bytes of its daemon unread is disconnected, and
    #: ended if it is a worker. Output of workers is left out long before (``unread_output``).
    unread_limit: int = 256 * 1024 * 1024

    # --- scheduling --------------------------------------------------------------
    #: A demand that has waited this long has what it needs set aside for it. A worker that waits so
    #: long for others before it exits lets its devices go to the next.
    reserve_after: float = 10.0
    #: A driver is notified of a demand that has waited this long, with the reason.
    pending_warning: float = 5.0
    #: Idle workers above the CPU count end after this time.
    worker_idle: float = 10.0

    # --- liveness ----------------------------------------------------------------
    #: Interval of a daemon's heartbeats to the head.
    heartbeat_interval: float = 1.0
    #: A node whose heartbeats stop for this long is dead.
    node_timeout: float = 15.0

    # --- objects -----------------------------------------------------------------
    #: Share of the container's memory that the object store may use.
    object_store_share: float = 0.3
    #: Where values go that do not fit into the object store; empty: a folder of the session, or
    #: /var/tmp if that is in memory (tmpfs).
    spill_folder: str = ""
    #: Share of the object store above which values are written to disk ahead of need.
    spill_threshold: float = 0.8
    #: A request that finds store and disk full waits so long for processes to unmap what they do
    #: not use.
    store_full_timeout: float = 3.0
    #: A process remembers this many finished tasks, and this many bytes of their arguments, to make
    #: results that are lost with a node again; beyond that the oldest are given up.
    lineage_calls: int = 10_000
    lineage_bytes: int = 64 * 1024 * 1024
    #: Record where small values were put too, for `miniray memory`; of large ones it always is.
    record_call_sites: bool = False
    #: Size of one piece of an object on its way between daemons.
    transfer_chunk: int = 1024 * 1024
    #: A node that passes a copy on and sends nothing for this long is left for another one. A
    #: process that moves values, and answers its own node nothing for this long, is ended.
    transfer_stall: float = 10.0

    # --- output ------------------------------------------------------------------
    #: Bytes that may wait for a driver that does not read before lines of workers are left out.
    unread_output: int = 16 * 1024 * 1024
    #: Do not log the errors of tasks and methods whose results were dropped unread.
    ignore_unhandled_errors: bool = False
    #: A log file of a worker, node or head of this size becomes an older one, of which this many
    #: are kept with it: each of a worker's two streams takes at most the product.
    log_file_bytes: int = 64 * 1024 * 1024
    log_files: int = 4
    #: Identical lines from many workers are folded into one with a count.
    dedup_logs: bool = True
    #: Lines that differ in numbers only are folded too.
    dedup_numbers: bool = False
    #: Time over which identical lines are folded.
    dedup_window: float = 5.0

    # --- training ----------------------------------------------------------------
    #: How long ranks wait for each other in ``miniray.train.collective``; 0 is no limit.
    train_collective_timeout: float = 1800.0


def parse(name: str, kind: type, text: str) -> object:
    """Return the value of a tunable given as text; raise ValueError that names it."""
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(f"MINIRAY_{name.upper()} must be 0 or 1, not {text!r}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"MINIRAY_{name.upper()} must be of type {kind.__name__}, not {text!r}"
        ) from None


@functools.cache
def config() -> Config:
    values = {}
    # Each worker looks, and a variable that is missing costs a look-up two exceptions.
    for variable in _NAMES.keys() & set(os.environ):
        name = _NAMES[variable]
        kind = type(Config._field_defaults[name])
        values[name] = parse(name, kind, os.environ[variable])
    return Config(**values)  # type: ignore[arg-type]


#: Tunables by the variables that override them.
_NAMES = {f"MINIRAY_{name.upper()}": name for name in Config._fields}
