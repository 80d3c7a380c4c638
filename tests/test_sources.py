"""Sources in the order of streams and of ordinary memory: what each has of its own."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceBuffer, mr
from numpy_rmm.testing import SimulatedCuda, simulate_cuda

MIB = 1 << 20
ASYNC = [
    mr.CudaAsyncMemoryResource,
    mr.CudaAsyncManagedMemoryResource,
]


# ---- pools of the driver -------------------------------------------------------------


def test_the_name_device_async(cuda: object) -> None:
    resource = numpy_rmm.registry["device_async"]
    assert type(resource) is mr.CudaAsyncMemoryResource
    assert resource.kind == "device"
    buffer = DeviceBuffer.to_device(np.arange(100, dtype=np.uint8), mr=resource)
    assert buffer.copy_to_host().tolist() == list(range(100))
    assert buffer.mr is resource


@pytest.mark.parametrize("make", ASYNC)
def test_freed_memory_stays_in_the_pool_until_a_trim(
    make: type[mr.CudaAsyncMemoryResource], simulator: SimulatedCuda
) -> None:
    resource = make()
    ptr = resource.allocate("10 MiB")
    assert resource.statistics().reserved_bytes >= 10 * MIB
    resource.deallocate(ptr, "10 MiB")
    numpy_rmm.Stream().synchronize()
    assert resource.statistics().reserved_bytes >= 10 * MIB
    assert resource.trim() >= 10 * MIB
    assert resource.statistics().reserved_bytes == 0


@pytest.mark.parametrize("threshold", [0, "0", "4 MiB", np.int64(0)])
def test_a_release_threshold_gives_back_at_a_synchronisation(
    threshold: int | str, simulator: SimulatedCuda
) -> None:
    resource = mr.CudaAsyncMemoryResource(release_threshold=threshold)
    resource.deallocate(resource.allocate("64 MiB"), 0)
    numpy_rmm.DEFAULT_STREAM.synchronize()
    assert resource.statistics().reserved_bytes == 0


@pytest.mark.parametrize("initial", [32 * MIB, "32 MiB", "1%"])
def test_an_initial_size_is_taken_at_once(
    initial: int | str, simulator: SimulatedCuda
) -> None:
    resource = mr.CudaAsyncMemoryResource(initial)
    assert resource.statistics().reserved_bytes >= 32 * MIB
    assert resource.statistics().current_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"initial_pool_size": -1}, ValueError, "initial_pool_size must not be neg"),
        ({"initial_pool_size": "much"}, ValueError, "initial_pool_size"),
        ({"initial_pool_size": 1.5}, TypeError, "initial_pool_size must be an int"),
        ({"initial_pool_size": "1 PiB"}, MemoryError, "initial pool size of 1 PiB"),
        ({"release_threshold": "50%"}, ValueError, "release_threshold"),
        ({"release_threshold": []}, TypeError, "release_threshold"),
        ({"device": 64}, ValueError, "device must be between 0 and 63"),
    ],
)
def test_arguments_that_are_none(
    arguments: dict[str, object], error: type, match: str, simulator: SimulatedCuda
) -> None:
    with pytest.raises(error, match=match):
        mr.CudaAsyncMemoryResource(**arguments)  # type: ignore[arg-type]
    assert simulator.outstanding()["pools"] == (0, 0)


def test_memory_is_exported_where_the_device_can(simulator: SimulatedCuda) -> None:
    resource = mr.CudaAsyncMemoryResource(enable_ipc=True)
    resource.deallocate(resource.allocate(100), 100)
    resource = mr.CudaAsyncMemoryResource(enable_fabric=True)
    with pytest.raises(numpy_rmm.CudaUnavailableError, match="as a fabric handle"):
        resource.allocate(100)


# ---- views ---------------------------------------------------------------------------


def test_a_view_shares_the_pool(cuda: object) -> None:
    own = mr.CudaAsyncMemoryResource()
    view = mr.CudaAsyncViewMemoryResource(own.pool_handle())
    assert view.pool_handle() == own.pool_handle() != 0
    ptr = view.allocate(1000)
    assert own.statistics().reserved_bytes == view.statistics().reserved_bytes > 0
    assert own.statistics().current_count == 0
    with pytest.raises(ValueError, match="another resource"):
        own.deallocate(ptr, 1000)
    view.deallocate(ptr, 1000)


def test_a_view_takes_handle_objects(cuda: object) -> None:
    class CUmemoryPool:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __int__(self) -> int:
            return self.handle

    own = mr.CudaAsyncMemoryResource()
    view = mr.CudaAsyncViewMemoryResource(CUmemoryPool(own.pool_handle()))
    assert view.pool_handle() == own.pool_handle()


@pytest.mark.parametrize("handle", [None, "7", 1.5, True, [], 0, -1, 2**64])
def test_what_is_no_handle(handle: object, cuda: object) -> None:
    with pytest.raises(ValueError, match="handle"):
        mr.CudaAsyncViewMemoryResource(handle)  # type: ignore[arg-type]


# ---- arrays --------------------------------------------------------------------------


def test_arrays_of_a_managed_pool_of_the_driver(cuda: object) -> None:
    resource = mr.CudaAsyncManagedMemoryResource()
    with numpy_rmm.use_handler(resource):
        array = np.arange(100_000)
    assert numpy_rmm.memory_kind(array) == "managed"
    assert array.sum() == 4_999_950_000
    del array
    numpy_rmm.trim()
    assert resource.statistics().current_count == 0


@pytest.mark.parametrize("headroom", [None, "1 GiB", 0])
def test_arrays_of_ordinary_memory_for_devices(headroom: object) -> None:
    with simulate_cuda(pageable_memory_access=1, memory="2 GiB") as machine:
        resource = (
            mr.SystemMemoryResource()
            if headroom is None
            else mr.SamHeadroomMemoryResource(headroom)  # type: ignore[arg-type]
        )
        pool = mr.PoolMemoryResource(resource)
        with numpy_rmm.use_handler(pool):
            array = np.full(1_000_000, 3.0)
        buffer = DeviceBuffer(size=100, mr=pool)
        assert resource.kind == pool.kind == numpy_rmm.memory_kind(array) == "managed"
        buffer.copy_from_host(np.arange(100, dtype=np.uint8))
        assert buffer.copy_to_host().tolist() == list(range(100))
        buffer.prefetch()
        assert (machine.outstanding()["advice"][0] > 0) == (headroom is not None)
        del array, buffer, pool
        gc.collect()
        numpy_rmm.trim()
        assert machine.outstanding()["advice"] == (0, 0)


def test_a_prefetched_managed_block_goes_back_without_advice(
    simulator: SimulatedCuda,
) -> None:
    pool = mr.PoolMemoryResource(mr.ManagedMemoryResource())
    buffer = DeviceBuffer(size=MIB, mr=pool)
    buffer.prefetch()
    buffer.prefetch(device=0)
    ptr = buffer.ptr
    del buffer
    place = ctypes.c_int(-9)
    driver = simulator.driver
    driver.check(driver.cuMemRangeGetAttribute(ctypes.byref(place), 4, 2, ptr, MIB))
    assert place.value == -2
    assert simulator.outstanding()["advice"] == (0, 0)


# ---- where they cannot be ------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "config", "match"),
    [
        (mr.CudaAsyncMemoryResource, {"memory_pools_supported": 0}, "no memory pools"),
        (mr.CudaAsyncManagedMemoryResource, {"driver": 12080}, "CUDA 13.0 or newer"),
        (
            mr.CudaAsyncManagedMemoryResource,
            {"concurrent_managed_access": 0},
            "concurrentManagedAccess 0",
        ),
        (mr.SystemMemoryResource, {}, "pageableMemoryAccess 0"),
        (
            lambda: mr.SamHeadroomMemoryResource("1 GiB"),
            {"driver": 12010, "pageable_memory_access": 1},
            "CUDA 12.2 or newer",
        ),
    ],
)
def test_what_a_device_or_its_driver_lacks_is_named(
    make: type, config: dict[str, int], match: str
) -> None:
    with simulate_cuda(**config):  # type: ignore[arg-type]
        resource = make()
        with pytest.raises(numpy_rmm.CudaUnavailableError, match=match) as caught:
            resource.allocate(100)
        assert isinstance(caught.value, RuntimeError)
        assert resource.statistics().current_count == 0
