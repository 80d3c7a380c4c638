"""DeviceArray and DeviceScalar: NumPy's shapes over memory of a device."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import (
    DeviceArray,
    DeviceBuffer,
    DeviceScalar,
    Stream,
    copyto,
    mr,
    to_device,
)
from numpy_rmm.testing import Driver

pytestmark = pytest.mark.usefixtures("driver")

DTYPES = ["u1", "<f4", ">i2", "c16", "?", "S7", "M8[s]", "f2"]
View = Callable[[Any], Any]


def host(shape: tuple[int, ...] = (6, 8), dtype: Any = np.int32) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) * 7 + 3).astype(dtype).reshape(shape)


# ---- making one ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0, 3), (1, 2, 3, 4)])
def test_its_attributes(shape: tuple[int, ...], order: Any) -> None:
    for dtype in DTYPES:
        array, like = DeviceArray(shape, dtype, order), np.empty(shape, dtype, order)
        for name in ("shape", "dtype", "ndim", "size", "itemsize", "nbytes"):
            assert getattr(array, name) == getattr(like, name)
        assert array.strides == like.strides or like.size == 0
        assert array.base.size == like.nbytes
        assert array.ptr == array.base.ptr
        assert (array.ptr == 0) is (like.nbytes == 0)
        said = f"<DeviceArray of shape {shape}, {like.dtype}, in <DeviceBuffer of "
        assert repr(array).startswith(said)


def test_what_it_is_made_of(pool: mr.MemoryResource, stream: Stream) -> None:
    array = DeviceArray(10, mr=pool, stream=stream)
    assert array.shape == (10,)
    assert array.dtype == np.float64
    assert len(array) == 10
    assert array.mr is array.base.mr is pool
    assert array.stream is array.base.stream is stream
    assert type(array.base) is DeviceBuffer
    assert pool.statistics().current_bytes == 80
    del array
    assert pool.statistics().current_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((3, object), TypeError, "cannot have elements of dtype"),
        ((3, [("a", object)]), TypeError, "cannot have elements of dtype"),
        ((3, "S0"), TypeError, "cannot have elements of dtype"),
        ((3, "nonsense"), TypeError, "nonsense"),
        ((-1,), ValueError, "a length of -1 is negative"),
        (((1 << 40, 1 << 40),), ValueError, "too large"),
        (("3",), TypeError, "integer"),
        ((3, "f4", "K"), ValueError, "order must be 'C' or 'F', not 'K'"),
        ((), TypeError, "needs the argument 'shape'"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceArray(*arguments)


def test_too_many_elements(pool: mr.MemoryResource) -> None:
    with pytest.raises(numpy_rmm.OutOfMemoryError, match="1 PiB"):
        DeviceArray((1 << 20, 1 << 27), np.float64, mr=pool)
    assert pool.statistics().current_count == 0


# ---- to the host and back ------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0, 3)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        given = np.zeros(shape, dtype)
        given.reshape(-1).view(np.uint8)[:] = 1
        back = to_device(given).copy_to_host()
        assert back.dtype == given.dtype
        assert back.shape == shape
        assert back.tobytes() == given.tobytes()


def test_fields() -> None:
    given = np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")])
    array = to_device(given)
    assert array.__cuda_array_interface__["descr"] == given.dtype.descr
    assert (array.copy_to_host() == given).all()


def test_what_becomes_an_array() -> None:
    assert (to_device([[1, 2], [3, 4]]).copy_to_host() == [[1, 2], [3, 4]]).all()
    fortran = to_device(np.asfortranarray(host()))
    assert fortran.strides == (4, 24)
    assert (fortran.copy_to_host() == host()).all()
    strided = to_device(host()[::2, ::-1])
    assert (strided.copy_to_host() == host()[::2, ::-1]).all()
    with pytest.raises(TypeError, match="elements of"):
        to_device([None])


def test_into_arrays_that_are_there() -> None:
    array, target = to_device(host()), np.zeros((6, 8), np.int32)
    assert array.copy_to_host(target) is target
    assert (target == host()).all()
    array.copy_from(-host())
    array[:2].copy_from(to_device(host()[2:4]))
    expected = -host()
    expected[:2] = host()[2:4]
    assert (array.copy_to_host() == expected).all()
    for call in (array.copy_to_host, array.copy_from):
        with pytest.raises(TypeError, match="does not convert"):
            call(np.zeros((6, 8)))
        with pytest.raises(ValueError, match="does not broadcast"):
            call(np.zeros(8, np.int32))


def test_nothing_is_copied_unasked() -> None:
    array = DeviceArray(3)
    for call in (np.asarray, np.array, list, float):
        with pytest.raises(TypeError):
            call(array)
    with pytest.raises(TypeError):
        memoryview(array)  # type: ignore[arg-type]


# ---- views ---------------------------------------------------------------------------

VIEWS: dict[str, View] = {
    "row": lambda x: x[2],
    "element": lambda x: x[2, 3],
    "last": lambda x: x[-1, -1],
    "numpy's int": lambda x: x[np.int64(1)],
    "rows": lambda x: x[1:4],
    "steps": lambda x: x[::2, 1::3],
    "backwards": lambda x: x[::-1, ::-2],
    "column": lambda x: x[:, 3],
    "no rows": lambda x: x[3:3],
    "new axis": lambda x: x[None, 1, ..., None],
    "all": lambda x: x[...],
    "nothing": lambda x: x[()],
    "transposed": lambda x: x.T,
    "part, transposed": lambda x: x[1:4].T,
    "reshaped": lambda x: x.reshape(3, 16),
    "reshaped, a tuple": lambda x: x.reshape((2, -1)),
    "other elements": lambda x: x.view(np.uint8),
    "smaller elements": lambda x: x[2:4].view("f2"),
    "view of a view": lambda x: x[1:][:, 2:][::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_those_of_numpy(view: View) -> None:
    array, like = to_device(host()), host()
    seen, expected = view(array), np.asarray(view(like))
    assert type(seen) is DeviceArray
    assert seen.shape == expected.shape
    assert seen.dtype == expected.dtype
    assert seen.base is array.base
    assert (seen.copy_to_host() == expected).all()
    if expected.size > 0:
        assert seen.strides == expected.strides or seen.size == 1
        seen.copy_from(np.zeros(expected.shape, expected.dtype))
        written = view(like)
        if isinstance(written, np.ndarray):
            written[...] = 0
            assert (array.copy_to_host() == like).all()


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ([0, 1], TypeError),
        (np.array([0, 1]), TypeError),
        (np.array(1), TypeError),
        (True, TypeError),
        (host() > 3, TypeError),
        ("field", TypeError),
        (1.5, TypeError),
        ((0, [1]), TypeError),
        (6, IndexError),
        ((0, 0, 0), IndexError),
    ],
)
def test_what_is_no_index(key: Any, error: type) -> None:
    with pytest.raises(error, match=r"index|indices"):
        to_device(host())[key]


def test_views_that_need_a_copy() -> None:
    array = to_device(host())
    with pytest.raises(ValueError, match="C-contiguous"):
        array.T.reshape(48)
    assert (array.T.copy().T.copy_to_host() == host()).all()
    with pytest.raises(ValueError, match="reshape"):
        array.reshape(47)
    with pytest.raises(TypeError, match="elements of"):
        array.view(object)
    with pytest.raises(ValueError, match="contiguous"):
        array[:, ::2].view(np.uint8)


def test_a_view_keeps_the_memory(pool: mr.MemoryResource) -> None:
    view = to_device(host(), mr=pool)[1:3]
    gc.collect()
    assert (view.copy_to_host() == host()[1:3]).all()
    assert pool.statistics().current_count == 1
    del view
    assert pool.statistics().current_count == 0


def test_the_buffer_does_not_move_under_an_array(pool: mr.MemoryResource) -> None:
    array = DeviceArray(10, np.uint8, mr=pool)
    base, view = array.base, array[2:]
    with pytest.raises(BufferError, match="2 arrays and DLPack tensors"):
        base.resize(100)
    del array, view
    base.resize(100)
    assert len(base) == 100


# ---- copies --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x.copy(), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("view", ["all", "transposed", "steps", "element", "no rows"])
def test_copies(make: View, view: str, pool: mr.MemoryResource, stream: Stream) -> None:
    source = VIEWS[view](to_device(host(), stream, pool))
    other = make(source)
    assert other.base is not source.base
    assert other.stream is stream
    assert other.mr is pool
    assert other.base.size == source.nbytes
    assert (other.copy_to_host(stream=stream) == VIEWS[view](host())).all()


def test_a_copy_on_a_stream_is_not_waited_for(driver: Driver, stream: Stream) -> None:
    array = to_device(host(), stream)
    with driver.held(stream):
        other = array.copy()
        assert other.__cuda_array_interface__["stream"] == stream.handle
    assert (other.copy_to_host(stream=stream) == host()).all()
    assert other.__cuda_array_interface__["stream"] is None


@pytest.mark.parametrize("make", [DeviceArray, DeviceBuffer])
def test_copyto_comes_behind_the_stream_of_its_ends(
    driver: Driver, stream: Stream, make: Any
) -> None:
    own = Stream(flags=1)
    if make is DeviceArray:
        source: Any = DeviceArray(1 << 16, np.uint8, stream=own)
    else:
        source = DeviceBuffer(size=1 << 16, stream=own)
    with numpy_rmm.pinned():
        target = np.zeros(1 << 16, np.uint8)
    with driver.held(own):
        driver.check(driver.cuMemsetD8Async(source.ptr, 7, 1 << 16, own.handle))
        pending = copyto(target, source, stream=stream, blocking=False)
        assert not pending.done
    pending.wait()
    assert set(target.tolist()) == {7}


@pytest.mark.parametrize("view", ["all", "transposed", "steps", "element", "no rows"])
def test_pickles(view: str) -> None:
    array = VIEWS[view](to_device(host()))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(array, protocol))
        assert again.shape == array.shape
        assert (again.copy_to_host() == VIEWS[view](host())).all()


def test_pickles_out_of_band() -> None:
    parts: list[pickle.PickleBuffer] = []
    stored = pickle.dumps(to_device(host()), 5, buffer_callback=parts.append)
    assert [bytes(part) for part in parts] == [host().tobytes()]
    assert (pickle.loads(stored, buffers=parts).copy_to_host() == host()).all()


# ---- for other libraries -------------------------------------------------------------


def test_the_array_interface() -> None:
    array = DeviceArray((3, 4), "<f4")
    interface = array.__cuda_array_interface__
    assert interface == {
        "shape": (3, 4),
        "typestr": "<f4",
        "data": (array.ptr, False),
        "strides": None,
        "version": 3,
        "stream": None,
    }
    view = array[1:, ::2].__cuda_array_interface__
    assert view["data"] == (array.ptr + 16, False)
    assert view["strides"] == (16, 8)
    assert DeviceArray((0, 3)).__cuda_array_interface__["data"] == (0, False)


def test_numpy_takes_page_locked_arrays() -> None:
    for dtype in ("?", "i2", "u8", "f2", "f4", "c8", "c16"):
        check_numpy_takes(dtype)


def check_numpy_takes(dtype: str) -> None:
    array = to_device(host(dtype=dtype), mr=numpy_rmm.registry["pinned"])
    for view in ("all", "transposed", "steps", "column", "no rows"):
        seen = np.from_dlpack(VIEWS[view](array))
        expected = VIEWS[view](host(dtype=dtype))
        assert seen.dtype == expected.dtype
        assert (seen == expected).all()
        assert seen.size == 0 or seen.strides == expected.strides


def test_elements_that_dlpack_has_not() -> None:
    for dtype in ("S3", "M8[s]", ">f4", [("a", "i4")]):
        with pytest.raises(BufferError, match="DLPack has no elements of"):
            DeviceArray(3, dtype).__dlpack__()


def test_strides_that_dlpack_has_not() -> None:
    fields = DeviceArray(3, [("a", "i4"), ("b", "i2")])
    part = fields.view(np.uint8).reshape(3, 6)[:, :4].view("i4")
    with pytest.raises(BufferError, match="no stride of 6 B between elements of 4 B"):
        part.__dlpack__()


def test_a_dlpack_copy() -> None:
    array = to_device(host(), mr=numpy_rmm.registry["pinned"])
    capsule = array[::2].__dlpack__(copy=True)
    array.copy_from(-host())
    del capsule
    assert array.__dlpack_device__() == (3, 0)


def test_weak_references_and_sizes() -> None:
    array = DeviceArray(1 << 20)
    dead = weakref.ref(array)
    assert sys.getsizeof(array) < 500
    del array
    assert dead() is None


def test_a_cycle_through_its_own_interface(pool: mr.MemoryResource) -> None:
    array = DeviceArray(10, mr=pool)
    array.__cuda_array_interface__["me"] = array
    del array
    gc.collect()
    assert pool.statistics().current_count == 0


def test_managed_memory_is_prefetched() -> None:
    array = DeviceArray((4, 4), mr=numpy_rmm.registry["managed"])
    array.prefetch()
    array[1:].prefetch(-1)
    with pytest.raises(ValueError, match="only contiguous memory"):
        array[:, 1:].prefetch()


class Named(DeviceArray):
    name = ""


STRUCTURES = {
    "one field": np.dtype([("a", "<i4")]),
    "padding": np.dtype([("a", "i1"), ("b", "<f8")], align=True),
    "padding at both ends": np.dtype(
        {"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 20}
    ),
    "in one another": np.dtype([("a", [("x", "<i2"), ("y", "u1", (3,))]), ("b", "S3")]),
    "a title": np.dtype([(("title", "a"), "<i4")]),
    "overlapping": np.dtype(
        {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]}
    ),
    "nothing": np.dtype("V5"),
}


@pytest.mark.parametrize("dtype", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_go_there_and_back(dtype: np.dtype[Any]) -> None:
    given = np.zeros(4, dtype)
    given.view(np.uint8)[:] = np.arange(given.nbytes)
    array = to_device(given)
    for each, expected in [
        (array, given),
        (array[::2].copy(), given[::2]),
        (pickle.loads(pickle.dumps(array)), given),
        (DeviceScalar(dtype, given[1]), given[1]),
    ]:
        back = each.copy_to_host()
        assert back.dtype == dtype
        assert np.array_equal(back, expected)


@pytest.mark.parametrize(
    "dtype", [dtype for name, dtype in STRUCTURES.items() if name != "overlapping"]
)
def test_structures_of_others_have_fields(dtype: np.dtype[Any]) -> None:
    given = np.zeros(3, dtype)
    given.view(np.uint8)[:] = np.arange(given.nbytes)
    array, back = to_device(given), np.zeros(3, dtype)

    interface = array.__cuda_array_interface__
    assert interface.get("descr", [("", dtype.str)]) == dtype.descr
    copyto(back, SimpleNamespace(__cuda_array_interface__=interface))
    assert back.tobytes() == given.tobytes()


def test_subclasses() -> None:
    named = Named((2, 3), np.int8)
    named.name = "x"
    named.copy_from(np.ones((2, 3), np.int8))
    assert type(named[0]) is type(named.copy()) is DeviceArray
    again = pickle.loads(pickle.dumps(named))
    assert type(again) is Named
    assert (again.copy_to_host() == 1).all()


# ---- scalars -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("i8", -5), ("f4", 1.5), ("?", True), ("c16", 1 + 2j), ("S3", b"abc")],
)
def test_scalars(
    dtype: str, value: Any, stream: Stream, pool: mr.MemoryResource
) -> None:
    scalar = DeviceScalar(dtype, value, stream=stream, mr=pool)
    assert isinstance(scalar, DeviceArray)
    assert (scalar.shape, scalar.dtype) == ((), np.dtype(dtype))
    assert scalar.value == scalar.get() == scalar.get(stream) == value
    assert isinstance(scalar.value, np.dtype(dtype).type)
    assert scalar.mr is pool
    other = np.zeros((), dtype)[()]
    scalar.value = other
    assert scalar.value == other
    scalar.set(value, stream)
    assert scalar.copy_to_host() == value
    assert repr(scalar).startswith("<DeviceScalar of shape (), ")


def test_a_scalar_without_a_value() -> None:
    assert DeviceScalar(np.int32).nbytes == 4
    assert DeviceScalar(np.int32, None).get().dtype == np.int32


@pytest.mark.parametrize("value", ["x", [1, 2], 1j, object()])
def test_what_is_no_value(value: Any) -> None:
    scalar = DeviceScalar(np.int32, 1)
    for call in (scalar.set, lambda value: setattr(scalar, "value", value)):
        with pytest.raises((TypeError, ValueError)):
            call(value)
    with pytest.raises((TypeError, ValueError)):
        DeviceScalar(np.int32, value)
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del scalar.value
    assert scalar.value == 1


def test_a_scalar_pickles_as_itself() -> None:
    again = pickle.loads(pickle.dumps(DeviceScalar(np.int32, 7)))
    assert type(again) is DeviceScalar
    assert again.value == 7


def test_copies_of_a_scalar_are_scalars() -> None:
    scalar = DeviceScalar(np.int32, 7)
    for again in (scalar.copy(), copy.copy(scalar), copy.deepcopy(scalar)):
        scalar.value = 8
        assert type(again) is DeviceScalar
        assert again.value == 7
        scalar.value = 7
    assert type(scalar.reshape(1)) is DeviceArray
