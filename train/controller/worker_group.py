"""The worker group: a placement group with one actor for each rank.

It is placed, started, connected and ended, all actors at once. The controller decides what the
actors do, and what follows from a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from typing import TYPE_CHECKING, Any

from miniray import api
from miniray.common.runtime import current_runtime
from miniray.decorator import remote
from miniray.exceptions import ActorDiedError, ActorError, DeathCause, MinirayError
from miniray.train.base.exceptions import (
    GroupStartError,
    PlacementTimeoutError,
    StorageNotSharedError,
    StorageUnusableError,
    WorkerFailure,
)
from miniray.train.base.ranks import (
    assign_ranks,
    listed,
    shared_devices,
    shares_devices,
    unreachable_address,
)
from miniray.train.controller.placement import (
    BundleReservation,
    explain,
    largest_reservation,
    waiting_demand,
)
from miniray.train.controller.pools import PoolActors
from miniray.train.controller.waits import end
from miniray.train.storage.storage import NOT_SHARED
from miniray.train.worker.backend import GroupMember
from miniray.train.worker.controller_client import rank_calls
from miniray.train.worker.worker import TrainWorker
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from miniray.train.base.ranks import WorkerInfo
    from miniray.train.base.states import ScalingDecision
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.session import SessionSetup
    from miniray.train.worker.worker import WorkerOutcome

    #: Runs a function that blocks in a thread.
    Blocking = Callable[..., Awaitable[Any]]

logger = logging.getLogger(__name__)


#: Seconds that workers get to end by themselves (atexit handlers) before they are killed.
EXIT_TIMEOUT = 5.0

#: After a worker has failed to start, seconds that others get to say that they failed too. They
#: are not waited for: a rank whose peer died waits for it until the timeout of its framework.
START_GRACE = 0.5

#: Seconds that nodes get to show the stacks of ranks; after a quarter of them, a rank that does not
#: show its own is looked at from outside.
STACKS_TIMEOUT = 8.0

#: What the processes of a run begin with: to load it takes longer than all else that they do.
MODULES = (
    "miniray.train.controller.controller",
    "miniray.accelerators.registry",
    "fsspec.implementations.local",
)

#: Label of every node with its id.
NODE_LABEL = "ray.io/node-id"


def worker_options(
    resources: Mapping[str, float],
    group: Any,
    bundle: int,
    runtime_env: Mapping[str, Any] | None,
    preload: Sequence[str] = (),
    later: Sequence[str] = (),
) -> dict[str, Any]:
    custom = {
        name: amount
        for name, amount in resources.items()
        # A bundle on a node of the type is enough; the type itself need not be held.
        if name not in ("CPU", "GPU", "memory") and not name.startswith("accelerator_type:")
    }
    needed: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": custom,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    }
    others = {
        "memory": int(resources.get("memory", 0)),
        "runtime_env": dict(runtime_env or {}),
        "_preload": list(preload),
        "_preload_later": list(later),
    }
    return needed | {name: value for name, value in others.items() if value}


class WorkerGroup:
    """The actors of one attempt."""

    def __init__(self, spec: RunSpec, decision: ScalingDecision) -> None:
        #: Number of workers; of an elastic group it is known once it is placed.
        self.size = decision.num_workers
        self._spec = spec
        self._decision = decision
        self._resources = decision.resources_per_worker
        self._reservation: BundleReservation | None = None
        self._workers: list[Any] = []  # in order of rank once they are connected
        self._pools = PoolActors(spec)
        #: Where each rank runs, in order of rank; empty until the ranks are given out.
        self.infos: list[WorkerInfo] = []

    async def place(self) -> None:
        """Reserve the resources of all workers; waits until they are free.

        An elastic group takes what fits, at least ``ScalingDecision.least``.
        """
        decision = self._decision
        least = decision.num_workers if decision.least is None else decision.least
        sizes = range(least, decision.num_workers + 1, decision.step)
        await largest_reservation(self._ask, sizes, self._wait_in)

    def _ask(self, size: int) -> BundleReservation:
        scaling = self._spec.scaling_config
        selectors = scaling.bundle_label_selectors(size)
        bundles = [dict(self._resources)] * size
        return BundleReservation(bundles, scaling.bundle_strategy, selectors, self._spec.name)

    def _wait_in(self, reserved: BundleReservation) -> None:
        self._reservation, self.size = reserved, reserved.size

    def why_waiting(self) -> str:
        """Return which resources are short, and by how much; block for a moment."""
        try:
            # An elastic group that still looks for its size has no reservation yet.
            demand = None if self._reservation is None else waiting_demand(self._reservation.name)
            total, free = api.cluster_resources(), api.available_resources()
        except (MinirayError, OSError) as error:
            logger.warning("It is not known why the workers wait for resources: %s", error)
            return explain(self.size, {}, {}, {})
        reason = "" if demand is None else demand.reason
        return explain(self.size, self._resources, total, free, reason)

    def lost_bundles(self) -> list[int]:
        """Return the workers that have no place any more, by bundle; block for a moment."""
        return [] if self._reservation is None else self._reservation.lost()

    def reserve_beside(self, number: int) -> BundleReservation:
        """Ask for one worker more, beside those that run and ``number`` others."""
        nodes = ",".join(sorted({info.node_id for info in self.infos}))
        # One more only makes a larger group where the strategy allows it.
        beside = {"STRICT_PACK": f"in({nodes})", "STRICT_SPREAD": f"!in({nodes})"}
        scaling = self._spec.scaling_config
        condition = beside.get(scaling.bundle_strategy)
        selectors = scaling.bundle_label_selectors(self.size + number + 1)
        selector = selectors[-1] if selectors else {}
        if condition is not None:
            selector = {**selector, NODE_LABEL: condition}
        bundles, name = [dict(self._resources)], f"{self._spec.name}-to-grow"
        return BundleReservation(bundles, "PACK", [selector], name)

    async def start(self, carrier: Carrier, attempt: int) -> None:
        """Start the workers and connect them.

        Raises:
            GroupStartError: Some of them failed; the others are left as they are.
        """
        assert self._reservation is not None
        placement = self._reservation.placement
        backend, config = self._spec.backend, self._spec.run_config
        preload = (*MODULES, *self._spec.preload, *backend.preload(self._resources))
        later = backend.preload_later(self._resources)
        actor_class = remote(TrainWorker)
        self._workers = [
            actor_class.options(
                **worker_options(
                    self._resources, placement, bundle, config.worker_runtime_env, preload, later
                )
            ).remote(backend, config.logging_config)
            for bundle in range(self.size)
        ]
        nodes = api.nodes()
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        labels = {node["NodeID"]: node.get("Labels", {}) for node in nodes}
        described = [worker.describe.remote(addresses) for worker in self._workers]
        # Sent right behind, so that frameworks load while ranks are given out.
        prepared = [worker.prepare.remote() for worker in self._workers]
        await self._pools.start()
        infos: list[WorkerInfo] = [
            dataclasses.replace(info, labels=labels.get(info.node_id, {}))
            for info in await gather_workers(described)
        ]
        members = self._take_ranks(infos, carrier, attempt)
        order = [member.ranks.world_rank for member in members]
        self.infos = _in_order(infos, order)
        connected = [
            worker.connect.remote(member)
            for worker, member in zip(self._workers, members, strict=True)
        ]
        self._workers = _in_order(self._workers, order)
        await gather_workers(_in_order(prepared, order))
        await gather_workers(_in_order(connected, order))

    async def storage_problems(self, storage: RunStorage, token: str) -> dict[int, str]:
        """Return what keeps ranks from using the storage in which this probe is, by rank."""
        problems = await gather_workers(
            [worker.storage_problem.remote(storage, token) for worker in self._workers]
        )
        return {rank: problem for rank, problem in enumerate(problems) if problem}

    def _take_ranks(
        self, infos: Sequence[WorkerInfo], carrier: Carrier, attempt: int
    ) -> list[GroupMember]:
        """Return the place of each worker in the group, in the order of ``infos``."""
        unreachable = unreachable_address(infos)
        if unreachable is not None:
            raise GroupStartError({0: WorkerFailure.of(ConnectionError(unreachable))})
        ranks = assign_ranks(infos)
        shared = shares_devices(infos)
        in_order = _in_order(infos, [rank.world_rank for rank in ranks])
        environments = self._spec.backend.environments(in_order, self._resources)
        master = in_order[0]
        return [
            GroupMember(
                ranks=rank,
                address=info.address,
                master_address=master.address,
                master_port=master.port,
                listener=None,
                resources=self._resources,
                node_devices=shared_devices(infos, info.node_id),
                shares_devices=shared,
                controller=rank_calls(carrier, attempt, rank.world_rank),
                environment=environments[rank.world_rank],
            )
            for info, rank in zip(infos, ranks, strict=True)
        ]

    def run(
        self, loop: Any, setup: SessionSetup, carrier: Carrier
    ) -> list[Awaitable[WorkerOutcome]]:
        setup = dataclasses.replace(setup, pools=self._pools.actors)
        return [worker.run.remote(loop, setup, carrier) for worker in self._workers]

    def stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """Return what ranks do, as ``miniray stack`` shows it: main threads first; block for it."""
        from miniray.profiling.stacks import as_text

        infos = {rank: self.infos[rank] for rank in ranks}
        nodes = [bytes.fromhex(id) for id in {info.node_id for info in infos.values()}]
        ids = [bytes.fromhex(info.worker_id) for info in infos.values()]
        try:
            told = current_runtime().head.ask_nodes("stack", (ids,), STACKS_TIMEOUT, nodes)
        except (MinirayError, OSError) as error:
            return dict.fromkeys(ranks, f"Its node could not be asked for its stacks: {error}\n")
        found = {each["worker_id"]: each for _, answer, _ in told for each in answer or ()}
        texts = {}
        for rank, info in infos.items():
            each = found.get(info.worker_id)
            lines = as_text(each["stacks"]) if each is not None else "Its node did not show them.\n"
            texts[rank] = f"{each['note']}\n{lines}" if each is not None and each["note"] else lines
        return texts

    async def end_rank(self, rank: int) -> None:
        """End the process of a rank whose train loop has returned, unless others may need it."""
        worker = self._workers[rank]
        with contextlib.suppress(MinirayError):  # it has ended already, or is out of reach
            if await worker.serves_others.remote():
                return
        await _end([worker])

    async def stop(self, *, graceful: bool) -> None:
        """End the workers, ``graceful`` by themselves in ``EXIT_TIMEOUT``; free their resources."""
        workers, self._workers = self._workers, []
        if graceful:
            await _end(workers)
        for worker in workers:
            api.kill(worker)
        self._pools.stop()
        reserved, self._reservation = self._reservation, None
        if reserved is not None:
            reserved.remove()


async def gather_workers(refs: Sequence[Any]) -> list[Any]:
    """Return the results of one call to each worker.

    Raises:
        GroupStartError: Some calls failed; others may still be under way.
    """
    calls = [asyncio.ensure_future(ref) for ref in refs]
    try:
        _, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        if running:
            await asyncio.wait(running, timeout=START_GRACE)
    finally:
        for call in calls:
            call.cancel()
    failures: dict[int, WorkerFailure] = {}
    for position, call in enumerate(calls):
        error = call.exception() if call.done() and not call.cancelled() else None
        if isinstance(error, MinirayError):
            failures[position] = WorkerFailure.of(error.with_traceback(None))
        elif error is not None:
            raise error
    if failures:
        raise GroupStartError(failures)
    return [call.result() for call in calls]


async def _end(workers: Sequence[Any]) -> None:
    """Let workers end by themselves; kill those that do not within ``EXIT_TIMEOUT``."""
    ends = {
        asyncio.ensure_future(_wait_for_end(worker.__ray_terminate__.remote())): worker
        for worker in workers
    }
    if not ends:
        return
    _, late = await asyncio.wait(ends, timeout=EXIT_TIMEOUT)
    if late:
        logger.warning(
            "%d workers did not end within %s s and are killed.", len(late), EXIT_TIMEOUT
        )
    for task in late:
        task.cancel()
        api.kill(ends[task])


async def _wait_for_end(ref: Any) -> None:
    try:
        await ref
    except ActorError:
        return  # the worker has ended, as it should


def _in_order(items: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the items sorted by their place in ``order``."""
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


#: Seconds after which the user reads that the run waits for resources.
PLACEMENT_NOTE_AFTER = 5.0

#: Seconds between two checks whether workers that start have lost their bundles.
BUNDLE_CHECK = 3.0


async def place(
    group: WorkerGroup, limit: float | None, note: Callable[[str], None], blocking: Blocking
) -> None:
    """Wait for the resources of a group, for ``limit`` seconds; show the user what is missing.

    Raises:
        PlacementTimeoutError: The resources were not free in time.
    """
    first = PLACEMENT_NOTE_AFTER if limit is None else min(limit, PLACEMENT_NOTE_AFTER)
    placed = asyncio.ensure_future(group.place())
    try:
        await asyncio.wait({placed}, timeout=first)
        if not placed.done():
            note(await blocking(group.why_waiting))
            await asyncio.wait({placed}, timeout=None if limit is None else limit - first)
        if not placed.done():
            why = await blocking(group.why_waiting)
            raise PlacementTimeoutError(f"The workers were not placed in {limit:g} s. {why}")
        await placed
    finally:
        await end(placed)


async def start(group: WorkerGroup, carrier: Carrier, attempt: int, blocking: Blocking) -> None:
    """Start the workers of a group that is placed, and connect them.

    Raises:
        GroupStartError: Some could not be started, or their node was lost before they were: they
            would wait for a place again, which may be never.
    """
    starting = asyncio.ensure_future(group.start(carrier, attempt))
    try:
        while not starting.done():
            await asyncio.wait({starting}, timeout=BUNDLE_CHECK)
            lost = [] if starting.done() else await blocking(group.lost_bundles)
            if lost:
                died = WorkerFailure.of(ActorDiedError(DeathCause.NODE_LOST))
                raise GroupStartError(dict.fromkeys(lost, died))
        await starting
    finally:
        await end(starting)


async def check_shared(group: WorkerGroup, storage: RunStorage, blocking: Blocking) -> None:
    """Check that every rank can use the storage.

    Raises:
        StorageNotSharedError: Ranks do not see what is written to the storage here.
        StorageUnusableError: Nothing can be written to it where ranks are.
    """
    token = secrets.token_hex(8)
    await blocking(storage.write_probe, token)
    try:
        problems = await group.storage_problems(storage, token)
    finally:
        await blocking(storage.delete_probe, token)
    if not problems:
        return
    strangers = [rank for rank, problem in problems.items() if problem == NOT_SHARED]
    ranks = strangers or list(problems)
    nodes = sorted({group.infos[rank].address for rank in ranks})
    where = f"{listed(ranks)} on {', '.join(nodes)}"
    if strangers:
        raise StorageNotSharedError(
            f"The storage path {storage.storage_fs_path} is not shared by the machines of this "
            f"run: {where} did not find what the controller had written there. Set "
            f"RunConfig(storage_path=...) to a network folder or a URL that all machines reach."
        )
    raise StorageUnusableError(
        f"Nothing can be written to the storage path {storage.storage_fs_path} on some machines of "
        f"this run, so that their ranks could not store checkpoints. "
        f"{where[0].upper()}{where[1:]} got {problems[ranks[0]]}"
    )
