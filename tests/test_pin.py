"""pin() page-locks the memory of arrays and buffers where it is, as a whole.

All of it runs on the simulated driver as well as on a GPU (NUMPY_RMM_TEST_GPU=1). What
ends a pin, and what is in its way, is in test_pin_close.
"""

from __future__ import annotations

import array
import gc
import mmap
import pickle
import sys
import weakref
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

import numpy_rmm
from numpy_rmm.testing import Driver, SimulatedCuda
from pins import (
    KIB,
    MIB,
    PORTABLE,
    address_of,
    is_locked,
    locked_range,
    pinned_nbytes,
)

pytestmark = pytest.mark.usefixtures("nothing_stays_locked")
READ_ONLY = 8


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
    "with strides of its own": lambda a: as_strided(a[100:], (10,), (16,)),
    "windows": lambda a: sliding_window_view(a[100:200], 7),
    "windows of windows": lambda a: as_strided(sliding_window_view(a, 7), (3,), (8,)),
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
