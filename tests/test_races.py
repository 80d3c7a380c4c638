"""The checker of the simulated driver: memory that is used out of order is found,
whatever the GPU happens to do first, and a right program is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import (
    SimulatedCuda,
    assert_no_races,
    host_read,
    host_write,
    simulate_cuda,
)

MIB = 1 << 20


class Machine:
    """A checked machine with a stream that stands still and some device memory."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda, self.driver = cuda, cuda.driver
        self.driver.activate()
        self.stream = self.driver.create_stream()
        self.device = self.driver.allocate(MIB)

    def to_device(self, array: np.ndarray, stream: int | None = None) -> None:
        self.driver.check(
            self.driver.cuMemcpyHtoDAsync(
                self.device, array.ctypes.data, array.nbytes, stream or self.stream
            )
        )

    def to_host(self, array: np.ndarray, stream: int | None = None) -> None:
        self.driver.check(
            self.driver.cuMemcpyDtoHAsync(
                array.ctypes.data, self.device, array.nbytes, stream or self.stream
            )
        )


@pytest.fixture
def machine() -> Iterator[Machine]:
    with simulate_cuda(check=True) as cuda:
        yield Machine(cuda)
        assert cuda.faults() == []


def refused() -> AbstractContextManager[object]:
    return pytest.raises(AssertionError, match="used out of order")


@pytest.fixture
def immediate() -> Iterator[None]:
    """Page-locked memory that is handed out again at once."""
    pool = mr.PoolMemoryResource(mr.PinnedHostMemoryResource(), reuse="immediate")
    with numpy_rmm.use_handler(pool):
        yield


# ---- arrays that die in flight -------------------------------------------------------


def test_an_array_that_dies_in_flight_is_safe(machine: Machine) -> None:
    with assert_no_races(), numpy_rmm.pinned():
        for _ in range(20):
            array = np.ones(MIB, np.uint8)
            machine.to_device(array)
            del array


def test_immediate_reuse_is_found(machine: Machine, immediate: None) -> None:
    with refused(), assert_no_races():
        array = np.ones(MIB, np.uint8)
        machine.to_device(array)
        del array
        np.ones(MIB, np.uint8)


def test_both_sides_are_named(machine: Machine, immediate: None) -> None:
    array = np.ones(MIB, np.uint8)
    address = array.ctypes.data
    machine.to_device(array)
    del array
    array = np.ones(MIB, np.uint8)
    assert array.ctypes.data == address
    (race,) = machine.cuda.races()
    assert "cuMemcpyHtoDAsync on stream" in race
    assert f"reads {MIB} B at {address:#x}" in race
    assert f"{MIB} B at {address:#x} handed out to thread" in race
    assert "given back: #" in race


def test_it_is_found_when_the_copy_is_done_by_chance(
    machine: Machine, immediate: None
) -> None:
    array = np.ones(MIB, np.uint8)
    event = machine.driver.create_event()
    machine.to_device(array)
    while machine.cuda.outstanding()["operations"][0]:
        pass
    del array
    np.ones(MIB, np.uint8)
    assert len(machine.cuda.races()) == 1
    assert machine.driver.is_done(event)


def test_a_program_that_synchronises_may_reuse_at_once(
    machine: Machine, immediate: None
) -> None:
    with assert_no_races():
        for _ in range(3):
            array = np.ones(MIB, np.uint8)
            machine.to_device(array)
            machine.driver.check(machine.driver.cuStreamSynchronize(machine.stream))
            del array


def test_work_on_an_array_that_is_gone_is_found(machine: Machine) -> None:
    with numpy_rmm.pinned():
        array = np.ones(MIB, np.uint8)
    address, nbytes = array.ctypes.data, array.nbytes
    del array
    copy = machine.driver.cuMemcpyHtoDAsync
    machine.driver.check(copy(machine.device, address, nbytes, machine.stream))
    (race,) = machine.cuda.races()
    assert "which were given back" in race


# ---- what the program touches --------------------------------------------------------


@pytest.mark.parametrize(
    ("copy", "touch", "is_race"),
    [
        ("to_device", host_read, False),
        ("to_device", host_write, True),
        ("to_host", host_read, True),
        ("to_host", host_write, True),
    ],
)
def test_what_the_program_touches_is_told(
    machine: Machine, copy: str, touch: object, is_race: bool
) -> None:
    with numpy_rmm.pinned():
        array = np.ones(MIB, np.uint8)
    getattr(machine, copy)(array)
    with refused() if is_race else nullcontext(), assert_no_races():
        touch(array)  # type: ignore[operator]
    machine.driver.check(machine.driver.cuStreamSynchronize(machine.stream))
    with assert_no_races():
        touch(array)  # type: ignore[operator]


def test_only_the_bytes_of_a_view_count(machine: Machine) -> None:
    with numpy_rmm.pinned():
        array = np.ones((64, 4096), np.uint8)
    machine.to_device(array[:32])
    with assert_no_races():
        host_write(array[32:])
    machine.to_device(array[33, :2048])
    with assert_no_races():
        host_write(array[32:, 2048:])
        host_write(memoryview(array[34]))
    with refused(), assert_no_races():
        host_write(array[32:, ::2])


def test_marks_do_nothing_elsewhere() -> None:
    array = np.ones(16)
    host_write(array)
    with simulate_cuda() as cuda:
        host_read(array)
        assert cuda.races() == []
        with pytest.raises(RuntimeError, match="nobody looks for races"):
            assert_no_races().__enter__()


# ---- kernels -------------------------------------------------------------------------


def test_a_kernel_keeps_its_memory_in_use(machine: Machine, immediate: None) -> None:
    array = np.ones((4, MIB), np.uint8)
    machine.cuda.launch(machine.stream, reads=[array[1:3, ::2]])
    with assert_no_races():
        host_read(array)
        host_write(array[3])
    with refused(), assert_no_races():
        host_write(array[2])
    machine.cuda.launch(machine.stream, writes=[(machine.device, MIB), array])
    del array
    with refused(), assert_no_races():
        np.ones((4, MIB), np.uint8)


def test_a_kernel_needs_memory_that_the_gpu_sees(machine: Machine) -> None:
    with pytest.raises(ValueError, match="is not known to the driver"):
        machine.cuda.launch(machine.stream, reads=[np.ones(16)])


# ---- schedules -----------------------------------------------------------------------


def order_of_work(seed: int) -> list[bytes]:
    """What two streams that fill the same memory leave there, time after time."""
    with simulate_cuda(manual="calls", seed=seed) as cuda:
        driver = cuda.driver
        driver.activate()
        streams = [driver.create_stream() for _ in range(4)]
        address = driver.allocate(4)
        seen = []
        for _ in range(10):
            for value, stream in enumerate(streams):
                driver.check(driver.cuMemsetD8Async(address, value, 4, stream))
            driver.check(driver.cuCtxSynchronize())
            seen.append(driver.read(address, 1))
        return seen


def test_a_seed_gives_the_same_order_each_time() -> None:
    orders = [order_of_work(seed) for seed in (1, 2, 3)]
    assert orders == [order_of_work(seed) for seed in (1, 2, 3)]
    assert orders[0] != orders[1] != orders[2]


# ---- device memory -------------------------------------------------------------------


def test_device_memory_in_the_order_of_streams_is_safe(machine: Machine) -> None:
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), maximum_pool_size=4 * MIB)
    streams = [numpy_rmm.Stream() for _ in range(3)]
    fill = machine.driver.cuMemsetD8Async
    with assert_no_races():
        for i in range(30):
            stream = streams[i % 3]
            address = pool.allocate(MIB, stream)
            machine.driver.check(fill(address, i, MIB, stream.__cuda_stream__()[1]))
            pool.deallocate(address, MIB, stream)


def test_device_memory_on_the_wrong_stream_is_found(machine: Machine) -> None:
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource())
    stream, other = numpy_rmm.Stream(), numpy_rmm.Stream()
    handle = other.__cuda_stream__()[1]
    address = pool.allocate(MIB, stream)
    machine.driver.check(machine.driver.cuMemsetD8Async(address, 1, MIB, handle))
    pool.deallocate(address, MIB, stream)
    with refused(), assert_no_races():
        assert pool.allocate(MIB, stream) == address


# ---- a whole program -----------------------------------------------------------------

PROGRAM = """
import numpy as np, numpy_rmm
from numpy_rmm import mr
from numpy_rmm.testing import Driver
numpy_rmm._core._cuda_initialize()
driver = Driver(numpy_rmm._core._cuda_driver()["library"])
driver.activate()
stream, device = driver.create_stream(), driver.allocate(1 << 20)
pool = mr.PoolMemoryResource(mr.PinnedHostMemoryResource(), reuse="immediate")
with numpy_rmm.use_handler(pool):
    array = np.ones(1 << 20, np.uint8)
    driver.check(driver.cuMemcpyHtoDAsync(device, array.ctypes.data, 1 << 20, stream))
    del array
    np.ones(1 << 20, np.uint8)
driver.check(driver.cuCtxSynchronize())
"""


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_whole_program_tells_on_its_error_output(check: str) -> None:
    environ = {
        **os.environ,
        "NUMPY_RMM_CUDA_LIBRARY": "simulator",
        "NUMPY_RMM_SIMULATED_CHECK": check,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("numpy_rmm: race: nothing orders") == int(check)
