"""Every error that miniray raises, each picklable, with its facts as attributes.

The class says what happened, the message says it in sentences, names the thing and what to do.
Ray's names for the same errors are aliases at the end.
"""

from __future__ import annotations

import enum
import signal
from typing import TYPE_CHECKING

from miniray.common.absent import absent, tell_imports
from miniray.common.names import printable, without_passwords
from miniray.common.task_error import MinirayError, TaskError

__all__ = [
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorError",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "AuthenticationError",
    "CodeStoreFullError",
    "DeathCause",
    "EngineError",
    "GetTimeoutError",
    "JobAlreadyExistsError",
    "JobError",
    "JobNotFoundError",
    "JobRunningError",
    "LocalRayletDiedError",
    "MinirayError",
    "NodeDiedError",
    "NotInitializedError",
    "ObjectLostError",
    "ObjectStoreFullError",
    "OwnerDiedError",
    "PendingCallsLimitExceeded",
    "PendingCallsLimitExceededError",
    "PlacementGroupRemovedError",
    "RayActorError",
    "RayError",
    "RayTaskError",
    "RuntimeEnvSetupError",
    "TaskCancelledError",
    "TaskError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "VersionMismatchError",
    "WorkerCrashedError",
]


class NotInitializedError(MinirayError, RuntimeError):
    """There is no runtime to use: none was started, it ended, or this is a forked child."""


class VersionMismatchError(MinirayError):
    """Two processes of one cluster run different versions of miniray or Python."""

    def __init__(self, what: str, ours: str, theirs: str) -> None:
        super().__init__(
            f"This process has {what} {ours}, the cluster has {theirs}. "
            f"Install the same version on every machine and start the processes again."
        )
        self.what = what
        self.ours = ours
        self.theirs = theirs


class AuthenticationError(MinirayError, ConnectionError):
    """A peer could not prove that it belongs to the cluster, or this process could not.

    A ``ConnectionError``, so that code which treats a peer as gone on any socket error
    does the same here. Its text never contains a secret.
    """


# --- errors of actors -------------------------------------------------------------------


class DeathCause(enum.Enum):
    """Why an actor died."""

    UNKNOWN = "unknown"
    KILLED = "killed"  # by kill()
    EXITED = "exited"  # its process ended, with a code or by a signal
    EXIT_ACTOR = "exit_actor"  # a planned exit
    NODE_LOST = "node lost"
    CREATION_FAILED = "creation failed"  # __init__ raised, or its environment can't be made
    OWNER_DIED = "owner died"
    OUT_OF_SCOPE = "out of scope"  # its last handle went away
    GROUP_REMOVED = "placement group removed"


class ActorError(MinirayError):
    """An actor could not finish a call: it is dead, or can't be reached now.

    Attributes:
        actor_id: Hex id of the actor.
        class_name: Name of its class.
    """

    def __init__(
        self,
        message: str = "The actor failed before it had finished this call.",
        *,
        actor_id: str = "",
        class_name: str = "",
    ) -> None:
        super().__init__(message)
        self.actor_id = actor_id
        self.class_name = class_name

    @property
    def error_msg(self) -> str:
        """The message."""
        return str(self)

    @property
    def actor_init_failed(self) -> bool:
        """Whether the actor's constructor failed."""
        return False

    @property
    def preempted(self) -> bool:
        """Whether the actor's node was taken away."""
        return False


class ActorDiedError(ActorError):
    """The actor is dead; calls that it had not finished may or may not have had effects.

    Attributes:
        cause: Why it died. For an error that came out of a task it is the exception, as in each
            ``TaskError``; ``error.cause.cause`` is the reason then.
        exit_code: Exit code of its process; a negative one is the signal that ended it.
        pid: Process id it had, or 0.
        node_id: Hex id of its node, or empty.
        creation_error: For CREATION_FAILED the error of the constructor.
        detail: What else is known, as a sentence.
        restarts: How often it had been started again.
        max_restarts: How often it might have been; -1 is no limit.
    """

    def __init__(
        self,
        cause: DeathCause = DeathCause.UNKNOWN,
        *,
        actor_id: str = "",
        class_name: str = "",
        exit_code: int | None = None,
        pid: int = 0,
        node_id: str = "",
        creation_error: TaskError | None = None,
        detail: str = "",
        restarts: int = 0,
        max_restarts: int = 0,
    ) -> None:
        name = printable(class_name)
        actor = f"{name} ({actor_id})" if name and actor_id else name or actor_id
        process = f"its process{f' {pid}' if pid else ''}{f' on node {node_id}' if node_id else ''}"
        reason = {
            DeathCause.UNKNOWN: "the reason is not known",
            DeathCause.KILLED: "it was killed by miniray.kill()",
            DeathCause.EXITED: f"{process} {describe_exit(exit_code)}",
            DeathCause.EXIT_ACTOR: "it ended itself with exit_actor() or __ray_terminate__",
            DeathCause.NODE_LOST: f"its node{f' {node_id}' if node_id else ''} was lost",
            DeathCause.CREATION_FAILED: "it could not be created",
            DeathCause.OWNER_DIED: "the process that created it ended; actors with "
            'lifetime="detached" outlive their creator once their arguments have values',
            DeathCause.OUT_OF_SCOPE: "its last handle went out of scope",
            DeathCause.GROUP_REMOVED: "its placement group was removed",
        }[cause]
        if restarts:
            times = f"{restarts} restart{'s' * (restarts > 1)}"
            reason += f", after {times} (max_restarts={max_restarts})"
        message = f"The actor {actor} died: {reason}.".replace("actor  died", "actor died")
        if detail:
            message += f" {detail}"
        if creation_error is not None:
            message += f"\n{creation_error}"
        super().__init__(message, actor_id=actor_id, class_name=class_name)
        #: Not ``cause``: that of a TaskError which is an ActorDiedError too is this error.
        self._death = cause
        self.cause = cause
        self.exit_code = exit_code
        self.pid = pid
        self.node_id = node_id
        self.creation_error = creation_error
        self.detail = detail
        self.restarts = restarts
        self.max_restarts = max_restarts

    @property
    def actor_init_failed(self) -> bool:
        """Whether the actor's constructor failed."""
        return self._death is DeathCause.CREATION_FAILED

    @property
    def preempted(self) -> bool:
        """Whether the actor's node was taken away."""
        return self._death is DeathCause.NODE_LOST


class ActorUnavailableError(ActorError):
    """The actor can't be reached now; the call may or may not have run, and may be tried again."""

    def __init__(
        self, reason: str, *, actor_id: str = "", class_name: str = "", tries: int = 1
    ) -> None:
        actor = f"{printable(class_name) or 'of this call'} ({actor_id})"
        tried = f"It was tried {tries} times (max_task_retries={tries - 1})."
        if tries == 1:
            tried = "It can be tried again; max_task_retries makes that automatic."
        super().__init__(
            f"The actor {actor} is unavailable: {reason}. "
            f"The call may or may not have run. {tried}",
            actor_id=actor_id,
            class_name=class_name,
        )
        self.reason = reason


#: Begins the sentence that says where a process's log is.
ITS_LOG = "Its log is"


def describe_exit(code: int | None, *, hint: bool = True) -> str:
    """Say in words how a process ended; a negative code is a signal's number.

    Args:
        code: Exit code; None: not known.
        hint: Whether to say what a signal mostly means.
    """
    if code is None:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    meaning = "; the kernel sends it when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by signal {-code} ({name}{meaning if hint else ''})"


class ActorAlreadyExistsError(MinirayError, ValueError):
    """An actor of this name exists already in the namespace."""

    def __init__(self, name: str, namespace: str) -> None:
        super().__init__(
            f"The name {name!r} is taken by another actor in namespace {namespace!r}. "
            f"Use miniray.get_actor({name!r}), or get_if_exists=True to get the existing one."
        )
        self.name = name
        self.namespace = namespace


class PendingCallsLimitExceededError(MinirayError):
    """The actor has as many unfinished calls as ``max_pending_calls`` allows."""

    def __init__(
        self, message: str = "", *, limit: int = 0, actor_id: str = "", class_name: str = ""
    ) -> None:
        actor = printable(class_name) or actor_id
        super().__init__(
            message
            or f"The actor {actor} has {limit} unfinished calls of this caller, "
            f"which is its max_pending_calls. Wait for some of them before calling again."
        )
        self.limit = limit
        self.actor_id = actor_id
        self.class_name = class_name


# --- errors of tasks, placement and processes -----------------------------------------------


class WorkerCrashedError(MinirayError):
    """The worker process ended while it ran a task.

    Attributes:
        function_name: The task.
        pid: Process id of the worker, or 0.
        node_id: Hex id of its node, or empty.
        exit_code: Exit code; a negative one is the signal that ended it; None if not known.
        detail: What else is known, as a sentence.
        tries: How often the task was begun.
    """

    def __init__(
        self,
        function_name: str = "",
        *,
        pid: int = 0,
        node_id: str = "",
        code: int | None = None,
        starting: bool = False,
        with_node: bool = False,
        detail: str = "",
        tries: int = 1,
        max_retries: int | None = 0,
    ) -> None:
        task = f"task {function_name}" if function_name else "a task"
        worker = f"The worker{f' {pid}' if pid else ''}{f' on node {node_id}' if node_id else ''}"
        hint = not detail or detail.startswith(ITS_LOG)  # else it says why
        how = "was lost with its node" if with_node else describe_exit(code, hint=hint)
        more = f" {detail}" if detail else ""
        super().__init__(
            f"{worker} {how} before it was ready, as others before it.{more}"
            if starting
            else f"{worker} that ran {task} {how}.{more} {_tried(tries, max_retries)}"
        )
        self.function_name = function_name
        self.pid = pid
        self.node_id = node_id
        self.exit_code = code
        self.detail = detail
        self.tries = tries


def _tried(tries: int, max_retries: int | None) -> str:
    if tries == 1 and not max_retries:
        return "max_retries lets such a task run again."
    allowed = f" (max_retries={max_retries})" if max_retries is not None else ""
    return f"It was tried {tries} time{'s' * (tries > 1)}{allowed}."


class NodeDiedError(MinirayError):
    """A node was lost, and with it what ran there."""

    def __init__(self, node_id: str, reason: str = "") -> None:
        super().__init__(f"The node {node_id} was lost{f': {reason}' if reason else ''}.")
        self.node_id = node_id
        self.reason = reason


class TaskCancelledError(MinirayError):
    """The task or call was cancelled."""

    def __init__(self, function_name: str = "", reason: str = "") -> None:
        task = f"The task {function_name}" if function_name else "The task"
        super().__init__(f"{task} was cancelled{f': {reason}' if reason else ''}.")
        self.function_name = function_name
        self.reason = reason


class TaskUnschedulableError(MinirayError):
    """No node can ever run the task, or the one it is bound to is gone."""


class ActorUnschedulableError(MinirayError):
    """No node can ever hold the actor, or the one it is bound to is gone."""


class PlacementGroupRemovedError(MinirayError):
    """The placement group of the task was removed."""

    def __init__(self, placement_group_id: str = "") -> None:
        super().__init__(
            f"The placement group {placement_group_id} was removed.".replace("  ", " ")
        )
        self.placement_group_id = placement_group_id


class RuntimeEnvSetupError(MinirayError):
    """The ``runtime_env`` of a task or actor could not be made on a node.

    Passwords in addresses are left out of the message.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_passwords(message))


class CodeStoreFullError(MinirayError):
    """The head's limit for functions, classes and packages of running jobs is reached."""


# --- errors of values ------------------------------------------------------------------------


class JobError(MinirayError, RuntimeError):
    """A request about a submitted job cannot be done; a ``RuntimeError``, as Ray's is."""


class JobNotFoundError(JobError):
    """There is no submitted job with this id."""


class JobAlreadyExistsError(JobError):
    """Another job was submitted under this id."""


class JobRunningError(JobError):
    """The job waits or runs, and can only be deleted once it has ended."""


class GetTimeoutError(MinirayError, TimeoutError):
    """``get`` did not have all values within its timeout."""

    def __init__(self, message: str = "The values were not ready within the timeout.") -> None:
        super().__init__(message)

    @classmethod
    def of(
        cls, id: str, call: str, missing: int, total: int, timeout: float, why: str = ""
    ) -> GetTimeoutError:
        """Name the first of the values that were missing.

        Args:
            id: Hex id of its ref.
            call: The name of the call that makes it; empty if that is not known.
            missing: How many were missing,
            total: Number of values waited for.
            timeout: In seconds.
            why: Begins with a space, and says what the value waits for.
        """
        name = f"ObjectRef({id})" + f", the result of {call}" * bool(call)
        if total == 1:
            told = f"The value of {name}{',' * bool(call)} was not ready within {timeout:g} s"
        else:
            told = f"{missing} of {total} values were not ready within {timeout:g} s; "
            told += f"the first is {name}"
        return cls(printable(f"{told}.{why}"))


class ObjectLostError(MinirayError):
    """A value is gone and can't be made again."""

    def __init__(self, object_id: str, reason: str = "") -> None:
        super().__init__(
            f"The value of ObjectRef({object_id}) is lost{f': {reason}' if reason else ''}."
        )
        self.object_id = object_id
        self.reason = reason


class OwnerDiedError(ObjectLostError):
    """The process that owned a value failed, and with it the knowledge of where the value is."""

    def __init__(self, object_id: str, owner: str = "") -> None:
        who = f"the process that created the ref{f' ({owner})' if owner else ''}"
        super().__init__(
            object_id,
            f"{who} failed, and only it could recreate the value (values of put() and of actors "
            f"cannot be recreated)",
        )
        self.owner = owner


class ObjectStoreFullError(MinirayError):
    """A value fits neither into the object store of a node nor on its disk.

    Attributes:
        needed: Bytes of the value.
        used: Bytes of memory that other values take.
        capacity: Bytes of memory that the store may take.
        details: The holders of memory and disk with their amounts, and what failed.
        node_id: Hex id of the node, or empty.
    """

    def __init__(
        self,
        message: str = "",
        *,
        needed: int = 0,
        used: int = 0,
        capacity: int = 0,
        details: str = "",
        node_id: str = "",
    ) -> None:
        node = f"node {node_id}" if node_id else "its node"
        if message:
            text = message
        elif needed > capacity:
            text = (
                f"A value of {needed} bytes is larger than the object store of {node}, which "
                f"has {capacity} bytes. Split it, or start the node with a larger "
                f"object_store_memory."
            )
        else:
            text = (
                f"A value of {needed} bytes does not fit into the object store of {node}, which "
                f"has {used} of {capacity} bytes in use. Drop refs and arrays that are no longer "
                f"needed, or start the node with a larger object_store_memory."
            )
        super().__init__(" ".join(filter(None, [text, details])))
        self.needed = needed
        self.used = used
        self.capacity = capacity
        self.details = details
        self.node_id = node_id


class EngineError(MinirayError, NotImplementedError):
    """The engine that this process has chosen does not offer the feature."""


# Ray's names.
RayError = MinirayError
RayTaskError = TaskError
RayActorError = ActorError
LocalRayletDiedError = NodeDiedError
# Raised only where a value is lost and cannot be made again.
ObjectReconstructionFailedError = ObjectLostError
PendingCallsLimitExceeded = PendingCallsLimitExceededError
TaskPlacementGroupRemoved = PlacementGroupRemovedError
ActorPlacementGroupRemoved = PlacementGroupRemovedError

#: Exceptions of Ray that are not here, and what is raised instead.
_ABSENT = {
    "AsyncioActorExit": "use miniray.actor.exit_actor()",
    "CrossLanguageError": "tasks and actors are Python",
    "ObjectRefStreamEndOfStreamError": "generators end with StopIteration",
    "UnserializableException": "what cannot be pickled arrives as a TaskError with its text",
    "UserCodeException": "catch TaskError",
    "ActorHandleNotFoundError": "a handle of another cluster raises ActorDiedError",
    "ObjectFetchTimedOutError": "a value that cannot be fetched raises ObjectLostError",
    "ObjectFreedError": "values go with their last ref",
    "OutOfDiskError": "a value that fits neither memory nor disk raises ObjectStoreFullError",
    "OutOfMemoryError": "a worker that the kernel kills for its memory raises WorkerCrashedError, "
    "or ActorDiedError",
    "RaySystemError": "catch the specific error, or MinirayError for all",
}
tell_imports(__name__, _ABSENT)


if not TYPE_CHECKING:  # else a type checker takes any name for one that is there

    def __getattr__(name):
        raise absent(__name__, name, _ABSENT)
