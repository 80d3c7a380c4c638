"""Two devices: whose memory it is, whose stream, whose thread.

All holds on the simulated driver and on a machine with two GPUs; what kernels do with
the memory of another device is in tests/gpu/test_two_devices.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceArray, DeviceBuffer, Stream, copyto, mr, to_device
from numpy_rmm.testing import Driver, simulate_cuda

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
NBYTES = 1 << 16


def real_driver() -> Driver:
    driver, n_devices = Driver(), ctypes.c_int()
    driver.check(driver.cuInit(0))
    driver.check(driver.cuDeviceGetCount(ctypes.byref(n_devices)))
    if n_devices.value < 2:
        pytest.skip(f"needs two devices, and there is {n_devices.value}")
    return driver


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Of a machine with two devices, of which the first is current."""
    if ON_GPU:
        driver = real_driver()
        driver.activate(0)
        yield driver
        return
    with simulate_cuda(devices=2) as machine:
        machine.driver.activate(0)
        yield machine.driver
        restore_resources()
        gc.collect()
        numpy_rmm.trim()
        assert machine.faults() == []


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    restore_resources()


def can_access_each_other(driver: Driver) -> bool:
    """The simulated devices can."""
    answers = [ctypes.c_int(1), ctypes.c_int(1)]
    for device in (0, 1) if ON_GPU else ():
        answer = ctypes.byref(answers[device])
        driver.check(driver.cuDeviceCanAccessPeer(answer, device, 1 - device))
    return all(answer.value for answer in answers)


def restore_resources() -> None:
    for device in range(2):
        mr.set_per_device_resource(device, None)


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns that runs in a thread of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def on(driver: Driver, device: int, function: Callable[[], Any]) -> Any:
    """What a function returns in a thread where a device is current."""

    def run() -> Any:
        driver.activate(device)
        return function()

    return in_thread(run)


def host(seed: int = 0) -> np.ndarray:
    return (np.arange(NBYTES) * 7 + seed).astype(np.uint8)


# ---- whose memory it is --------------------------------------------------------------


def test_each_device_has_a_resource_of_its_own(driver: Driver) -> None:
    mine = mr.StatisticsResourceAdaptor(mr.PoolMemoryResource(mr.CudaMemoryResource()))
    default = mr.get_per_device_resource(0)
    mr.set_per_device_resource(1, mine)
    assert mr.get_per_device_resource(1) is mine
    assert mr.get_current_device_resource() is default
    driver.activate(1)
    assert mr.get_current_device_resource() is mine
    buffer = DeviceBuffer(size=100)
    assert (buffer.mr, mine.device) == (mine, 1)
    driver.activate(0)
    mr.set_per_device_resource(1, None)
    assert mr.get_per_device_resource(1) is not mine
    assert mine.statistics().current_bytes == 100
    del buffer  # to where it came from
    assert mine.statistics().current_bytes == 0


def test_a_buffer_is_of_the_device_that_was_current(driver: Driver) -> None:
    for device in (0, 1):
        driver.activate(device)
        array = to_device(host(device))
        assert array.mr.device == device
        assert array.__dlpack_device__() == (2, device)
        driver.activate(1 - device)
        assert array.__dlpack_device__() == (2, device)
        assert (array.copy_to_host() == host(device)).all()
        again = array.copy()
        assert again.mr is array.mr
        assert (again.copy_to_host() == host(device)).all()


def test_free_memory_of_a_device(driver: Driver) -> None:
    for device in (0, 1):
        driver.activate(device)
        free, total = mr.available_device_memory()
        assert 0 < free <= total


# ---- copies --------------------------------------------------------------------------


@pytest.fixture(params=["allocated", "mapped and opened"])
def reachable(request: pytest.FixtureRequest, driver: Driver) -> None:
    """The resources of both devices have memory that the other one's copies reach."""
    is_mapped = request.param != "allocated"
    if is_mapped and not can_access_each_other(driver):
        pytest.skip("these two devices cannot reach each other's memory")
    for device in (0, 1):
        pool = mr.PoolMemoryResource(
            mr.CudaMemoryResource(device=device),
            segments="vmm" if is_mapped else "alloc",
        )
        if is_mapped:
            pool.add_peer(1 - device)
        mr.set_per_device_resource(device, pool)


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("source", [0, 1])
def test_copies_between_devices(driver: Driver, source: int, current: int) -> None:
    arrays = []
    for device in (0, 1):
        driver.activate(device)
        arrays.append(to_device(host(device).reshape(256, 256)))
    driver.activate(current)
    copyto(arrays[1 - source], arrays[source])
    copyto(arrays[1 - source][:, 1:200:3], arrays[source].T[:, 1:200:3])
    expected = host(source).reshape(256, 256).copy()
    expected[:, 1:200:3] = host(source).reshape(256, 256).T[:, 1:200:3]
    assert (arrays[1 - source].copy_to_host() == expected).all()
    assert (arrays[source].copy_to_host().ravel() == host(source)).all()


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize("streams", ["of its own device", "of the other one"])
def test_buffers_and_streams_of_both(driver: Driver, streams: str) -> None:
    made = []
    for device in (0, 1):
        driver.activate(device)
        made.append(Stream(flags=1))
    if streams == "of the other one":
        made.reverse()
    buffers = []
    for device in (0, 1):
        driver.activate(device)
        buffers.append(DeviceBuffer.to_device(host(device), made[device]))
    for _ in range(20):
        buffers[0].copy_from_device(buffers[1], made[1])
        assert buffers[0].tobytes() == host(1).tobytes()
        buffers[0].copy_from_host(host(0), made[0])
        buffers[1].copy_from_device(buffers[0], made[0])
        assert buffers[1].tobytes(made[1]) == host(0).tobytes()
        buffers[1].copy_from_host(host(1), made[1])
    buffers[0].resize(2 * NBYTES, made[1])
    assert buffers[0].tobytes()[:NBYTES] == host(0).tobytes()


@pytest.mark.usefixtures("reachable")
def test_a_copy_comes_behind_the_other_devices_stream(driver: Driver) -> None:
    driver.activate(1)
    stream = Stream(flags=1)
    source = DeviceBuffer(size=NBYTES, stream=stream)
    driver.activate(0)
    target = DeviceBuffer(size=NBYTES, stream=Stream(flags=1))
    driver.activate(1)
    with driver.held(stream):
        driver.check(driver.cuMemsetD8Async(source.ptr, 9, NBYTES, stream.handle))
        driver.activate(0)
        target.copy_from_device(source, target.stream)
        driver.activate(1)
    assert set(target.tobytes(target.stream)) == {9}


# ---- streams and threads -------------------------------------------------------------


def test_memory_used_on_the_other_devices_stream_is_not_handed_out_early(
    driver: Driver,
) -> None:
    """A block goes back behind the stream that it is freed on, of whichever device."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(device=0), segments="alloc")
    driver.activate(1)
    other = Stream(flags=1)
    driver.activate(0)
    own = Stream(flags=1)
    ptr = pool.allocate(NBYTES, other)
    driver.activate(1)
    with driver.held(other):
        driver.activate(0)
        pool.deallocate(ptr, NBYTES, other)
        again = pool.allocate(NBYTES, own)
        handed_out_behind = again != ptr
        event = driver.create_event()
        driver.check(driver.cuEventRecord(event, own.handle))
        assert handed_out_behind or not driver.is_done(event)
        driver.activate(1)
    driver.activate(0)
    own.synchronize()
    driver.check(driver.cuEventDestroy(event))
    pool.deallocate(again, NBYTES, own)


@pytest.mark.parametrize("where", ["of the other device", "without a device"])
@pytest.mark.parametrize("with_stream", [True, False])
def test_frees_in_a_thread(driver: Driver, where: str, with_stream: bool) -> None:
    pools = [
        mr.StatisticsResourceAdaptor(
            mr.PoolMemoryResource(mr.CudaMemoryResource(device=device))
        )
        for device in (0, 1)
    ]
    for device in (0, 1):
        driver.activate(device)
        stream = {"stream": Stream(flags=1)} if with_stream else {}
        held = [
            DeviceArray(n, np.uint8, mr=pools[device], **stream)
            for n in (1, 1000, 1 << 20)
        ]
        assert pools[device].statistics().current_count == 3
        if where == "of the other device":
            on(driver, 1 - device, held.clear)
        else:
            in_thread(held.clear)
        assert pools[device].statistics().current_count == 0
        # and the memory is good for the next one
        again = to_device(host(device), mr=pools[device], **stream)
        assert (again.copy_to_host(**stream) == host(device)).all()


def test_allocations_in_threads_of_both_devices(driver: Driver) -> None:
    default = [mr.get_per_device_resource(device) for device in (0, 1)]
    before = [x.statistics().current_count for x in default]
    held: list[list[DeviceArray]] = [[], []]

    def work(device: int) -> None:
        driver.activate(device)
        stream = Stream(flags=1)
        for n in range(1, 200):
            array = DeviceArray(n * 100, np.uint8, stream=stream)
            assert array.mr is default[device]
            held[device].append(array)
            if n % 3 == 0:
                held[device].pop(0)

    threads = [threading.Thread(target=work, args=(device % 2,)) for device in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for device in (0, 1):  # each in a thread of the other device
        on(driver, 1 - device, held[device].clear)
    assert [x.statistics().current_count for x in default] == before


# ---- peers ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_peer_uses_the_memory_of_a_pool(driver: Driver, when: str) -> None:
    if not can_access_each_other(driver):
        pytest.skip("these two devices cannot reach each other's memory")
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(device=0))
    if when == "before":
        pool.add_peer(1)
    array = DeviceArray(NBYTES, np.uint8, mr=pool)
    if when == "after":
        pool.add_peer(1)
    driver.activate(1)
    stream = Stream(flags=1)
    driver.check(driver.cuMemsetD8Async(array.ptr, 3, NBYTES, stream.handle))
    stream.synchronize()
    driver.activate(0)
    assert set(array.copy_to_host().tolist()) == {3}


# ---- DLPack --------------------------------------------------------------------------


def test_a_consumer_on_the_other_device(driver: Driver) -> None:
    driver.activate(1)
    stream = Stream(flags=1)
    array = DeviceArray(NBYTES, np.uint8, stream=stream)
    driver.activate(0)
    consumer = Stream(flags=1)
    driver.activate(1)
    with driver.held(stream):
        driver.activate(0)
        array.__dlpack__(stream=consumer.handle)
        event = driver.create_event()
        driver.check(driver.cuEventRecord(event, consumer.handle))
        assert not driver.is_done(event)
        driver.activate(1)
    driver.activate(0)
    consumer.synchronize()
    assert driver.is_done(event)
    driver.check(driver.cuEventDestroy(event))
    with pytest.raises(BufferError, match=r"device 1 cannot be shown as .* \(2, 0\)"):
        array.__dlpack__(dl_device=(2, 0))
