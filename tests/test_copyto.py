"""copyto: every byte arrives, and no other changes, whatever the strides.

Memory of a device is read and written by the driver's own calls, so all of it runs on
the simulated driver as well as on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    CudaError,
    Pending,
    Stream,
    copyto,
    mr,
)
from numpy_rmm.testing import Driver, SimulatedCuda

NBYTES = 1 << 20


class Device:
    """Memory of a device that looks like a view of a NumPy array: a copy of all that
    the view's base has."""

    def __init__(self, driver: Driver, view: np.ndarray, **more: object) -> None:
        base = view
        while isinstance(base.base, np.ndarray):
            base = base.base
        self.driver, self.view, self.base = driver, view, base
        self.address = driver.allocate(max(base.nbytes, 1))
        self.first = self.address + view.ctypes.data - base.ctypes.data
        driver.check(driver.cuMemcpyHtoD(self.address, base.ctypes.data, base.nbytes))
        self.more = more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.view.shape,
            "typestr": self.view.dtype.str,
            "descr": self.view.dtype.descr,
            "data": (self.first, False),
            "strides": self.view.strides,
            "stream": None,
            **self.more,
        }

    def read(self) -> np.ndarray:
        """What all of it holds now, shaped as the base."""
        self.driver.check(self.driver.cuCtxSynchronize())
        data = self.driver.read(self.address, self.base.nbytes)
        return np.frombuffer(data, self.base.dtype).reshape(self.base.shape)

    def close(self) -> None:
        self.driver.check(self.driver.cuMemFree(self.address))


MakeDevice = Callable[..., Device]


@pytest.fixture
def driver(cuda: Driver) -> Iterator[Driver]:
    cuda.activate()
    pool = numpy_rmm.registry["device"]  # has its addresses from here on
    pool.deallocate(pool.allocate(1), 1)
    with numpy_rmm.testing.assert_no_leaks():
        yield cuda
        # What a copy left behind when its Pending died goes with the next copy.
        cuda.check(cuda.cuCtxSynchronize())
        target = cuda.allocate(1)
        copyto(target, np.zeros(1, np.uint8))
        cuda.check(cuda.cuMemFree(target))
        gc.collect()
        pool.trim()


@pytest.fixture
def device(driver: Driver) -> Iterator[MakeDevice]:
    made: list[Device] = []

    def make(view: np.ndarray, **more: object) -> Device:
        made.append(Device(driver, view, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()
    made.clear()


def pattern(shape: tuple[int, ...] = (16, 18), dtype: Any = np.int32) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) * 7 + 3).astype(dtype).reshape(shape).copy()


View = Callable[[np.ndarray], np.ndarray]

# Each takes a base of (16, 18) to a view of (6, 4).
VIEWS: dict[str, View] = {
    "corner": lambda base: base[:6, :4],
    "middle": lambda base: base[3:9, 5:9],
    "steps": lambda base: base[2:14:2, 1:9:2],
    "rows backwards": lambda base: base[8:2:-1, :4],
    "columns backwards": lambda base: base[:6, 9:5:-1],
    "all backwards": lambda base: base[8:2:-1, 9:5:-1],
    "transposed": lambda base: base[4:8, 2:8].T,
    "dense": lambda base: base.reshape(-1)[10:34].reshape(6, 4),
    "dense, Fortran": lambda base: base.reshape(-1)[10:34].reshape(4, 6).T,
}


@pytest.fixture(params=VIEWS)
def to(request: pytest.FixtureRequest) -> View:
    return VIEWS[request.param]


@pytest.mark.parametrize("blocking", [True, False])
def test_to_a_device(device: MakeDevice, to: View, blocking: bool) -> None:
    for of in VIEWS.values():
        source, expected = pattern(), np.zeros((16, 18), np.int32)
        target = device(to(expected))
        pending = copyto(target, of(source), blocking=blocking)
        np.copyto(to(expected), of(source))
        if pending is not None:
            assert pending.result() is target
        assert (target.read() == expected).all()


@pytest.mark.parametrize("blocking", [True, False])
def test_to_the_host(device: MakeDevice, to: View, blocking: bool) -> None:
    for of in VIEWS.values():
        source, expected = pattern(), np.zeros((16, 18), np.int32)
        target = expected.copy()
        pending = copyto(to(target), device(of(source)), blocking=blocking)
        np.copyto(to(expected), of(source))
        if pending is not None:
            pending.wait()
            assert pending.done
        assert (target == expected).all()


def test_within_a_device(device: MakeDevice, to: View) -> None:
    for of in VIEWS.values():
        source, expected = pattern(), np.zeros((16, 18), np.int32)
        target = device(to(expected))
        copyto(target, device(of(source)))
        np.copyto(to(expected), of(source))
        assert (target.read() == expected).all()


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (np.s_[1:], np.s_[:-1]),
        (np.s_[:-1], np.s_[1:]),
        (np.s_[::-1], np.s_[:]),
        (np.s_[:], np.s_[:]),
        (np.s_[3:13:2], np.s_[5:10]),
    ],
)
def test_memory_that_overlaps(device: MakeDevice, target: slice, source: slice) -> None:
    base = pattern()
    whole = device(base)

    def part(rows: slice) -> Device:
        view = Device.__new__(Device)
        view.view, view.more = base[rows], {}
        view.first = whole.address + view.view.ctypes.data - base.ctypes.data
        return view

    to, of = part(target), part(source)
    copyto(to, of)
    expected = base.copy()
    np.copyto(expected[target], base[source].copy())
    assert (whole.read() == expected).all()


@pytest.mark.parametrize("dtype", ["u1", "<f8", ">i2", "c16", "S7", "M8[s]", "?"])
def test_dtypes(device: MakeDevice, dtype: str) -> None:
    source = np.zeros(10, dtype)
    source.view(np.uint8)[:] = np.arange(source.nbytes) % 2
    target = device(np.zeros(10, dtype))
    copyto(target, source)
    assert target.read().tobytes() == source.tobytes()


def test_a_dtype_with_fields(device: MakeDevice) -> None:
    source = np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")])
    target = device(np.zeros(2, source.dtype))
    copyto(target, source)
    assert (target.read() == source).all()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 1, 3, 1, 2)])
def test_shapes(device: MakeDevice, shape: tuple[int, ...]) -> None:
    source = pattern(shape)
    target = device(np.zeros(shape, source.dtype))
    copyto(target, source)
    back = np.zeros(shape, source.dtype)
    copyto(back, target)
    assert (back == source).all()


def test_an_address_is_read_like_the_other_side(driver: Driver) -> None:
    source, back = pattern(), np.zeros((16, 18), np.int32)
    address = driver.allocate(source.nbytes)
    copyto(address, source)
    copyto(back, np.intp(address))
    assert (back == source).all()
    driver.check(driver.cuMemFree(address))


def test_two_numpy_arrays_are_copied_by_numpy() -> None:
    source, target = pattern(), np.zeros((18, 16), np.int32)
    assert copyto(target, source.T) is None
    assert (target == source.T).all()
    pending = copyto(target.T, source[::-1], blocking=False)
    assert pending.done
    assert (pending.result() == source[::-1]).all()


def test_a_contiguous_copy_is_one_call(
    simulator: SimulatedCuda, device: MakeDevice
) -> None:
    source, target = pattern((4, 5, 6)), device(np.zeros((4, 5, 6), np.int32))
    simulator.clear_log()
    copyto(target, source)
    copyto(source, target)
    calls = [entry.split("(")[0] for entry in simulator.log()]
    assert [call for call in calls if "Memcpy" in call] == [
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
    ]


# ---- not waiting ---------------------------------------------------------------------


def pinned(nbytes: int = NBYTES, value: int = 1) -> np.ndarray:
    with numpy_rmm.pinned():
        return np.full(nbytes, value, np.uint8)


@pytest.fixture
def stream(driver: Driver) -> Stream:
    return Stream(flags=1)


def test_a_copy_that_is_not_waited_for(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    source, target = pinned(), device(np.zeros(NBYTES, np.uint8))
    with driver.held(stream):
        pending = copyto(target, source, stream=stream, blocking=False)
        assert isinstance(pending, Pending)
        assert not pending.done
        assert repr(pending) == "<Pending copy, submitted>"
        assert numpy_rmm.array_info(source).uses == (f"{stream.handle:#x}",)
    pending.wait()
    assert pending.done
    assert pending.result() is target
    assert repr(pending) == "<Pending copy, done>"
    assert numpy_rmm.array_info(source).uses == ()
    assert (target.read() == 1).all()


def test_a_pending_copy_keeps_both_ends_alive(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    class Array(np.ndarray):
        pass

    source = pinned().view(Array)
    target = device(np.zeros(NBYTES, np.uint8))
    dead = weakref.ref(source)
    with driver.held(stream):
        pending = copyto(target, source, stream=stream, blocking=False)
        del source
        gc.collect()
        assert dead() is not None
        del pending  # they live on until it is done
        gc.collect()
        assert dead() is not None
    stream.synchronize()
    copyto(target, np.zeros(NBYTES, np.uint8))
    assert dead() is None


def test_its_memory_is_not_handed_out_again(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    pool = mr.PoolMemoryResource(mr.PinnedHostMemoryResource(), reuse="recorded")
    target = device(np.zeros(NBYTES, np.uint8))
    with numpy_rmm.use_handler(pool):
        source = np.full(NBYTES, 1, np.uint8)
        address = source.ctypes.data
        with driver.held(stream):
            pending = copyto(target, source.view(), stream=stream, blocking=False)
            numpy_rmm.array_info(source)
            del source, pending
            others = [np.full(NBYTES, 2, np.uint8) for _ in range(4)]
            assert address not in [other.ctypes.data for other in others]
            del others
        assert (target.read() == 1).all()


def test_others_run_while_a_copy_is_waited_for(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    source, target = pinned(), device(np.zeros(NBYTES, np.uint8))
    let_go = threading.Event()

    def hold() -> None:
        driver.activate()
        with driver.held(stream):
            held.set()
            let_go.wait(10)

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    timer = threading.Timer(0.1, let_go.set)
    timer.start()
    copyto(target, source, stream=stream)
    assert let_go.is_set()
    thread.join()
    timer.join()
    assert (target.read() == 1).all()


def test_what_the_producer_was_given_comes_first(
    driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    producer = driver.create_stream()
    source = device(np.zeros(NBYTES, np.uint8), stream=producer)
    target = pinned(value=0)
    with driver.held(producer):
        driver.check(driver.cuMemsetD8Async(source.address, 5, NBYTES, producer))
        pending = copyto(target, source, stream=stream, blocking=False)
        assert not pending.done
    pending.wait()
    assert (target == 5).all()


@pytest.mark.parametrize("kind", ["handle", "object"])
def test_streams_of_others(driver: Driver, device: MakeDevice, kind: str) -> None:
    class Theirs:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    handle = driver.create_stream()
    source, target = pinned(), device(np.zeros(NBYTES, np.uint8))
    stream = Theirs() if kind == "object" else handle
    with driver.held(handle):
        pending = copyto(target, source, stream=stream, blocking=False)
        assert not pending.done
    pending.wait()
    assert (target.read() == 1).all()


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 512])
def test_an_address_where_it_does_not_fit(driver: Driver, offset: int) -> None:
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    address = pool.allocate(1000)
    given = np.zeros(1001 - offset, np.uint8)
    message = (
        rf": {given.nbytes} B do not fit at {address + offset:#x}, where the block "
    )
    message += f"ends after {1000 - offset} B"
    with pytest.raises(ValueError, match=f"^dst{message}$"):
        copyto(address + offset, given)
    with pytest.raises(ValueError, match=f"^src{message}$"):
        copyto(given, address + offset)
    copyto(address + offset, given[1:])
    pool.deallocate(address, 1000)


def test_dtypes_that_differ(device: MakeDevice) -> None:
    target = device(np.zeros(3, np.int32))
    with pytest.raises(TypeError, match="dst has dtype int32, src int64"):
        copyto(target, np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="does not convert"):
        copyto(np.zeros(3), np.zeros(3, np.float32))


def test_shapes_that_differ(device: MakeDevice) -> None:
    target = device(np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"dst has shape \(3, 4\), src \(4,\)"):
        copyto(target, np.zeros(4))


def test_a_destination_that_is_read_only(device: MakeDevice) -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    source = device(np.zeros(4))
    with pytest.raises(ValueError, match="dst is read-only"):
        copyto(array, source)
    target = device(np.zeros(4), data=(source.first, True))
    with pytest.raises(ValueError, match="dst is read-only"):
        copyto(target, np.zeros(4))
    copyto(np.zeros(4), target)  # as a source it is fine


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"version": 1}, ValueError, "version 1 is too old"),
        ({"mask": object()}, TypeError, "mask"),
        ({"stream": 0}, ValueError, "ambiguous"),
        ({"stream": -1}, ValueError, "stream of __cuda_array_interface__ must not be"),
        ({"stream": 1 << 64}, ValueError, "stream of __cuda_array_interface__ must be"),
        ({"stream": "1"}, TypeError, "stream of __cuda_array_interface__"),
        ({"stream": 1.5}, TypeError, "stream of __cuda_array_interface__"),
        ({"strides": (8, 8)}, ValueError, "1 axes, and 2 strides"),
        ({"typestr": "nonsense"}, TypeError, "nonsense"),
        ({"version": "3"}, ValueError, "version '3'"),
        (
            {"data": None},
            TypeError,
            r"data .* must be \(address, read-only\), not None",
        ),
        ({"data": ("x", False)}, TypeError, "data .* must be a tuple of int"),
        ({"data": (-8, False)}, ValueError, "from -8 to -8 and 24, where no addresses"),
        ({"data": (1 << 70, False)}, ValueError, "where no addresses are"),
        ({"data": ((1 << 64) - 8, False)}, ValueError, "where no addresses are"),
        ({"shape": 4}, TypeError, "shape .* must be a tuple of int, not 4"),
        ({"shape": (4.0,)}, TypeError, "shape .* must be a tuple of int"),
        ({"shape": (-1,)}, ValueError, "an axis cannot have -1 elements"),
        ({"strides": (1 << 62,)}, ValueError, rf"strides \({1 << 62},\) lead from"),
        ({"strides": (-(1 << 62),)}, ValueError, "where no addresses are"),
        ({"strides": (1 << 70,)}, ValueError, "where no addresses are"),
    ],
)
def test_an_interface_that_is_wrong(
    device: MakeDevice, more: dict[str, object], error: type, match: str
) -> None:
    with pytest.raises(error, match=f"^src: .*{match}|^[^:]*{match}"):
        copyto(np.zeros(4), device(np.zeros(4), **more))


class NotADict:
    __cuda_array_interface__ = 5


class Empty:
    __cuda_array_interface__ = {"version": 3, "shape": (3,)}  # noqa: RUF012


def test_an_interface_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"^dst: .* must be a dict, not int"):
        copyto(NotADict(), np.zeros(3))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^dst: .* has no data, typestr"):
        copyto(Empty(), np.zeros(3))


class HostTensor:
    """As PyTorch's: of one element it has an index, which is no address."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.array([5])

    def __index__(self) -> int:
        return 5


@pytest.mark.parametrize("wrong", [None, "text", [1, 2], 1.5, HostTensor()])
def test_what_is_no_array(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"dst must be a numpy.ndarray"):
        copyto(wrong, np.zeros(3))
    with pytest.raises(TypeError, match=r"src must be a numpy.ndarray"):
        copyto(np.zeros(3), wrong)


def test_two_addresses() -> None:
    with pytest.raises(TypeError, match="of two addresses"):
        copyto(0x1000, 0x2000)


def test_python_objects() -> None:
    with pytest.raises(TypeError, match="Python objects"):
        copyto(0x1000, np.array([None]))


@pytest.mark.parametrize("wrong", [None, "0", [], 1.0])
def test_what_is_no_stream(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^stream must be a handle \(int\), a Stream"):
        copyto(np.zeros(3), np.zeros(3), stream=wrong)


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_a_number_that_is_no_handle(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"^stream must (not )?be"):
        copyto(np.zeros(3), np.zeros(3), stream=wrong)


def test_an_address_takes_what_is_read_only(device: MakeDevice) -> None:
    target, source = device(np.zeros(3)), np.arange(3.0)
    source.flags.writeable = False
    copyto(target.first, source)
    assert target.read().tolist() == [0, 1, 2]


def test_a_closed_stream(device: MakeDevice, stream: Stream) -> None:
    stream.close()
    with pytest.raises(CudaError, match="closed"):
        copyto(device(np.zeros(3)), np.zeros(3), stream=stream)


@pytest.mark.parametrize("number", [5, 0x1000])
def test_memory_that_is_nobodys(
    simulator: SimulatedCuda, device: MakeDevice, number: int
) -> None:
    message = rf": a copy of 24 B at {number:#x}, which is no memory of a device"
    with pytest.raises(CudaError, match=f"^dst{message}"):
        copyto(number, np.zeros(3))
    with pytest.raises(CudaError, match=f"^src{message}"):
        copyto(device(np.zeros(3)), number)  # not an element, as NumPy's would be
    assert simulator.faults() == []


def test_a_pending_is_made_by_a_copy_only() -> None:
    with pytest.raises(TypeError):
        Pending()


# ---- captures ------------------------------------------------------------------------


def test_a_copy_that_is_captured_cannot_be_waited_for(
    simulator: SimulatedCuda, driver: Driver, device: MakeDevice, stream: Stream
) -> None:
    source, target = pinned(), device(np.zeros(NBYTES, np.uint8))
    graph = ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, 2))
        pending = copyto(target, source, stream=stream, blocking=False)
        driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
    assert not pending.done
    assert repr(pending) == "<Pending copy, captured>"
    with pytest.raises(RuntimeError, match="captured into a graph"):
        pending.wait()
    assert numpy_rmm.array_info(source).uses == (f"{stream.handle:#x} (captured)",)
    driver.check(driver.cuGraphDestroy(graph))
    assert numpy_rmm.array_info(source).uses == ()
    assert DEFAULT_STREAM.is_default()
