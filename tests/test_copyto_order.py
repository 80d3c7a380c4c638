"""copyto: what comes before a copy, and what a stream capture takes of it.

Memory of devices is read by the driver's own calls: all of it runs on a GPU as well.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import (
    CudaError,
    DeviceBuffer,
    Stream,
    copy_host_to_ptr,
    copy_ptr_to_host,
    copyto,
)
from numpy_rmm.testing import Driver, SimulatedCuda

Run = Callable[..., Any]
NBYTES = 1 << 20
CAPTURED = 1  # as cuStreamIsCapturing says it


class Device:
    """Memory of a device."""

    def __init__(self, address: int, nbytes: int = NBYTES, **more: object) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            **more,
        }


@pytest.fixture
def address(driver: Driver) -> Iterator[int]:
    """Of memory of a device, all zeros."""
    address = driver.allocate(2 * NBYTES)
    driver.check(driver.cuMemsetD8(address, 0, 2 * NBYTES))
    driver.check(driver.cuCtxSynchronize())
    yield address
    driver.check(driver.cuCtxSynchronize())
    driver.check(driver.cuMemFree(address))


def ones() -> np.ndarray:
    with numpy_rmm.pinned():
        return np.ones(NBYTES, np.uint8)


# ---- what lives on -------------------------------------------------------------------


LET_GO: dict[str, Callable[[Stream], object]] = {
    "synchronize": lambda stream: stream.synchronize(),
    "event": lambda stream: stream.record().synchronize(),
    "wait": lambda stream: copyto(np.zeros(1), np.zeros(1), blocking=False).wait(),
    "trim": lambda stream: numpy_rmm.trim(),
    "trim of a resource": lambda stream: numpy_rmm.registry["host"].trim(),
    "trim of a handler": lambda stream: numpy_rmm.get_handler().trim(),
}


@pytest.mark.parametrize("how", LET_GO)
def test_what_a_copy_kept_goes_when_it_is_done(
    simulator: SimulatedCuda, driver: Driver, address: int, stream: Stream, how: str
) -> None:
    array = np.ones(NBYTES, np.uint8)
    alive = weakref.ref(array)
    simulator.hold(stream)
    copyto(address, array, stream=stream, blocking=False)
    del array
    with numpy_rmm.host():
        LET_GO["trim"](stream)
        assert alive() is not None
        simulator.release(stream)
        driver.check(driver.cuCtxSynchronize())
        LET_GO[how](stream)
    assert alive() is None


# ---- one and the same memory ---------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_a_copy_of_memory_to_itself_comes_after_its_producer(
    simulator: SimulatedCuda, driver: Driver, stream: Stream, blocking: bool
) -> None:
    producer = Stream(flags=1)
    with numpy_rmm.managed():
        array = np.zeros(NBYTES, np.uint8)
    same = Device(array.ctypes.data, stream=producer.handle)
    simulator.hold(producer)
    simulator.launch(producer, writes=[array])
    pending = copyto(array, same, stream=stream, blocking=False)
    assert not pending.done
    simulator.release(producer)
    if blocking:
        copyto(array, same, stream=stream)
    else:
        assert pending.result() is array
    assert pending.done
    assert simulator.calls("cuMemcpyDtoHAsync") + simulator.calls("cuMemcpyAsync") == 0


# ---- captures ------------------------------------------------------------------------


@contextmanager
def capture(driver: Driver, stream: Stream, launches: int) -> Iterator[None]:
    """Of a stream, which goes on until the end; its graph is launched so often."""
    status = ctypes.c_uint()
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, 2))
        yield
        driver.check(driver.cuStreamIsCapturing(stream.handle, ctypes.byref(status)))
        driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
    assert status.value == CAPTURED
    driver.check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0))
    for _ in range(launches):
        driver.check(driver.cuGraphLaunch(executable, stream.handle))
    driver.check(driver.cuCtxSynchronize())
    driver.check(driver.cuGraphExecDestroy(executable))
    driver.check(driver.cuGraphDestroy(graph))


def to_a_device(address: int, stream: Stream) -> object:
    return copyto(Device(address), ones(), stream=stream)


def to_the_host(address: int, stream: Stream) -> object:
    return copyto(ones(), Device(address), stream=stream)


def within(address: int, stream: Stream) -> object:
    return copyto(Device(address), Device(address + NBYTES), stream=stream)


def that_overlaps(address: int, stream: Stream) -> object:
    return copyto(Device(address), Device(address + 1), stream=stream)


def that_is_the_same(address: int, stream: Stream) -> object:
    return copyto(Device(address), Device(address), stream=stream)


def in_pieces(address: int, stream: Stream) -> object:
    return copyto(Device(address), ones()[::-1], stream=stream)


def of_bytes(address: int, stream: Stream) -> object:
    return DeviceBuffer.to_device(b"1" * 1000, stream=stream)


def from_an_address(address: int, stream: Stream) -> object:
    return copy_ptr_to_host(address, bytearray(1000), stream=stream)


def to_an_address(address: int, stream: Stream) -> object:
    return copy_host_to_ptr(b"1" * 1000, address, stream=stream)


@pytest.mark.parametrize(
    "copy",
    [
        to_a_device,
        to_the_host,
        within,
        that_overlaps,
        that_is_the_same,
        in_pieces,
        of_bytes,
        from_an_address,
        to_an_address,
    ],
)
def test_a_copy_that_is_waited_for_does_not_come_into_a_graph(
    driver: Driver,
    address: int,
    stream: Stream,
    copy: Callable[[int, Stream], Any],
) -> None:
    with (
        capture(driver, stream, launches=1),
        pytest.raises(NotImplementedError, match=f"stream {stream.handle:#x} is being"),
    ):
        copy(address, stream)
    assert driver.read(address, 2 * NBYTES) == bytes(2 * NBYTES)


@pytest.mark.parametrize("producer", ["legacy", "another"])
def test_a_capture_goes_on_whatever_stream_the_memory_was_used_on(
    driver: Driver, address: int, stream: Stream, producer: str
) -> None:
    other = Stream(flags=1)
    handle = 1 if producer == "legacy" else other.handle
    source = ones()
    with capture(driver, stream, launches=3):
        copyto(Device(address, stream=handle), source, stream=stream, blocking=False)
    assert driver.read(address, NBYTES) == source.tobytes()


def test_a_copy_outside_a_capture_does_not_wait_for_a_stream_in_it(
    driver: Driver, address: int, stream: Stream
) -> None:
    other = Stream(flags=1)
    with capture(driver, stream, launches=0):
        copyto(Device(address, stream=stream.handle), ones(), stream=other)
    assert driver.read(address, NBYTES) == ones().tobytes()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_copy_on_a_default_stream_does_not_end_the_capture_of_a_blocking_one(
    driver: Driver, address: int, blocking: bool
) -> None:
    source = ones()
    with (
        capture(driver, Stream(), launches=0),
        pytest.raises(CudaError, match="CAPTURE_IMPLICIT"),
    ):
        copyto(Device(address), source, blocking=blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_capture_that_somebody_broke_is_told_of(
    driver: Driver, address: int, stream: Stream, blocking: bool
) -> None:
    source, graph = ones(), ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, 2))
        assert driver.cuStreamSynchronize(stream.handle) != 0
        with pytest.raises(CudaError, match="CAPTURE_INVALIDATED"):
            copyto(Device(address), source, stream=stream, blocking=blocking)
        with pytest.raises(CudaError, match="CAPTURE_INVALIDATED"):
            DeviceBuffer.to_device(b"1" * 1000, stream=stream)
        assert driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)) != 0
    copyto(Device(address), source, stream=stream)


# ---- forks ---------------------------------------------------------------------------


def test_the_copy_of_a_parent_is_none_of_its_childs(run_python: Run) -> None:
    done = run_python(
        """
        import os

        import numpy as np

        import numpy_rmm
        from numpy_rmm.testing import simulate_cuda

        with simulate_cuda() as machine:
            machine.driver.activate()
            with numpy_rmm.pinned():
                array = np.zeros(1 << 20, np.uint8)
            source = machine.driver.allocate(array.nbytes)
            stream = numpy_rmm.Stream(flags=1)
            machine.hold(stream)
            pending = numpy_rmm.copyto(array, source, stream=stream, blocking=False)
            child = os.fork()
            if child == 0:
                for ask in (pending.wait, pending.result, lambda: pending.done):
                    try:
                        ask()
                    except numpy_rmm.CudaUnavailableError as error:
                        assert "spawn" in str(error)
                    else:
                        os._exit(1)
                del pending
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert not pending.done
            machine.release(stream)
            assert pending.result() is array
        """
    )
    assert done.returncode == 0, done.stderr
