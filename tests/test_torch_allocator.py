"""The C functions that PyTorch calls for its memory, called as PyTorch does."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

import numpy_rmm
from numpy_rmm import Stream, mr
from numpy_rmm.testing import Driver, SimulatedCuda, simulate_cuda


@pytest.fixture(autouse=True)
def driver(simulator: SimulatedCuda) -> Driver:
    simulator.driver.activate()
    return simulator.driver


def count(resource: mr.MemoryResource) -> int:
    return resource.statistics().current_count


@pytest.fixture
def functions() -> Any:
    """The C functions as PyTorch calls them: without the interpreter's lock."""
    core = ctypes.CDLL(numpy_rmm._core.__file__)
    word = ctypes.c_void_p
    core.nrm_torch_allocate.restype = word
    core.nrm_torch_allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, word]
    core.nrm_torch_deallocate.restype = None
    core.nrm_torch_deallocate.argtypes = [word, ctypes.c_ssize_t, ctypes.c_int, word]
    core.nrm_torch_record_stream.restype = None
    core.nrm_torch_record_stream.argtypes = [word, word]
    core.nrm_torch_empty_cache.restype = None
    yield core
    numpy_rmm._core._torch_errors(0, 0)


def lost() -> tuple[int, str]:
    """How many errors had nowhere to go, and the first of them."""
    first, n_lost = numpy_rmm._core._lost_error()
    return n_lost, "" if first is None else first.message


def test_torch_allocates_and_gives_back(
    functions: Any, counted: mr.MemoryResource
) -> None:
    stream = Stream(flags=1)
    ptr = functions.nrm_torch_allocate(1000, 0, stream.handle)
    other = functions.nrm_torch_allocate(1000, 0, None)
    assert len({ptr, other, None}) == 3
    assert counted.statistics().current_bytes == 2000
    functions.nrm_torch_deallocate(ptr, 1000, 0, stream.handle)
    functions.nrm_torch_deallocate(other, 1000, 0, None)
    assert count(counted) == 0


def test_torch_gets_no_bytes(functions: Any, counted: mr.MemoryResource) -> None:
    assert functions.nrm_torch_allocate(0, 0, None) is None
    functions.nrm_torch_deallocate(None, 0, 0, None)
    assert counted.statistics().total_count == 0


@pytest.mark.parametrize("freed_on", ["its stream", "another stream"])
def test_torchs_memory_goes_back_behind_its_stream(
    functions: Any, simulator: SimulatedCuda, driver: Driver, freed_on: str
) -> None:
    """What is freed on a stream that works is handed out on that stream alone."""
    mr.set_current_device_resource(
        mr.PoolMemoryResource(mr.CudaMemoryResource(), "1 MiB", "1 MiB")
    )
    own, other = Stream(flags=1), Stream(flags=1)
    nbytes = 1 << 20
    ptr = functions.nrm_torch_allocate(nbytes, 0, own.handle)
    with driver.held(own):
        driver.check(driver.cuMemsetD8Async(ptr, 1, nbytes, own.handle))
        functions.nrm_torch_deallocate(ptr, nbytes, 0, own.handle)
        asks = own if freed_on == "its stream" else other
        again = functions.nrm_torch_allocate(nbytes, 0, asks.handle)
        assert again == ptr
        event = driver.create_event()
        driver.check(driver.cuEventRecord(event, asks.handle))
        assert not driver.is_done(event)  # whoever has it comes behind the work
    asks.synchronize()
    functions.nrm_torch_deallocate(again, nbytes, 0, asks.handle)
    driver.check(driver.cuEventDestroy(event))
    mr.set_current_device_resource(None)
    assert simulator.faults() == []


def test_torchs_memory_that_two_streams_use(
    functions: Any, simulator: SimulatedCuda, driver: Driver
) -> None:
    """After record_stream a block waits for the other stream too, and no stream waits
    for it."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    mr.set_current_device_resource(pool)
    own, other = Stream(flags=1), Stream(flags=1)
    ptr = functions.nrm_torch_allocate(1 << 20, 0, own.handle)
    with driver.held(other):
        driver.check(driver.cuMemsetD8Async(ptr + 10, 1, 100, other.handle))
        functions.nrm_torch_record_stream(ptr, other.handle)
        functions.nrm_torch_deallocate(ptr, 1 << 20, 0, own.handle)
        again = functions.nrm_torch_allocate(1 << 20, 0, own.handle)
        assert again != ptr
        own.synchronize()  # it waits for nothing
    other.synchronize()
    functions.nrm_torch_deallocate(again, 1 << 20, 0, own.handle)
    mr.set_current_device_resource(None)
    assert simulator.faults() == []


def test_torchs_memory_goes_back_to_where_it_came_from(
    functions: Any, counted: mr.MemoryResource
) -> None:
    ptr = functions.nrm_torch_allocate(1000, 0, None)
    mr.set_current_device_resource(mr.CudaMemoryResource())
    assert count(counted) == 1
    functions.nrm_torch_deallocate(ptr, 1000, 0, None)
    assert count(counted) == 0


def test_torch_holds_the_resource(functions: Any) -> None:
    resource = mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())
    mr.set_current_device_resource(resource)
    ptr = functions.nrm_torch_allocate(1000, 0, None)
    mr.set_current_device_resource(None)
    del resource
    gc.collect()
    before = lost()
    functions.nrm_torch_deallocate(ptr, 1000, 0, None)
    assert lost() == before


def test_torch_gives_back_what_is_not_its_own(functions: Any) -> None:
    before = lost()[0]
    functions.nrm_torch_deallocate(0x1234500, 10, 0, None)
    assert lost()[0] == before + 1
    assert before or "which it has not from here" in lost()[1]


def test_torch_gives_back_in_other_threads(
    functions: Any, counted: mr.MemoryResource
) -> None:
    pointers = [functions.nrm_torch_allocate(100, 0, None) for _ in range(200)]
    threads = [
        threading.Thread(
            target=lambda part: [
                functions.nrm_torch_deallocate(ptr, 100, 0, None) for ptr in part
            ],
            args=(pointers[i::4],),
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(counted) == 0


def test_torchs_empty_cache_trims_the_pools_of_devices(functions: Any) -> None:
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    pool.deallocate(pool.allocate(1000), 1000)
    host = numpy_rmm.registry["host"]
    host.deallocate(host.allocate(1 << 20), 1 << 20)
    before = host.statistics().reserved_bytes
    assert pool.statistics().reserved_bytes > 0
    functions.nrm_torch_empty_cache()
    assert pool.statistics().reserved_bytes == 0
    assert host.statistics().reserved_bytes == before


Thrown = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_char_p
)


@pytest.mark.parametrize("asks", ["PyTorch", "a MemPool of PyTorch"])
def test_torch_hears_of_the_end_of_memory(functions: Any, asks: str) -> None:
    """By an exception; but by NULL where its caching allocator asks, which looks."""
    thrown: list[bytes] = []
    throw = Thrown(lambda function, file, line, message: thrown.append(message))
    current = ctypes.c_void_p(0x1000)  # the caching allocator
    numpy_rmm._core._torch_errors(
        ctypes.cast(throw, ctypes.c_void_p).value, ctypes.addressof(current)
    )
    if asks == "PyTorch":
        current.value = 0x2000  # ours is the current one
    assert functions.nrm_torch_allocate(1 << 50, 0, None) is None
    assert numpy_rmm.last_error() is not None
    if asks == "PyTorch":
        assert len(thrown) == 1
        assert b"1 PiB" in thrown[0]
    else:
        assert thrown == []


def test_torch_takes_no_resource_that_calls_python(functions: Any) -> None:
    source = mr.CudaMemoryResource()
    callback = mr.CallbackMemoryResource(
        lambda size, stream: source.allocate(size, stream),
        lambda ptr, size, stream: source.deallocate(ptr, size, stream),
        kind="device",
    )
    mr.set_current_device_resource(mr.PoolMemoryResource(callback))
    assert functions.nrm_torch_allocate(100, 0, None) is None
    error = numpy_rmm.last_error()
    assert error is not None
    assert "calls Python code" in error.message
    mr.set_current_device_resource(None)


def test_torchs_memory_of_another_device(functions: Any) -> None:
    with simulate_cuda(devices=2) as machine:
        machine.driver.activate(0)
        ptr = functions.nrm_torch_allocate(1000, 1, None)
        resource = mr.get_per_device_resource(1)
        assert resource.device == 1
        assert count(resource) == 1
        functions.nrm_torch_deallocate(ptr, 1000, 1, None)
        assert count(resource) == 0
        assert machine.faults() == []
