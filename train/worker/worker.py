"""The actor of one rank: it loads the framework, joins the group and runs the train loop.

All of it runs in the main thread of the actor's process, where user code may
install signal handlers. When to do what is the controller's decision.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import multiprocessing
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.common.names import RANK_VARIABLE
from miniray.common.runtime import current_runtime, runtime_or_none
from miniray.runtime_context import get_runtime_context
from miniray.train.base.exceptions import WorkerFailure
from miniray.train.base.ranks import WorkerInfo
from miniray.train.data.shards import Datasets, Shards, set_shards
from miniray.train.worker import context
from miniray.train.worker.rank_logs import output_of_this_process
from miniray.train.worker.session import RankSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.train.base.ranks import Ranks
    from miniray.train.config import LoggingConfig
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.backend import Backend, GroupMember
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.session import SessionSetup

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: How the names of miniray's own threads begin.
_OWN_THREADS = "miniray-"


@dataclasses.dataclass(frozen=True)
class TrainLoop:
    """The user's function, its config, and its datasets."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    datasets: Datasets = dataclasses.field(default_factory=Datasets)

    def __call__(self) -> Any:
        return self.function(*self.arguments)


def sent(loop: TrainLoop, put: Callable[[Any], T]) -> T:
    """Pickle a train loop without datasets.

    Raises:
        TypeError: It can't be pickled; the text names the variable or the item at fault.
    """
    try:
        return put(loop)
    except TypeError as error:
        from miniray.values.serialization import at_fault, explain

        parts = [("train_loop_per_worker", loop.function)]
        parts += [("train_loop_config", argument) for argument in loop.arguments]
        for name, part in parts:
            fault = at_fault(part, 1)
            if fault is not None:
                raise explain(part, fault[2], name, "train loop") from error.__cause__
        raise


@dataclasses.dataclass(frozen=True)
class WorkerOutcome:
    """How the train loop of a rank ended: with a pickled value or a failure."""

    value: bytes = b""
    failure: WorkerFailure | None = None


class TrainWorker:
    """One rank of a worker group."""

    def __init__(self, backend: Backend, logging_config: LoggingConfig | None = None) -> None:
        self._backend = backend
        self._listener: socket.socket | None = None
        self._ranks: Ranks | None = None
        self._session: RankSession | None = None
        if logging_config is not None:
            logging_config.apply()

    def describe(self, addresses: Mapping[str, str]) -> WorkerInfo:
        """Return where this worker runs; from now on it listens, should it become rank 0."""
        runtime = get_runtime_context()
        node_id = runtime.get_node_id()
        address = addresses[node_id]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        _, port, *_ = self._listener.getsockname()
        return WorkerInfo(
            node_id=node_id,
            address=address,
            port=port,
            pid=os.getpid(),
            accelerator_ids={
                name: list(ids) for name, ids in runtime.get_accelerator_ids().items() if ids
            },
            worker_id=runtime.get_worker_id(),
            output=output_of_this_process(),
        )

    def prepare(self) -> None:
        """Load the framework, while the controller gives out the ranks."""
        self._backend.prepare()

    def connect(self, member: GroupMember) -> None:
        self._ranks = member.ranks
        os.environ[RANK_VARIABLE] = str(member.ranks.world_rank)
        listener, self._listener = self._listener, None
        assert listener is not None
        if member.ranks.world_rank != 0:
            listener.close()
            listener = None
        self._backend.on_start(dataclasses.replace(member, listener=listener))

    def storage_problem(self, storage: RunStorage, token: str) -> str:
        """Return why this process cannot use the controller's storage; empty if it can."""
        assert self._ranks is not None
        return storage.problem_here(token, writes=self._ranks.local_rank == 0)

    def run(self, loop: TrainLoop, setup: SessionSetup, carrier: Carrier) -> WorkerOutcome:
        """Run the train loop to its end; its exception is part of the outcome."""
        assert self._ranks is not None
        session = self._session = RankSession(setup, self._ranks, carrier)
        context.set_session(session)
        ranks = self._ranks
        shards = Shards(loop.datasets, ranks.world_rank, ranks.world_size, setup.pools)
        runtime = runtime_or_none()  # in local mode there need be no cluster
        if runtime is not None:
            runtime.answer("train_rank", functools.partial(_about_rank, session, shards))
            runtime.answer("metrics of rank", functools.partial(_metrics, session, shards))
        earlier = set_shards(shards)  # in local mode those of a train loop that runs this one
        try:
            value = loop()
            session.finish()
            self._backend.on_shutdown()
            told = value is not None and self._ranks.world_rank == 0
            outcome = WorkerOutcome(value=_pickled(value) if told else b"")
        except BaseException as error:  # noqa: BLE001 - also sys.exit() in a train loop is a failure
            return self._give_up(session, error)
        finally:
            set_shards(earlier)
            if runtime is not None:
                runtime.answer("train_rank", None)
                runtime.answer("metrics of rank", None)
        context.set_session(None)
        return outcome

    def serves_others(self) -> bool:
        """Return whether the train loop left things that other ranks may use and that end with us.

        Such are actors, and the threads and child processes for which a program waits at its end.
        """
        threads = [
            thread
            for thread in threading.enumerate()
            if not (thread.daemon or thread is threading.main_thread())
            and not thread.name.startswith(_OWN_THREADS)
        ]
        children = [child for child in multiprocessing.active_children() if not child.daemon]
        return bool(threads or children) or current_runtime().owns_actors()

    def _give_up(self, session: RankSession, error: BaseException) -> WorkerOutcome:
        # What it has reported may complete checkpoints, so it is uploaded until this process ends
        # with its group; uploads of the user get the storage from the session.
        session.close(upload_rest=True)
        # The outcome may come by another connection, and with it the attempt is over.
        try:
            session.confirm_reports()
        except Exception as unconfirmed:  # noqa: BLE001 - the failure of the loop is what counts
            logger.warning("a report did not reach the controller: %s", unconfirmed)
        return WorkerOutcome(failure=WorkerFailure.of(error, skip_frames=2))


def _about_rank(session: RankSession, shards: Shards) -> dict[str, Any]:
    """Return a rank's answer to the page of a run."""
    datasets = shards.progress()
    return {
        "datasets": datasets,
        "data_wait": sum(each["waited"] for each in datasets.values()),
        "blocked": round(session.blocked, 3),
        "device_memory": _device_memory(),
    }


def _metrics(session: RankSession, shards: Shards) -> list[tuple[Any, ...]]:
    """Return what a rank counts, as series of metrics."""
    rank = ("run", session.storage.name), ("rank", str(session.ranks.world_rank))
    blocked = "Seconds that a train loop has spent in report()."
    waited = "Seconds that a train loop has waited for batches."
    given = "Rows that a train loop was given."
    rows: list[tuple[Any, ...]] = [
        ("counter", "train_report_blocked_seconds", blocked, (), rank, [session.blocked])
    ]
    for name, read in shards.progress().items():
        tags = (*rank, ("dataset", name))
        rows.append(("counter", "train_data_wait_seconds", waited, (), tags, [read["waited"]]))
        rows.append(("counter", "train_data_rows", given, (), tags, [float(read["rows"])]))
    return rows


def _device_memory() -> int | None:
    """Return the bytes that PyTorch holds on the GPUs of this process; None if it uses none."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return sum(int(cuda.memory_reserved(index)) for index in range(cuda.device_count()))


def _pickled(value: Any) -> bytes:
    import cloudpickle

    from miniray.values.serialization import explain

    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:  # whatever a user's class raises
        raise explain(value, error, "what the train loop returned", "driver") from error
    return pickled
