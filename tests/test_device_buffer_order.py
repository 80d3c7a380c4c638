"""DeviceBuffer: what is done to one is in the order of its streams."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from device_buffers import Theirs
from numpy_rmm import (
    DEFAULT_STREAM,
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    DeviceBuffer,
    Stream,
    copy_device_to_ptr,
    copy_host_to_ptr,
    copy_ptr_to_host,
    mr,
)
from numpy_rmm.testing import Driver, SimulatedCuda

pytestmark = pytest.mark.usefixtures("driver")

NBYTES = 1 << 20
Run = Callable[..., Any]


def test_copies_on_a_stream_are_not_waited_for(driver: Driver, stream: Stream) -> None:
    source = DeviceBuffer.to_device(b"abc", stream)
    target = DeviceBuffer(size=3, stream=stream)
    with driver.held(stream):
        target.copy_from_device(source, stream)
        other = source.copy()
        for buffer in (target, other):
            interface = buffer.__cuda_array_interface__
            assert interface["stream"] == stream.handle
    stream.synchronize()
    for buffer in (target, other):
        assert buffer.__cuda_array_interface__["stream"] is None
        assert buffer.tobytes(stream) == b"abc"


def test_copies_on_the_default_stream_are(driver: Driver) -> None:
    source = DeviceBuffer.to_device(b"abc")
    held = threading.Event()
    let_go = threading.Event()
    blocking = Stream()  # the default stream waits for it

    def hold() -> None:
        driver.activate()
        with driver.held(blocking):
            held.set()
            let_go.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    timer = threading.Timer(0.1, let_go.set)
    timer.start()
    other = source.copy()
    assert let_go.is_set()  # and others ran meanwhile
    assert other.__cuda_array_interface__["stream"] is None
    thread.join()
    timer.join()


@pytest.mark.parametrize("to", ["host", "device"])
def test_a_copy_comes_behind_the_streams_of_its_ends(
    driver: Driver, stream: Stream, to: str
) -> None:
    own = Stream(flags=1)
    source = DeviceBuffer.to_device(bytes(NBYTES), own)
    target = DeviceBuffer(size=NBYTES, stream=stream)
    with driver.held(own):
        driver.check(driver.cuMemsetD8Async(source.ptr, 7, NBYTES, own.handle))
        if to == "device":
            target.copy_from_device(source, stream)
    if to == "host":
        assert set(source.tobytes(stream)) == {7}
    else:
        assert set(target.tobytes(stream)) == {7}


@pytest.mark.parametrize("freed", ["source", "target"])
def test_memory_that_is_freed_while_it_is_copied(
    driver: Driver, pool: mr.MemoryResource, stream: Stream, freed: str
) -> None:
    """Neither does another stream overwrite what is read, nor the copy what it got."""
    own = Stream(flags=1)
    on = {"source": stream, "target": stream, freed: own}
    source = DeviceBuffer.to_device(b"\1" * NBYTES, on["source"], pool)
    target = DeviceBuffer(size=NBYTES, stream=on["target"], mr=pool)
    with driver.held(stream):
        target.copy_from_device(source, stream)
        left = [target] if freed == "source" else []
        del source, target
        others = [DeviceBuffer(size=NBYTES, stream=own, mr=pool) for _ in range(4)]
        for other in others:
            driver.check(driver.cuMemsetD8Async(other.ptr, 2, NBYTES, own.handle))
    assert all(set(each.tobytes(stream)) == {1} for each in left)
    assert all(set(other.tobytes(stream)) == {2} for other in others)


def test_memory_of_others_lives_while_it_is_copied(
    driver: Driver, stream: Stream
) -> None:
    theirs = Theirs(DeviceBuffer.to_device(b"abc"))
    dead = weakref.ref(theirs)
    target = DeviceBuffer(size=3, stream=stream)
    with driver.held(stream):
        target.copy_from_device(theirs, stream)
        del theirs
        gc.collect()
        assert dead() is not None
    assert target.tobytes(stream) == b"abc"
    assert target.__cuda_array_interface__["stream"] is None
    assert dead() is None


def test_the_producer_of_others_comes_first(driver: Driver, stream: Stream) -> None:
    producer = Stream(flags=1)
    source = DeviceBuffer.to_device(bytes(NBYTES))
    target = DeviceBuffer(size=NBYTES, stream=stream)
    theirs = Theirs(source, stream=producer.handle)
    with driver.held(producer):
        driver.check(driver.cuMemsetD8Async(source.ptr, 5, NBYTES, producer.handle))
        target.copy_from_device(theirs, stream)
    assert set(target.tobytes(stream)) == {5}


def allocate_and_deallocate(stream: Any) -> None:
    current = mr.get_current_device_resource()
    current.deallocate(current.allocate(8, stream), 8, stream)


STREAM_CALLS: dict[str, Callable[[DeviceBuffer, Any], object]] = {
    "to_device": lambda _, stream: DeviceBuffer.to_device(b"abc", stream),
    "copy_to_host": lambda buffer, stream: buffer.copy_to_host(stream=stream),
    "copy_from_host": lambda buffer, stream: buffer.copy_from_host(b"abc", stream),
    "copy_from_device": lambda buffer, stream: buffer.copy_from_device(buffer, stream),
    "tobytes": lambda buffer, stream: buffer.tobytes(stream),
    "reserve": lambda buffer, stream: buffer.reserve(100, stream),
    "resize": lambda buffer, stream: buffer.resize(100, stream),
    "copy_ptr_to_host": lambda b, s: copy_ptr_to_host(b.ptr, bytearray(3), s),
    "copy_host_to_ptr": lambda b, s: copy_host_to_ptr(b"abc", b.ptr, s),
    "copy_device_to_ptr": lambda b, s: copy_device_to_ptr(b.ptr, b.ptr + 3, 3, s),
    "allocate": lambda _, stream: allocate_and_deallocate(stream),
}


@pytest.mark.parametrize("call", STREAM_CALLS.values(), ids=STREAM_CALLS)
def test_a_stream_that_is_none(call: Run) -> None:
    buffer = DeviceBuffer(size=6)
    with pytest.raises(TypeError, match="stream argument cannot be None"):
        call(buffer, None)


@pytest.mark.parametrize("call", STREAM_CALLS.values(), ids=STREAM_CALLS)
def test_every_kind_of_stream(driver: Driver, call: Run) -> None:
    class OfOthers:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, handle

    handle = driver.create_stream()
    buffer = DeviceBuffer(size=6)
    for stream in (
        DEFAULT_STREAM,
        LEGACY_DEFAULT_STREAM,
        PER_THREAD_DEFAULT_STREAM,
        Stream(),
        OfOthers(),
    ):
        call(buffer, stream)


def test_a_stream_lives_as_long_as_its_buffer(
    simulator: SimulatedCuda, pool: mr.MemoryResource
) -> None:
    stream = Stream()
    buffer = DeviceBuffer(size=100, stream=stream, mr=pool)
    simulator.clear_log()
    stream.close()
    del stream
    assert simulator.calls("cuStreamDestroy") == 0
    del buffer
    pool.trim()
    assert sum("cuStreamDestroy" in line for line in simulator.log()) == 1
    assert simulator.faults() == []


def test_a_per_thread_stream_is_that_of_the_thread() -> None:
    made: list[DeviceBuffer] = []
    thread = threading.Thread(
        target=lambda: made.append(
            DeviceBuffer.to_device(b"abc", PER_THREAD_DEFAULT_STREAM)
        )
    )
    thread.start()
    thread.join()
    assert made[0].tobytes() == b"abc"
    assert made[0].tobytes(PER_THREAD_DEFAULT_STREAM) == b"abc"
    made[0].resize(10, PER_THREAD_DEFAULT_STREAM)
    assert made[0].tobytes()[:3] == b"abc"
    made.clear()
