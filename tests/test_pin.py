"""pin() page-locks the memory of arrays and buffers where it is, as a whole.

All of it runs on the simulated driver as well as on a GPU (NUMPY_RMM_TEST_GPU=1).
"""

from __future__ import annotations

import array
import copy
import ctypes
import gc
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm.testing import Driver, SimulatedCuda

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
KIB, MIB = 1 << 10, 1 << 20
PORTABLE, READ_ONLY = 1, 8


def pinned_nbytes() -> int:
    nbytes: int = numpy_rmm.info()["system"]["page_locked_by_pin_nbytes"]
    return nbytes


@pytest.fixture(autouse=True)
def nothing_stays_locked(request: pytest.FixtureRequest) -> Iterator[None]:
    uses_cuda = {"cuda", "simulator"} & set(request.fixturenames)
    machine: SimulatedCuda | None = None
    if uses_cuda and not ON_GPU:
        machine = request.getfixturevalue("simulator")
    yield
    gc.collect()

    def n_left() -> int:
        if machine is None:
            return pinned_nbytes()
        return pinned_nbytes() + machine.outstanding()["registrations"][0]

    for _ in range(100):
        if n_left() == 0:
            break
        numpy_rmm.trim()
        time.sleep(0.01)
    assert n_left() == 0
    if machine is not None:
        assert machine.faults() == []


@pytest.fixture
def driver(cuda: Driver) -> Driver:
    """With the primary context current, which on a GPU is never let go of again."""
    cuda.activate()
    return cuda


def address_of(thing: Any) -> int:
    return np.frombuffer(thing, np.uint8).ctypes.data


def attribute(driver: Driver, number: int, address: int) -> int | None:
    """A pointer attribute; None: the driver does not know the address."""
    value = ctypes.c_uint64()
    result = driver.cuPointerGetAttribute(ctypes.byref(value), number, address)
    return value.value if result == 0 else None


def is_locked(driver: Driver, address: int) -> bool:
    memory_type = attribute(driver, 2, address)
    return memory_type is not None and memory_type & 0xFFFFFFFF == 1


def locked_range(driver: Driver, address: int) -> tuple[int | None, int | None]:
    return attribute(driver, 11, address), attribute(driver, 12, address)


# ---- what is locked ------------------------------------------------------------------

VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "itself": lambda a: a,
    "a slice": lambda a: a[100:200],
    "every third": lambda a: a[::3],
    "backwards": lambda a: a[::-1],
    "a matrix": lambda a: a.reshape(100, -1).T,
    "other items": lambda a: a.view(np.uint8),
    "without elements": lambda a: a[:0],
    "one element": lambda a: a[7:8],
    "broadcast": lambda a: np.broadcast_to(a[:10], (5, 10)),
    "of a subclass": lambda a: a.view(Holder)[5:],
    "a memoryview": lambda a: memoryview(a),
    "a part of a memoryview": lambda a: memoryview(a)[5:10],
    "an array over a memoryview": lambda a: np.frombuffer(memoryview(a), count=3),
    "a pickle buffer": lambda a: pickle.PickleBuffer(a),
    "an array over bytes of it": lambda a: np.frombuffer(a.view(np.uint8)[800:1600]),
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_whole_buffer_of_a_view_is_locked(driver: Driver, view: str) -> None:
    whole = np.arange(20_000.0)
    with numpy_rmm.pin(VIEWS[view](whole)) as pin:
        assert locked_range(driver, whole.ctypes.data) == (
            whole.ctypes.data,
            whole.nbytes,
        )
        assert pin.nbytes == pinned_nbytes() == whole.nbytes
        assert numpy_rmm.memory_kind(whole) == "registered"
        assert numpy_rmm.memory_kind(whole[5:10]) == "registered"
        assert numpy_rmm.is_pinned(whole)
    assert not is_locked(driver, whole.ctypes.data)
    assert numpy_rmm.memory_kind(whole) == "host"
    assert (whole == np.arange(20_000.0)).all()


@pytest.mark.parametrize("handler", ["host", "host_direct", "huge_pages", None])
@pytest.mark.parametrize("nbytes", [8, 1000, 100 * KIB, 5 * MIB])
def test_arrays_of_any_host_handler(
    driver: Driver, handler: str | None, nbytes: int
) -> None:
    with numpy_rmm.use_handler(handler):
        whole = np.full(nbytes, 7, np.uint8)
    with numpy_rmm.pin(whole):
        assert locked_range(driver, whole.ctypes.data) == (whole.ctypes.data, nbytes)
        assert numpy_rmm.memory_kind(whole) == "registered"
        assert numpy_rmm.array_info(whole).kind == "registered"
    assert numpy_rmm.memory_kind(whole) == "host"
    assert (whole == 7).all()


def make_shared_memory(tmp_path: Path) -> Any:
    block = shared_memory.SharedMemory(create=True, size=64 * KIB)
    block.unlink()
    return block.buf, block.close


def make_mmap(tmp_path: Path) -> Any:
    memory = mmap.mmap(-1, 64 * KIB)
    return memory, memory.close


def make_bytearray(tmp_path: Path) -> Any:
    memory = bytearray(64 * KIB)
    return memory, lambda: memory.append(0)


def make_array(tmp_path: Path) -> Any:
    memory = array.array("d", bytes(64 * KIB))
    return memory, lambda: memory.append(0)


OWNERS = [make_shared_memory, make_mmap, make_bytearray, make_array]


@pytest.mark.parametrize("make", OWNERS)
@pytest.mark.parametrize("how", ["the owner", "an array", "a part", "a memoryview"])
def test_owners_with_the_buffer_protocol(
    driver: Driver, make: Callable[[Path], Any], how: str, tmp_path: Path
) -> None:
    owner, change = make(tmp_path)
    address = address_of(owner)
    given = {
        "the owner": lambda: owner,
        "an array": lambda: np.frombuffer(owner, np.uint8),
        "a part": lambda: np.ndarray((100,), np.uint8, owner, 1000),
        "a memoryview": lambda: memoryview(owner)[50:60],
    }[how]()
    pin = numpy_rmm.pin(given)
    assert locked_range(driver, address)[0] == address
    assert pin.nbytes >= 64 * KIB
    del given
    with pytest.raises(BufferError):
        change()
    pin.close()
    assert not is_locked(driver, address)
    change()


def test_several_arrays_and_several_of_one_buffer(driver: Driver) -> None:
    first, second = np.ones(1000), np.ones(2000)
    with numpy_rmm.pin(first, second, first[5:], second[::2], first) as pin:
        assert pin.nbytes == pinned_nbytes() == 24_000
        assert repr(pin) == "<pin of 2 buffers, 24000 B>"
        assert is_locked(driver, first.ctypes.data)
        assert is_locked(driver, second.ctypes.data)
    assert pin.nbytes == 0
    assert repr(pin) == "<pin, closed>"


def test_nested_and_repeated_pins_are_counted(simulator: SimulatedCuda) -> None:
    whole = np.ones(10_000)
    with numpy_rmm.pin(whole), numpy_rmm.pin(whole[5:]), numpy_rmm.pin(whole[:5]):
        assert pinned_nbytes() == whole.nbytes
        one = numpy_rmm.pin(whole)
    assert numpy_rmm.is_pinned(whole)
    assert simulator.calls("cuMemHostRegister") == 1
    assert simulator.calls("cuMemHostUnregister") == 0
    one.close()
    assert not numpy_rmm.is_pinned(whole)
    assert simulator.calls("cuMemHostUnregister") == 1


@pytest.mark.parametrize("make", ["empty", "nothing", "bytes"])
def test_an_array_without_bytes_needs_nothing(make: str) -> None:
    given = {
        "empty": np.empty(0),
        "nothing": np.empty(5, "V0"),
        "bytes": b"",
    }
    with numpy_rmm.pin(given[make]) as pin:
        assert pin.nbytes == 0
        assert pinned_nbytes() == 0


def test_memory_of_ours_that_is_page_locked_needs_nothing(cuda: Driver) -> None:
    whole = numpy_rmm.zeros_pinned(100_000)
    with numpy_rmm.pin(whole), numpy_rmm.pin(whole[5:10]) as pin:
        assert pin.nbytes == whole.nbytes
        assert pinned_nbytes() == 0
        assert numpy_rmm.memory_kind(whole) == "pinned"
    assert numpy_rmm.memory_kind(whole) == "pinned"


def test_copies_from_and_to_pinned_memory_are_right(driver: Driver) -> None:
    source, target = np.arange(MIB, dtype=np.uint8), np.zeros(MIB, np.uint8)
    device = driver.allocate(MIB)
    stream = driver.create_stream()
    with numpy_rmm.pin(source, target):
        driver.check(driver.cuMemcpyHtoDAsync(device, source.ctypes.data, MIB, stream))
        driver.check(driver.cuMemcpyDtoHAsync(target.ctypes.data, device, MIB, stream))
    assert (source == target).all()  # closing waits
    driver.check(driver.cuStreamDestroy(stream))
    driver.check(driver.cuMemFree(device))


# ---- files and reading only ----------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "values.npy"
    np.save(path, np.arange(100_000.0))
    return path


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_memory_map_is_locked_as_a_whole(
    driver: Driver, file: Path, mode: Any
) -> None:
    values = np.load(file, mmap_mode=mode)
    with numpy_rmm.pin(values[100:200]) as pin:
        start = values.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        assert locked_range(driver, values.ctypes.data) == (start, pin.nbytes)
        assert pin.nbytes == file.stat().st_size
        assert numpy_rmm.is_pinned(values)
        assert (values == np.arange(100_000.0)).all()
    assert not numpy_rmm.is_pinned(values)


def test_a_writable_file_is_refused_with_the_reason_and_the_way_out(
    cuda: Driver, file: Path
) -> None:
    values = np.load(file, mmap_mode="r+")
    with pytest.raises(ValueError, match="writable mapping of the file") as caught:
        numpy_rmm.pin(values)
    assert file.name in str(caught.value)
    assert 'mode "r" or "c"' in str(caught.value)
    assert "use a copy" in str(caught.value)
    assert not numpy_rmm.is_pinned(values)


READERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: bytes(64 * KIB),
    "an array over bytes": lambda: np.frombuffer(bytes(64 * KIB)),
    "a read-only map": lambda: mmap.mmap(-1, 64 * KIB, prot=mmap.PROT_READ),
}


@pytest.mark.parametrize("what", READERS)
def test_what_can_only_be_read_is_locked_for_reading(
    simulator: SimulatedCuda, what: str
) -> None:
    given = READERS[what]()
    with numpy_rmm.pin(given):
        flags = [line for line in simulator.log() if "cuMemHostRegister(" in line]
        assert f", {PORTABLE | READ_ONLY:#x}," in flags[0]


@pytest.mark.parametrize("what", READERS)
def test_a_device_that_cannot_lock_for_reading_says_so(what: str) -> None:
    given = READERS[what]()
    with (
        numpy_rmm.testing.simulate_cuda(read_only_host_register_supported=0),
        pytest.raises(NotImplementedError, match="may only be read"),
    ):
        numpy_rmm.pin(given)


def test_a_device_that_locks_nothing_in_place_says_so() -> None:
    with (
        numpy_rmm.testing.simulate_cuda(host_register_supported=0),
        pytest.raises(NotImplementedError, match="HOST_REGISTER_SUPPORTED 0"),
    ):
        numpy_rmm.pin(np.ones(10))


@pytest.mark.parametrize("what", READERS)
def test_what_can_only_be_read_is_pinned(driver: Driver, what: str) -> None:
    given = READERS[what]()
    with numpy_rmm.pin(given):
        assert is_locked(driver, address_of(given))


def test_an_array_that_is_not_writeable_now_may_be_later(
    simulator: SimulatedCuda,
) -> None:
    whole = np.ones(10_000)
    whole.setflags(write=False)
    with numpy_rmm.pin(whole):
        flags = [line for line in simulator.log() if "cuMemHostRegister(" in line]
        assert f", {PORTABLE:#x}," in flags[0]


# ---- what keeps it in place ----------------------------------------------------------


@pytest.mark.parametrize("refcheck", [True, False])
def test_an_array_cannot_be_resized_while_it_is_pinned(
    cuda: Driver, refcheck: bool
) -> None:
    whole = np.ones(1000)
    with numpy_rmm.pin(whole), pytest.raises(ValueError, match="resize"):
        whole.resize(2000, refcheck=refcheck)
    whole.resize(2000, refcheck=False)


def test_the_pin_keeps_the_owner_alive(driver: Driver) -> None:
    whole = np.ones(10_000)
    alive, address = weakref.ref(whole), whole.ctypes.data
    pin = numpy_rmm.pin(whole[5:])
    del whole
    gc.collect()
    assert alive() is not None
    assert is_locked(driver, address)
    pin.close()
    assert alive() is None


def test_a_pin_without_a_user_lets_go(driver: Driver) -> None:
    whole = np.ones(10_000)
    pin = numpy_rmm.pin(whole)
    alive = weakref.ref(pin)
    del pin
    assert alive() is None
    assert not is_locked(driver, whole.ctypes.data)


def test_no_reference_is_kept(cuda: Driver) -> None:
    whole, memory = np.ones(1000), bytearray(1000)
    before = sys.getrefcount(whole), sys.getrefcount(memory)
    for _ in range(10):
        with numpy_rmm.pin(whole, whole[5:], memory, memoryview(memory)):
            pass
        with pytest.raises(TypeError):
            numpy_rmm.pin(memory, whole, 5)  # type: ignore[arg-type]
    assert (sys.getrefcount(whole), sys.getrefcount(memory)) == before


class Holder(np.ndarray):
    pin: Any


def test_a_cycle_of_an_array_and_its_pin_is_garbage(driver: Driver) -> None:
    whole = np.ones(10_000).view(Holder).copy()
    address, alive = whole.ctypes.data, weakref.ref(whole)
    whole.pin = numpy_rmm.pin(whole)
    del whole
    assert is_locked(driver, address)
    gc.collect()
    assert alive() is None
    assert not is_locked(driver, address)


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


@pytest.mark.parametrize("ending", ["close", "with", "del", "garbage"])
@pytest.mark.parametrize("operation", ["H2D", "D2H"])
def test_closing_waits_for_what_is_not_done(
    driver: Driver, ending: str, operation: str
) -> None:
    """And lets other threads and the driver work meanwhile."""
    whole = np.zeros(MIB, np.uint8)
    address, device = whole.ctypes.data, driver.allocate(MIB)
    stream = driver.create_stream()
    pin = numpy_rmm.pin(whole)
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
    if ending == "close":
        pin.close()
    elif ending == "with":
        with pin:
            pass
    elif ending == "del":
        del pin
    else:
        cycle: list[Any] = [pin]
        cycle.append(cycle)
        del pin, cycle
        gc.collect()
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


# ---- processes -----------------------------------------------------------------------


def test_the_process_ends_with_pins_open(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import atexit, sys, types
        import numpy as np, numpy_rmm
        held = numpy_rmm.pin(np.ones(10_000), bytearray(100))
        atexit.register(held.close)
        module = types.ModuleType("holder")
        module.pin = numpy_rmm.pin(np.ones(10_000))
        sys.modules["holder"] = module
        class Cycle: pass
        cycle = Cycle()
        cycle.me, cycle.pin = cycle, numpy_rmm.pin(np.ones(10_000))
        late = numpy_rmm.pin(np.ones(100))
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_pins_of_a_child_are_its_parents(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import gc, os, sys
        import numpy as np, numpy_rmm
        whole, memory = np.arange(10_000), bytearray(1000)
        pin, other = numpy_rmm.pin(whole, memory), numpy_rmm.pin(whole)
        child = os.fork()
        if child == 0:
            assert (whole == np.arange(10_000)).all()
            assert not numpy_rmm.is_pinned(whole)
            assert numpy_rmm.info()["system"]["page_locked_by_pin_nbytes"] == 0
            try:
                numpy_rmm.pin(np.ones(10))
            except numpy_rmm.CudaUnavailableError as error:
                assert "fork" in str(error)
            else:
                raise AssertionError
            pin.close()
            memory.append(0)
            del pin, other
            gc.collect()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert numpy_rmm.is_pinned(whole)
        pin.close()
        assert numpy_rmm.is_pinned(whole)
        other.close()
        assert not numpy_rmm.is_pinned(whole)
        print("parent done")
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "parent done\n"


def test_info_shows_what_is_pinned(cuda: Driver) -> None:
    whole = np.ones(MIB, np.uint8)
    with numpy_rmm.pin(whole):
        assert "page_locked_by_pin: 1 MiB" in repr(numpy_rmm.info())
        assert numpy_rmm.info()["system"]["page_locked_nbytes"] >= MIB
