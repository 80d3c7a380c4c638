"""A large array of a pool that grew in steps, copied by several libraries.

A copy across two registrations fails, and one across two pieces of mapped device memory
must not: whatever a pool puts together has to be one memory for everybody, from every
offset. The driver copies around every 2 MiB, which covers the seams of segments and of
huge pages, the libraries around every 64 MiB.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import Driver

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU, reason="needs a GPU: NUMPY_RMM_TEST_GPU=1 on a machine with one"
    ),
    # Of the libraries; ours are RuntimeWarnings and stay errors.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MIB = 1 << 20
NBYTES = 1 << 30
SEAM = 2 * MIB
SPAN = 64 * MIB
AROUND = (-4097, -1, 0, 1, 4096)
CHUNK = 3 * 4096 + 1  # crosses a seam from either side


def pattern(nbytes: int) -> np.ndarray:
    """Bytes that do not repeat in step with any power of two."""
    return np.resize((np.arange(251) * 31 % 251).astype(np.uint8), nbytes)


def grow(pool: mr.MemoryResource) -> None:
    """Leaves the free memory of many steps of growth behind."""
    sizes = [MIB, 5 * MIB, 20 * MIB, 3 * MIB, 70 * MIB, 130 * MIB] * 2
    blocks = [(pool.allocate(nbytes), nbytes) for nbytes in sizes]
    for ptr, nbytes in blocks[::2] + blocks[1::2]:
        pool.deallocate(ptr, nbytes)


@pytest.fixture(scope="module")
def driver() -> Driver:
    driver = Driver()
    driver.activate()
    return driver


@pytest.fixture(params=[mr.PinnedHostMemoryResource, mr.ManagedMemoryResource])
def array(request: pytest.FixtureRequest, driver: Driver) -> np.ndarray:
    """A host array of 1 GiB."""
    pool = mr.PoolMemoryResource(request.param())
    grow(pool)
    with numpy_rmm.use_handler(pool):
        array = np.empty(NBYTES, np.uint8)
    array[:] = pattern(NBYTES)
    return array


@pytest.fixture
def device(driver: Driver) -> Iterator[int]:
    """1 GiB of device memory, with the pattern in it."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    grow(pool)
    ptr = pool.allocate(NBYTES)
    expected = pattern(NBYTES)
    driver.check(driver.cuMemcpyHtoD(ptr, expected.ctypes.data, NBYTES))
    yield ptr
    driver.check(driver.cuCtxSynchronize())
    pool.deallocate(ptr, NBYTES)


def offsets(step: int) -> list[int]:
    around = [seam + near for seam in range(step, NBYTES, step) for near in AROUND]
    return [0, *around, NBYTES - CHUNK]


# ---- the driver ----------------------------------------------------------------------


def test_the_driver_copies_a_host_array(driver: Driver, array: np.ndarray) -> None:
    expected, base = pattern(NBYTES), array.ctypes.data
    target = driver.allocate(CHUNK)
    wrong = []
    for offset in offsets(SEAM):
        driver.check(driver.cuMemcpyHtoD(target, base + offset, CHUNK))
        right = expected[offset : offset + CHUNK].tobytes()
        if driver.read(target, CHUNK) != right:
            wrong.append(offset)
    driver.check(driver.cuMemFree(target))
    assert wrong == []


def test_the_driver_copies_device_memory(driver: Driver, device: int) -> None:
    expected = pattern(NBYTES)
    wrong = [
        offset
        for offset in offsets(SEAM)
        if driver.read(device + offset, CHUNK)
        != expected[offset : offset + CHUNK].tobytes()
    ]
    assert wrong == []


def test_the_driver_copies_all_of_it_between_the_two(
    driver: Driver, array: np.ndarray, device: int
) -> None:
    back = np.zeros(NBYTES, np.uint8)
    driver.check(driver.cuMemsetD8(device, ctypes.c_ubyte(0), NBYTES))
    driver.check(driver.cuMemcpyHtoD(device, array.ctypes.data, NBYTES))
    driver.check(driver.cuMemcpyDtoH(back.ctypes.data, device, NBYTES))
    assert np.array_equal(back, pattern(NBYTES))


# ---- the libraries -------------------------------------------------------------------


class Interface:
    """Memory of a device as libraries take it from others."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "version": 3,
        }


class Torch:
    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")

    def upload(self, part: np.ndarray) -> np.ndarray:
        result: np.ndarray = self.torch.from_numpy(part).cuda().cpu().numpy()
        return result

    def download(self, ptr: int, nbytes: int) -> np.ndarray:
        part = self.torch.as_tensor(Interface(ptr, nbytes), device="cuda")
        result: np.ndarray = part.cpu().numpy()
        return result


class Cupy:
    def __init__(self) -> None:
        self.cupy: Any = importlib.import_module("cupy")

    def upload(self, part: np.ndarray) -> np.ndarray:
        result: np.ndarray = self.cupy.asnumpy(self.cupy.asarray(part))
        return result

    def download(self, ptr: int, nbytes: int) -> np.ndarray:
        result: np.ndarray = self.cupy.asnumpy(
            self.cupy.asarray(Interface(ptr, nbytes))
        )
        return result


@pytest.fixture(params=[Torch, Cupy])
def library(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param.__name__.lower())
    return request.param()


def pieces() -> list[tuple[int, int]]:
    """Around each span, and from each to the end of the next but one."""
    short = [(offset, CHUNK) for offset in offsets(SPAN)]
    long = [
        (start + 1, min(2 * SPAN, NBYTES - start - 1))
        for start in range(0, NBYTES, 4 * SPAN)
    ]
    return short + long


def test_a_library_copies_a_host_array(library: Any, array: np.ndarray) -> None:
    expected = pattern(NBYTES)
    wrong = [
        (start, nbytes)
        for start, nbytes in pieces()
        if not np.array_equal(
            library.upload(array[start : start + nbytes]),
            expected[start : start + nbytes],
        )
    ]
    assert wrong == []


def test_a_library_copies_device_memory(library: Any, device: int) -> None:
    expected = pattern(NBYTES)
    wrong = [
        (start, nbytes)
        for start, nbytes in pieces()
        if not np.array_equal(
            library.download(device + start, nbytes), expected[start : start + nbytes]
        )
    ]
    assert wrong == []
