"""What is known of a worker that failed, in a form that any process can read.

The exception itself may be of a class that only the worker and the driver can
load, so the controller passes it on as bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import traceback
from types import MappingProxyType
from typing import TYPE_CHECKING

from miniray.common.exception_transport import pack, unpack
from miniray.train.base.exceptions import TrainLoopLoadError
from miniray.train.base.ranks import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from miniray.exceptions import TaskError

#: An error tells of at most this many ranks what they were doing, or why they failed at one place.
MOST_TOLD = 16
#: An exception keeps so many causes on its way, itself included.
MOST_CAUSES = 8


@dataclasses.dataclass(frozen=True)
class WorkerFailure:
    """Why a worker failed.

    Attributes:
        summary: Type and message of the exception, or how the process ended.
        traceback: The traceback as text; empty when the process ended.
        pickled: The exception and its causes, each pickled; none when it can't be pickled.
    """

    summary: str
    traceback: str = ""
    pickled: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, error: BaseException, *, skip_frames: int = 0) -> WorkerFailure:
        """Describe an exception; ``skip_frames`` leaves out the outermost frames."""
        trace = error.__traceback__
        for _ in range(skip_frames):
            trace = trace.tb_next if trace is not None else None
        text = "".join(traceback.format_exception(type(error), error, trace)) if trace else ""
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(_noted(summary, error), text and _noted(text, error), _pickled(error))

    @classmethod
    def to_load(cls, error: TaskError) -> WorkerFailure:
        """Describe that a worker could not load the train loop, so that nothing has run."""
        failure = TrainLoopLoadError(
            f"The worker could not load the train loop: {type(error.cause).__name__}: "
            f"{error.cause}. What train_loop_per_worker, train_loop_config and datasets refer to "
            f"has to be there, too: install it on every node, or give it with "
            f"RunConfig(worker_runtime_env=...)."
        )
        failure.__cause__ = error.cause
        return cls.of(failure)

    @property
    def kind(self) -> str:
        """The name of the exception's class."""
        return self.summary.partition(":")[0].rpartition(".")[2].strip()

    @property
    def frames(self) -> str:
        """The traceback without its last line, which is the summary."""
        return self.traceback.rstrip().removesuffix(self.summary).rstrip()

    def exception(self) -> BaseException:
        """Return the exception, or a RuntimeError with its text where it can't be loaded."""
        errors = _unpickled(self.pickled)
        for error, cause in itertools.pairwise(errors):
            error.__cause__ = cause
        if errors:
            return errors[0]
        return RuntimeError(self.traceback or self.summary)


def _noted(text: str, error: BaseException) -> str:
    """Return the text of an exception with its notes.

    Python adds them by itself from version 3.11 on, as does the package exceptiongroup before.
    """
    if sys.version_info >= (3, 11):
        return text
    notes = "\n".join(getattr(error, "__notes__", ()))
    return text if text.rstrip().endswith(notes) else f"{text.rstrip()}\n{notes}"


def _pickled(error: BaseException) -> tuple[bytes, ...]:
    """Pickle an exception, then its causes, which pickle leaves out, up to one that can't be."""
    each: BaseException | None = error
    pickled: list[bytes] = []
    while each is not None and len(pickled) < MOST_CAUSES:
        blob, _ = pack(each)
        if blob is None:  # user exceptions may hold anything; the text remains
            break
        pickled.append(blob)
        each = each.__cause__
    return tuple(pickled)


def _unpickled(pickled: Sequence[bytes]) -> list[BaseException]:
    """Return the exceptions, up to the first that can't be loaded here."""
    errors: list[BaseException] = []
    for data in pickled:
        try:
            errors.append(unpack(data))
        except Exception:  # noqa: BLE001, PERF203 - whatever is raised when a class is missing
            break
    return errors


class GroupStartError(Exception):
    """Some workers could not be started or connected.

    Attributes:
        failures: Why, by rank; by position in the group where ranks were not yet given out.
    """

    def __init__(self, failures: dict[int, WorkerFailure]) -> None:
        super().__init__(f"{len(failures)} workers could not be started")
        self.failures = failures

    @property
    def lost(self) -> bool:
        """Whether processes or nodes were lost, rather than their code having failed."""
        from miniray.exceptions import ActorError

        errors = [failure.exception() for failure in self.failures.values()]
        return any(isinstance(e, ActorError) and not e.actor_init_failed for e in errors)


def describe(
    failures: Mapping[int, WorkerFailure],
    returned: Collection[int],
    activities: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return what happened as text, with ranks that failed alike told together."""
    parts = _told_together(failures)
    if returned:
        parts.append(f"The train loop had already returned on: {listed(returned)}.")
    if activities:
        lines = [f"  rank {rank} {doing}" for rank, doing in sorted(activities.items())]
        if len(lines) > MOST_TOLD:
            lines[MOST_TOLD:] = [f"  and {len(lines) - MOST_TOLD} other ranks"]
        parts.append("Meanwhile:\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _told_together(failures: Mapping[int, WorkerFailure]) -> list[str]:
    """Return one text for all ranks that failed at the same place, in order of their first."""
    places: dict[str, dict[str, list[int]]] = {}
    for rank, failure in sorted(failures.items()):
        place = failure.frames or failure.summary
        places.setdefault(place, {}).setdefault(failure.summary, []).append(rank)
    texts = []
    for reasons in places.values():
        lines = [
            f"[{listed(ranks).capitalize()}] {summary}"
            for summary, ranks in list(reasons.items())[:MOST_TOLD]
        ]
        if len(reasons) > MOST_TOLD:
            lines.append(f"and {len(reasons) - MOST_TOLD} more of these, at the same place:")
        elif len(reasons) > 1:
            lines.append("All of these at the same place:")
        first = failures[min(rank for ranks in reasons.values() for rank in ranks)]
        lines.append(first.frames if len(reasons) > 1 else first.traceback)
        texts.append("\n".join(lines).rstrip())
    return texts
