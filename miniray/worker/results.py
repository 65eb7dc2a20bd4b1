"""What an executor answers: results into values, exceptions into error values."""

from __future__ import annotations

import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

from miniray.config import config
from miniray.core import protocol as p
from miniray.core.borrowing import error_value
from miniray.core.serialization import serialize
from miniray.exceptions import TaskError

if TYPE_CHECKING:
    from miniray.core.cluster_runtime import ClusterRuntime
    from miniray.core.objects import Value
    from miniray.core.peers import Peer
    from miniray.object_ref import ObjectRef

_NONE: Value = (p.VALUE_PICKLE, pickle.dumps(None, 5), ())


class Results:
    """Stores what calls return and keeps refs inside it until the caller counts them."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        #: Refs inside values on their way, by caller and call.
        self._pins: dict[tuple[bytes, int], list[ObjectRef[Any]]] = {}
        # Reentrant: a garbage collection may run user code in any section.
        self._lock = threading.RLock()
        self._all_counted = threading.Condition(self._lock)

    def value(self, result: Any, caller: Peer, number: int, name: str) -> Value:
        """A result as the value that travels to the caller, who owns it.

        Raises:
            TypeError: the result cannot be pickled.
        """
        if result is None:
            return _NONE
        serialized = serialize(result)
        if serialized.refs:
            with self._lock:
                self._pins.setdefault((caller.process_id, number), []).extend(serialized.refs)
        if serialized.size > config().inline_limit:
            shared_memory = self._runtime.shared_memory
            return shared_memory.write(serialized, caller.process_id, caller.node_id, name)
        contained = tuple((ref.binary(), ref._owner_node) for ref in serialized.refs)
        return (serialized.form, serialized.payload(), contained)

    def values(self, result: Any, count: int, caller: Peer, number: int, name: str) -> list[Value]:
        """The values of a call with several results.

        Raises:
            ValueError: the call did not return as many values as it has return ids.
        """
        if count == 1:
            return [self.value(result, caller, number, name)]
        if count == 0:
            return []
        try:
            items = list(result)
        except TypeError:
            raise ValueError(
                f"{name} has num_returns={count} but returned a {type(result).__name__}, "
                f"which cannot be split into {count} values."
            ) from None
        if len(items) != count:
            raise ValueError(f"{name} has num_returns={count} but returned {len(items)} values.")
        return [self.value(item, caller, number, name) for item in items]

    def error(self, error: BaseException, name: str) -> Value:
        """What the caller's get() raises: the user's exception with its traceback."""
        from miniray.exceptions import MinirayError

        if isinstance(error, TaskError) or not isinstance(error, MinirayError):
            facts = self._runtime.facts
            actor_id = facts.actor_id.hex() if facts.actor_id is not None else None
            wrapped = TaskError.from_exception(error, name, pid=os.getpid(), actor_id=actor_id)
            return error_value(wrapped)
        return error_value(error)

    def holds(self) -> list[tuple[str, list[ObjectRef[Any]]]]:
        """What keeps refs until callers have counted them: a name for it, and the refs."""
        with self._lock:
            return [("a result on its way", refs) for refs in self._pins.values()]

    def release(self, caller: Peer, numbers: list[int]) -> None:
        """The caller counts the refs in these replies now."""
        with self._lock:
            for number in numbers:
                self._pins.pop((caller.process_id, number), None)
            self._all_counted.notify_all()

    def caller_gone(self, caller: Peer) -> None:
        """Nobody will count them."""
        with self._lock:
            for key in [key for key in self._pins if key[0] == caller.process_id]:
                del self._pins[key]
            self._all_counted.notify_all()

    def wait_counted(self, timeout: float) -> None:
        """Wait until the receivers have counted the refs in all replies (at a planned exit)."""
        with self._lock:
            self._all_counted.wait_for(lambda: not self._pins, timeout)
