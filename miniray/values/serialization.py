"""Values to bytes and back: pickle protocol 5 with out-of-band buffers; errors name the part.

The packed form, in messages and in shared memory alike::

    u64 number of buffers n | u64 length of the pickle | n x u64 buffer lengths
    pickle | padding | buffer 0 | padding | buffer 1 ...

Buffers begin at multiples of 64 bytes, those under 1 KiB at multiples of 16. Reading makes no
copy: NumPy arrays and the like are read-only views of the block. Refs inside a value are
collected while it is pickled, so that the holder of the bytes can keep the refs alive.
"""

from __future__ import annotations

import inspect
import io
import pickle
import struct
import threading
import traceback
from typing import TYPE_CHECKING, Any

from miniray.messages.protocol import VALUE_BYTES, VALUE_PACKED, VALUE_PICKLE, VALUE_TENSORS
from miniray.values.call_signature import UnpicklableArgumentError, reference_to
from miniray.values.mapped import bytes_of
from miniray.values.picklers import parts_of, pickler, pickler_for, thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.common.object_ref import ObjectRef
    from miniray.messages.value import Value

#: Of the first byte of a buffer in its block; the second for buffers smaller than ``_LARGE``, of
#: which a value may have thousands.
ALIGNMENT, SMALL_ALIGNMENT = 64, 16
_LARGE = 1024
_HEAD = struct.Struct("<QQ")
#: Types whose pickle needs neither cloudpickle nor a search for refs.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
#: Above this a `bytes` object is stored as it is, without a pickle around it.
_PLAIN_LIMIT = 64 * 1024
#: How deep the search looks. Each level pickles again what is at fault.
_DEPTH = 50
#: Modules whose frames belong to a pickler.
_PICKLERS = ("cloudpickle", "copyreg", "miniray", "pickle")


class _Collector(threading.local):
    """The refs met while this thread pickles; None outside of that."""

    refs: list[ObjectRef[Any]] | None = None


collector = _Collector()


class Serialized:
    """A value as bytes that were not yet put anywhere."""

    __slots__ = ("buffers", "form", "parts", "pickled", "refs", "size")

    def __init__(
        self,
        form: int,
        parts: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview] = (),
        refs: Sequence[ObjectRef[Any]] = (),
    ) -> None:
        self.form = form
        #: The pickle. Large bytes in it are the value's own, and not copied; a bytearray is a view.
        self.parts = parts
        #: Bytes of it.
        self.pickled = sum(map(len, parts))
        self.buffers = buffers
        self.refs = refs
        #: Bytes that the value takes where it is stored.
        self.size = _packed_size(self.pickled, buffers) if buffers else self.pickled

    def payload(self) -> bytes:
        """Return the bytes as they travel inside a message."""
        if not self.buffers and len(self.parts) == 1:
            return bytes(self.parts[0])  # which it is: no copy
        return b"".join(self.pieces())

    def value(self) -> Value:
        """Return the pickle as a value that travels inside a message."""
        refs = tuple([(ref.binary(), ref._owner_node) for ref in self.refs])
        return self.form, self.payload(), refs

    def pieces(self) -> list[bytes | memoryview]:
        """Return what to write one after the other to get the stored form."""
        if not self.buffers:
            return [*self.parts]
        lengths = [buffer.nbytes for buffer in self.buffers]
        head = _HEAD.pack(len(lengths), self.pickled) + struct.pack(f"<{len(lengths)}Q", *lengths)
        pieces: list[bytes | memoryview] = [head, *self.parts]
        position = len(head) + self.pickled
        for buffer in self.buffers:
            gap = _gap(position, buffer.nbytes)
            if gap:
                pieces.append(bytes(gap))
            pieces.append(buffer)
            position += gap + buffer.nbytes
        return pieces


def _packed_size(pickle_length: int, buffers: Sequence[memoryview]) -> int:
    position = _HEAD.size + 8 * len(buffers) + pickle_length
    for buffer in buffers:
        position += _gap(position, buffer.nbytes) + buffer.nbytes
    return position


def _gap(position: int, size: int) -> int:
    """Return the bytes to leave out before a buffer of this size."""
    return -position % (ALIGNMENT if size >= _LARGE else SMALL_ALIGNMENT)


def serialize(value: Any, returned_by: str = "") -> Serialized:
    """Pickle a value.

    Args:
        value: Anything.
        returned_by: The function that returned it, for the error; empty if none did.

    Raises:
        TypeError: the value, or something in it, cannot be pickled; the text names it.
        Exception: what a signal's handler raised meanwhile.
    """
    kind = type(value)
    if kind in _PLAIN:
        if kind is bytes and len(value) > _PLAIN_LIMIT:
            return Serialized(VALUE_BYTES, (value,))
        return Serialized(VALUE_PICKLE, (pickle.dumps(value, 5),))
    try:
        return pickled(value)
    except Exception as error:  # noqa: BLE001 - explained, with its text
        _pass_interruption(value, error)
        name = f"what {returned_by} returned" * bool(returned_by)
        raise explain(value, error, name) from _cause_to_show(error)


def serialize_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Serialized:
    """Pickle the arguments of a call as one value, ``(args, kwargs)``.

    Raises:
        TypeError: one of them, or something in it, cannot be pickled; the text names it.
        Exception: what a signal's handler raised meanwhile.
    """
    if not kwargs:
        for value in args:
            if type(value) not in _PLAIN:
                break
        else:
            return Serialized(VALUE_PICKLE, (pickle.dumps((args, kwargs), 5),))
    try:
        return pickled((args, kwargs))
    except Exception as error:  # noqa: BLE001 - explained, with its text
        _pass_interruption((args, kwargs), error)
        raise _explain_arguments(args, kwargs, error) from _cause_to_show(error)


class _Parts:
    """The file of a pickler. It passes large bytes on as they are, without a copy.

    A bytearray could be made longer or shorter by another thread before it is stored, which is
    refused as long as there is a view of it.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        self._parts = parts

    def write(self, part: bytes | bytearray) -> None:
        self._parts.append(part if type(part) is bytes else memoryview(part))


def pickled(value: Any) -> Serialized:
    """Pickle a value; only the result keeps its refs alive.

    Raises:
        Exception: Whatever pickling raises.
    """
    parts: list[bytes | memoryview] = []
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not contiguous: pickle copies it into the stream
            return True
        if not view.nbytes:
            return True
        buffers.append(view)
        return False

    outer = collector.refs, thread.met_tensor
    refs: list[ObjectRef[Any]] = []
    collector.refs = refs
    thread.met_tensor = False
    try:
        pickler()(_Parts(parts), protocol=5, buffer_callback=keep).dump(value)
        packed = VALUE_TENSORS if thread.met_tensor else VALUE_PACKED
    finally:
        collector.refs, thread.met_tensor = outer
    return Serialized(packed if buffers else VALUE_PICKLE, parts, buffers, refs)


def dumps_code(target: Callable[..., Any] | type) -> tuple[bytes, list[ObjectRef[Any]]]:
    """Pickle a function or class for another process; return it, and refs that it captured.

    By value, as the name in its module is that of the remote function or class around it.
    What uses globals that cannot be pickled is imported by the other process instead.

    Raises:
        TypeError: It cannot be pickled and has no module to be imported from.
        Exception: What a signal's handler raised meanwhile.
    """
    outer = collector.refs
    refs: list[ObjectRef[Any]] = []
    collector.refs = refs
    try:
        code = io.BytesIO()
        pickler_for()(code, protocol=5).dump(target)
        return code.getvalue(), refs
    except Exception as error:  # noqa: BLE001 - explained, with its text
        _pass_interruption(target, error)
        reference = reference_to(target)
        if reference is None:
            raise explain(target, error) from _cause_to_show(error)
        return pickle.dumps(reference, 5), []
    finally:
        collector.refs = outer


def deserialize(form: int, data: Any, *, mapped: bool = False) -> Any:
    """Load the value of a stored form; views in it keep ``data`` alive.

    Args:
        form: VALUE_PICKLE, VALUE_PACKED, VALUE_TENSORS or VALUE_BYTES.
        data: bytes, or a memoryview of shared memory.
        mapped: Whether it is mapped shared memory. VALUE_TENSORS must be mapped for this reader.
    """
    if form == VALUE_PICKLE:
        return pickle.loads(data)
    if form == VALUE_BYTES:
        return bytes_of(memoryview(data))
    view = memoryview(data)
    count, length = _HEAD.unpack_from(view)
    lengths = struct.unpack_from(f"<{count}Q", view, _HEAD.size)
    start = _HEAD.size + 8 * count
    position = start + length
    buffers = []
    # Arrays over a read-only buffer are read-only: one value is shared by all its readers.
    locked = view.toreadonly()
    for size in lengths:
        position += _gap(position, size)
        buffers.append(locked[position : position + size])
        position += size
    if form != VALUE_TENSORS:
        return pickle.loads(view[start : start + length], buffers=buffers)
    outer = thread.owns_buffers
    thread.owns_buffers = mapped
    try:
        return pickle.loads(view[start : start + length], buffers=buffers)
    finally:
        thread.owns_buffers = outer


def explain(
    value: object, error: BaseException, name: str = "", inside: str = "task or actor"
) -> TypeError:
    """Make an error that names the attribute, item or variable at fault.

    Args:
        value: What cannot be pickled.
        error: What pickling it raised.
        name: What the value is to the user; empty: only its type is known.
        inside: What it is sent to.
    """
    path = _find(value, "", _DEPTH, set())
    what = f"{name}, {_describe(value)}," if name else _describe(value)
    if path:
        place, part = path
        return TypeError(
            f"{what} cannot be pickled: {place} is a {type(part).__qualname__} "
            f"({type(error).__name__}: {error}). Create it inside the {inside} instead, "
            f"or leave it out with __getstate__."
        )
    return TypeError(f"{what} cannot be pickled ({type(error).__name__}: {error}).")


def _cause_to_show(error: BaseException) -> BaseException | None:
    """Return what pickling raised, if it came out of the user's code, as a ``__reduce__``.

    What the pickler itself raised is in the text of ``explain``: users have no use for its frames.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "") if frames else ""
    return None if module.partition(".")[0] in _PICKLERS else error


def _pass_interruption(value: object, error: Exception) -> None:
    """Raise what pickling a value raised again, if it is no fault of the value.

    One that can be pickled was interrupted by a signal whose handler raised, as that of a time
    limit does. The handler's error is the caller's, not the value's.
    """
    if not _fails(value):
        raise error


def _explain_arguments(
    args: tuple[object, ...], kwargs: dict[str, object], error: BaseException
) -> TypeError:
    """Do as ``explain`` for the arguments of a call: name the one at fault."""
    placed: list[tuple[int | str, object]] = [*enumerate(args), *kwargs.items()]
    for where, value in placed:
        if _fails(value):
            fault = str(explain(value, error, "argument")).removeprefix("argument")
            return UnpicklableArgumentError(where, fault)
    return explain((args, kwargs), error)  # each of them can be, by itself


def _describe(value: object) -> str:
    if inspect.isfunction(value):
        return f"function {value.__qualname__}"
    if inspect.ismethod(value):
        return f"method {value.__qualname__}"
    if inspect.isclass(value):
        return f"class {value.__qualname__}"
    return f"a value of type {type(value).__qualname__}"


def at_fault(value: object, depth: int) -> tuple[str, object, Exception] | None:
    """Find the innermost part that cannot be pickled: its place, the part, and the error.

    None if the value can be pickled; an empty place if none of its parts is at fault by itself.
    """
    error = _error_of(value)
    if error is None:
        return None
    place, part = _find(value, "", depth, set()) or ("", value)
    return place, part, _error_of(part) or error


def _fails(value: object) -> bool:
    return _error_of(value) is not None


def _error_of(value: object) -> Exception | None:
    try:
        # Not by cloudpickle alone: refs in it would be kept to the end of the process.
        pickled(value)
    except Exception as error:  # noqa: BLE001 - any failure to pickle counts
        return error
    return None


def _find(value: object, path: str, depth: int, seen: set[int]) -> tuple[str, object] | None:
    """Return the path and value of the innermost part that fails by itself."""
    if depth == 0 or id(value) in seen:
        return None
    seen.add(id(value))
    for part in parts_of(value):
        if id(part.value) not in seen and _fails(part.value):
            inner = f"{path}{part.step()}"
            return _find(part.value, inner, depth - 1, seen) or (inner.lstrip(".: "), part.value)
    return None
