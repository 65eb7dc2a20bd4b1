from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniray.common.object_ref import ObjectRef, hooks
from miniray.messages.protocol import VALUE_BYTES, VALUE_PACKED, VALUE_PICKLE, VALUE_TENSORS
from miniray.values import serialization
from miniray.values.mapped import address_of
from miniray.values.serialization import (
    ALIGNMENT,
    SMALL_ALIGNMENT,
    Serialized,
    deserialize,
    dumps_code,
    serialize,
    serialize_arguments,
)


def round_trip(value: Any) -> Any:
    serialized = serialize(value)
    data = serialized.payload()
    assert len(data) == serialized.size
    assert b"".join(serialized.pieces()) == data
    return deserialize(serialized.form, data)


@pytest.mark.parametrize(
    "value",
    [0, True, None, 1.5, "text", b"bytes", b"x" * 100_000, [1, {"a": (2, {3})}], lambda x: x + 1],
    ids=["int", "bool", "none", "float", "text", "bytes", "large bytes", "nested", "function"],
)
def test_values_come_back_equal(value: Any) -> None:
    back = round_trip(value)
    if callable(value):
        assert back(1) == value(1)
    else:
        assert back == value
        assert type(back) is type(value)


def test_code_keeps_the_name_of_its_file() -> None:
    def function() -> None:
        pass

    for code in (dumps_code(function)[0], serialize(function).payload()):
        assert pickle.loads(code).__code__.co_filename == __file__


def test_large_bytes_travel_without_a_pickle_around_them() -> None:
    assert serialize(b"x" * 70_000).form == VALUE_BYTES
    assert serialize(b"x" * 100).form == VALUE_PICKLE


@given(st.lists(st.integers(0, 5000), max_size=6))
def test_arrays_of_any_size_come_back_aligned_and_without_a_copy(sizes: list[int]) -> None:
    arrays = [np.arange(size, dtype=np.int64) for size in sizes]
    serialized = serialize(arrays)
    block = bytearray(serialized.payload())
    start = np.frombuffer(block, dtype=np.uint8).__array_interface__["data"][0]
    back = deserialize(serialized.form, memoryview(block))
    for array, size in zip(back, sizes, strict=True):
        assert (array == np.arange(size)).all()
        if size:
            offset = array.__array_interface__["data"][0] - start
            assert offset % (ALIGNMENT if size * 8 >= 1024 else SMALL_ALIGNMENT) == 0
            assert 0 < offset < len(block)
            assert not array.flags.writeable


def test_arrays_stay_valid_when_the_message_is_gone() -> None:
    serialized = serialize(np.arange(10_000))
    array = deserialize(serialized.form, bytes(serialized.payload()))
    del serialized
    assert array[-1] == 9999


def test_arrays_that_are_not_contiguous_or_in_fortran_order_come_back() -> None:
    value = np.arange(40_000).reshape(200, 200)
    for array in (value[::2, ::3], np.asfortranarray(value), value.T):
        assert (round_trip(array) == array).all()
    assert serialize(value).form == VALUE_PACKED


@pytest.mark.parametrize("dtype", ["i8", ">f4", "?", "U3", [("a", "i4"), ("b", "f8")]])
def test_arrays_with_gaps_are_buffers_and_cannot_be_changed_either(dtype: Any) -> None:
    value = np.arange(40_000).reshape(200, 200).astype(dtype)
    for array in (value, value[::2, ::3], np.asfortranarray(value), value[::-1], value[5]):
        stored = serialize({"it": array})
        assert [buffer.nbytes for buffer in stored.buffers] == [array.nbytes]
        back = round_trip({"it": array, "again": array})
        assert back["it"] is back["again"]
        assert back["it"].dtype == array.dtype
        assert (back["it"] == array).all()
        assert not back["it"].flags.writeable


def test_arrays_of_objects_and_dates_and_subclasses_come_back_as_numpy_pickles_them() -> None:
    numbers = np.arange(1000)
    for array in (
        np.array([{"a": 1}, None], dtype=object),
        np.array([[{"a": 1}], [2]], dtype=object)[::-1],
        numbers.view(np.recarray),
        np.ma.masked_equal(numbers, 3)[::2],
        np.array("2026-01-01", dtype="M8[D]"),
        np.empty((0, 3), dtype="M8[s]"),
        numbers.astype("M8[s]")[::2],
        np.empty((6, 0))[::2],
    ):
        back = round_trip(array)
        assert type(back) is type(array)
        assert back.shape == array.shape
        assert (back == array).all()


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_inside_of_a_value_are_written_from_where_they_are(kind: Any) -> None:
    data = kind(b"x" * 200_000)
    for value in ([data], {"a": (1, data)}, [data, np.arange(1000)]):
        stored = serialize(value)
        pieces = stored.pieces()
        assert any(piece is data or getattr(piece, "obj", None) is data for piece in pieces)
        back = deserialize(stored.form, stored.payload())
        assert (back["a"][1] if isinstance(back, dict) else back[0]) == data
        assert type(back["a"][1] if isinstance(back, dict) else back[0]) is kind


def test_a_bytearray_keeps_its_length_until_it_is_stored() -> None:
    data = bytearray(b"x" * 200_000)
    stored = serialize([data])
    for resize in (data.clear, lambda: data.extend(b"more")):
        with pytest.raises(BufferError):
            resize()
    payload = stored.payload()
    assert deserialize(stored.form, payload) == [data]
    del stored
    data.extend(b"more")


def test_empty_buffers_stay_in_the_pickle() -> None:
    assert serialize([np.empty(0), np.empty(0)]).form == VALUE_PICKLE


@pytest.mark.parametrize("size", [1, 3, 127, 128])
def test_an_array_is_read_only_however_small_it_is(size: int) -> None:
    with pytest.raises(ValueError, match="read-only"):
        round_trip(np.zeros(size))[0] = 1.0


def test_arguments_are_a_pair_of_args_and_kwargs() -> None:
    for args, kwargs in (((), {}), ((1, "a"), {}), (([1],), {}), ((1,), {"k": 2})):
        serialized = serialize_arguments(args, kwargs)
        assert deserialize(serialized.form, serialized.payload()) == (args, kwargs)


# --- refs -------------------------------------------------------------------------


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[ObjectRef[Any]]:
    """Refs that are pickled outside of the runtime; those inside are collected."""
    outside: list[ObjectRef[Any]] = []

    def note(ref: ObjectRef[Any]) -> None:
        refs = serialization.collector.refs
        (outside if refs is None else refs).append(ref)

    monkeypatch.setattr(hooks, "serialized", note)
    return outside


def ref(number: int) -> ObjectRef[Any]:
    return ObjectRef(number.to_bytes(16, "big"), b"")


def test_refs_inside_a_value_are_found(collected: list[ObjectRef[Any]]) -> None:
    assert list(serialize({"a": [ref(1)], "b": ref(2)}).refs) == [ref(1), ref(2)]
    assert collected == []


def test_refs_of_a_value_pickled_while_another_is_do_not_mix(
    collected: list[ObjectRef[Any]],
) -> None:
    inner: list[Any] = []

    class Nested:
        def __reduce__(self) -> Any:
            inner.extend(serialize([ref(1)]).refs)
            return (list, ((),))

    assert list(serialize([ref(0), Nested(), ref(2)]).refs) == [ref(0), ref(2)]
    assert inner == [ref(1)]
    assert collected == []


def test_threads_collect_their_own_refs(collected: list[ObjectRef[Any]]) -> None:
    def work(number: int, found: list[bool]) -> None:
        pair = [ref(number), ref(9)]
        found.extend(list(serialize(pair).refs) == pair for _ in range(50))

    results: list[bool] = []
    threads = [threading.Thread(target=work, args=(n, results)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 200
    assert all(results)


def test_refs_captured_by_a_function_are_found(collected: list[ObjectRef[Any]]) -> None:
    captured = ref(5)

    def function() -> Any:
        return captured

    blob, refs = dumps_code(function)
    assert refs == [captured]
    assert blob
    assert collected == []


def test_a_failure_leaves_the_collector_as_it_was(collected: list[ObjectRef[Any]]) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError):
        serialize([ref(1), lock])
    with pytest.raises(TypeError):
        dumps_code(lambda: lock)
    assert serialization.collector.refs is None


# --- tensors -----------------------------------------------------------------------------
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def in_shared_memory(stored: Serialized) -> Any:
    """The value as a reader of a mapped segment gets it, and the block that is mapped."""
    payload = stored.payload()
    block = (ctypes.c_char * len(payload)).from_buffer_copy(payload)
    return deserialize(stored.form, memoryview(block).cast("B"), mapped=True), block


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "bool", "complex64"])
def test_a_dense_tensor_is_a_buffer_beside_the_pickle(torch: Any, dtype: str) -> None:
    tensor = torch.arange(6000).reshape(2, 3, 1000).to(getattr(torch, dtype))
    stored = serialize({"t": [tensor]})
    assert len(stored.buffers) == 1
    assert stored.buffers[0].nbytes == tensor.nbytes
    assert stored.pickled < 500
    value, _ = in_shared_memory(stored)
    assert torch.equal(value["t"][0], tensor)
    assert value["t"][0].dtype == tensor.dtype


def test_a_tensor_is_on_the_cpu_whatever_the_default_device_of_its_reader(torch: Any) -> None:
    tensor = torch.arange(1000.0)
    stored = serialize(tensor)
    with torch.device("meta"):
        mapped, _ = in_shared_memory(stored)
        inline = deserialize(stored.form, stored.payload())
    assert torch.equal(mapped, tensor)
    assert torch.equal(inline, tensor)


def test_a_tensor_in_another_order_of_memory_is_not_copied_either(torch: Any) -> None:
    images = torch.arange(2 * 3 * 40 * 50.0).reshape(2, 3, 40, 50)
    for tensor in (
        images.permute(3, 1, 0, 2),
        images.to(memory_format=torch.channels_last),
        torch.arange(1000.0).expand(20, 1000),  # takes the memory of one row
    ):
        stored = serialize(tensor)
        (buffer,) = stored.buffers
        assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) == tensor.data_ptr()
        assert buffer.nbytes == tensor.untyped_storage().nbytes()
        assert stored.pickled < 500
        for value in (in_shared_memory(stored)[0], round_trip(tensor)):
            assert torch.equal(value, tensor)
            assert value.stride() == tensor.stride()


def test_a_part_of_a_tensor_is_stored_without_the_rest(torch: Any) -> None:
    whole = torch.arange(100_000.0).reshape(100, 1000)
    for part in (
        whole[7, 10:20],
        whole[:, 3],
        whole[::2, ::5].requires_grad_(),
        whole[5:5],
        [row[:10] for row in whole],
    ):
        stored = serialize(part)
        elements = sum(map(torch.numel, part)) if isinstance(part, list) else part.numel()
        assert stored.size < 4 * elements + 300 * max(1, len(stored.buffers)) + 500
        value, _ = in_shared_memory(stored)
        if isinstance(part, list):
            assert all(map(torch.equal, value, part))
        else:
            assert torch.equal(value, part)
            assert value.requires_grad == part.requires_grad


def test_what_one_reader_does_to_a_tensor_no_other_sees(torch: Any) -> None:
    stored = serialize(torch.zeros(1000))
    view = memoryview(stored.payload())
    with torch.no_grad():
        first = deserialize(stored.form, view)
    first += torch.ones(1000, requires_grad=True)
    first.detach_().resize_(10)
    assert deserialize(stored.form, view).sum() == 0


def test_a_tensor_that_is_read_without_gradients_can_have_some_later(torch: Any) -> None:
    stored = serialize(torch.zeros(10, 100))
    with torch.no_grad():
        tensor, _ = in_shared_memory(stored)
    tensor += torch.ones(100, requires_grad=True)
    assert tensor.requires_grad


def test_a_tensor_in_shared_memory_is_not_copied_and_arrays_beside_it_stay_locked(
    torch: Any,
) -> None:
    (tensor, array), block = in_shared_memory(serialize((torch.zeros(1000), np.zeros(1000))))
    start = ctypes.addressof(block)
    assert start <= tensor.data_ptr() < start + len(block)
    tensor += 1
    assert tensor.sum() == 1000
    assert not array.flags.writeable
    view = weakref.ref(block)
    del block, array
    assert view() is not None  # the tensor keeps it
    del tensor
    assert view() is None


def test_pickling_inside_of_pickling_keeps_tensors_apart(torch: Any) -> None:
    class Outer:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __reduce__(self) -> Any:
            serialize(self.inner)
            return str, ("outer",)

    assert serialize([Outer(torch.ones(1000)), np.ones(1000)]).form == VALUE_PACKED
    assert serialize([Outer(np.ones(1000)), torch.ones(1000)]).form == VALUE_TENSORS


def test_a_tensor_without_its_storage_is_left_to_torch(torch: Any) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    assert not serialize([torch.ones(10), tensor.new_empty(0)]).buffers
    with contextlib.suppress(RuntimeError, TypeError):
        assert not serialize(tensor).buffers


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_other_tensors_come_back_as_torch_pickles_them(torch: Any) -> None:
    base = torch.arange(10_000.0).reshape(100, 100)
    for tensor in (
        base.t(),
        base[::2, ::3],
        base.to_sparse(),
        torch.zeros(0),
        torch.tensor(3),
        torch.ones(4000)[1000:3000],
        torch.nn.Parameter(base.clone()),
        base.clone().requires_grad_(),
    ):
        value, _ = in_shared_memory(serialize(tensor))
        assert type(value) is type(tensor)
        assert value.requires_grad == tensor.requires_grad
        assert value.shape == tensor.shape
        assert plain(value) == plain(tensor)


def plain(tensor: Any) -> Any:
    return (tensor.to_dense() if tensor.is_sparse else tensor).tolist()


def test_a_tensor_of_a_graph_becomes_a_leaf(torch: Any) -> None:
    value, _ = in_shared_memory(serialize(torch.ones(1000, requires_grad=True) * 2))
    assert value.is_leaf
    assert value.requires_grad
    assert value.tolist() == [2.0] * 1000


# --- tables ------------------------------------------------------------------------------
def test_the_columns_of_an_arrow_table_are_views_of_the_block() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"n": np.arange(100_000), "text": [f"row {n}" for n in range(100_000)]})
    stored = serialize([table])
    value, block = in_shared_memory(stored)
    assert value[0].equals(table)
    begin, end = ctypes.addressof(block), ctypes.addressof(block) + len(block)
    for column in value[0].itercolumns():
        for buffer in column.chunk(0).buffers():
            assert buffer is None or begin <= buffer.address < end


@pytest.mark.parametrize("part", ["table", "batch", "column", "array", "table of slices"])
def test_a_part_of_an_arrow_table_is_stored_without_the_rest(part: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    rows = range(20_000)
    table = arrow.table(
        {
            "n": arrow.array(rows),
            "text": arrow.array([f"row {n}" for n in rows]),
            "kind": arrow.array(["even", "odd"] * (len(rows) // 2)).dictionary_encode(),
            "list": arrow.array([[n, None] for n in rows]),
            "pair": arrow.array([{"a": n, "b": str(n)} for n in rows]),
        }
    ).replace_schema_metadata({"of": "these rows"})
    few = table.slice(10_000, 100)
    value = {
        "table": few,
        "batch": few.to_batches()[0],
        "column": few["pair"],
        "array": table["text"].chunk(0)[10_000:10_100],
        "table of slices": arrow.concat_tables([table.slice(n, 10) for n in range(0, 100, 10)]),
    }[part]
    stored = serialize(value)
    assert stored.size < 20_000
    back = deserialize(stored.form, stored.payload())
    assert back.equals(value)
    if part == "table":
        assert back.schema.equals(table.schema, check_metadata=True)


def test_most_of_an_arrow_array_is_stored_without_a_copy() -> None:
    arrow = pytest.importorskip("pyarrow")
    array = arrow.array(np.arange(100_000))
    stored = serialize(array[1000:])
    begin = array.buffers()[1].address
    assert any(address_of(buffer) == begin for buffer in stored.buffers)


def test_the_columns_of_a_data_frame_are_read_only_views_of_the_block() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": np.arange(100_000), "x": np.linspace(0, 1, 100_000)})
    value, block = in_shared_memory(serialize(frame))
    pandas.testing.assert_frame_equal(value, frame)
    begin, end = ctypes.addressof(block), ctypes.addressof(block) + len(block)
    for name in frame:
        column = value[name].to_numpy()
        assert begin <= column.ctypes.data < end
        assert not column.flags.writeable
