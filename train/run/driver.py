"""The driver's side of a run on a cluster: starts its controller, shows its progress, stops it."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.common.runtime import current_runtime
from miniray.decorator import remote
from miniray.exceptions import ActorError, MinirayError, TaskCancelledError
from miniray.runtime_context import get_runtime_context
from miniray.train.base.exceptions import ControllerError
from miniray.train.controller.controller import TrainController
from miniray.train.controller.feed import Seen
from miniray.train.controller.run_spec import STOPPING
from miniray.train.controller.worker_group import MODULES
from miniray.train.run.display import PAUSE, make_display
from miniray.train.worker.worker import sent
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from miniray.train.controller.run_spec import RunOutcome, RunSpec
    from miniray.train.worker.worker import TrainLoop

logger = logging.getLogger(__name__)

#: Seconds that a run gets to end after Ctrl-C, before its controller is killed.
ABORT_TIMEOUT = 10.0

#: Seconds that it gets after the second one, to leave a folder that says how the run ended.
AT_ONCE_TIMEOUT = 5.0

#: Seconds after which a controller that does not answer is killed, when its run is to be stopped.
ANSWER_TIMEOUT = 10.0


def run_on_cluster(spec: RunSpec, loop: TrainLoop) -> RunOutcome:
    """Run to the end, with a controller that ends with this process.

    Raises:
        ControllerError: The controller was lost.
        KeyboardInterrupt: The user stopped the run.
    """
    spec = with_uploaded_environment(spec)
    datasets = loop.datasets
    loop_ref = sent(dataclasses.replace(loop, datasets=datasets.published(api.put)), api.put)
    spec = dataclasses.replace(spec, pools=datasets.pools(api.put))
    actor_class: Any = remote(TrainController)
    controller = actor_class.options(**controller_options(spec)).remote(spec)
    run = controller.run.remote(controller.call.remote, [loop_ref])
    try:
        follow(spec, controller, run)
        outcome: RunOutcome = api.get(run)
        return outcome
    except KeyboardInterrupt:
        stop(controller, run)
        raise
    except MinirayError as error:
        raise ControllerError(error) from error
    finally:
        api.kill(controller)


def with_uploaded_environment(spec: RunSpec) -> RunSpec:
    """Return the run with packages in place of the local paths of its workers' environment.

    The controller may run on another machine, and start workers when the paths are gone.
    """
    own = spec.run_config.worker_runtime_env
    if not own:
        return spec
    config = copy.copy(spec.run_config)
    prepared = current_runtime().prepare_runtime_env(own)  # empty if it sets nothing
    config.worker_runtime_env = json.loads(prepared or "{}")
    return dataclasses.replace(spec, run_config=config)


def controller_options(spec: RunSpec) -> dict[str, Any]:
    resources = spec.scaling_config.controller_resources
    node_id = get_runtime_context().get_node_id()
    return {
        # Each rank may have a call that waits here, beside those that end it.
        "max_concurrency": 1_000_000,
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "_preload": [*MODULES, *(spec.preload if spec.pools else ())],
        # Near the driver, whose storage path it uses; elsewhere if that node is full.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=True),
    }


def follow(spec: RunSpec, controller: Any, run: Any) -> None:
    """Show the progress of a run until it ends, or its controller does."""
    display = make_display(spec.name, spec.run_config.callbacks or ())
    seen, over = Seen(), False
    try:
        while not over:
            progress = api.get(controller.progress.remote(seen))
            display.show(progress)
            seen, over = progress.seen, progress.state.terminal
            api.wait([run], timeout=PAUSE)
    except (ActorError, TaskCancelledError) as error:
        # The controller has ended; the other call returns how the run did.
        logger.debug("Run %s is not followed any more: %s", spec.name, error)
    finally:
        display.close()


def stop(controller: Any, run: Any) -> None:
    """Stop a run and wait until its workers have ended.

    A controller that does not answer in time waits for resources or for a node: it has no workers
    to end first.

    Raises:
        KeyboardInterrupt: The user does not want to wait for uploads that have begun.
    """
    lives, _ = api.wait([controller.__ray_ready__.remote()], timeout=ANSWER_TIMEOUT)
    if not lives:
        return
    try:
        logger.warning(STOPPING)
        api.wait([controller.abort.remote(), run])
    except KeyboardInterrupt:
        controller.abort.remote(True)
        api.wait([run], timeout=AT_ONCE_TIMEOUT)
        raise
    ended, _ = api.wait([run], timeout=ABORT_TIMEOUT)
    if not ended:
        logger.warning("The run did not end within %s s and is killed.", ABORT_TIMEOUT)
