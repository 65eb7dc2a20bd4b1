"""What a detached run brings along, as bytes: its controller passes them on without loading them.

A ref would not do: what a driver has put into the store ends with the driver.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.messages.protocol import VALUE_BYTES
from miniray.values.serialization import serialize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.train.data.shards import Datasets
    from miniray.train.worker.worker import TrainLoop


T = TypeVar("T")


def sent(loop: TrainLoop, put: Callable[[Any], T]) -> T:
    """Pickle a train loop without datasets.

    Args:
        loop: The train loop.
        put: Pickles it.

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
            if at_fault(part, 1) is not None:
                raise explain(part, error, name, "train loop") from error
        raise


class Packed:
    """A pickled value. Arrays in it stay in shared memory when it is passed on.

    Args:
        form: One of the forms of ``values/serialization.py``.
        data: The pickle.
        buffers: What is beside it.
    """

    __slots__ = ("_buffers", "_data", "_form")

    def __init__(self, form: int, data: Any, buffers: Sequence[Any]) -> None:
        self._form = form
        self._data = data
        self._buffers = buffers

    @classmethod
    def of(cls, value: Any) -> Packed:
        """Pickle a value.

        Raises:
            TypeError: It can't be pickled; the text names what can't.
            ValueError: It holds refs or actors that belong to this process.
        """
        serialized = serialize(value)
        owned = [ref for ref in serialized.refs if ref._owner_node]
        if owned:
            raise ValueError(
                f"A detached run can't take along {owned[0]!r}, an ObjectRef or an actor that ends "
                f"with this driver. Pass the value itself, or the name of a detached actor."
            )
        return cls(serialized.form, b"".join(serialized.parts), serialized.buffers)

    def load(self) -> Any:
        """The value; arrays in it are read-only and share the memory."""
        if self._form == VALUE_BYTES:
            return bytes(self._data)
        buffers = [memoryview(buffer).toreadonly() for buffer in self._buffers]
        return pickle.loads(self._data, buffers=buffers)

    def __reduce__(self) -> tuple[Callable[..., Packed], tuple[Any, ...]]:
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return Packed, (self._form, pickle.PickleBuffer(self._data), buffers)


@dataclasses.dataclass(frozen=True)
class PackedLoop:
    """A train loop with its datasets.

    Attributes:
        loop: The train loop without datasets.
        datasets: The datasets, each packed, or refs to such.
    """

    loop: Packed
    datasets: Datasets

    @classmethod
    def of(cls, loop: TrainLoop) -> PackedLoop:
        """Pack a train loop whose datasets are sources.

        Raises:
            TypeError: Something can't be pickled.
            ValueError: Something belongs to this process.
        """
        from miniray.train.data.shards import Datasets

        bare = dataclasses.replace(loop, datasets=Datasets())
        return cls(sent(bare, Packed.of), loop.datasets.published(Packed.of))

    def published(self, put: Callable[[Any], Any]) -> PackedLoop:
        """The same with refs in place of the datasets, so that each node gets those only once."""
        return dataclasses.replace(self, datasets=self.datasets.published(put))

    def load(self) -> TrainLoop:
        """The train loop with its datasets."""
        loop: TrainLoop = self.loop.load()
        return dataclasses.replace(loop, datasets=self.datasets)
