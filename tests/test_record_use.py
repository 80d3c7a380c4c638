"""record_use: memory goes with the uses that were noted of it.

The uses are the driver's own calls, so all of it runs on the simulated driver as well
as on a GPU: a copy from page-locked memory, and a fill of managed memory, since a copy
from that waits in the call.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import (
    DEFAULT_STREAM,
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    CudaError,
    Stream,
    mr,
    record_use,
)
from numpy_rmm.testing import Driver

NBYTES = 1 << 20
SOURCES = {
    "pinned": mr.PinnedHostMemoryResource,
    "managed": mr.ManagedMemoryResource,
}


class Program:
    """A pool under a policy, and a device buffer to copy to."""

    def __init__(self, driver: Driver, kind: str, reuse: str) -> None:
        self.driver = driver
        self.copies = kind == "pinned"
        self.target = driver.allocate(NBYTES)
        self.pool = mr.PoolMemoryResource(SOURCES[kind](), reuse=reuse)  # type: ignore[arg-type]

    def new(self, value: int = 1) -> np.ndarray:
        with numpy_rmm.use_handler(self.pool):
            return np.full(NBYTES, value, np.uint8)

    def use(self, array: np.ndarray, stream: object) -> None:
        """Queues work on the stream that reads the array, or writes 9s into it."""
        handle = stream if isinstance(stream, int) else stream.handle  # type: ignore[attr-defined]
        address, driver = array.ctypes.data, self.driver
        if self.copies:
            driver.check(driver.cuMemcpyHtoDAsync(self.target, address, NBYTES, handle))
        else:
            driver.check(driver.cuMemsetD8Async(address, 9, NBYTES, handle))

    def is_right(self, others: list[np.ndarray]) -> bool:
        """Whether the 1s were read, or nothing was written to other arrays of 2s."""
        self.driver.check(self.driver.cuCtxSynchronize())
        if self.copies:
            return set(self.driver.read(self.target, NBYTES)) == {1}
        return all((other == 2).all() for other in others)


@pytest.fixture(params=sorted(SOURCES))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def driver(cuda: Driver) -> Iterator[Driver]:
    cuda.activate()
    with numpy_rmm.testing.assert_no_leaks():
        yield cuda


@pytest.fixture
def make(driver: Driver, kind: str) -> Iterator[Callable[[str], Program]]:
    """Makes a program under a policy, and frees what it allocated by itself."""
    programs: list[Program] = []

    def make(reuse: str) -> Program:
        programs.append(Program(driver, kind, reuse))
        return programs[-1]

    yield make
    gc.collect()  # an exception that a test caught keeps its frames in a cycle
    for program in programs:
        driver.check(driver.cuMemFree(program.target))
    programs.clear()


@pytest.fixture
def program(make: Callable[[str], Program]) -> Program:
    return make("recorded")


class Theirs:
    """A stream of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


STREAMS: dict[str, Any] = {
    "Stream": lambda driver: Stream(flags=1),
    "handle": lambda driver: driver.create_stream(),
    "object": lambda driver: Theirs(driver.create_stream()),
    "default": lambda driver: DEFAULT_STREAM,
    "legacy": lambda driver: LEGACY_DEFAULT_STREAM,
    "per-thread": lambda driver: PER_THREAD_DEFAULT_STREAM,
}


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_memory_waits_for_its_uses(program: Program, name: str) -> None:
    stream = STREAMS[name](program.driver)
    array = program.new()
    address = array.ctypes.data
    with program.driver.held(stream):
        program.use(array, stream)
        record_use(array, stream)
        del array
        others = [program.new(2) for _ in range(4)]
        assert address not in [other.ctypes.data for other in others]
    assert program.is_right(others)
    others += [program.new(2) for _ in range(4)]
    assert address in [other.ctypes.data for other in others]


def test_recorded_memory_without_a_use_is_handed_out_at_once(
    program: Program,
) -> None:
    stream = Stream(flags=1)
    array = program.new()
    with program.driver.held(stream):
        program.use(array, stream)
        address = array.ctypes.data
        del array
        assert program.new(2).ctypes.data == address


def test_a_view_stands_for_the_array_that_owns_the_data(program: Program) -> None:
    stream = Stream(flags=1)
    array = program.new()
    with program.driver.held(stream):
        program.use(array, stream)
        record_use(array[100:200].reshape(10, 10)[::2], stream)
        assert numpy_rmm.array_info(array).uses == (f"{stream.handle:#x}",)
        assert numpy_rmm.array_info(array[5:]).uses == (f"{stream.handle:#x}",)
    stream.synchronize()
    assert numpy_rmm.array_info(array).uses == ()


def test_an_address_may_be_interior(program: Program) -> None:
    array = program.new()
    with program.driver.held(DEFAULT_STREAM):
        program.use(array, DEFAULT_STREAM)
        record_use(array.ctypes.data + 1000, stream=DEFAULT_STREAM)
        assert numpy_rmm.array_info(array).uses == ("DEFAULT_STREAM",)


@pytest.mark.parametrize("reuse", ["context", "recorded"])
def test_uses_of_several_streams_are_listed(
    make: Callable[[str], Program], driver: Driver, reuse: str
) -> None:
    program = make(reuse)
    first, second = Stream(flags=1), driver.create_stream()
    array = program.new()
    with driver.held(first), driver.held(second):
        for stream in (first, second, first):
            program.use(array, stream)
            record_use(array, stream)
        names = (f"{first.handle:#x}", f"{second:#x}")
        assert numpy_rmm.array_info(array).uses == names
    driver.check(driver.cuCtxSynchronize())
    assert numpy_rmm.array_info(array).uses == ()


def test_immediate_notes_nothing(make: Callable[[str], Program]) -> None:
    program = make("immediate")
    stream = Stream(flags=1)
    array = program.new()
    with program.driver.held(stream):
        program.use(array, stream)
        record_use(array, stream)
        assert numpy_rmm.array_info(array).uses == ()


def test_a_stream_may_be_closed_while_it_is_in_use(program: Program) -> None:
    driver, blocker, stream = program.driver, Stream(flags=1), Stream(flags=1)
    array, event = program.new(), program.driver.create_event()
    address = array.ctypes.data
    with driver.held(blocker):
        driver.check(driver.cuMemsetD8Async(program.target, 9, 1, blocker.handle))
        driver.check(driver.cuEventRecord(event, blocker.handle))
        driver.check(driver.cuStreamWaitEvent(stream.handle, event, 0))
        program.use(array, stream)
        record_use(array, stream)
        stream.close()
        del array
        others = [program.new(2) for _ in range(4)]
        assert address not in [other.ctypes.data for other in others]
    assert program.is_right(others)


def test_small_arrays_of_a_pinned_handler_are_host_memory(driver: Driver) -> None:
    with numpy_rmm.pinned():
        array = np.zeros(10)
    record_use(array, DEFAULT_STREAM)
    assert numpy_rmm.array_info(array).uses == ()


# ---- wrong arguments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (np.zeros(10), ValueError, "'host' memory"),
        (np.frombuffer(bytes(80)), ValueError, "'external' memory"),
        (1 << 20, ValueError, "'unknown' memory"),
        (0, ValueError, "^0x0 is 'unknown' memory"),
        ([1, 2], TypeError, r"must be a numpy.ndarray or an address \(int\), not list"),
        (None, TypeError, "not NoneType"),
        (-1, ValueError, "negative"),
    ],
)
def test_memory_that_is_not_ours(
    driver: Driver, wrong: Any, error: type, match: str
) -> None:
    with pytest.raises(error, match=match):
        record_use(wrong, DEFAULT_STREAM)


def test_device_memory_is_ordered_otherwise(driver: Driver) -> None:
    resource = mr.CudaMemoryResource()
    address = resource.allocate(1000)
    with pytest.raises(ValueError, match="device memory"):
        record_use(address, DEFAULT_STREAM)
    resource.deallocate(address, 1000)


@pytest.mark.parametrize("wrong", [None, "0", 1.5, [], object()])
def test_something_that_is_no_stream(program: Program, wrong: Any) -> None:
    array = program.new()
    with pytest.raises(TypeError, match=r"^stream must be a handle \(int\), a Stream"):
        record_use(array, wrong)
    assert numpy_rmm.array_info(array).uses == ()


def test_a_closed_stream(program: Program) -> None:
    stream = Stream()
    stream.close()
    array = program.new()
    with pytest.raises(CudaError, match="closed"):
        record_use(array, stream)


@pytest.mark.parametrize(
    "number", [100, 12345, 0x1234560, 0xDEADBEEF, 1 << 60, 2**64 - 1]
)
@pytest.mark.parametrize("kind_of_stream", [int, Theirs, Stream])
def test_a_handle_of_no_stream(
    program: Program, number: int, kind_of_stream: Callable[[int], Any]
) -> None:
    """Not even a driver that would follow it gets to see it."""
    array = program.new()
    with pytest.raises(CudaError, match=r"where there is nothing.*INVALID_HANDLE"):
        record_use(array, kind_of_stream(number))
    assert numpy_rmm.array_info(array).uses == ()


def test_a_handle_of_a_stream_that_is_gone(program: Program, simulator: object) -> None:
    array, handle = program.new(), program.driver.create_stream()
    program.driver.check(program.driver.cuStreamDestroy(handle))
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        record_use(array, handle)
    assert numpy_rmm.array_info(array).uses == ()


def test_a_missing_argument() -> None:
    with pytest.raises(TypeError, match="stream"):
        record_use(np.zeros(3))  # type: ignore[call-arg]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_trim_gives_back_what_uses_kept(
    driver: Driver, kind: str, fixed: bool
) -> None:
    for _ in range(10):
        program = Program(driver, kind, "recorded")
        if fixed:
            with numpy_rmm.options(reuse="recorded"):
                program.pool = mr.FixedSizeMemoryResource(SOURCES[kind](), NBYTES, 2)  # type: ignore[assignment]
        for _ in range(3):
            array = program.new()
            stream = Stream(flags=1)
            program.use(array, stream)
            record_use(array, stream)
            del array
        driver.check(driver.cuCtxSynchronize())
        program.pool.trim()
        assert program.pool.statistics().reserved_bytes == 0
        driver.check(driver.cuMemFree(program.target))


@pytest.mark.parametrize("of", ["handle", "Stream", "theirs"])
def test_a_use_in_a_broken_capture_is_told_of(
    driver: Driver, program: Program, of: str
) -> None:
    stream, graph, array = Stream(flags=1), ctypes.c_void_p(), program.new()
    handle = ctypes.c_void_p(stream.handle)
    subjects = {
        "handle": stream.handle,
        "Stream": stream,
        "theirs": Theirs(stream.handle),
    }
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(handle, 2))
        assert driver.cuStreamSynchronize(handle) != 0  # which breaks it
        with pytest.raises(CudaError, match="STREAM_CAPTURE_INVALIDATED") as info:
            record_use(array, subjects[of])
        assert info.value.code == 901
        assert numpy_rmm.array_info(array).uses == ()
        assert driver.cuStreamEndCapture(handle, ctypes.byref(graph)) != 0
    record_use(array, subjects[of])
