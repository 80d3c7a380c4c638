"""`numpy_rmm.testing`: the simulated machine from Python, and the check for leaks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm.testing import Driver, assert_no_leaks, simulate_cuda

MIB = 2**20


def test_a_machine_is_as_asked() -> None:
    with simulate_cuda(devices=2, memory="1.5 GiB", pageable_memory_access=1) as cuda:
        value, nbytes = ctypes.c_int(), ctypes.c_size_t()
        cuda.driver.activate(1)
        assert cuda.driver.cuDeviceGetCount(ctypes.byref(value)) == 0
        assert value.value == 2
        assert cuda.driver.cuDeviceGetAttribute(ctypes.byref(value), 88, 1) == 0
        assert value.value == 1
        assert cuda.driver.cuDeviceTotalMem(ctypes.byref(nbytes), 0) == 0
        assert nbytes.value == 3 * 2**29
        assert "2 devices" in repr(cuda)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": 17}, ValueError, "devices must be from 0 to 16, not 17"),
        ({"devices": True}, TypeError, "devices must be an integer"),
        ({"devices": 1.5}, TypeError, "devices must be an integer"),
        ({"memory": "8 parsecs"}, ValueError, "memory: .* has no unit out of"),
        ({"memory": 0}, ValueError, "memory must be from 1"),
        ({"driver": "13.0"}, TypeError, "driver must be an integer"),
        ({"init_error": "NO"}, ValueError, "no CUDA error is called 'NO'"),
        ({"page_locked": "much"}, ValueError, "page_locked: .* does not start with"),
        ({"colour": 1}, TypeError, "no device attribute is called 'colour'"),
        ({"manual": "call"}, ValueError, "manual must be True, False or 'calls'"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with simulate_cuda(devices=3) as before:
        with pytest.raises(error, match=message):
            simulate_cuda(**arguments)
        assert "3 devices" in repr(before)
        assert ", active" in repr(before)


def test_a_nested_machine_gives_way_to_the_outer_one() -> None:
    version = ctypes.c_int()
    with simulate_cuda(driver=12080) as outer:
        with simulate_cuda(driver=12040) as inner:
            inner.driver.cuDriverGetVersion(ctypes.byref(version))
            assert version.value == 12040
            with pytest.raises(AttributeError, match="has no cuCtxRecordEvent"):
                _ = inner.driver.cuCtxRecordEvent
        outer.driver.cuDriverGetVersion(ctypes.byref(version))
        assert version.value == 12080


def test_a_decorated_function_has_a_machine_of_its_own_at_each_call() -> None:
    machine = simulate_cuda(devices=3)

    @machine
    def allocate() -> int:
        machine.driver.activate()
        machine.driver.allocate(1)
        count, _ = machine.outstanding()["device_allocations"]
        return count

    assert "not active" in repr(machine)
    assert [allocate(), allocate()] == [1, 1]
    assert "not active" in repr(machine)


def test_as_a_plain_function_it_lasts_until_it_is_stopped() -> None:
    machine = simulate_cuda()
    assert ", active" in repr(machine)
    machine.stop()
    machine.stop()
    assert "not active" in repr(machine)


def test_calls_fail_when_told() -> None:
    with simulate_cuda() as cuda:
        cuda.driver.activate()
        cuda.fail("cuMemAlloc", nth=2, error="CUDA_ERROR_UNKNOWN", times=None)
        cuda.driver.allocate(1)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
                cuda.driver.allocate(1)
        cuda.fail("cuMemAlloc", error=0)
        cuda.driver.allocate(1)
        assert cuda.calls("cuMemAlloc") == 5
        assert cuda.calls() > 5
        with pytest.raises(ValueError, match="no call 'cuMemAllocate'"):
            cuda.fail("cuMemAllocate")


def test_a_sticky_error_is_everywhere_until_it_is_taken_back() -> None:
    with simulate_cuda() as cuda:
        cuda.driver.activate()
        event = cuda.driver.create_event()
        cuda.set_sticky("ILLEGAL_ADDRESS")
        name = cuda.driver.error_name(cuda.driver.cuEventQuery(event))
        assert name == "CUDA_ERROR_ILLEGAL_ADDRESS"
        cuda.set_sticky(0)
        assert cuda.driver.is_done(event)


@pytest.mark.parametrize("how", ["control", "flag"])
def test_a_held_stream_waits(how: str) -> None:
    with simulate_cuda() as cuda:
        driver = cuda.driver
        driver.activate()
        stream, event = driver.create_stream(), driver.create_event()
        address = driver.allocate(64)
        held = driver.held(stream)
        if how == "control":
            cuda.hold(stream)
        else:
            held.__enter__()
        driver.check(driver.cuMemsetD8Async(address, 7, 64, stream))
        driver.check(driver.cuEventRecord(event, stream))
        assert not driver.is_done(event)
        assert cuda.outstanding()["operations"][0] >= 1
        if how == "control":
            cuda.release(stream)
        else:
            held.__exit__(None, None, None)
        driver.check(driver.cuEventSynchronize(event))
        assert driver.is_done(event)
        assert driver.read(address, 4) == bytes([7] * 4)


def test_a_control_of_no_stream_is_no_fault_of_the_program() -> None:
    with simulate_cuda() as cuda:
        cuda.driver.activate()
        gone = cuda.driver.create_stream()
        cuda.driver.check(cuda.driver.cuStreamDestroy(gone))
        for control in (cuda.hold, cuda.release, cuda.launch):
            with pytest.raises(ValueError, match="stream"):
                control(gone)
        assert not cuda.step(gone)
        assert cuda.faults() == []


def test_in_manual_mode_work_runs_step_by_step() -> None:
    with simulate_cuda(manual=True) as cuda:
        driver = cuda.driver
        driver.activate()
        stream = driver.create_stream()
        address = driver.allocate(64)
        driver.check(driver.cuMemsetD8Async(address, 1, 64, stream))
        assert cuda.outstanding()["operations"] == (1, 0)
        assert cuda.step(stream)
        assert not cuda.step(stream)


def test_the_log_tells_calls_and_results() -> None:
    with simulate_cuda() as cuda:
        cuda.driver.activate()
        cuda.clear_log()
        cuda.driver.cuMemFree(12)
        line = cuda.log()[-1]
        assert line.startswith("cuMemFree(0xc,")
        assert line.endswith("= CUDA_ERROR_INVALID_VALUE")


def test_faults_are_told() -> None:
    with simulate_cuda(driver=12040) as cuda:
        assert cuda.faults() == []
        address = ctypes.c_void_p()
        find = cuda.driver.cuGetProcAddress
        assert find(b"cuStreamGetCtx", ctypes.byref(address), 12000, 0, None) == 0
        assert cuda.faults() == []
        cuda.set_attribute("managed_memory", 0)


def test_a_library_that_is_no_driver_is_refused() -> None:
    with pytest.raises(OSError, match="is no CUDA driver"):
        Driver("libc.so.6")


def test_memory_in_flight_is_not_handed_out() -> None:
    with simulate_cuda() as cuda:
        driver = cuda.driver
        driver.activate()
        stream, address = driver.create_stream(), driver.allocate(MIB)
        with numpy_rmm.pinned():
            array = np.ones(MIB, np.uint8)
            with driver.held(stream):
                driver.check(
                    driver.cuMemcpyHtoDAsync(address, array.ctypes.data, MIB, stream)
                )
                del array
                others = [np.full(MIB, 7, np.uint8) for _ in range(6)]
        assert set(driver.read(address, MIB)) == {1}
        assert cuda.faults() == []
        del others


def test_no_leak_is_no_error() -> None:
    with simulate_cuda(), assert_no_leaks(), numpy_rmm.pinned():
        array = np.ones(MIB, np.uint8)
        del array


def test_a_leak_is_named() -> None:
    kept = []
    with (
        simulate_cuda(),
        pytest.raises(AssertionError, match=r"'pinned'.*1048576 bytes in 1 alloc"),
        assert_no_leaks(),
        numpy_rmm.pinned(),
    ):
        kept.append(np.ones(MIB, np.uint8))


def test_a_kernel_takes_arrays_of_devices() -> None:
    with simulate_cuda() as cuda:
        cuda.driver.activate()
        array = numpy_rmm.to_device(np.zeros((4, 6)))
        inside = (array.ptr, array.nbytes)
        cuda.launch(reads=[array, array[::-1, ::2]], writes=[inside])
        cuda.launch(writes=[numpy_rmm.DeviceBuffer(size=100)])
        with pytest.raises(ValueError, match="not known to the driver"):
            cuda.launch(reads=[(array.ptr, 1 << 40)])


@pytest.mark.parametrize("wrong", [5, None, [1.0], (1,), ("0", 8), object()])
@pytest.mark.parametrize("name", ["reads", "writes"])
def test_what_no_kernel_touches_is_named(name: str, wrong: object) -> None:
    arguments: dict[str, Any] = {name: [wrong]}
    with simulate_cuda() as cuda, pytest.raises(TypeError, match=f"{name} takes"):
        cuda.launch(**arguments)
