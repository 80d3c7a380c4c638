"""Kernels on the memory of another GPU; tests/test_two_devices.py has the rest."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import numpy as np
import pytest

from numpy_rmm import DeviceArray, Stream, mr
from numpy_rmm.testing import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

N = 1 << 20


@pytest.fixture(autouse=True)
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs two GPUs: set NUMPY_RMM_TEST_GPU=1 on a machine with them")
    driver, n_devices = Driver(), ctypes.c_int()
    driver.check(driver.cuInit(0))
    driver.check(driver.cuDeviceGetCount(ctypes.byref(n_devices)))
    if n_devices.value < 2:
        pytest.skip(f"needs two devices, and there is {n_devices.value}")
    answer = ctypes.c_int()
    driver.check(driver.cuDeviceCanAccessPeer(ctypes.byref(answer), 1, 0))
    if not answer.value:
        pytest.skip("the second device cannot reach the memory of the first")
    driver.activate(0)
    return driver


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(params=["vmm", "alloc"])
def array(request: pytest.FixtureRequest, cupy: Any) -> DeviceArray:
    """On the first device, and open to the second."""
    pool = mr.PoolMemoryResource(
        mr.CudaMemoryResource(device=0), segments=request.param
    )
    if request.param == "vmm":
        pool.add_peer(1)
    else:
        with cupy.cuda.Device(1):
            if not cupy.cuda.runtime.deviceCanAccessPeer(1, 0):
                pytest.skip("the second device cannot reach the memory of the first")
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.deviceEnablePeerAccess(0)  # it may be already
    return DeviceArray(N, np.float32, mr=pool)


def test_a_kernel_of_the_other_device(cupy: Any, array: DeviceArray) -> None:
    fill = cupy.RawKernel(
        r"""extern "C" __global__ void fill(float *x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) x[i] = 2.0f * i;
        }""",
        "fill",
    )
    with cupy.cuda.Device(1):
        fill((N // 256,), (256,), (np.intp(array.ptr), np.int32(N)))
        cupy.cuda.Device(1).synchronize()
    assert (array.copy_to_host() == 2 * np.arange(N, dtype=np.float32)).all()


def test_memory_freed_on_the_other_devices_stream(
    cupy: Any, driver: Driver, array: DeviceArray
) -> None:
    """It is handed out again behind the work of that stream."""
    pool = array.mr
    del array
    driver.activate(1)
    other = Stream(flags=1)
    driver.activate(0)
    own = Stream(flags=1)
    wrong = 0
    for _ in range(20):
        first = DeviceArray(N, np.uint8, mr=pool, stream=other)
        driver.activate(1)
        with driver.held(other):
            driver.check(driver.cuMemsetD8Async(first.ptr, 1, N, other.handle))
            driver.activate(0)
            del first
            second = DeviceArray(N, np.uint8, mr=pool, stream=own)
            driver.check(driver.cuMemsetD8Async(second.ptr, 2, N, own.handle))
            driver.activate(1)
        driver.activate(0)
        wrong += int((second.copy_to_host(stream=own) != 2).sum())
        del second
    assert wrong == 0
