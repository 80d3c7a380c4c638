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
RELAXED = 2  # of capture modes


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


def of_default(device: int) -> None:
    """Its memory is mapped, and open to its own device."""
    mr.set_per_device_resource(device, None)


def of_pool(device: int) -> mr.PoolMemoryResource:
    return mr.PoolMemoryResource(mr.CudaMemoryResource(device=device), segments="vmm")


def of_opened_pool(device: int) -> mr.PoolMemoryResource:
    pool = of_pool(device)
    pool.add_peer(1 - device)
    return pool


def of_allocated_pool(device: int) -> mr.PoolMemoryResource:
    return mr.PoolMemoryResource(mr.CudaMemoryResource(device=device), segments="alloc")


def of_driver_pool(device: int) -> mr.CudaAsyncMemoryResource:
    return mr.CudaAsyncMemoryResource(device=device)


def of_managed(device: int) -> mr.ManagedMemoryResource:
    return mr.ManagedMemoryResource(device=device)


MEMORY: dict[str, Callable[[int], Any]] = {
    "default": of_default,
    "mapped": of_pool,
    "mapped and opened": of_opened_pool,
    "allocated": of_allocated_pool,
    "a pool of the driver": of_driver_pool,
    "managed": of_managed,
}


@pytest.fixture(params=MEMORY)
def memory(request: pytest.FixtureRequest, driver: Driver) -> str:
    """Of both devices; who may touch it differs."""
    if request.param == "mapped and opened" and not can_access_each_other(driver):
        pytest.skip("these two devices cannot reach each other's memory")
    for device in (0, 1):
        driver.activate(device)
        mr.set_per_device_resource(device, MEMORY[request.param](device))
    driver.activate(0)
    return str(request.param)


@pytest.mark.usefixtures("memory")
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


@pytest.mark.usefixtures("memory")
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


@pytest.mark.usefixtures("memory")
def test_a_copy_comes_behind_the_other_devices_stream(driver: Driver) -> None:
    driver.activate(1)
    stream = Stream(flags=1)
    source = DeviceBuffer(size=NBYTES, stream=stream)
    driver.activate(0)
    target = DeviceBuffer(size=NBYTES, stream=Stream(flags=1))
    target.copy_from_device(source, target.stream)  # what the driver prepares is ready
    driver.activate(1)
    with driver.held(stream):
        driver.check(driver.cuMemsetD8Async(source.ptr, 9, NBYTES, stream.handle))
        driver.activate(0)
        target.copy_from_device(source, target.stream)
        driver.activate(1)
    assert set(target.tobytes(target.stream)) == {9}


@pytest.mark.parametrize("to", MEMORY)
@pytest.mark.parametrize("source", MEMORY)
def test_memory_of_two_kinds(driver: Driver, source: str, to: str) -> None:
    """Also with one end open to both devices, and the other one to its own."""
    if not can_access_each_other(driver) and "mapped and opened" in (source, to):
        pytest.skip("these two devices cannot reach each other's memory")
    ends = []
    for device, kind in enumerate((source, to)):
        driver.activate(device)
        ends.append(to_device(host(device), mr=MEMORY[kind](device)))
    for current in (0, 1):
        driver.activate(current)
        stream = Stream(flags=1)
        copyto(ends[1][::2], ends[0][1::2], stream=stream)
        copyto(ends[1][1000:9000], ends[0][:8000])
    expected = host(1)
    expected[::2] = host(0)[1::2]
    expected[1000:9000] = host(0)[:8000]
    assert (ends[1].copy_to_host() == expected).all()
    assert (ends[0].copy_to_host() == host(0)).all()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("ends", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("place", [0, 1])
def test_layouts_and_streams(driver: Driver, place: int, ends: tuple[int, int]) -> None:
    """Rows, planes, single pieces and reversals, on a stream of each device."""
    whole = np.arange(6 * 10 * 50, dtype=np.int32).reshape(6, 10, 50)
    driver.activate(ends[0])
    source = to_device(whole)
    driver.activate(ends[1])
    target = to_device(np.zeros_like(whole))
    driver.activate(place)
    stream = Stream(flags=1)
    expected = np.zeros_like(whole)
    for part in (
        np.s_[:],
        np.s_[2],
        np.s_[1:5, ::2],
        np.s_[1:5, 2:7, 3:40],
        np.s_[:, :, ::7],
        np.s_[::-1, 3, :],
        np.s_[::3, ::-2, 5:9],
    ):
        flipped = expected[part][..., ::-1]
        flipped[...] = whole[part]
        copyto(target[part][..., ::-1], source[part], stream=stream)
        assert (target.copy_to_host(stream=stream) == expected).all()
        assert (target.copy_to_host() == expected).all()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("is_pinned", [True, False])
def test_host_memory_on_a_stream_of_the_other_device(
    driver: Driver, is_pinned: bool
) -> None:
    make = numpy_rmm.empty_pinned if is_pinned else np.empty
    driver.activate(1)
    stream = Stream(flags=1)
    driver.activate(0)
    source, back = make(NBYTES, np.uint8), make(NBYTES, np.uint8)
    source[:] = host(3)
    target = to_device(host(0))
    copyto(target, source, stream=stream)
    copyto(target[::4], source[1::4], stream=stream)
    copyto(back, target, stream=stream)
    expected = host(3)
    expected[::4] = host(3)[1::4]
    assert (back == expected).all()
    back[:] = 0
    copyto(back, target, stream=stream, blocking=False).wait()
    assert (back == expected).all()


@pytest.mark.usefixtures("memory")
def test_methods_of_buffers(driver: Driver) -> None:
    driver.activate(1)
    other = mr.get_current_device_resource()
    source = DeviceBuffer.to_device(host(1))
    driver.activate(0)
    assert source.copy().tobytes() == host(1).tobytes()
    made = DeviceBuffer(ptr=source.ptr, size=NBYTES)
    assert made.tobytes() == host(1).tobytes()
    made = DeviceBuffer(size=NBYTES)
    made.copy_from_device(source)
    assert made.tobytes() == host(1).tobytes()
    there = DeviceBuffer(size=NBYTES, mr=other)
    numpy_rmm.copy_host_to_ptr(host(5), there.ptr)
    numpy_rmm.copy_device_to_ptr(there.ptr, made.ptr, NBYTES)
    seen = bytearray(NBYTES)
    numpy_rmm.copy_ptr_to_host(made.ptr, seen)
    assert seen == host(5).tobytes()
    there.resize(2 * NBYTES)
    assert there.tobytes()[:NBYTES] == host(5).tobytes()
    array = DeviceArray(NBYTES, np.uint8, mr=other)
    copyto(array, host(7))
    assert (array.copy_to_host() == host(7)).all()
    assert (array.copy().copy_to_host() == host(7)).all()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("produced_on", ["a stream of its own", "the default stream"])
def test_a_copy_comes_behind_what_its_source_was_given(
    driver: Driver, produced_on: str
) -> None:
    driver.activate(1)
    own = Stream(flags=1)
    on_default = produced_on == "the default stream"
    stream = {} if on_default else {"stream": own}
    source = DeviceArray(NBYTES, np.uint8, **stream)
    driver.activate(0)
    target = to_device(host(0))
    wanted = Stream(flags=1)
    copyto(target, source, stream=wanted)  # what the driver prepares is ready
    driver.activate(1)
    handle = 0 if on_default else own.handle
    with driver.held(handle):
        driver.check(driver.cuMemsetD8Async(source.ptr, 9, NBYTES, handle))
        driver.activate(0)
        pending = copyto(target, source, stream=wanted, blocking=False)
        driver.activate(1)
        assert not pending.done
    driver.activate(0)
    pending.wait()
    assert set(target.copy_to_host().tolist()) == {9}


def captured_copy(
    driver: Driver, stream: Stream, target: DeviceArray, source: DeviceArray
) -> ctypes.c_void_p:
    """A graph of one copy; a stream whose capture fails is none any more."""
    graph = ctypes.c_void_p()
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream.handle, RELAXED))
        try:
            copyto(target, source, stream=stream, blocking=False)
        finally:
            driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
            assert graph.value is not None
    return graph


def test_a_graph_copies_between_devices_that_are_open_to_each_other(
    driver: Driver,
) -> None:
    arrays = []
    for device in (0, 1):
        driver.activate(device)
        mr.get_current_device_resource().add_peer(1 - device)
        arrays.append(to_device(host(device)))
    stream = Stream(flags=1)
    graph = captured_copy(driver, stream, arrays[0], arrays[1])
    assert (arrays[0].copy_to_host() == host(0)).all()
    copyto(arrays[1], host(5))
    executable = ctypes.c_void_p()
    driver.check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0))
    driver.check(driver.cuGraphLaunch(executable, stream.handle))
    stream.synchronize()
    assert (arrays[0].copy_to_host() == host(5)).all()
    driver.check(driver.cuGraphExecDestroy(executable))
    driver.check(driver.cuGraphDestroy(graph))


@pytest.mark.parametrize("owners", [(0, 1), (1, 0), (1, 1)], ids=str)
def test_a_graph_between_devices_is_refused_and_goes_on(
    driver: Driver, owners: tuple[int, int]
) -> None:
    """Before the driver hears of it: its peer calls break a capture."""
    arrays = []
    for owner in owners:
        driver.activate(owner)
        arrays.append(to_device(host(len(arrays))))
    driver.activate(0)
    stream = Stream(flags=1)
    graph = ctypes.c_void_p()
    driver.check(driver.cuStreamBeginCapture(stream.handle, RELAXED))
    with numpy_rmm.stream_capture(), pytest.raises(NotImplementedError) as error:
        copyto(arrays[0], arrays[1], stream=stream, blocking=False)
    driver.check(driver.cuStreamEndCapture(stream.handle, ctypes.byref(graph)))
    driver.check(driver.cuGraphDestroy(graph))
    assert "stream of device 0 cannot copy memory of device 1" in str(error.value)
    assert "add_peer(0)" in str(error.value)
    copyto(arrays[0], arrays[1], stream=stream)
    assert (arrays[0].copy_to_host() == host(1)).all()


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
