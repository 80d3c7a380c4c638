"""Memory of a pinned or managed array is not handed out while the GPU may touch it.

The copies here are the driver's own calls, so all of it runs on the simulated driver as
well as on a GPU; tests/gpu has the same for the copies of PyTorch, CuPy and numba.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hazards
import numpy_rmm
from hazards import KIB, KINDS, MIB, Case, Hold, held
from numpy_rmm.testing import Driver

ON_GPU = os.environ.get("NUMPY_RMM_TEST_GPU") == "1"
# Larger copies of the simulator take seconds: there, 32 MiB get one test of their own.
SIZES = hazards.SIZES if ON_GPU else (64 * KIB, MIB)

ROW = ("library", "kind", "operation", "room", "nbytes")


def rows(reuse: str) -> list[Any]:
    return [
        pytest.param(
            library,
            *row,
            id="-".join(
                [library.name, *row[:3], numpy_rmm._core._format_nbytes(row[3])]
            ),
        )
        for library in hazards.RAW_LIBRARIES
        for row in hazards.rows(library, reuse, SIZES)
    ]


@pytest.fixture
def driver(cuda: Driver) -> Driver:
    """With the primary context current, which on a GPU is never let go of again."""
    cuda.activate()
    if not hazards.has_managed(cuda):
        pytest.skip("the CPU cannot touch managed memory while this device works")
    return cuda


@pytest.fixture(autouse=True)
def nothing_leaks(driver: Driver) -> Iterator[None]:
    with numpy_rmm.testing.assert_no_leaks():
        yield


def outcomes(
    library: type[hazards.Library],
    driver: Driver,
    streams: tuple[str, ...] = hazards.STREAMS,
    **case: Any,
) -> dict[str, hazards.Outcome]:
    """Of the hazard on every kind of stream."""
    if not hazards.fits(Case(stream="", **case)):
        pytest.skip("too little memory")
    user = library(driver)
    return {
        stream: hazards.run(user, Case(stream=stream, **case)) for stream in streams
    }


# ---- the hazard ----------------------------------------------------------------------


@pytest.mark.parametrize(ROW, rows("context"))
def test_no_byte_is_wrong(
    driver: Driver,
    library: type[hazards.Library],
    kind: str,
    operation: str,
    room: str,
    nbytes: int,
) -> None:
    found = outcomes(
        library,
        driver,
        kind=kind,
        reuse="context",
        room=room,
        nbytes=nbytes,
        operation=operation,
    )
    assert {
        stream: outcome.wrong for stream, outcome in found.items()
    } == dict.fromkeys(hazards.STREAMS, 0)
    # The memory of the dead array is the only memory left in a full pool.
    n_fresh = {"below": 6, "full": 2, "waiting": 1}[room]
    for stream, outcome in found.items():
        if outcome.waited:
            # Nothing was pending: it may be among the fresh arrays already.
            assert outcome.comes_back or outcome.n_fresh > n_fresh, stream
        else:
            assert outcome.n_fresh == n_fresh, stream
            assert outcome.comes_back or room == "waiting", stream
    if kind == "pinned":
        assert not any(outcome.waited for outcome in found.values())


@pytest.mark.parametrize(ROW, rows("immediate"))
def test_the_same_program_with_immediate_reuse_has_wrong_bytes(
    driver: Driver,
    library: type[hazards.Library],
    kind: str,
    operation: str,
    room: str,
    nbytes: int,
) -> None:
    found = outcomes(
        library,
        driver,
        kind=kind,
        reuse="immediate",
        room=room,
        nbytes=nbytes,
        operation=operation,
    )
    # Where the driver itself waits in a call on managed memory there is no hazard.
    right = [
        stream
        for stream, outcome in found.items()
        if outcome.wrong == 0 and not (outcome.waited and kind == "managed")
    ]
    assert right == []


@pytest.mark.skipif(ON_GPU, reason="the tests above have this size on a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["H2D", "D2H"])
def test_a_large_array_on_the_simulator(
    driver: Driver, kind: str, operation: str
) -> None:
    wrong = {}
    for reuse in hazards.POLICIES:
        found = outcomes(
            hazards.DriverCopies,
            driver,
            ("non-blocking",),
            kind=kind,
            reuse=reuse,
            room="full",
            nbytes=32 * MIB,
            operation=operation,
        )
        wrong[reuse] = found["non-blocking"].wrong
    assert wrong["context"] == 0
    assert wrong["immediate"] > 0


# ---- programs ------------------------------------------------------------------------

TURN = MIB
PAGE = 4 * KIB


class Ring:
    """Device memory for copies in turn, and one page of each turn's bytes as they
    arrived."""

    def __init__(self, driver: Driver, n_turns: int, nbytes: int = TURN) -> None:
        self.driver, self.n_turns, self.nbytes = driver, n_turns, nbytes
        self.target = driver.allocate(nbytes)
        self.pages = driver.allocate(n_turns * PAGE)

    def copy(self, array: np.ndarray, turn: int, stream: int) -> None:
        """Queues the copy of a whole array, and one of a page of what arrives.

        The untyped call: cuMemcpyHtoDAsync waits for the stream when the source is
        managed memory.
        """
        cuda, address = self.driver, hazards.address_of(array)
        cuda.check(cuda.cuMemcpyAsync(self.target, address, self.nbytes, stream))
        page = self.target + turn * 17 % (self.nbytes // PAGE) * PAGE
        kept = self.pages + turn * PAGE
        cuda.check(cuda.cuMemcpyAsync(kept, page, PAGE, stream))

    def wrong_turns(self, first: int = 0) -> list[int]:
        """The turns in which anything but ``turn % 251`` arrived."""
        self.driver.check(self.driver.cuCtxSynchronize())
        found = np.frombuffer(
            self.driver.read(self.pages, self.n_turns * PAGE), np.uint8
        ).reshape(self.n_turns, PAGE)
        right = (np.arange(self.n_turns) + first) % 251
        return np.flatnonzero((found != right[:, None]).any(axis=1)).tolist()

    def close(self) -> None:
        self.driver.check(self.driver.cuMemFree(self.target))
        self.driver.check(self.driver.cuMemFree(self.pages))


def temporaries(
    ring: Ring, stream: int, make: Callable[[], np.ndarray], first: int = 0
) -> None:
    """Makes, fills and copies an array in each turn, and never waits."""
    for turn in range(ring.n_turns):
        array = make()
        array.fill((first + turn) % 251)
        ring.copy(array, turn, stream)


@pytest.fixture
def stream(driver: Driver) -> Iterator[int]:
    handle = driver.create_stream()
    yield handle
    driver.check(driver.cuStreamDestroy(handle))


def maker(pool: Any, nbytes: int = TURN) -> Callable[[], np.ndarray]:
    handler = numpy_rmm.use_handler(pool).handler
    return lambda: handler.run(np.empty, nbytes, np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_temporaries_is_right_and_needs_little_memory(
    driver: Driver, stream: int, kind: str
) -> None:
    pool = hazards.make_pool(kind, "context", "below", TURN)
    ring = Ring(driver, 4000)
    temporaries(ring, stream, maker(pool))
    assert ring.wrong_turns() == []
    ring.close()
    # At most the parked limit of 16 MiB is parked where the device keeps up; a wait is
    # bounded in time, so a slow one may double that a few times.
    assert pool.statistics().reserved_bytes <= 4000 * TURN // 16


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_ahead_of_a_held_stream_is_right(
    driver: Driver, stream: int, kind: str
) -> None:
    wrong = {}
    for reuse in hazards.POLICIES:
        pool = hazards.make_pool(kind, reuse, "below", TURN)
        ring = Ring(driver, 60)
        make = maker(pool)
        with held(driver, stream):
            temporaries(ring, stream, make)
        wrong[reuse] = ring.wrong_turns()
        ring.close()
    assert wrong["context"] == []
    assert wrong["immediate"] != []


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_gpu_rotates_few_blocks(driver: Driver, kind: str) -> None:
    make = maker(hazards.make_pool(kind, "context", "below", TURN))
    addresses = {hazards.address_of(make()) for _ in range(200)}
    assert len(addresses) <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_built_in_names_keep_the_promise(
    driver: Driver, stream: int, kind: str
) -> None:
    make = maker(kind)
    ring = Ring(driver, 40)
    with held(driver, stream):
        temporaries(ring, stream, make)
    assert ring.wrong_turns() == []
    ring.close()


def is_known_to_the_driver(driver: Driver, address: int) -> bool:
    """Whether an address belongs to registered or managed memory."""
    memory_type, found = 2, ctypes.c_uint()
    result = driver.cuPointerGetAttribute(
        ctypes.cast(ctypes.byref(found), ctypes.c_void_p), memory_type, address
    )
    return result == 0 and found.value != 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_may_die_while_a_copy_is_pending(
    driver: Driver, stream: int, kind: str
) -> None:
    nbytes = 4 * MIB
    pool = hazards.make_pool(kind, "context", "below", nbytes)
    make = maker(pool, nbytes)
    device = driver.allocate(nbytes)
    array = make()
    array[:] = hazards.pattern(nbytes)
    address = hazards.address_of(array)
    with held(driver, stream):
        driver.check(driver.cuMemcpyAsync(device, address, nbytes, stream))
        del array, make, pool
        numpy_rmm.trim()
        assert is_known_to_the_driver(driver, address)
        # What the system would give to others, had the pages been unmapped.
        fresh = [np.full(nbytes, 255, np.uint8) for _ in range(6)]
    copy = np.frombuffer(driver.read(device, nbytes), np.uint8)
    assert hazards.count_wrong(copy, hazards.pattern(nbytes)) == 0
    assert all(hazards.count_wrong(other, 255) == 0 for other in fresh)
    driver.check(driver.cuMemFree(device))
    numpy_rmm.trim()
    assert not is_known_to_the_driver(driver, address)


# ---- threads -------------------------------------------------------------------------

N_THREADS = 4


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_pool(driver: Driver, kind: str) -> None:
    pool = hazards.make_pool(kind, "context", "below", TURN)
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))

    def work(number: int) -> list[int]:
        driver.check(driver.cuCtxSetCurrent(context))
        own = driver.create_stream()
        ring = Ring(driver, 200)
        temporaries(ring, own, maker(pool), first=number * 50)
        wrong = ring.wrong_turns(first=number * 50)
        ring.close()
        driver.check(driver.cuStreamDestroy(own))
        return wrong

    with ThreadPoolExecutor(N_THREADS) as threads:
        assert list(threads.map(work, range(N_THREADS))) == [[]] * N_THREADS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("handle", [0, 2], ids=["own stream", "per-thread stream"])
def test_a_thread_does_not_get_what_the_gpu_reads_for_another(
    driver: Driver, kind: str, handle: int
) -> None:
    """All threads copy from arrays that die, then all overwrite new ones."""
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    barrier = threading.Barrier(N_THREADS, timeout=hazards.HOLD_LIMIT)

    def work(number: int, make: Callable[[], np.ndarray]) -> list[int]:
        driver.check(driver.cuCtxSetCurrent(context))
        own = handle or driver.create_stream()
        ring = Ring(driver, 8)
        barrier.wait()
        with held(driver, own):
            temporaries(ring, own, make, first=number * 50)
            barrier.wait()
            fresh = [make() for _ in range(8)]
            for array in fresh:
                array.fill(255)
            barrier.wait()
        barrier.wait()
        wrong = ring.wrong_turns(first=number * 50)
        ring.close()
        if handle == 0:
            driver.check(driver.cuStreamDestroy(own))
        return wrong

    wrong = {}
    for reuse in hazards.POLICIES:
        make = maker(hazards.make_pool(kind, reuse, "below", TURN))
        with ThreadPoolExecutor(N_THREADS) as threads:
            found = threads.map(work, range(N_THREADS), [make] * N_THREADS)
            wrong[reuse] = [turn for turns in found for turn in turns]
    assert wrong["context"] == []
    assert wrong["immediate"] != []


# ---- the interpreter's lock ----------------------------------------------------------


def free_device(driver: Driver, stream: int) -> Callable[[], int]:
    """Device memory that held work uses: freeing it waits for the work."""
    address = driver.allocate(MIB)
    driver.check(driver.cuMemsetD8Async(address, 1, MIB, stream))
    return lambda: driver.cuMemFree(address)


def unregister(driver: Driver, stream: int) -> Callable[[], int]:
    """The same with memory that the program page-locked itself."""
    memory = np.zeros(MIB, np.uint8)
    address = hazards.address_of(memory)
    device = driver.allocate(MIB)
    driver.check(driver.cuMemHostRegister(address, memory.nbytes, 1))
    driver.check(driver.cuMemcpyHtoDAsync(device, address, memory.nbytes, stream))

    def wait(_: np.ndarray = memory) -> int:
        result = driver.cuMemHostUnregister(address)
        driver.cuMemFree(device)
        return result

    return wait


def free_host(driver: Driver, stream: int) -> Callable[[], int]:
    """And with page-locked memory of the driver's own."""
    pointer = ctypes.c_void_p()
    device = driver.allocate(MIB)
    driver.check(driver.cuMemHostAlloc(ctypes.byref(pointer), MIB, 0))
    driver.check(driver.cuMemcpyHtoDAsync(device, pointer.value, MIB, stream))

    def wait() -> int:
        result = driver.cuMemFreeHost(pointer)
        driver.cuMemFree(device)
        return result

    return wait


class HostFunction:
    """Holds a stream as a `Hold` does, by a Python function that waits on it."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._event = driver, threading.Event()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def wait(_: object) -> None:
            self._event.wait(60)

        self._function = wait  # alive until it has returned
        driver.check(driver.cuLaunchHostFunc(stream, wait, None))

    def let_go_after(self, seconds: float) -> None:
        """It gives up by itself."""

    def let_go(self) -> None:
        self._event.set()

    def close(self) -> None:
        self.let_go()
        self._driver.check(self._driver.cuCtxSynchronize())


def run_beside_a_waiting_thread(
    driver: Driver,
    prepare: Callable[[Driver, int], Callable[[], int]],
    holder: Callable[[Driver, int], Hold | HostFunction],
) -> None:
    """Ends with the process within seconds, or the test that started it fails.

    A thread waits inside the driver for a held stream, and so keeps the driver's lock.
    Only Python code lets the stream go, after a while in which this thread allocates:
    with the interpreter's lock held in the driver nothing would ever go on.
    """
    driver.activate()
    stream = driver.create_stream()
    pool = hazards.make_pool("pinned", "context", "full", MIB)
    make = maker(pool)
    make()
    hold = holder(driver, stream)
    hold.let_go_after(60)  # not before this program is given up
    wait = prepare(driver, stream)
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    results, ticks, allocated = [], [], []

    def free() -> None:
        driver.check(driver.cuCtxSetCurrent(context))
        results.append(wait())

    def let_go() -> None:
        for _ in range(100):
            time.sleep(0.001)
            ticks.append(time.perf_counter())
        hold.let_go()

    threads = [threading.Thread(target=free), threading.Thread(target=let_go)]
    threads[0].start()
    time.sleep(0.05)
    assert results == [], "the driver did not wait"
    threads[1].start()
    start = time.perf_counter()
    while threads[1].is_alive():
        allocated.append(make())  # each closes an epoch, and that needs the driver
        allocated.clear()
    elapsed = time.perf_counter() - start
    for thread in threads:
        thread.join()
    assert results == [0]
    assert len(ticks) == 100
    assert elapsed < 1, f"took {elapsed:.2f} s"
    hold.close()
    print("finished")


PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import test_safe_reuse as tests
from numpy_rmm.testing import Driver, simulate_cuda
driver = Driver() if tests.ON_GPU else simulate_cuda().driver
tests.run_beside_a_waiting_thread(driver, tests.{prepare}, tests.{holder})
"""


@pytest.mark.parametrize(
    ("prepare", "holder"),
    [
        ("free_device", "Hold"),
        ("unregister", "Hold"),
        ("free_device", "HostFunction"),
        ("free_host", "HostFunction"),
        ("unregister", "HostFunction"),
    ],
)
def test_an_allocation_beside_a_waiting_thread_lets_python_run(
    run_python: Callable[..., Any], prepare: str, holder: str
) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here / "gpu")]
    code = PROGRAM.format(paths=paths, prepare=prepare, holder=holder)
    done = run_python(code)
    assert done.stdout == "finished\n", done.stderr
