"""The C exchange of DLPack: a consumer in C, by ctypes, with the layout of 1.3."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
)
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from dlpack_structures import Tensor
from numpy_rmm import (
    DeviceArray,
    DeviceBuffer,
    DeviceScalar,
    Stream,
    as_dlpack_pinned,
    mr,
    to_device,
)
from numpy_rmm.testing import Driver

pytestmark = pytest.mark.usefixtures("driver")

Deleter = CFUNCTYPE(None, c_void_p)


class Managed(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", Deleter),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


SetError = CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)
Out = POINTER(POINTER(Managed))


class Exchange(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("older", c_void_p),
        # called without the interpreter, the others with it
        ("allocate", CFUNCTYPE(c_int, POINTER(Tensor), Out, c_void_p, SetError)),
        ("from_object", ctypes.PYFUNCTYPE(c_int, py_object, Out)),
        ("to_object", ctypes.PYFUNCTYPE(c_int, POINTER(Managed), POINTER(py_object))),
        ("borrow", ctypes.PYFUNCTYPE(c_int, py_object, POINTER(Tensor))),
        ("current", ctypes.PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [py_object, c_char_p]


def exchange_of(kind: type) -> Exchange:
    address = _pointer(vars(kind)["__dlpack_c_exchange_api__"], b"dlpack_exchange_api")
    return Exchange.from_address(address)


@pytest.fixture
def exchange() -> Exchange:
    return exchange_of(DeviceArray)


def host(dtype: Any = np.int32) -> np.ndarray:
    return np.arange(48).astype(dtype).reshape(6, 8)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x,
    "transposed": lambda x: x.T,
    "steps": lambda x: x[::2, 1::3],
    "element": lambda x: x[2, 3, ...],
    "no rows": lambda x: x[3:3],
}


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[: tensor.n_dims])


def take(exchange: Exchange, array: object) -> Any:
    out = POINTER(Managed)()
    assert exchange.from_object(array, byref(out)) == 0
    return out


def give(exchange: Exchange, tensor: Any) -> Any:
    array = py_object()
    assert exchange.to_object(tensor, byref(array)) == 0
    found = array.value
    ctypes.pythonapi.Py_DecRef(array)  # the reference that was handed over
    return found


# ---- out -----------------------------------------------------------------------------


def test_the_types_have_the_table(exchange: Exchange) -> None:
    for kind in (DeviceArray, DeviceBuffer):
        table = exchange_of(kind)
        assert (table.major, table.minor, table.older) == (1, 3, None)
        assert all(getattr(table, name) for name in ("allocate", "borrow", "current"))
    assert hasattr(DeviceScalar, "__dlpack_c_exchange_api__")  # by its base


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("borrows", [True, False])
def test_what_a_consumer_sees(exchange: Exchange, view: str, borrows: bool) -> None:
    array, like = VIEWS[view](to_device(host())), VIEWS[view](host())
    held = None
    if borrows:
        tensor = Tensor()
        assert exchange.borrow(array, byref(tensor)) == 0
    else:
        held = take(exchange, array)
        tensor = held.contents.tensor
    assert shape_of(tensor) == like.shape
    strides = tuple(4 * stride for stride in tensor.strides[: like.ndim])
    assert like.size == 0 or strides == like.strides
    assert tensor.data == (array.ptr or None)
    assert (tensor.device_type, tensor.device_id, tensor.byte_offset) == (2, 0, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (0, 32, 1)
    if held is not None:
        assert (held.contents.major, held.contents.flags) == (1, 0)
        held.contents.deleter(held)


def test_a_buffer_is_its_bytes() -> None:
    exchange, buffer = exchange_of(DeviceBuffer), DeviceBuffer(size=100)
    tensor = Tensor()
    assert exchange.borrow(buffer, byref(tensor)) == 0
    assert (tensor.data, shape_of(tensor)) == (buffer.ptr, (100,))
    assert (tensor.code, tensor.bits, tensor.strides[0]) == (1, 8, 1)
    held = take(exchange, buffer)
    assert held.contents.tensor.data == buffer.ptr
    with pytest.raises(BufferError, match="1 arrays and DLPack tensors"):
        buffer.resize(200)
    held.contents.deleter(held)
    buffer.resize(200)
    assert exchange.borrow(buffer, byref(tensor)) == 0
    assert (tensor.data, shape_of(tensor)) == (buffer.ptr, (200,))


def test_a_tensor_keeps_the_memory(exchange: Exchange, pool: mr.MemoryResource) -> None:
    array = to_device(host(), mr=pool)
    held = take(exchange, array)
    del array
    gc.collect()
    assert pool.statistics().current_count == 1
    thread = threading.Thread(target=held.contents.deleter, args=(held,))
    thread.start()
    thread.join()
    assert pool.statistics().current_count == 0


@pytest.mark.parametrize("function", ["borrow", "from_object"])
def test_what_is_no_array_of_ours(exchange: Exchange, function: str) -> None:
    out = Tensor() if function == "borrow" else POINTER(Managed)()
    for wrong, error in [
        (np.zeros(3), TypeError),
        (DeviceArray(3, "S3"), BufferError),
        (DeviceArray(3, [("a", "i4"), ("b", "i2")]).view("u1")[:0:-1].T, None),
    ]:
        if error is None:
            assert getattr(exchange, function)(wrong, byref(out)) == 0
            continue
        with pytest.raises(error):
            getattr(exchange, function)(wrong, byref(out))


@pytest.mark.parametrize("kind", ["managed", "pinned"])
def test_memory_that_the_host_can_read(exchange: Exchange, kind: str) -> None:
    array = DeviceArray(3, mr=numpy_rmm.registry[kind])
    tensor = Tensor()
    assert exchange.borrow(array, byref(tensor)) == 0
    assert (tensor.device_type, tensor.device_id) == array.__dlpack_device__()


def test_work_goes_to_the_legacy_stream(exchange: Exchange) -> None:
    handle = c_void_p(5)
    assert exchange.current(2, 0, byref(handle)) == 0
    assert handle.value is None


def test_a_copy_of_ours_that_runs_comes_before(
    exchange: Exchange, driver: Driver
) -> None:
    stream = Stream(flags=1)
    array = to_device(host(), stream)
    with driver.held(stream):
        copied = array.copy()
        tensor = Tensor()
        assert exchange.borrow(copied, byref(tensor)) == 0
        event = driver.create_event()
        driver.check(driver.cuEventRecord(event, 1))
        assert not driver.is_done(event)
    driver.check(driver.cuCtxSynchronize())
    driver.check(driver.cuEventDestroy(event))


# ---- in ------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_what_came_from_here_is_what_it_was(
    exchange: Exchange, view: str, pool: mr.MemoryResource
) -> None:
    array = VIEWS[view](to_device(host(), mr=pool))
    again = give(exchange, take(exchange, array))
    assert type(again) is DeviceArray
    assert again.base is array.base
    assert (again.copy_to_host() == VIEWS[view](host())).all()
    assert again.shape == array.shape
    del array, again
    assert pool.statistics().current_count == 0


class Foreign:
    """A tensor of another library, which counts how often it is deleted."""

    def __init__(self, ptr: int, dtype: str = "int32", **changes: Any) -> None:
        self.n_deleted = 0
        self.shape, self.strides = (c_int64 * 2)(3, 4), (c_int64 * 2)(8, 2)
        codes = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
        found = np.dtype(dtype)
        self.managed = Managed(
            major=1,
            minor=1,
            deleter=Deleter(self.delete),
            flags=changes.pop("flags", 0),
        )
        self.managed.major = changes.pop("major", 1)
        self.managed.tensor = Tensor(
            data=ptr - 16,
            device_type=2,
            n_dims=2,
            code=codes[found.kind],
            bits=8 * found.itemsize,
            lanes=1,
            shape=ctypes.cast(self.shape, POINTER(c_int64)),
            strides=ctypes.cast(self.strides, POINTER(c_int64)),
            byte_offset=16,
        )
        for name, value in changes.items():
            setattr(self.managed.tensor, name, value)

    def delete(self, address: int) -> None:
        self.n_deleted += 1


@pytest.mark.parametrize("offset", [0, 4])
def test_a_tensor_of_another_library(
    exchange: Exchange, pool: mr.MemoryResource, offset: int
) -> None:
    memory = to_device(np.arange(40, dtype="i4"), mr=pool)
    foreign = Foreign(memory.ptr + offset)
    array = give(exchange, byref(foreign.managed))
    like = np.lib.stride_tricks.as_strided(
        np.arange(40, dtype="i4")[offset // 4 :], (3, 4), (32, 8)
    )
    assert type(array) is DeviceArray
    assert (array.shape, array.strides, array.dtype) == ((3, 4), (32, 8), np.int32)
    assert (array.ptr, array.base.nbytes) == (memory.ptr + offset, 4 * (16 + 6 + 1))
    assert array.__dlpack_device__() == (2, 0)
    assert (array.copy_to_host() == like).all()
    part = array[1:, ::2]
    array.copy_from(-like)
    assert foreign.n_deleted == 0
    del array
    assert (part.copy_to_host() == -like[1:, ::2]).all()
    assert foreign.n_deleted == 0
    del part
    assert foreign.n_deleted == 1


def test_a_copy_of_such_a_tensor_is_of_the_current_resource(
    exchange: Exchange, pool: mr.MemoryResource
) -> None:
    memory = to_device(np.arange(40, dtype="i4"))
    mr.set_current_device_resource(pool)
    foreign = Foreign(memory.ptr)
    array = give(exchange, byref(foreign.managed))
    copied = array.copy()
    mr.set_current_device_resource(None)
    del array
    assert foreign.n_deleted == 1
    assert pool.statistics().current_count == 1
    assert copied.copy_to_host()[1, 1] == 10
    del copied
    assert pool.statistics().current_count == 0


def test_tensors_of_the_same_memory(exchange: Exchange) -> None:
    memory = to_device(np.arange(40, dtype="i4"))
    tensors = [Foreign(memory.ptr + offset) for offset in (0, 0, 8)]
    arrays = [give(exchange, byref(foreign.managed)) for foreign in tensors]
    for i in (0, 2, 1):  # in any order
        arrays[i] = None
        assert [x.n_deleted for x in tensors] == [int(x is None) for x in arrays]


@pytest.mark.parametrize(("device_type", "kind"), [(3, "pinned"), (13, "managed")])
def test_a_tensor_that_the_host_can_read(
    exchange: Exchange, device_type: int, kind: str
) -> None:
    memory = to_device(np.arange(40, dtype="i4"), mr=numpy_rmm.registry[kind])
    foreign = Foreign(memory.ptr, device_type=device_type)
    array = give(exchange, byref(foreign.managed))
    assert array.mr.kind == kind
    assert array.__dlpack_device__() == memory.__dlpack_device__()
    assert (array.copy_to_host()[0] == [0, 2, 4, 6]).all()
    del array
    assert foreign.n_deleted == 1


def test_the_buffer_of_a_tensor_moves_when_it_grows(
    exchange: Exchange, pool: mr.MemoryResource
) -> None:
    memory = to_device(np.arange(40, dtype="i4"))
    mr.set_current_device_resource(pool)
    foreign = Foreign(memory.ptr)
    base = give(exchange, byref(foreign.managed)).base
    assert base.size == 92
    base.resize(1000)
    mr.set_current_device_resource(None)
    assert foreign.n_deleted == 1
    assert pool.statistics().current_bytes == 1000
    assert base.tobytes()[:92] == np.arange(23, dtype="i4").tobytes()


def test_a_tensor_of_nothing(exchange: Exchange) -> None:
    foreign = Foreign(0x1000)
    foreign.shape[0] = 0
    array = give(exchange, byref(foreign.managed))
    assert (array.shape, array.size, array.ptr) == ((0, 4), 0, 0)
    assert foreign.n_deleted == 1


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"device_type": 1}, r"DLPack device \(1, 0\) is none"),
        ({"flags": 1}, "cannot be read-only"),
        ({"major": 2}, "DLPack 2 cannot be read"),
        ({"code": 4, "bits": 16}, "NumPy has no elements of DLPack type 4"),
        ({"lanes": 4}, "with 32 bits in 4 lanes"),
        ({"n_dims": 100}, "100 dimensions are too many"),
    ],
)
def test_a_tensor_that_is_no_array(
    exchange: Exchange, wrong: dict[str, int], match: str
) -> None:
    foreign = Foreign(DeviceBuffer(size=1000).ptr, **wrong)
    with pytest.raises(BufferError, match=match):
        give(exchange, byref(foreign.managed))
    assert foreign.n_deleted == 1


# ---- new ones ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "kind"), [((2, 0), "device"), ((3, 0), "pinned"), ((13, 0), "managed")]
)
def test_memory_for_another_library(
    exchange: Exchange, place: tuple[int, int], kind: str
) -> None:
    like = Foreign(0x1000, "float64", device_type=place[0]).managed.tensor
    out, errors = POINTER(Managed)(), []
    set_error = SetError(lambda context, kind, text: errors.append((kind, text)))
    resource = numpy_rmm.registry[kind]
    before = resource.statistics().current_bytes
    assert exchange.allocate(byref(like), byref(out), None, set_error) == 0
    tensor = out.contents.tensor
    assert (shape_of(tensor), tensor.code, tensor.bits) == ((3, 4), 2, 64)
    assert tuple(tensor.strides[:2]) == (4, 1)
    assert resource.statistics().current_bytes == before + 96
    out.contents.deleter(out)
    assert resource.statistics().current_bytes == before
    assert errors == []


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [({"device_type": 1}, b"BufferError"), ({"code": 9}, b"BufferError")],
)
def test_memory_that_there_is_not(
    exchange: Exchange, wrong: dict[str, int], kind: bytes
) -> None:
    like = Foreign(0x1000, **wrong).managed.tensor
    errors: list[Any] = []
    set_error = SetError(lambda context, kind, text: errors.append((kind, text)))
    out = POINTER(Managed)()
    assert exchange.allocate(byref(like), byref(out), None, set_error) == -1
    assert [error[0] for error in errors] == [kind]
    assert errors[0][1]


def test_too_much_memory_for_another_library(exchange: Exchange) -> None:
    foreign = Foreign(0x1000)
    foreign.shape[0] = 1 << 48
    errors: list[Any] = []
    set_error = SetError(lambda context, kind, text: errors.append((kind, text)))
    out = POINTER(Managed)()
    like = foreign.managed.tensor
    assert exchange.allocate(byref(like), byref(out), None, set_error) == -1
    assert errors[0][0] == b"OutOfMemoryError"
    assert b"4 PiB" in errors[0][1]


# ---- page-locked arrays --------------------------------------------------------------


class Asking:
    """What NumPy's from_dlpack may ask, with the answers that a test wants."""

    def __init__(self, view: Any, **arguments: Any) -> None:
        self.view, self.arguments = view, arguments

    def __dlpack__(self, **given: Any) -> Any:
        return self.view.__dlpack__(**{**given, **self.arguments})

    def __dlpack_device__(self) -> tuple[int, int]:
        place: tuple[int, int] = self.view.__dlpack_device__()
        return place


def test_a_page_locked_array_says_so() -> None:
    with numpy_rmm.pinned(threshold=0):
        array = host(np.float32)
    view = as_dlpack_pinned(array[::2])
    assert view.__dlpack_device__() == (3, 0)
    seen = np.from_dlpack(view)
    assert seen.ctypes.data == array.ctypes.data
    assert (seen == array[::2]).all()
    seen[0, 0] = 5
    assert array[0, 0] == 5
    assert seen.__dlpack_device__() == (3, 0)
    assert array.__dlpack_device__() == (1, 0)  # as before
    assert (
        np.from_dlpack(Asking(view, dl_device=(1, 0))).ctypes.data == seen.ctypes.data
    )


def test_a_page_locked_array_lives_as_long_as_it_is_used() -> None:
    with numpy_rmm.pinned(threshold=0) as handler:
        before = handler.statistics()
        seen = np.from_dlpack(as_dlpack_pinned(host()))
    gc.collect()
    now = handler.statistics()
    assert before is not None
    assert now is not None
    assert now.current_count > before.current_count
    assert (seen == host()).all()


def test_a_pinned_array_too() -> None:
    array = host(np.int64)
    with pytest.raises(ValueError, match="host memory, which is not page-locked"):
        as_dlpack_pinned(array)
    with numpy_rmm.pin(array):
        assert np.from_dlpack(as_dlpack_pinned(array)).ctypes.data == array.ctypes.data
    with pytest.raises(TypeError, match=r"must be a numpy\.ndarray, not list"):
        as_dlpack_pinned([1])  # type: ignore[arg-type]


def test_a_read_only_array_stays_so() -> None:
    with numpy_rmm.pinned(threshold=0):
        array = host()
    array.flags.writeable = False
    view = as_dlpack_pinned(array)
    assert not np.from_dlpack(view).flags.writeable
    with pytest.raises(BufferError, match=r"only DLPack 1\.0 can say"):
        view.__dlpack__()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"stream": 1}, ValueError),
        ({"copy": True}, BufferError),
        ({"dl_device": (2, 0)}, BufferError),
        ({"dl_device": (13, 0)}, BufferError),
    ],
)
def test_what_a_page_locked_array_is_not(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with numpy_rmm.pinned(threshold=0):
        view = as_dlpack_pinned(host())
    with pytest.raises(error):
        view.__dlpack__(max_version=(1, 0), **wrong)
    view.__dlpack__(stream=-1)
    with pytest.raises(TypeError):
        type(view)()
