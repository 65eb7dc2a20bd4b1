"""The class that pickles code and values: cloudpickle's, with more for tracebacks and arrays.

It imports none of the libraries.

- Arrays of NumPy that have gaps between their elements are made contiguous: NumPy would copy them
  into the pickle. NumPy pickles objects, subclasses and dates by itself; it offers
  no buffer of dates: pandas takes a read-only column of dates for an error of its own.
- Arrays of Arrow that are parts of larger ones are pickled without the rest. Arrow pickles the
  buffers of an array whole, so each slice of a table would take as much memory as the table.
- Tensors of PyTorch on the CPU are buffers beside the pickle, in the order in which their elements
  lie in memory: torch would copy a tensor's whole storage into the pickle. PyTorch knows no
  read-only tensors, and an operation in place must not be seen by the next reader: so each reader
  maps shared memory for itself, copy-on-write, and what came in a message is copied.
"""

from __future__ import annotations

import collections
import ctypes
import dis
import functools
import inspect
import pickle
import sys
import threading
import types
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from miniray.values.mapped import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

#: Parts of one value that are examined.
_MOST = 10_000


class Part(NamedTuple):
    """A part of a value that is pickled with it."""

    #: "attribute", "item", "element", "variable", "global variable" or "default".
    kind: str
    #: Of the attribute, the variable or the parameter; key or index of an item.
    name: str
    value: Any

    def step(self) -> str:
        """Return the way from the whole to the part, as the text of a path."""
        if self.kind == "attribute":
            return f".{self.name}"
        if self.kind == "item":
            return f"[{self.name}]"
        if self.kind == "element":
            return "{an element}"
        return f": {self.words()}"

    def words(self) -> str:
        if self.kind == "default":
            return f"default of {self.name!r}"
        return f"{self.kind} {self.name!r}" if self.name else f"an {self.kind}"


def parts_of(value: Any) -> list[Part]:
    """Return the parts of a value, or none where they are not known."""
    try:
        return [part for part, _ in zip(_parts(value), range(_MOST), strict=False)]
    except Exception:  # noqa: BLE001 - user code runs in it; another error is being described
        return []


def _parts(value: Any) -> Iterator[Part]:
    if inspect.isfunction(value):
        yield from _of_function(value)
    elif inspect.ismethod(value):
        yield Part("attribute", "__self__", value.__self__)
        yield Part("attribute", "__func__", value.__func__)
    elif inspect.isclass(value):
        for name, member in vars(value).items():
            part = _function_of(member)
            if inspect.isfunction(part) or not (name.startswith("__") or name == "_abc_impl"):
                yield Part("attribute", name, part)
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield Part("attribute", name, getattr(value, name))
    else:
        yield from _items(value)
        # One of miniray's that pickles itself says why it cannot be pickled.
        ours = type(value).__module__.partition(".")[0] == "miniray"
        if not ours or getattr(type(value), "__reduce__", None) is object.__reduce__:
            yield from _attributes(value)


def _function_of(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _items(value: Any) -> Iterator[Part]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield Part("item", repr(key), item)
    elif isinstance(value, list | tuple | collections.deque):
        for index, item in enumerate(value):
            yield Part("item", str(index), item)
    elif isinstance(value, set | frozenset):
        for item in value:
            yield Part("element", "", item)


def _attributes(value: Any) -> Iterator[Part]:
    cls = type(value)
    if getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None):
        state = value.__getstate__()
        if not isinstance(state, dict):
            yield Part("attribute", "__getstate__()", state)
            return
    else:
        state = getattr(value, "__dict__", None) or {}
        for base in cls.__mro__:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                    yield Part("attribute", name, getattr(value, name))
    for name, part in state.items():
        yield Part("attribute", str(name), part)


def _of_function(function: types.FunctionType) -> Iterator[Part]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # it has a value
            yield Part("variable", name, cell.cell_contents)
    names = function.__globals__
    for name in dict.fromkeys(_globals(code)):
        if name in names and not inspect.ismodule(names[name]):
            yield Part("global variable", name, names[name])
    defaults = function.__defaults__ or ()
    parameters = code.co_varnames[: code.co_argcount]
    for name, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
        yield Part("default", name, default)
    for name, default in (function.__kwdefaults__ or {}).items():
        yield Part("default", name, default)


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield names of globals that a function, or one that it defines, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


#: Bytes, and part of what an array of Arrow shows, that its buffers may hold beside it: less is not
#: worth a copy.
_SPARE_BYTES, _SPARE_PART = 1024, 1 / 8
#: A tensor whose storage is smaller is pickled as torch does it.
_MIN_BYTES = 1024


class _Thread(threading.local):
    """State of this thread's pickling or unpickling."""

    #: It has met a tensor.
    met_tensor = False
    #: The buffers are the reader's own.
    owns_buffers = False


thread = _Thread()


def pickler() -> type[cloudpickle.Pickler]:
    """Return a pickler class for those of NumPy, torch and Arrow that are imported."""
    loaded = sys.modules.get
    # A module that is being imported may not have its class yet.
    return pickler_for(
        getattr(loaded("numpy"), "ndarray", None),
        getattr(loaded("torch"), "Tensor", None),
        # The package has this one when the module with all of its classes is loaded.
        getattr(loaded("pyarrow"), "Table", None) and loaded("pyarrow.lib"),
    )


@functools.cache
def pickler_for(
    array: type | None = None, tensor: type | None = None, arrow: ModuleType | None = None
) -> type[cloudpickle.Pickler]:
    """Return one that writes values of these classes as buffers; with none, the one for code."""
    known: dict[type, Callable[[Any], Any]] = {CodeType: _reduce_code}
    if array is not None:
        known[array] = _reduce_array
    if tensor is not None:
        known[tensor] = _reduce_tensor
    if arrow is not None:
        known.update(dict.fromkeys(_classes_of(arrow), _reduce_arrow))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Looks its table up when it is made: so it is in the class."""

        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(known)

    return Pickler


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Keep the name of the file, which cloudpickle 3.1.3 drops: tracebacks show its lines."""
    made_by, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return made_by, (*arguments[:10], code.co_filename, *arguments[11:])


def _reduce_array(array: Any) -> Any:
    """Reduce an array whose class is ``numpy.ndarray`` itself."""
    dtype = array.dtype
    if not (array.flags.forc or dtype.hasobject or dtype.kind in "mM"):
        array = array.copy(order="C")
    return array.__reduce_ex__(5)


def _classes_of(lib: Any) -> list[type]:
    """Return the classes of arrays in ``pyarrow.lib``; subclasses of users may have reducers."""
    found: list[type] = []
    pending = [lib.Array]
    while pending:
        cls = pending.pop()
        if cls.__module__ == lib.__name__:
            found.append(cls)
            pending += cls.__subclasses__()
    return found


def _reduce_arrow(array: Any) -> Any:
    """Reduce an array of Arrow, without what it does not show."""
    shown = array.nbytes
    if array.get_total_buffer_size() - shown > _SPARE_BYTES + shown * _SPARE_PART:
        import pyarrow as pa

        array = pa.concat_arrays([array])  # always a copy, of what the array shows
    return array.__reduce_ex__(5)


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor whose class is ``torch.Tensor`` itself."""
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(5)
    stored = tensor.untyped_storage().nbytes()  # what torch would put into the pickle
    if stored < _MIN_BYTES:
        return tensor.__reduce_ex__(5)
    requires_grad = tensor.requires_grad
    if not tensor.numel():  # a part without elements of something large
        return tensor.detach().clone().requires_grad_(requires_grad).__reduce_ex__(5)
    span = _span(tensor)
    if not tensor.data_ptr() or tensor.storage_offset() * tensor.itemsize + span > stored:
        return tensor.__reduce_ex__(5)  # sharded training gives the storage back for a while
    if span > tensor.nbytes:  # what lies between its elements stays here
        tensor = tensor.detach().contiguous()
        span = tensor.nbytes
    octets: Any = (ctypes.c_char * span).from_address(tensor.data_ptr())
    octets.keeps = tensor
    thread.met_tensor = True
    dtype = str(tensor.dtype).removeprefix("torch.")
    facts = (dtype, tuple(tensor.shape), tensor.stride(), requires_grad)
    return rebuild_tensor, (pickle.PickleBuffer(octets), *facts)


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is only its elements in memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is _strided()
        and not tensor.is_nested
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not tensor._backward_hooks
    )


@functools.cache
def _strided() -> Any:
    import torch

    return torch.strided


def _span(tensor: Any) -> int:
    """Return bytes from the first element to the last: less than ``nbytes`` if some overlap."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int((sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize)


#: Said each time, as the reader may have set another default.
_CPU = "cpu"


def rebuild_tensor(
    buffer: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Any:
    import torch

    view = memoryview(buffer)
    kind = getattr(torch, dtype)
    if thread.owns_buffers:
        octets: Any = (ctypes.c_char * view.nbytes).from_address(address_of(view))
        octets.keeps = view
        flat = torch.frombuffer(octets, dtype=kind)
    else:
        flat = torch.empty(view.nbytes // kind.itemsize, dtype=kind, device=_CPU)
        ctypes.memmove(flat.data_ptr(), address_of(view), view.nbytes)
    # No view of it: one that is made under no_grad() may not be changed in place after that.
    tensor = torch.empty(0, dtype=kind, device=_CPU).set_(flat.untyped_storage(), 0, shape, strides)
    return tensor.requires_grad_(requires_grad)
