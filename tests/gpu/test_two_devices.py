"""Kernels on the memory of two GPUs; tests/test_two_devices.py has the rest.

A kernel is launched by the driver's own calls, so that no library is needed; where
there is CuPy its arrays are copied, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import DeviceArray, Stream, copyto, mr, to_device
from numpy_rmm.testing import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

N = 1 << 20
THREADS = 256
ALREADY_ENABLED = 704

# x[i] = 2 * i + first
FILL = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 x, .param .u32 first)
{
    .reg .b32 %r<7>;
    .reg .b64 %a<5>;
    ld.param.u64 %a1, [x];
    ld.param.u32 %r1, [first];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %a2, %r5, 4;
    shl.b32 %r6, %r5, 1;
    add.u32 %r6, %r6, %r1;
    cvta.to.global.u64 %a3, %a1;
    add.u64 %a4, %a3, %a2;
    st.global.u32 [%a4], %r6;
    ret;
}
\0"""


def filled(first: int = 0) -> np.ndarray:
    return (2 * np.arange(N) + first).astype(np.uint32)


class Kernel:
    """The kernel above, in the context that was current.

    It has run once: the driver loads code at the first launch, and may wait then.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.library = ctypes.CDLL(driver.path)
        self.function, module = ctypes.c_void_p(), ctypes.c_void_p()
        driver.check(self.library.cuModuleLoadData(ctypes.byref(module), FILL))
        found = ctypes.byref(self.function)
        driver.check(self.library.cuModuleGetFunction(found, module, b"fill"))
        array, stream = DeviceArray(N, np.uint32), Stream(flags=1)
        self(array, stream)
        assert (array.copy_to_host(stream=stream) == filled()).all()

    def __call__(self, array: DeviceArray, stream: Stream, first: int = 0) -> None:
        values = ctypes.c_uint64(array.ptr), ctypes.c_uint32(first)
        pointers = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        shape = [N // THREADS, 1, 1, THREADS, 1, 1]
        self.driver.check(
            self.library.cuLaunchKernel(
                self.function,
                *(ctypes.c_uint(n) for n in shape),
                ctypes.c_uint(0),
                ctypes.c_void_p(stream.handle),
                pointers,
                None,
            )
        )


@pytest.fixture(autouse=True)
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs two GPUs: set NUMPY_RMM_TEST_GPU=1 on a machine with them")
    driver, n_devices = Driver(), ctypes.c_int()
    driver.check(driver.cuInit(0))
    driver.check(driver.cuDeviceGetCount(ctypes.byref(n_devices)))
    if n_devices.value < 2:
        pytest.skip(f"needs two devices, and there is {n_devices.value}")
    driver.activate(0)
    return driver


@pytest.fixture
def kernels(driver: Driver) -> list[Kernel]:
    """One for each device."""
    made = []
    for device in (0, 1):
        driver.activate(device)
        made.append(Kernel(driver))
    driver.activate(0)
    return made


@pytest.fixture
def streams(driver: Driver) -> list[Stream]:
    made = []
    for device in (0, 1):
        driver.activate(device)
        made.append(Stream(flags=1))
    driver.activate(0)
    return made


def need_access(driver: Driver) -> None:
    answer = ctypes.c_int()
    driver.check(driver.cuDeviceCanAccessPeer(ctypes.byref(answer), 1, 0))
    if not answer.value:
        pytest.skip("the second device cannot reach the memory of the first")


def enable_access(driver: Driver) -> None:
    """Device 1 may touch what is allocated on device 0."""
    context = driver.activate(0)
    driver.activate(1)
    library = ctypes.CDLL(driver.path)
    result = library.cuCtxEnablePeerAccess(ctypes.c_void_p(context), 0)
    driver.activate(0)
    if result != ALREADY_ENABLED:
        driver.check(result)


@pytest.fixture(params=["vmm", "alloc"])
def opened(request: pytest.FixtureRequest, driver: Driver) -> mr.PoolMemoryResource:
    """A pool of the first device whose memory the second one reaches."""
    need_access(driver)
    pool = mr.PoolMemoryResource(
        mr.CudaMemoryResource(device=0), segments=request.param
    )
    if request.param == "vmm":
        pool.add_peer(1)
    else:
        enable_access(driver)
    return pool


def in_thread(driver: Driver, device: int, function: Callable[[], Any]) -> Any:
    def run() -> Any:
        driver.activate(device)
        return function()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


# ---- the other device's memory -------------------------------------------------------


def test_a_kernel_of_the_other_device(
    driver: Driver,
    kernels: list[Kernel],
    streams: list[Stream],
    opened: mr.PoolMemoryResource,
) -> None:
    array = DeviceArray(N, np.uint32, mr=opened)
    driver.activate(1)
    kernels[1](array, streams[1], 5)
    streams[1].synchronize()
    driver.activate(0)
    assert (array.copy_to_host() == filled(5)).all()
    later = DeviceArray(N, np.uint32, mr=opened)
    driver.activate(1)
    kernels[1](later, streams[1], 6)
    streams[1].synchronize()
    assert (later.copy_to_host() == filled(6)).all()


def test_memory_freed_on_the_other_devices_stream(
    driver: Driver,
    kernels: list[Kernel],
    streams: list[Stream],
    opened: mr.PoolMemoryResource,
) -> None:
    """It is handed out again behind the kernels of that stream."""
    own, other = streams
    wrong = 0
    for _ in range(20):
        first = DeviceArray(N, np.uint32, mr=opened, stream=other)
        driver.activate(1)
        with driver.held(other):
            kernels[1](first, other, 1)
            driver.activate(0)
            del first
            second = DeviceArray(N, np.uint32, mr=opened, stream=own)
            kernels[0](second, own, 2)
            driver.activate(1)
        driver.activate(0)
        wrong += int((second.copy_to_host(stream=own) != filled(2)).sum())
        del second
    assert wrong == 0


# ---- copies, with nothing opened -----------------------------------------------------


@pytest.mark.parametrize("place", [0, 1])
def test_a_copy_comes_behind_the_kernels_of_its_source(
    driver: Driver, kernels: list[Kernel], streams: list[Stream], place: int
) -> None:
    """Between default pools, on a stream of either device, and kernels behind it."""
    driver.activate(1)
    source = DeviceArray(N, np.uint32, stream=streams[1])
    driver.activate(0)
    target = DeviceArray(N, np.uint32, stream=streams[0])
    driver.activate(place)
    stream = Stream(flags=1)
    copyto(target, source, stream=stream)  # what the driver prepares is ready
    for turn in range(10):
        driver.activate(1)
        with driver.held(streams[1]):
            kernels[1](source, streams[1], turn)
            driver.activate(place)
            pending = copyto(target, source, stream=stream, blocking=False)
            driver.activate(1)
            assert not pending.done
        pending.wait()
        driver.activate(0)
        assert (target.copy_to_host(stream=stream) == filled(turn)).all()
        kernels[0](target, streams[0], turn + 100)
        assert (target.copy_to_host(stream=streams[0]) == filled(turn + 100)).all()


def test_a_large_copy(driver: Driver) -> None:
    """Over many segments of both pools."""
    whole = np.arange(64 << 20, dtype=np.uint32).reshape(-1, 1024)
    driver.activate(1)
    source = to_device(whole)
    driver.activate(0)
    target = to_device(np.zeros_like(whole))
    copyto(target, source)
    assert (target.copy_to_host() == whole).all()
    copyto(source[::2], target[1::2])
    assert (source.copy_to_host()[::2] == whole[1::2]).all()


def test_arrays_of_cupy(driver: Driver) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(1):
        foreign = cupy.arange(N, dtype=cupy.uint32)
        driver.activate(0)
        target = to_device(np.zeros(N, np.uint32))
        copyto(target, foreign)
        assert (target.copy_to_host() == np.arange(N)).all()
        copyto(foreign, to_device(filled()))
        copyto(foreign[::2], target[1::2], stream=Stream(flags=1))
    with cupy.cuda.Device(1):
        seen = cupy.asnumpy(foreign)
    expected = filled()
    expected[::2] = np.arange(N)[1::2]
    assert (seen == expected).all()


# ---- resources and threads -----------------------------------------------------------


def test_kernels_on_the_current_resource_of_each_device(
    driver: Driver, kernels: list[Kernel], streams: list[Stream]
) -> None:
    pools = [
        mr.StatisticsResourceAdaptor(
            mr.PoolMemoryResource(mr.CudaMemoryResource(device=device))
        )
        for device in (0, 1)
    ]
    try:
        for device in (0, 1):
            mr.set_per_device_resource(device, pools[device])
        for device in (0, 1):
            driver.activate(device)
            array = DeviceArray(N, np.uint32, stream=streams[device])
            assert array.mr is pools[device]
            kernels[device](array, streams[device], device)
            assert (array.copy_to_host(stream=streams[device]) == filled(device)).all()
            del array
            assert pools[device].statistics().current_bytes == 0
    finally:
        for device in (0, 1):
            mr.set_per_device_resource(device, None)


def test_frees_in_a_thread_of_the_other_device(
    driver: Driver, kernels: list[Kernel], streams: list[Stream]
) -> None:
    """While a kernel works on it: what comes next on that memory waits for it."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(device=0))
    driver.activate(0)
    another = Stream(flags=1)
    wrong = 0
    for turn in range(10):
        held = [DeviceArray(N, np.uint32, mr=pool, stream=streams[0])]
        with driver.held(streams[0]):
            kernels[0](held[0], streams[0], 1)
            in_thread(driver, 1, held.clear)
            again = DeviceArray(N, np.uint32, mr=pool, stream=another)
            kernels[0](again, another, turn)
        wrong += int((again.copy_to_host(stream=another) != filled(turn)).sum())
        del again
    assert wrong == 0
    numpy_rmm.trim()
