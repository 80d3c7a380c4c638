"""Contexts that a program makes beside the primary one, and ends when it likes.

Their work is covered by `record_use` and by our own copies. When one ends, no handle of
it is named to the driver again: another context may have it by then.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DEFAULT_STREAM, Event, Stream, copyto, mr, record_use
from numpy_rmm.testing import Driver, SimulatedCuda

NBYTES = 1 << 20


class Foreign:
    """A context of the program's own, which is current from the beginning."""

    def __init__(self, driver: Driver, device: int = 0) -> None:
        context = ctypes.c_void_p()
        driver.check(driver.cuCtxCreate(ctypes.byref(context), 0, device))
        self.driver, self.handle = driver, context.value or 0
        self.stream = driver.create_stream()

    def destroy(self) -> None:
        if self.handle:
            self.driver.check(self.driver.cuCtxDestroy(self.handle))
            self.handle = 0


def current(driver: Driver) -> int:
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    return context.value or 0


@pytest.fixture
def primary(cuda: Driver) -> int:
    return cuda.activate()


@pytest.fixture
def foreign(cuda: Driver, primary: int) -> Iterator[Foreign]:
    context = Foreign(cuda)
    yield context
    if context.handle:
        cuda.check(cuda.cuCtxSynchronize())
    context.destroy()
    gc.collect()
    numpy_rmm.trim()
    cuda.check(cuda.cuCtxSetCurrent(primary))


@pytest.fixture(params=["context", "recorded"])
def new(request: pytest.FixtureRequest, cuda: Driver) -> Callable[[int], np.ndarray]:
    pool = mr.PoolMemoryResource(
        mr.PinnedHostMemoryResource(), reuse=request.param, wait_limit=0
    )

    def new(value: int = 1) -> np.ndarray:
        with numpy_rmm.use_handler(pool):
            return np.full(NBYTES, value, np.uint8)

    return new


def addresses(arrays: list[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


# ---- what is current -----------------------------------------------------------------


def test_what_is_current_stays_so(cuda: Driver, foreign: Foreign) -> None:
    for _ in range(5):
        with numpy_rmm.pinned():
            array = np.zeros(NBYTES, np.uint8)
        record_use(array, DEFAULT_STREAM)
        target = numpy_rmm.DeviceBuffer(size=NBYTES)
        copyto(target.ptr, array)
        with numpy_rmm.pin(np.zeros(NBYTES)):
            assert current(cuda) == foreign.handle
        del array, target
        numpy_rmm.trim()
        assert current(cuda) == foreign.handle


def test_streams_of_ours_are_in_the_primary_context(
    cuda: Driver, foreign: Foreign, primary: int
) -> None:
    stream, context = Stream(), ctypes.c_void_p()
    cuda.check(cuda.cuStreamGetCtx(stream.handle, ctypes.byref(context)))
    assert context.value == primary
    foreign.destroy()
    stream.synchronize()  # and live on


def test_work_in_the_primary_context_is_waited_for(
    cuda: Driver, foreign: Foreign, new: Callable[[int], np.ndarray]
) -> None:
    stream, target = Stream(flags=1), numpy_rmm.DeviceBuffer(size=NBYTES)
    array = new(1)
    address = array.ctypes.data
    with cuda.held(stream):
        pending = copyto(target.ptr, array, stream=stream, blocking=False)
        del array
        others = [new(2) for _ in range(4)]
        assert address not in addresses(others)
    pending.wait()
    back = np.zeros(NBYTES, np.uint8)
    copyto(back, target.ptr)
    assert (back == 1).all()


# ---- work in the other context -------------------------------------------------------

MARKS = ["record_use", "copyto"]


@pytest.mark.parametrize("mark", MARKS)
def test_memory_waits_for_uses_in_another_context(
    cuda: Driver, foreign: Foreign, new: Callable[[int], np.ndarray], mark: str
) -> None:
    target, array = cuda.allocate(NBYTES), new(1)
    address = array.ctypes.data
    with cuda.held(foreign.stream):
        if mark == "copyto":
            copyto(target, array, stream=foreign.stream, blocking=False)
        else:
            cuda.check(cuda.cuMemcpyHtoDAsync(target, address, NBYTES, foreign.stream))
            record_use(array, foreign.stream)
        assert numpy_rmm.array_info(array).uses == (f"{foreign.stream:#x}",)
        del array
        gc.collect()
        others = [new(2) for _ in range(6)]
        assert address not in addresses(others)
    cuda.check(cuda.cuCtxSynchronize())
    assert set(cuda.read(target, NBYTES)) == {1}
    copyto(np.zeros(NBYTES, np.uint8), target)  # what the last one kept goes
    del others
    assert address in addresses([new(2) for _ in range(20)])
    cuda.check(cuda.cuMemFree(target))


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_are_those_of_the_current_context(
    cuda: Driver, foreign: Foreign, new: Callable[[int], np.ndarray], handle: int
) -> None:
    target, array = cuda.allocate(NBYTES), new(1)
    address = array.ctypes.data
    with cuda.held(handle):
        cuda.check(cuda.cuMemcpyHtoDAsync(target, address, NBYTES, handle))
        record_use(array, handle)
        del array
        others = [new(2) for _ in range(6)]
        assert address not in addresses(others)
    cuda.check(cuda.cuCtxSynchronize())
    assert set(cuda.read(target, NBYTES)) == {1}
    cuda.check(cuda.cuMemFree(target))


# ---- its end -------------------------------------------------------------------------


def test_uses_end_with_their_context(
    cuda: Driver, foreign: Foreign, new: Callable[[int], np.ndarray]
) -> None:
    array = new(1)
    address = array.ctypes.data
    record_use(array, foreign.stream)
    del array
    foreign.destroy()
    assert address in addresses([new(2) for _ in range(20)])


def test_events_of_others_with_the_handles_of_ours_stay(
    simulator: SimulatedCuda, foreign: Foreign, new: Callable[[int], np.ndarray]
) -> None:
    """Three ways to have an event in a context that ends."""
    driver, array, event = simulator.driver, new(1), Event()
    target = driver.allocate(NBYTES)
    simulator.hold(foreign.stream)
    record_use(array, foreign.stream)
    pending = copyto(target, array, stream=foreign.stream, blocking=False)
    event.record(Stream(foreign.stream))
    foreign.destroy()
    theirs = [driver.create_event() for _ in range(8)]
    for _ in range(4):
        new(2)
    del array, pending
    event.record(DEFAULT_STREAM)  # it is an event of this context now
    assert event.done
    del event
    gc.collect()
    numpy_rmm.trim()
    assert [driver.cuEventQuery(each) for each in theirs] == [0] * 8
    assert simulator.faults() == []


@pytest.mark.parametrize("is_primary", [False, True])
def test_a_copy_whose_context_ended_has_failed(
    simulator: SimulatedCuda, foreign: Foreign, is_primary: bool
) -> None:
    driver = simulator.driver
    stream = Stream(flags=1) if is_primary else foreign.stream
    target, event = driver.allocate(NBYTES), Event()
    simulator.hold(stream)
    with numpy_rmm.pinned():
        pending = copyto(
            target, np.zeros(NBYTES, np.uint8), stream=stream, blocking=False
        )
    event.record(Stream(stream))
    if is_primary:
        driver.check(driver.cuDevicePrimaryCtxReset(0))
    else:
        foreign.destroy()
    driver.activate()
    theirs = [driver.create_event() for _ in range(8)]
    for wait in (pending.wait, event.synchronize):
        with pytest.raises(numpy_rmm.CudaError, match="CONTEXT_IS_DESTROYED"):
            wait()
    del pending, event
    gc.collect()
    assert [driver.cuEventQuery(each) for each in theirs] == [0] * 8


def test_a_context_that_another_thread_has_destroyed(
    simulator: SimulatedCuda, foreign: Foreign, primary: int
) -> None:
    """It stays current, and everything of it is gone."""
    thread = threading.Thread(target=foreign.destroy)
    thread.start()
    thread.join()
    assert current(simulator.driver) != primary
    with numpy_rmm.pinned():
        array = np.zeros(NBYTES, np.uint8)
    record_use(array, DEFAULT_STREAM)
    assert numpy_rmm.array_info(array).uses == ()
    with numpy_rmm.pin(np.zeros(NBYTES)):
        pass
    del array
    numpy_rmm.trim()
    assert simulator.faults() == []


# ---- without a primary one -----------------------------------------------------------


def is_active(driver: Driver) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.check(
        driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
    )
    return bool(active.value)


@pytest.fixture
def only(simulator: SimulatedCuda) -> Iterator[Foreign]:
    """The one context that there is; another one would be a surprise."""
    simulator.driver.check(simulator.driver.cuInit(0))
    context = Foreign(simulator.driver)
    yield context
    assert not is_active(simulator.driver)
    context.destroy()
    gc.collect()
    numpy_rmm.trim()
    assert simulator.outstanding()["registrations"] == (0, 0)
    assert simulator.faults() == []


@pytest.mark.parametrize("ends", ["after", "before", "elsewhere"])
def test_a_pin_in_the_only_context_is_unlocked(
    simulator: SimulatedCuda, only: Foreign, ends: str
) -> None:
    array = np.zeros(NBYTES, np.uint8)
    pin = numpy_rmm.pin(array)
    assert simulator.outstanding()["registrations"] == (1, NBYTES)
    if ends == "before":
        only.destroy()
    if ends == "elsewhere":
        thread = threading.Thread(target=pin.close)  # which has no context
        thread.start()
        thread.join()
    pin.close()
    assert not numpy_rmm.is_pinned(array)
    assert simulator.outstanding()["registrations"] == (0, 0)


@pytest.mark.parametrize("name", ["pinned", "managed", "pinned_direct"])
@pytest.mark.parametrize("ends", ["after", "before"])
def test_arrays_that_outlive_the_only_context(
    simulator: SimulatedCuda, only: Foreign, name: str, ends: str
) -> None:
    with numpy_rmm.use_handler(name):
        array = np.ones(NBYTES, np.uint8)
    if ends == "before":
        only.destroy()
    del array
    numpy_rmm.trim()
    if ends == "after":
        only.destroy()
    numpy_rmm.trim()


def test_arrays_and_copies_in_the_only_context(
    simulator: SimulatedCuda, only: Foreign
) -> None:
    target = numpy_rmm.DeviceBuffer(size=NBYTES)
    stream, back = Stream(only.stream), np.zeros(NBYTES, np.uint8)
    for value in range(1, 4):
        with numpy_rmm.pinned():
            array = np.full(NBYTES, value, np.uint8)
        copyto(target.ptr, array, stream=stream)
        copyto(back, target.ptr, stream=stream)
        assert (back == value).all()


@pytest.mark.parametrize("on", ["default", "theirs", "ours"])
@pytest.mark.parametrize("new", [mr.PoolMemoryResource, mr.ArenaMemoryResource])
def test_device_memory_goes_back_behind_the_work_in_the_only_context(
    simulator: SimulatedCuda,
    only: Foreign,
    on: str,
    new: Callable[..., mr.MemoryResource],
) -> None:
    driver, seen = simulator.driver, simulator.driver.allocate(NBYTES)
    upstream = mr.CudaMemoryResource()
    pool = (
        new(upstream, arena_size=64 << 20)
        if new is mr.ArenaMemoryResource
        else new(upstream)
    )
    stream = {
        "default": DEFAULT_STREAM,
        "theirs": Stream(only.stream),
        "ours": Stream(flags=1),
    }[on]
    buffer = numpy_rmm.DeviceBuffer.to_device(b"\7" * NBYTES, stream, pool)
    address = buffer.ptr
    with driver.held(stream):
        driver.check(driver.cuMemcpyAsync(seen, address, NBYTES, stream.handle))
        del buffer
        other = Stream(driver.create_stream())
        others = [
            numpy_rmm.DeviceBuffer(size=NBYTES, stream=other, mr=pool) for _ in range(3)
        ]
        assert address not in [each.ptr for each in others]
    driver.check(driver.cuCtxSynchronize())
    assert set(driver.read(seen, NBYTES)) == {7}
    pool.trim()
    assert address in [
        numpy_rmm.DeviceBuffer(size=NBYTES, stream=other, mr=pool).ptr for _ in range(2)
    ]
    driver.check(driver.cuMemFree(seen))


@pytest.mark.parametrize("ends", ["after", "before"])
def test_nobody_waits_for_device_memory_of_the_only_context(
    simulator: SimulatedCuda, only: Foreign, ends: str
) -> None:
    """For work that was never there, at the end of a pool."""
    pools = [mr.PoolMemoryResource(mr.CudaMemoryResource()) for _ in range(2)]
    streams = [DEFAULT_STREAM, Stream(only.stream)]
    for pool, stream in zip(pools, streams, strict=True):
        numpy_rmm.DeviceBuffer(size=NBYTES, stream=stream, mr=pool)
    if ends == "before":
        only.destroy()
    before = time.monotonic()
    del pool, pools
    gc.collect()
    numpy_rmm.trim()
    assert time.monotonic() - before < 5  # where it waits it is ten seconds for each


# ---- captures ------------------------------------------------------------------------


def test_captures_of_another_context_do_not_hold_up_ours(
    simulator: SimulatedCuda, foreign: Foreign
) -> None:
    """A record on the primary context leaves them alone, as they are not in it."""
    driver, graph = simulator.driver, ctypes.c_void_p()
    driver.check(driver.cuStreamBeginCapture(foreign.stream, 0))
    before = numpy_rmm.registry["pinned"].statistics().epochs
    for _ in range(64):
        with numpy_rmm.pinned():
            np.zeros(NBYTES, np.uint8)
    assert numpy_rmm.registry["pinned"].statistics().epochs > before
    driver.check(driver.cuStreamEndCapture(foreign.stream, ctypes.byref(graph)))
    driver.check(driver.cuGraphDestroy(graph))
