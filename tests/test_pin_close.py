"""How a pin ends, what is in its way, and calls of the driver that fail."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm.testing import Driver, SimulatedCuda
from pins import KIB, MIB, PORTABLE, is_locked, pinned_nbytes

pytestmark = pytest.mark.usefixtures("nothing_stays_locked")


# ---- closing -------------------------------------------------------------------------


def test_close_twice_is_fine_and_a_closed_pin_cannot_be_entered(cuda: Driver) -> None:
    pin = numpy_rmm.pin(np.ones(1000))
    assert not pin.closed
    pin.close()
    pin.close()
    assert pin.closed
    with pytest.raises(ValueError, match="closed"):
        pin.__enter__()
    with numpy_rmm.pin(np.ones(10)) as other:
        other.close()


def test_an_exception_of_the_block_goes_on(cuda: Driver) -> None:
    whole = np.ones(1000)
    with pytest.raises(ZeroDivisionError), numpy_rmm.pin(whole):
        1 / 0  # noqa: B018
    assert not numpy_rmm.is_pinned(whole)


def end(pins: list[Any], ending: str) -> None:
    """Ends the only pin of the list, which nobody else refers to."""
    if ending == "close":
        pins[0].close()
    elif ending == "with":
        with pins[0]:
            pass
    elif ending == "del":
        pins.clear()
    else:
        cycle = [pins.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()


@pytest.mark.parametrize("ending", ["close", "with", "del", "garbage"])
@pytest.mark.parametrize("operation", ["H2D", "D2H"])
def test_closing_waits_for_what_is_not_done(
    driver: Driver, ending: str, operation: str
) -> None:
    """And lets other threads and the driver work meanwhile."""
    whole = np.zeros(MIB, np.uint8)
    address, device = whole.ctypes.data, driver.allocate(MIB)
    stream = driver.create_stream()
    pins = [numpy_rmm.pin(whole)]
    order: list[str] = []
    others: list[int] = []

    def let_go() -> None:
        time.sleep(0.1)
        try:
            others.append(driver.allocate(100))  # does not stand behind the pin
            order.append("let go")
        finally:
            word.value = 1  # or closing would wait for ever

    # As Driver.held, in the order in which this test needs it.
    flag, mapped = ctypes.c_void_p(), ctypes.c_uint64()
    driver.check(driver.cuMemHostAlloc(ctypes.byref(flag), 4096, 3))
    assert flag.value is not None
    word = ctypes.c_uint.from_address(flag.value)
    word.value = 0
    driver.check(driver.cuMemHostGetDevicePointer(ctypes.byref(mapped), flag, 0))
    driver.check(driver.cuStreamWaitValue32(stream, mapped, 1, 0))
    try:
        if operation == "H2D":
            driver.check(driver.cuMemcpyHtoDAsync(device, address, MIB, stream))
        else:
            driver.check(driver.cuMemcpyDtoHAsync(address, device, MIB, stream))
    except BaseException:
        word.value = 1
        raise
    thread = threading.Thread(target=with_context(driver, let_go))
    thread.start()
    end(pins, ending)
    order.append("closed")
    thread.join()
    assert order == ["let go", "closed"]
    assert not is_locked(driver, address)
    driver.check(driver.cuStreamSynchronize(stream))
    driver.check(driver.cuStreamDestroy(stream))
    for memory in (device, *others):
        driver.check(driver.cuMemFree(memory))
    driver.check(driver.cuMemFreeHost(flag))


def with_context(driver: Driver, function: Callable[[], None]) -> Callable[[], None]:
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))

    def run() -> None:
        driver.check(driver.cuCtxSetCurrent(context))
        function()

    return run


def unlocks(driver: Driver, address: int) -> bool:
    """Whether it is unlocked by what trim does, after a while."""
    for _ in range(200):
        numpy_rmm.trim()
        if not is_locked(driver, address):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("ending", ["close", "with"])
def test_a_signal_ends_the_wait_of_closing(driver: Driver, ending: str) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    whole, more = np.zeros(MIB, np.uint8), np.zeros(MIB, np.uint8)
    device, stream = driver.allocate(MIB), driver.create_stream()
    pin = numpy_rmm.pin(whole, more)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with driver.held(stream):
            driver.check(
                driver.cuMemcpyHtoDAsync(device, whole.ctypes.data, MIB, stream)
            )
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            leave = {"close": pin.close, "with": pin.__enter__().__exit__}[ending]
            with pytest.raises(Stop):
                leave(*([None] * 3 if ending == "with" else []))
            assert pin.closed
            assert is_locked(driver, whole.ctypes.data)
            assert is_locked(driver, more.ctypes.data)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert unlocks(driver, whole.ctypes.data)
    assert unlocks(driver, more.ctypes.data)
    driver.check(driver.cuStreamDestroy(stream))
    driver.check(driver.cuMemFree(device))


@pytest.mark.parametrize("ending", ["close", "del"])
def test_inside_a_capture_it_is_unlocked_later(driver: Driver, ending: str) -> None:
    whole = np.ones(10_000)
    address, alive = whole.ctypes.data, weakref.ref(whole)
    stream, graph = driver.create_stream(), ctypes.c_void_p()
    pin, theirs = numpy_rmm.pin(whole), np.ones(1000)
    driver.check(driver.cuMemHostRegister(theirs[5:].ctypes.data, 10, PORTABLE))
    with numpy_rmm.stream_capture():
        driver.check(driver.cuStreamBeginCapture(stream, 0))
        if ending == "close":
            pin.close()
        del pin, whole
        assert alive() is not None
        assert is_locked(driver, address)
        other = np.ones(1000)
        with numpy_rmm.pin(other):  # and a pin does not hurt the capture
            pass
        with pytest.raises(ValueError, match="somebody else"):
            numpy_rmm.pin(theirs)  # nor does one that fails
        driver.check(driver.cuStreamEndCapture(stream, ctypes.byref(graph)))
    driver.check(driver.cuMemHostUnregister(theirs[5:].ctypes.data))
    assert unlocks(driver, address)
    assert unlocks(driver, other.ctypes.data)
    for _ in range(100):  # the reference is dropped in the main thread
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None
    driver.check(driver.cuGraphDestroy(graph))
    driver.check(driver.cuStreamDestroy(stream))


def test_in_a_host_function_it_is_unlocked_later(driver: Driver) -> None:
    whole = np.ones(10_000)
    pins = [numpy_rmm.pin(whole)]
    stream = driver.create_stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def let_go(_: object) -> None:
        pins.pop().close()

    driver.check(driver.cuLaunchHostFunc(stream, let_go, None))
    driver.check(driver.cuStreamSynchronize(stream))
    assert pins == []
    assert unlocks(driver, whole.ctypes.data)
    driver.check(driver.cuStreamDestroy(stream))


def test_memory_that_waits_to_be_unlocked_can_be_pinned_again(driver: Driver) -> None:
    whole = np.ones(10_000)
    with numpy_rmm.stream_capture():
        numpy_rmm.pin(whole).close()
        pin = numpy_rmm.pin(whole[5:])
    numpy_rmm.trim()
    assert numpy_rmm.is_pinned(whole)
    pin.close()
    assert not is_locked(driver, whole.ctypes.data)


def test_threads_pin_one_buffer(cuda: Driver) -> None:
    whole = np.ones(10_000)

    def work(_: int) -> int:
        n_pinned = 0
        for i in range(100):
            with numpy_rmm.pin(whole[i:]):
                n_pinned += numpy_rmm.is_pinned(whole)
        return n_pinned

    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(work, range(4))) == [100] * 4
    assert not numpy_rmm.is_pinned(whole)


# ---- what is in the way --------------------------------------------------------------


@pytest.mark.parametrize("part", ["all", "the first half", "the middle", "the end"])
def test_what_somebody_else_has_registered_is_named(driver: Driver, part: str) -> None:
    whole = np.ones(4 * KIB, np.uint8).repeat(4)
    theirs = {
        "all": whole,
        "the first half": whole[: 8 * KIB],
        "the middle": whole[6 * KIB : 12 * KIB],
        "the end": whole[-100:],
    }[part]
    driver.check(driver.cuMemHostRegister(theirs.ctypes.data, theirs.nbytes, PORTABLE))
    with pytest.raises(ValueError, match="by somebody else") as caught:
        numpy_rmm.pin(whole)
    assert f"{whole.nbytes} B at {whole.ctypes.data:#x}" in str(caught.value)
    assert f"{theirs.nbytes} B at {theirs.ctypes.data:#x}" in str(caught.value)
    driver.check(driver.cuMemHostUnregister(theirs.ctypes.data))
    with numpy_rmm.pin(whole):
        assert numpy_rmm.is_pinned(whole)


class Part:
    """Bytes of an array, told by an object that does not say whose they are."""

    def __init__(self, part: np.ndarray) -> None:
        self._part = part
        self.__array_interface__ = part.__array_interface__


def test_a_pin_of_unknown_bytes_must_not_cross_another(driver: Driver) -> None:
    whole = np.ones(10_000, np.uint8)
    inside, across = np.asarray(Part(whole[50:60])), np.asarray(Part(whole[60:200]))
    with numpy_rmm.pin(np.asarray(Part(whole[:100]))):
        assert pinned_nbytes() == 100
        with numpy_rmm.pin(inside):
            assert pinned_nbytes() == 100
        with pytest.raises(ValueError, match="by another pin") as caught:
            numpy_rmm.pin(across)
        assert f"140 B at {across.ctypes.data:#x}" in str(caught.value)
        assert f"100 B at {whole.ctypes.data:#x}" in str(caught.value)
        with pytest.raises(ValueError, match="by another pin"):
            numpy_rmm.pin(whole)
    with numpy_rmm.pin(whole, across):
        assert pinned_nbytes() == 10_000


def test_a_failure_unlocks_what_came_before_it(driver: Driver) -> None:
    first, second = np.ones(1000), np.ones(1000)
    with pytest.raises(TypeError):
        numpy_rmm.pin(first, second, 5)  # type: ignore[arg-type]
    assert not is_locked(driver, first.ctypes.data)
    assert pinned_nbytes() == 0


class OnDevice:
    __cuda_array_interface__ = {"shape": (1,), "data": (4096, False)}  # noqa: RUF012


class ArrayOnDevice(np.ndarray):
    __cuda_array_interface__ = OnDevice.__cuda_array_interface__


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (5, "not int"),
        (None, "not NoneType"),
        ("text", "not str"),
        ([1.0], "not list"),
        (np.float64, "not type"),
        (np.array([{}, []], object), "references to Python objects"),
        (np.zeros(3, [("x", "f8"), ("y", "O")]), "references to Python objects"),
        (np.array([{}], object)[:0], "references to Python objects"),
        (OnDevice(), "a device"),
        (np.ones(3).view(ArrayOnDevice), "a device"),
    ],
)
def test_what_cannot_be_pinned(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        numpy_rmm.pin(given)


def test_the_arguments_of_pin() -> None:
    with pytest.raises(TypeError, match="needs an array"):
        numpy_rmm.pin()
    with pytest.raises(TypeError, match="no keyword"):
        numpy_rmm.pin(np.ones(3), stream=0)  # type: ignore[call-arg]


def test_a_view_of_an_array_that_was_resized_is_refused(cuda: Driver) -> None:
    whole = np.ones(1000)
    view = whole[5:10]
    whole.resize(10_000_000, refcheck=False)
    if not whole.ctypes.data <= view.ctypes.data < whole.ctypes.data + whole.nbytes:
        with pytest.raises(ValueError, match="resized"):
            numpy_rmm.pin(view)


def test_a_released_memoryview_is_refused(cuda: Driver) -> None:
    view = memoryview(bytearray(100))
    view.release()
    with pytest.raises(ValueError, match="released"):
        numpy_rmm.pin(view)


def test_managed_memory_is_refused(cuda: Driver) -> None:
    with numpy_rmm.managed():
        values = np.ones(10_000)
    with pytest.raises(ValueError, match="managed memory"):
        numpy_rmm.pin(values)


def test_a_pin_belongs_to_its_process(cuda: Driver) -> None:
    with numpy_rmm.pin(np.ones(10)) as pin:
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(pin)
        with pytest.raises(TypeError, match="copied"):
            copy.copy(pin)


def test_without_a_driver(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import numpy as np, numpy_rmm
        try:
            numpy_rmm.pin(np.ones(10))
        except numpy_rmm.CudaUnavailableError as error:
            print("told:", error)
        """,
        NUMPY_RMM_CUDA_LIBRARY="/nowhere/libcuda.so.1",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "/nowhere/libcuda.so.1" in done.stdout


# ---- failures of the driver ----------------------------------------------------------


def test_the_limit_is_named_when_the_driver_refuses() -> None:
    with numpy_rmm.testing.simulate_cuda(page_locked="3 MiB"):
        first, second = np.ones(2 * MIB, np.uint8), np.ones(2 * MIB, np.uint8)
        with numpy_rmm.pin(first):
            with pytest.raises(numpy_rmm.OutOfMemoryError) as caught:
                numpy_rmm.pin(second)
            assert "cuMemHostRegister of 2 MiB" in str(caught.value)
            assert "2 MiB page-locked by us, RLIMIT_MEMLOCK" in str(caught.value)
            assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
        with numpy_rmm.pin(second):
            pass


CALLS = [
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuCtxRecordEvent",
    "cuEventCreate",
]


@pytest.mark.parametrize("error", ["OUT_OF_MEMORY", "INVALID_VALUE", "UNKNOWN"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_once_leaves_nothing_behind(
    simulator: SimulatedCuda, call: str, error: str
) -> None:
    whole = np.ones(10_000)
    with numpy_rmm.testing.assert_no_leaks():
        simulator.fail(call, error=error)
        try:
            with numpy_rmm.pin(whole):
                assert numpy_rmm.is_pinned(whole)
        except (numpy_rmm.CudaError, numpy_rmm.OutOfMemoryError):
            assert call == "cuMemHostRegister"
        assert unlocks(simulator.driver, whole.ctypes.data)
    with numpy_rmm.pin(whole):
        assert numpy_rmm.is_pinned(whole)
    assert not numpy_rmm.is_pinned(whole)
