"""The controller of a run: an asyncio actor that goes from state to state.

It starts and ends worker groups, passes the calls of their ranks on to the attempt that runs, and
hands completed steps to the recorder. How an attempt ended is decided by ``Attempt``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from miniray.common.series import COUNTED
from miniray.exceptions import MinirayError, TaskError
from miniray.train.base.exceptions import (
    AttemptOverError,
    CallbackError,
    GroupStartError,
    StorageUnusableError,
    TrainingFailedError,
    WorkerFailure,
    describe,
)
from miniray.train.base.states import RunState, check_transition
from miniray.train.callbacks import CallbackRunner
from miniray.train.controller.attempt import Attempt, watch_for_hang
from miniray.train.controller.board import RunBoard
from miniray.train.controller.feed import ProgressFeed, Row
from miniray.train.controller.placement import Growth
from miniray.train.controller.recorder import RunRecorder
from miniray.train.controller.run_spec import STOPPED, RunFacts, RunOutcome, pause_after
from miniray.train.controller.waits import BlockingWork, end, first_of, within
from miniray.train.controller.worker_group import WorkerGroup, check_shared, place, start
from miniray.train.worker import rank_logs
from miniray.train.worker.rank_logs import RankLogs
from miniray.train.worker.session import SessionSetup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from miniray.train.base.reports import Step
    from miniray.train.base.states import ScalingDecision
    from miniray.train.controller.feed import Progress, Seen
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.worker import WorkerOutcome


logger = logging.getLogger(__name__)

#: Seconds that a rank's process lives on after its train loop has returned, while others run.
RETURN_GRACE = 2.0

#: After a rank has failed, seconds that others get to say why they failed too: a rank whose peer
#: died often fails before the death is known, and the error should name both.
FAILURE_GRACE = 0.5

#: After a rank has failed, seconds for the uploads of checkpoints that every rank has reported:
#: their steps need not be computed again.
UPLOAD_GRACE = 30.0


#: How an attempt ended that did not fail, and why, by the run's state.
_ENDED = {
    RunState.FINISHED: ("FINISHED", ""),
    RunState.RESIZING: ("RESIZED", "There was capacity for more workers."),
    RunState.ABORTED: ("ABORTED", STOPPED),
}


class TrainController:
    """Runs one training run; an actor with asyncio methods."""

    def __init__(
        self,
        spec: RunSpec,
        make_group: Callable[[RunSpec, ScalingDecision], WorkerGroup] = WorkerGroup,
    ) -> None:
        self._spec = spec
        self._make_group = make_group
        storage = spec.storage
        self._callbacks = CallbackRunner(spec.run_config.callbacks or [], spec.context())
        assert spec.run_config.checkpoint_config is not None
        assert spec.run_config.logging_config is not None
        spec.run_config.logging_config.apply()
        self._token = f"{spec.run_id}-{secrets.token_hex(8)}"
        self._recorder = RunRecorder(
            storage, spec.run_config.checkpoint_config, self._callbacks, self._token
        )
        self._feed = ProgressFeed()
        self._work = BlockingWork(storage.path, self._feed.note)
        self._blocking = self._work.do
        self._attempt: Attempt | None = None
        #: Steps that every rank has reported and that are to be recorded.
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._logs = RankLogs(storage)
        self._facts = RunFacts(spec.name, spec.run_id, self._token)
        self._run_board = RunBoard(spec, self._facts, self._recorder, self._feed)
        self._state = RunState.INITIALIZING
        self._group: WorkerGroup | None = None
        #: Checkpoints that a rank may still be writing although its attempt has ended.
        self._unsafe_names: set[str] = set()
        interval = spec.scaling_config.elastic_resize_monitor_interval_s
        self._growth = Growth(spec.group, interval)
        self._size = 0  # world size of the group that was connected last
        self._message = ""
        self._failure: WorkerFailure | None = None
        self._machine: asyncio.Task[None] | None = None
        self._stop_asked = False
        self._began = False  # whether it has written to its folder, or tried to

    # --- calls of the driver and the ranks ---------------------------------------------

    async def run(self, carrier: Carrier, loop: list[Any]) -> RunOutcome:
        """Run to the end.

        Args:
            carrier: The way to this controller, for the ranks.
            loop: The ref of the train loop, in a list so that it is not fetched here: it may
                need modules that only the ranks should load.
        """
        self._run_board.open()
        recording = asyncio.create_task(self._record_steps())
        self._machine = asyncio.create_task(self._go_through_states(carrier, loop))
        if self._stop_asked:
            self._machine.cancel()
        try:
            await first_of(self._machine, recording)
        except asyncio.CancelledError:
            try:
                await self._record_rest(recording)  # before callbacks get the end
                if not self._state.terminal:  # else callbacks have just got its end
                    await self._move(RunState.ABORTED)
            except CallbackError as error:
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - the driver gets it
            self._fail(error)
        finally:
            await end(self._machine)
            await self._record_rest(recording)
            await self._stop_group(graceful=self._state is RunState.FINISHED)
        return await self._finish()

    async def call(self, method: str, attempt: int, rank: int, *arguments: Any) -> Any:
        """Pass the call of a rank on to its attempt; ``RankCalls`` has the methods.

        Raises:
            AttemptOverError: Another attempt runs.
        """
        current = self._attempt
        if current is None or current.number != attempt:
            raise AttemptOverError(f"Rank {rank} of attempt {attempt} was replaced: others run.")
        return await getattr(current, method)(rank, *arguments)

    async def progress(self, seen: Seen) -> Progress:
        return await self._feed.after(seen)

    async def abort(self, at_once: bool = False) -> None:
        """Stop the run once the uploads that ranks have begun have ended.

        ``run`` returns when everything has ended.
        """
        self._stop_asked = True
        if self._attempt is not None and not at_once:
            await self._attempt.drain()
        if self._machine is not None:
            self._machine.cancel()

    # --- the states ---------------------------------------------------------------------

    async def _go_through_states(self, carrier: Carrier, loop: list[Any]) -> None:
        while not self._state.terminal:
            if self._state is RunState.INITIALIZING:
                await self._blocking(self._open)
                following = RunState.SCHEDULING
            elif self._state is RunState.SCHEDULING:
                following = await self._schedule(carrier)
            elif self._state is RunState.RUNNING:
                following = await self._supervise(carrier, loop)
            else:
                following = await self._restart()
            await self._move(following)

    def _open(self) -> None:
        storage = self._spec.storage
        try:
            storage.refuse_strangers()
            self._began = True
            self._run_board.write(self._state, self._message)
            configuration = json.dumps(dict(self._spec.configuration), indent=1)
            storage.files.write("config.json", configuration)
        except StorageUnusableError:
            raise
        except Exception as error:  # clients of stores raise what they like
            raise StorageUnusableError(
                f"The storage path {storage.storage_fs_path} can't be used: "
                f"{type(error).__name__}: {error}. Set RunConfig(storage_path=...) to a folder or "
                f"URL that can be written to."
            ) from error
        self._run_board.forget_old()
        self._logs.open()
        self._recorder.open()
        self._callbacks.start()

    async def _schedule(self, carrier: Carrier) -> RunState:
        spec = self._spec
        decision = self._growth.next_group()
        self._group = group = self._make_group(spec, decision)
        limit = spec.scaling_config.placement_timeout_s
        await place(group, limit, self._feed.note, self._blocking)
        self._attempt = Attempt(
            self._facts.begin_attempt(group.size),
            group.size,
            self._recorder,
            self._work,
            self._steps,
            self._feed.note,
            spec.collective_timeout,
            frozenset(self._unsafe_names),
        )
        try:
            await start(group, carrier, self._attempt.number, self._blocking)
            await check_shared(group, spec.storage, self._blocking)
        except GroupStartError as error:
            for rank, failure in error.failures.items():
                self._attempt.fail(rank, failure)
            return await self._judge_failure(at_start=error.lost)
        self._run_board.watch(self._attempt, group.infos)
        nodes = len({info.node_id for info in group.infos})
        told = (self._attempt.number, spec.name, group.size, nodes)
        logger.info("attempt %d of run %s has started: workers %d, nodes %d", *told)
        self._facts.lost_in_a_row = 0
        old, self._size = self._size, group.size
        if old not in (0, group.size) and self._callbacks:
            await self._blocking(self._callbacks.tell, "after_resize", old, group.size)
        return RunState.RUNNING

    async def _supervise(self, carrier: Carrier, loop: list[Any]) -> RunState:
        assert self._group is not None
        assert self._attempt is not None
        setup = SessionSetup(
            storage=self._spec.storage,
            token=self._token,
            attempt=self._attempt.number,
            first_number=self._attempt.first_number,
            checkpoint=self._recorder.latest_checkpoint,
        )
        self._attempt.begin()
        self._facts.since = time.time()
        if self._spec.group.least is not None:
            self._growth.begin(self._group.size, self._group.reserve_beside)
        outcomes = self._group.run(loop[0], setup, carrier)
        watches = [self._watch(rank, each) for rank, each in enumerate(outcomes)]
        if (limit := self._spec.failures.hang_timeout_s) is not None:
            look, storage = self._group.stacks, self._spec.storage
            watches.append(watch_for_hang(self._attempt, limit, look, storage))
        watching = asyncio.gather(*watches)
        over = asyncio.ensure_future(self._attempt.over.wait())
        try:
            ends: set[asyncio.Future[Any]] = {over, watching}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises what is wrong with the watching itself
            if self._attempt.failures:
                await within(FAILURE_GRACE, self._attempt.all_ended.wait())
                await within(UPLOAD_GRACE, self._attempt.settle())
        finally:
            await end(over, watching)
        self._attempt.close()
        await self._steps.join()
        if self._attempt.failures:
            return await self._judge_failure()
        return RunState.RESIZING if self._attempt.running else RunState.FINISHED

    async def _watch(self, rank: int, outcome: Awaitable[WorkerOutcome]) -> None:
        assert self._attempt is not None
        try:
            result = await outcome
        except MinirayError as error:
            if isinstance(error, TaskError) and not _is_own(error.cause):
                # What the train loop raises is part of an outcome, so it has not begun.
                self._attempt.lose(rank, WorkerFailure.to_load(error))
                return
            # The frames in which it was awaited here do not help.
            self._attempt.lose(rank, WorkerFailure.of(error.with_traceback(None)))
            return
        if result.failure is not None:
            self._attempt.fail(rank, result.failure)
            return
        self._attempt.finish(rank, result.value)
        # Its end closes its sockets, which fails a collective call in which others wait for it.
        await asyncio.sleep(RETURN_GRACE)
        assert self._group is not None
        await self._group.end_rank(rank)

    async def _restart(self) -> RunState:
        assert self._attempt is not None
        if self._state is RunState.RESIZING:
            self._feed.note(f"There is capacity for more workers than {self._size}.")
        await self._stop_group(graceful=False)
        self._attempt.replace()
        self._unsafe_names |= self._attempt.unfinished_uploads()
        await self._blocking(self._recorder.clear_incomplete, self._attempt.next_number)
        # Whatever ends workers at once at their start is given time to go by.
        await asyncio.sleep(pause_after(self._facts.lost_in_a_row))
        return RunState.SCHEDULING

    async def _judge_failure(self, *, at_start: bool = False) -> RunState:
        assert self._attempt is not None
        attempt, failures = self._attempt, self._attempt.failures
        count = self._facts.count_failure(at_start=at_start)
        kind = next((each.kind for each in failures.values()), "start")
        run = ("run", self._spec.name)
        COUNTED.count("train_failures_total", (run, ("cause", kind)))
        self._message = describe(failures, attempt.returned, attempt.activities())
        await self._blocking(self._tell_failure, failures)
        if not self._spec.failures.allows(count, at_start=at_start):
            return RunState.ERRORED
        self._feed.note(f"Starting the workers again, since some failed:\n{self._message}")
        return RunState.RESTARTING

    def _tell_failure(self, failures: dict[int, WorkerFailure]) -> None:
        if self._callbacks:
            exceptions = {rank: failure.exception() for rank, failure in failures.items()}
            self._callbacks.tell("after_exception", exceptions)

    # --- steps, states, endings -----------------------------------------------------------

    async def _record_steps(self) -> None:
        while True:
            steps = [await self._steps.get()]
            while not self._steps.empty():
                steps.append(self._steps.get_nowait())
            assert self._attempt is not None
            first = self._attempt.first_number
            notes = await self._blocking(self._recorder.record, first, steps)
            self._feed.add_rows(Row.of(first + step.index, step) for step in steps)
            for note in notes:
                self._feed.note(note)
            self._run_board.reported()
            self._attempt.recorded(steps[-1].index)
            if any(step.uploads for step in steps):
                self._facts.keep()
                if self._attempt.can_resize and self._growth.at_checkpoint():
                    self._attempt.over.set()
            for _ in steps:
                self._steps.task_done()

    async def _record_rest(self, recording: asyncio.Task[None]) -> None:
        """Record what ranks have reported by now, unless recording itself has failed."""
        if self._attempt is not None:
            self._attempt.close()
        rest = asyncio.ensure_future(self._steps.join())
        await asyncio.wait({rest, recording}, return_when=asyncio.FIRST_COMPLETED)
        await end(rest, recording)

    async def _move(self, state: RunState) -> None:
        old = self._state
        check_transition(old, state)
        self._state = state
        self._feed.set_state(state)
        if state is RunState.RUNNING:
            await self._blocking(self._note_running)
        if self._callbacks:
            await self._blocking(self._callbacks.tell, "on_state_change", old, state)

    def _fail(self, error: BaseException) -> None:
        """End in ERRORED without calling callbacks, which may have failed."""
        if isinstance(error, TrainingFailedError):
            logger.debug("Run %s failed.", self._spec.name, exc_info=error)
            error = error.with_traceback(None)  # it says all that a user needs
        self._failure = WorkerFailure.of(error)
        self._message = self._failure.summary
        self._state = RunState.ERRORED
        self._feed.set_state(RunState.ERRORED)

    def _fail_at_end(self, error: Exception) -> None:
        """Enter that a run could not be ended as it should, unless it has failed before."""
        if self._state is RunState.ERRORED:
            logger.warning(
                "Run %s has failed, and could not be ended as it should: %s: %s",
                self._spec.name,
                type(error).__name__,
                error,
            )
            return
        self._fail(error)

    async def _stop_group(self, *, graceful: bool) -> None:
        await self._growth.end()
        group, self._group = self._group, None
        if group is not None:
            await group.stop(graceful=graceful)
            state, reason = _ENDED.get(self._state, ("FAILED", self._message))
            why = reason.partition("\n")[0]
            logger.info("the attempt has ended: %s", f"{state}. {why}" if why else state)
            self._facts.end_attempt(state, reason, self._logs.keep(group.infos))

    async def _finish(self) -> RunOutcome:
        aborted = self._state is RunState.ABORTED
        await self._logs.close(rank_logs.ABORT_TIMEOUT if aborted else rank_logs.TIMEOUT)
        # What is stored of the run comes last, so that it includes what the others raise.
        for ending in (self._end_callbacks, self._close_recorder, self._write_end):
            try:
                await self._blocking(ending)
            except Exception as error:  # noqa: PERF203, BLE001 - the driver gets it
                self._fail_at_end(error)
        self._work.close()  # idle: its work was waited for
        self._run_board.close()
        return self._outcome()

    def _outcome(self) -> RunOutcome:
        attempt = self._attempt
        by_workers = self._state is RunState.ERRORED and self._failure is None
        return RunOutcome(
            state=self._state,
            metrics=self._recorder.latest_metrics,
            checkpoints=self._recorder.checkpoints,
            return_value=attempt.return_value if attempt is not None else b"",
            message=self._message,
            worker_failures=attempt.failures if attempt is not None and by_workers else {},
            controller_failure=self._failure,
        )

    def _end_callbacks(self) -> None:
        error = self._message if self._state is RunState.ERRORED else None
        self._callbacks.end(self._state, error)

    def _close_recorder(self) -> None:
        if self._began and self._recorder.owned:
            self._recorder.close()

    def _write_end(self) -> None:
        if self._began and self._recorder.owned:
            self._run_board.write(self._state, self._message)

    def _note_running(self) -> None:
        """Store that ranks run now, so that a run that is killed is seen not to have ended."""
        self._spec.storage.require_owner(self._token)
        self._run_board.write(self._state, self._message)


def _is_own(error: BaseException) -> bool:
    """Return whether an exception is of miniray; a plain ``MinirayError`` stands for a lost one."""
    return isinstance(error, MinirayError) and type(error) is not MinirayError
