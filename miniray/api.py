"""The functions of ``import miniray``: they check arguments and call the runtime.

The first of them that needs a runtime starts an embedded cluster where ``init()``
was not called. Nothing here depends on how a runtime works.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miniray.actor import ActorHandle
from miniray.client.init_options import check_init
from miniray.common import runtime as _runtime
from miniray.common.object_ref import ObjectRef
from miniray.common.runtime import (
    current_runtime,
    runtime_of,
    runtime_or_none,
    set_runtime,
)
from miniray.exceptions import MinirayError
from miniray.objects.ref_checks import (
    is_generator,
    number_of_returns,
    refs_only,
    timeout_of,
    unique_refs,
)
from miniray.runtime_context import InitContext
from miniray.system.option_checks import shown, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.actor import ActorProxy
    from miniray.client.init_options import InitOptions
    from miniray.common.runtime import Runtime
    from miniray.job_config import JobConfig
    from miniray.objects.object_ref_generator import ObjectRefGenerator

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Guards starting and stopping.
_lock = threading.RLock()
_context: InitContext | None = None
#: The process that called init(): a forked child must not end its parent's cluster.
_owner_pid: int | None = None


def _renew_lock() -> None:
    """Run in a forked child: another thread of its parent may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def init(
    address: str | None = None,
    *,
    engine: str | None = None,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    gpu_family: str | None = None,
    resources: Mapping[str, float | Mapping[str, Any]] | None = None,
    labels: Mapping[str, str] | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    log_to_driver: bool | None = None,
    ignore_reinit_error: bool = False,
    job_config: JobConfig | None = None,
    object_store_memory: int | None = None,
    **kwargs: Any,
) -> InitContext:
    """Attach this process to a cluster, or start one that ends with the process.

    Args:
        address: "host:port" of a head, "auto" for a cluster of this machine, "local" to start one,
            "ray://host:10001" for Ray. Default: MINIRAY_ADDRESS, else a running or a new one.
        engine: "miniray" or "ray". Default: the variable MINIRAY_ENGINE, else "miniray".
        num_cpus: Logical CPUs of a new cluster. Default: those of the machine.
        num_gpus: Logical GPUs of a new cluster. Default: those of the machine.
        gpu_family: "nvidia", "amd" or "intel". Default: what is found first, else "nvidia".
        resources: Further ones by name: amounts, or ``{"count": 4, "env": "FPGA_VISIBLE"}``.
        labels: Labels of the node of a new cluster.
        namespace: Where names are looked up. Default: an unused one.
        runtime_env: Environment of the job's tasks and actors.
        log_to_driver: Whether what workers print is printed here too. Default: True.
        ignore_reinit_error: Return the context of the first call if there was one.
        job_config: The lifetime that the job's actors have by default, and its metadata.
        object_store_memory: Size of a new cluster's object store, in bytes.
        **kwargs: ``_memory`` and ``_temp_dir`` of a new cluster; others of Ray, with a warning.

    Returns:
        The context, with ``address_info``; used in ``with``, it shuts down at the end.

    Raises:
        ConnectionError: There is no cluster at the address.
        RuntimeError: ``init`` was called before.
        TypeError, ValueError: There is no such argument, or its value is not allowed.
    """
    options = check_init(
        kwargs,
        job_config,
        address=address,
        engine=engine,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        gpu_family=gpu_family,
        resources=resources,
        labels=labels,
        namespace=namespace,
        runtime_env=runtime_env,
        log_to_driver=log_to_driver,
        object_store_memory=object_store_memory,
    )
    return _connect(options, ignore_reinit_error)


def _connect(options: InitOptions, ignore_reinit_error: bool) -> InitContext:
    from miniray.client.bootstrap import connect

    global _context, _owner_pid
    with _lock:
        if runtime_or_none() is not None:
            if not ignore_reinit_error:
                raise RuntimeError(
                    "miniray.init() was called before, or an earlier call of the API started "
                    "miniray. Call miniray.shutdown() first, call init() before everything else, "
                    "or give ignore_reinit_error=True."
                )
            if _context is None:  # a worker's
                return InitContext({"address": current_runtime().context().gcs_address}, shutdown)
            return _context
        runtime, address_info = connect(options)
        set_runtime(runtime)
        if options.logging_level is not None:
            logging.getLogger("miniray").setLevel(options.logging_level)
        _context = InitContext(address_info, shutdown)
        _owner_pid = os.getpid()
        atexit.register(shutdown)
        return _context


def shutdown(*, wait_for_processes: bool = False, _exiting_interpreter: bool = False) -> None:
    """Leave the cluster, and end it if ``init()`` started it. Does nothing if there is none.

    Args:
        wait_for_processes: Of Ray; the processes of a cluster that ends are waited for anyway.
        _exiting_interpreter: Of Ray, without effect.
    """
    global _context, _owner_pid
    with _lock:
        runtime = runtime_or_none()
        if runtime is None or (_owner_pid is not None and _owner_pid != os.getpid()):
            return
        atexit.unregister(shutdown)
        try:
            runtime.shutdown()
        finally:
            set_runtime(None)
            _context = None
            _owner_pid = None


def is_initialized() -> bool:
    """Return whether this process is attached to a cluster."""
    return runtime_or_none() is not None


@overload
def get(object_refs: ObjectRef[T], *, timeout: float | None = None) -> T: ...
@overload
def get(object_refs: Sequence[ObjectRef[T]], *, timeout: float | None = None) -> list[T]: ...
@overload
def get(
    object_refs: ObjectRefGenerator[T], *, timeout: float | None = None
) -> ObjectRefGenerator[T]: ...
def get(object_refs: Any, *, timeout: float | None = None) -> Any:
    """Wait for values and return them. Raises as soon as one of them has failed.

    Args:
        object_refs: A ref, or a list of them.
        timeout: How long to wait at most, in seconds. Default: without end.

    Returns:
        The value, or the list of values. Arrays may be read-only: they are shared.

    Raises:
        GetTimeoutError: Not all values were there in time.
        TaskError: The task failed; also an instance of the class of the task's exception.
        ValueError: ``object_refs`` is neither a ref nor a list.
        TypeError: The list holds something else than refs, or ``timeout`` is not a number.
    """
    runtime = _runtime._current or _runtime_for(object_refs)
    if timeout is not None:
        # -1 is Ray's other way to say: without end.
        timeout = None if timeout == -1 else timeout_of("get", timeout)
    try:
        if type(object_refs) is ObjectRef:
            return runtime.objects.get((object_refs,), timeout)[0]
        if isinstance(object_refs, list | tuple):
            refs_only("get", object_refs)
            return runtime.objects.get(object_refs, timeout)
        if isinstance(object_refs, ObjectRef):  # an engine's own, for which it looks longer
            return runtime.objects.get((object_refs,), timeout)[0]
    except (KeyboardInterrupt, MinirayError) as error:
        raise error.with_traceback(None)
    if is_generator(object_refs):
        return object_refs  # its refs are read one by one
    given = object_refs
    hint = " Call it with .remote(...), and get what that returns." * hasattr(given, "remote")
    if isinstance(given, ActorHandle):
        hint = " Call one of its methods with .remote(...), and get what that returns."
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes):
        hint = " Make a list of its refs."
    raise ValueError(
        f"get takes an ObjectRef or a list of them, not {shown(given)} ({type(given).__name__})."
        f"{hint}"
    )


def put(value: T, *, _owner: None = None) -> ObjectRef[T]:
    """Store a value where every task and actor can read it.

    Args:
        value: What to store.
        _owner: Of Ray; only None is allowed.

    Raises:
        TypeError: The value is a ref already, or can't be pickled; or an owner is given.
        ObjectStoreFullError: The value fits neither into memory nor on disk.
    """
    if type(value) is ObjectRef:  # another engine refuses its own, which spares each value a look
        raise TypeError(
            f"put was given {value!r}, which is a ref already. Pass the ref on, or put it inside "
            f"a list to store the ref itself."
        )
    if _owner is not None:
        raise TypeError(
            "put has no _owner in miniray: the process that calls put owns the value. Call put in "
            "a method of the actor that should own it, and return the ref in a list."
        )
    return (_runtime._current or current_runtime()).objects.put(value)


def wait(
    ray_waitables: list[ObjectRef[T]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]:
    """Wait until some of the values are there.

    Args:
        ray_waitables: A list of refs, each once.
        num_returns: How many to wait for.
        timeout: How long to wait at most, in seconds. Default: without end.
        fetch_local: Whether values count only once they are on this node. One whose transfer has
            begun comes also after this has returned, as in Ray, unless its ref goes.

    Returns:
        The refs that are ready, at most ``num_returns``, and the others, each in the
        order given.

    Raises:
        TypeError: ``ray_waitables`` is not a list of refs, or a number is none.
        ValueError: A ref is there twice, or ``num_returns`` or ``timeout`` can't be met.
    """
    global _rest
    refs = ray_waitables
    given: Any = refs
    if not isinstance(given, list | tuple):
        if isinstance(given, ObjectRef):
            raise TypeError(f"wait takes a list of refs, not a single one: wait([{given!r}]).")
        raise TypeError(
            f"wait takes a list of refs, not {shown(given)} ({type(given).__name__})."
            f"{' Make a list of its refs.' * isinstance(given, Iterable)}"
        )
    if timeout is not None:
        timeout = timeout_of("wait", timeout)
    runtime = _runtime._current or _runtime_for(refs)
    if not refs:
        return [], []
    if num_returns.__class__ is not int:
        num_returns = number_of_returns(num_returns)
    if num_returns != 1 or _identity(refs) != _rest:
        unique_refs(refs)
    if not 0 < num_returns <= len(refs):
        raise ValueError(
            f"num_returns of wait must be from 1 to {len(refs)}, the number of refs, "
            f"not {num_returns}."
        )
    try:
        ready, rest = runtime.objects.wait(
            refs if isinstance(refs, list) else list(refs),
            num_returns=num_returns,
            timeout=timeout,
            fetch_local=fetch_local,
        )
    except KeyboardInterrupt as interrupt:
        raise interrupt.with_traceback(None)
    _rest = _identity(rest)
    return ready, rest


def _runtime_for(given: Any) -> Runtime:
    """Return the runtime of these refs; the error says so if it has ended."""
    refs = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(ref, ObjectRef) for ref in refs):
        return runtime_of("ref")
    return current_runtime()


def _identity(refs: Sequence[Any]) -> tuple[int, ...] | None:
    return (id(refs), len(refs), id(refs[0]), id(refs[-1])) if refs else None


#: Which list ``wait`` returned last. A loop that takes one ref at a time from thousands passes
#: that list again: looking at all of them each time would be quadratic.
_rest: tuple[int, ...] | None = None


def kill(actor: ActorProxy[Any], *, no_restart: bool = True) -> None:
    """End an actor's process at once; its unfinished calls fail.

    Args:
        actor: A handle to the actor.
        no_restart: False to let ``max_restarts`` start it again.

    Raises:
        ValueError: ``actor`` is not a handle.
    """
    if not isinstance(actor, ActorHandle):
        raise ValueError(
            f"kill takes the handle of an actor, not {shown(actor)} ({type(actor).__name__}). "
            f"For tasks, use miniray.cancel(ref)."
        )
    runtime_of("actor handle").head.kill_actor(actor._ref, no_restart=bool(no_restart))


def cancel(
    ray_waitable: ObjectRef[Any] | ObjectRefGenerator[Any],
    *,
    force: bool = False,
    recursive: bool = True,
) -> None:
    """Cancel the task or call that makes a value; ``get`` then raises TaskCancelledError.

    A task that runs gets a KeyboardInterrupt, an async method a CancelledError. Other methods
    of actors run on; they can check ``get_runtime_context().is_canceled()``, and calls that they
    have made are cancelled. What has finished stays.

    Args:
        ray_waitable: What the task or call returned, here or in the process that passed it on.
        force: End the worker's process instead. Not for calls of actors.
        recursive: Cancel also what the task started.

    Raises:
        TypeError: ``ray_waitable`` is not a ref.
        ValueError: ``force`` was given for a call of an actor that this process made.
    """
    given: Any = ray_waitable
    if is_generator(given):
        given = given.call_ref()
    if not isinstance(given, ObjectRef):
        raise TypeError(
            f"cancel takes an ObjectRef, not {shown(given)} ({type(given).__name__}). "
            f"For actors, use miniray.kill(handle)."
        )
    runtime_of("ref").calls.cancel(given, force=bool(force), recursive=bool(recursive))


def get_actor(name: str, namespace: str | None = None) -> ActorHandle[Any]:
    """Get a handle to a named actor.

    Args:
        name: Its name.
        namespace: Where to look. Default: the namespace of this job.

    Raises:
        ValueError: There is no such actor, or a name is empty.
        TypeError: A name is not a string.
    """
    name = text("The name of an actor", name)
    if namespace is not None:
        namespace = text("The namespace of an actor", namespace)
    runtime = current_runtime()
    try:
        location = runtime.head.get_actor(name, namespace)
    except ValueError:
        where = namespace or runtime.context().namespace
        raise ValueError(
            f"There is no actor named {name!r} in namespace {where!r}: none was created there, or "
            "it has ended, as actors do with their last handle unless they are "
            'lifetime="detached". For one of another namespace, pass its namespace.'
        ) from None
    return ActorHandle(location.ref, location.info)


@overload
def list_named_actors(all_namespaces: Literal[False] = False) -> list[str]: ...
@overload
def list_named_actors(all_namespaces: Literal[True]) -> list[dict[str, str]]: ...
def list_named_actors(all_namespaces: bool = False) -> list[str] | list[dict[str, str]]:
    """Return the names of the living named actors.

    Args:
        all_namespaces: Whether to list those of every namespace, as dicts of ``name`` and
            ``namespace``. Default: the names in the namespace of this job.
    """
    return current_runtime().head.list_named_actors(all_namespaces)


def nodes() -> list[dict[str, Any]]:
    """Return a dict per node: NodeID, Alive, NodeManagerAddress, Resources, Labels, ..."""
    return current_runtime().head.nodes()


def cluster_resources() -> dict[str, float]:
    """Return the totals of all resources over the living nodes, in units (memory: bytes)."""
    return current_runtime().head.cluster_resources()


def available_resources() -> dict[str, float]:
    """Return what is free of all resources over the living nodes, in units (memory: bytes)."""
    return current_runtime().head.available_resources()


def get_gpu_ids() -> list[int] | list[str]:
    """Return the ids of the GPUs that this worker may use; strings where they are not numbers."""
    ids = current_runtime().context().accelerator_ids.get("GPU", [])
    return [int(id) for id in ids] if all(id.isdecimal() for id in ids) else list(ids)
