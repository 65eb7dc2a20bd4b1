"""Drivers of detached runs: they start a run, or follow one that runs, and may end before it.

The run itself is in ``detached.py``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.decorator import remote
from miniray.exceptions import (
    ActorAlreadyExistsError,
    ActorDiedError,
    ActorError,
    MinirayError,
    TaskCancelledError,
)
from miniray.runtime_context import get_runtime_context
from miniray.train.base.exceptions import ControllerError, StorageNotSharedError
from miniray.train.config import RunConfig
from miniray.train.controller.outcome import read_outcome
from miniray.train.run.detached import NAMESPACE, DetachedController, controller_name
from miniray.train.run.driver import (
    AGAIN,
    controller_options,
    follow,
    stop,
    with_uploaded_environment,
)
from miniray.train.storage.storage import RunStorage
from miniray.train.worker.worker import PackedLoop

if TYPE_CHECKING:
    import os

    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.worker.worker import TrainLoop

logger = logging.getLogger(__name__)


def run_detached(spec: RunSpec, loop: TrainLoop) -> RunOutcome:
    """Start a run that outlives this process, or follow the one of its name; wait for its end.

    Raises:
        ControllerError: The controller was lost.
        KeyboardInterrupt: The user stopped the run.
        StorageNotSharedError: A run of this name has its folder elsewhere.
        ValueError: There is no cluster that outlives this process, or the train loop holds what
            ends with this process.
    """
    require_lasting_cluster()
    packed = PackedLoop.of(loop)
    spec = with_uploaded_environment(spec)
    while True:
        controller = find_controller(spec.storage)
        started = controller is None
        if controller is None:
            controller = _start(spec, packed)
        if controller is not None:
            outcome = _attend(spec, controller, started=started)
            if outcome is not None:
                return outcome


def stop_run(
    name: str,
    storage_path: str | os.PathLike[str] | None = None,
    storage_filesystem: Any = None,
) -> None:
    """Stop a detached run as Ctrl-C in its driver does, and wait until it has ended.

    Uploads of checkpoints that have begun end before. A run that has not ended after ten seconds
    more is killed, and so is one whose controller waits for resources.

    Args:
        name: Name of the run.
        storage_path: Its ``RunConfig(storage_path)``.
        storage_filesystem: Its ``RunConfig(storage_filesystem)``.

    Raises:
        ValueError: No detached run of this name and storage path runs in the cluster.
    """
    config = RunConfig(
        name=name, storage_path=storage_path, storage_filesystem=storage_filesystem, detached=True
    )
    require_lasting_cluster()
    storage = RunStorage(config.storage_url, name, storage_filesystem)
    controller = find_controller(storage)
    if controller is None:
        raise ValueError(
            f"No detached run named {name!r} with its folder in {storage.storage_fs_path} runs in "
            f"this cluster. `miniray status` lists the controllers of those that run."
        )
    _stop(controller)
    _await_end(controller)


def require_lasting_cluster() -> None:
    """Attach this process to a cluster that outlives it, unless it is attached to one.

    Raises:
        ValueError: There is none.
    """
    instead = (
        "RunConfig(detached=True) needs a cluster that outlives this program. Start one with "
        "`miniray start --head`, and attach to it with init(), or init(address=...) from another "
        "machine."
    )
    if not api.is_initialized():
        try:
            api.init(address="auto")
        except ConnectionError as error:
            raise ValueError(f"{instead} ({error})") from error
    if get_runtime_context().gcs_address.startswith("unix:"):
        raise ValueError(
            f"{instead} This one belongs to a program, whose init() or `miniray run` has started "
            "it, and ends with it."
        )


def find_controller(storage: RunStorage) -> Any:
    try:
        return api.get_actor(controller_name(storage), namespace=NAMESPACE)
    except ValueError:
        return None


def _start(spec: RunSpec, packed: PackedLoop) -> Any:
    """Start the controller; None if another driver was quicker."""
    assert spec.run_config.failure_config is not None
    actor_class = remote(DetachedController).options(
        **controller_options(spec),
        name=controller_name(spec.storage),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=spec.run_config.failure_config.controller_failure_limit,
    )
    try:
        return actor_class.remote(spec, packed)
    except ActorAlreadyExistsError:
        return None
    except KeyboardInterrupt:
        # It may exist by now, and no driver would follow it.
        controller = find_controller(spec.storage)
        if controller is not None and api.get(controller.run_id.remote()) == spec.run_id:
            api.kill(controller)
        raise


def _attend(spec: RunSpec, controller: Any, *, started: bool) -> RunOutcome | None:
    """Follow a run to its end; None if it had ended before, and its controller is gone now."""
    run_id = spec.run_id if started else None
    try:
        run = controller.outcome.options(**AGAIN).remote()
        opened = api.get(controller.opened.options(**AGAIN).remote())
        if opened.over and not started:
            _await_end(controller)
            return None
        run_id = opened.run_id
        if not started:
            _join(spec, run_id)
        follow(spec, controller, run)
        outcome: RunOutcome = api.get(run)
        return outcome
    except KeyboardInterrupt:
        _stop(controller)
        raise
    except (ActorError, TaskCancelledError) as error:
        if run_id is None:
            return None
        return _outcome_of_gone(spec.storage, run_id, error)
    except StorageNotSharedError:
        raise
    except MinirayError as error:
        raise ControllerError(error) from error


def _join(spec: RunSpec, run_id: str) -> None:
    """Tell the user that this driver follows a run that it has not started.

    Raises:
        StorageNotSharedError: That run is in another folder of the same path.
    """
    if spec.storage.run_facts().get("run_id") != run_id:
        raise StorageNotSharedError(
            f"A detached run named {spec.name!r} with its folder in {spec.storage.storage_fs_path} "
            f"runs in this cluster, but what this machine has there is another folder. Set "
            f"RunConfig(storage_path=...) to a network folder or a URL that all machines reach."
        )
    logger.warning(
        "Run %s runs already: this driver follows it and does not start another one. Ctrl-C stops "
        "the run.",
        spec.name,
    )


def _await_end(controller: Any) -> None:
    """Wait until a controller whose run is over is gone, and with it its name."""
    while True:
        try:
            api.get(controller.gone.options(**AGAIN).remote())
        except ActorDiedError as gone:  # noqa: PERF203 - it waits for another process
            logger.debug("The controller is gone: %s", gone)
            return
        except TaskCancelledError as ending:
            logger.debug("The controller is on its way out: %s", ending)


def _stop(controller: Any) -> None:
    """Stop a run; at once if the user does not want to wait, or its controller does not run."""
    ended = False
    try:
        answer = controller.run_id.options(**AGAIN).remote()
        ended = stop(controller, answer, controller.outcome.options(**AGAIN).remote())
    finally:
        if not ended:
            api.kill(controller)


def _outcome_of_gone(storage: RunStorage, run_id: str, error: Exception) -> RunOutcome:
    """Return how a run ended whose controller is gone, and could not tell this driver."""
    outcome = read_outcome(storage, run_id)
    if outcome is None:
        raise ControllerError(error) from error
    return outcome
