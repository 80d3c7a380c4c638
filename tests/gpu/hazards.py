"""The hazard of pooled page-locked memory, as a program that can be run in many ways.

A stream is held, a copy from or to an array is queued behind it, the array dies, six
arrays of its size are made and overwritten, the stream is let go. If one of the six got
the memory of the dead array too early, bytes are wrong: on the device when the copy
read them, in the new array when it wrote them. `run` does this for one `Case`.

The copies are queued by a `Library`: the CUDA driver itself, on a GPU or simulated, or
PyTorch, CuPy, numba and cuda.core where they are installed (`libraries`).
`tests/test_safe_reuse.py`, `tests/gpu/test_safe_reuse.py` and `tests/gpu/proof.py`
share this file.

Nothing here blocks for ever: a `Hold` lets its stream go after some seconds by itself,
and says so.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import numpy_rmm
from libraries import (
    FILL_BYTE,
    PYTHON_LIBRARIES,
    RAW_LIBRARIES,
    CupyCopies,
    DriverCopies,
    Library,
    TorchCopies,
    TypedDriverCopies,
    address_of,
    is_installed,
)
from numpy_rmm.testing import Driver

__all__ = [
    "PYTHON_LIBRARIES",
    "RAW_LIBRARIES",
    "CupyCopies",
    "DriverCopies",
    "Library",
    "TorchCopies",
    "TypedDriverCopies",
    "is_installed",
]

KIB, MIB = 1 << 10, 1 << 20

SIZES = (64 * KIB, MIB, 32 * MIB, 256 * MIB)
KINDS = ("pinned", "managed")
POLICIES = ("context", "immediate")
STREAMS = ("legacy", "per-thread", "blocking", "non-blocking", "destroyed")

# "below": the pool may grow. "full": it has room for three arrays and then refuses.
# "waiting": it has room for one, and an allocation waits for it as long as it takes.
ROOMS = {"below": None, "full": 3, "waiting": 1}

HOLD_LIMIT = 10.0  # seconds after which a stream is let go, whatever goes on
QUEUE_LIMIT = 0.5  # of the call that queues the copy: some calls wait for the stream
WAIT_TIME = 0.03  # that an allocation of a "waiting" pool has to wait

# The pattern of the dead array has bytes up to 250 only, and `FILL_BYTE` is the next:
# nothing is right by chance.
FRESH_BYTES = (255, 254, 253, 252, 255, 254)  # of the new arrays

_CONCURRENT_MANAGED_ACCESS = 89


@dataclass(frozen=True)
class Case:
    """What is done, and with what memory."""

    kind: str
    reuse: str
    room: str
    nbytes: int
    operation: str
    stream: str


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    wrong: int  # bytes
    waited: bool  # the call that queued the copy returned only when it was done
    n_fresh: int  # arrays that could be made while the stream was held
    comes_back: bool  # after it all, one more array could be made


class HoldRanOutError(Exception):
    """The stream had to be let go before the program was through."""


# ---- bytes ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def pattern(nbytes: int) -> np.ndarray:
    """Bytes from 0 to 250 that do not repeat in step with any power of two."""
    tile = (np.arange(251) * 31 % 251).astype(np.uint8)
    return np.resize(tile, nbytes)


@functools.lru_cache(maxsize=1)
def scratch(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def count_wrong(array: np.ndarray, expected: np.ndarray | int) -> int:
    """How many bytes differ; in pieces that stay in the cache."""
    step = 4 * MIB
    wrong = 0
    for start in range(0, array.nbytes, step):
        piece = slice(start, start + step)
        right = expected if isinstance(expected, int) else expected[piece]
        wrong += int(np.count_nonzero(array[piece] != right))
    return wrong


def available_nbytes() -> int:
    """Host memory that can be had without swapping."""
    with open("/proc/meminfo") as lines:
        found = {line.split(":")[0]: line.split()[1] for line in lines}
    return int(found["MemAvailable"]) * KIB


def fits(case: Case) -> bool:
    """Whether this machine has memory for a case, with as much again to spare."""
    return 2 * (len(FRESH_BYTES) + 5) * case.nbytes <= available_nbytes()


# ---- holding a stream ----------------------------------------------------------------


class Hold:
    """Keeps the later work of a stream from running, for `HOLD_LIMIT` seconds at most.

    The stream waits for a word of page-locked memory, so nothing but a store lets it
    go: no call of the driver, which could itself have to wait.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        self._timer: threading.Timer | None = None
        flag, address = ctypes.c_void_p(), ctypes.c_uint64()
        portable_and_mapped = 3
        driver.check(
            driver.cuMemHostAlloc(ctypes.byref(flag), 4096, portable_and_mapped)
        )
        self._flag = flag
        self._word = ctypes.c_uint32.from_address(flag.value or 0)
        self._word.value = 0
        driver.check(
            driver.cuMemHostGetDevicePointer(ctypes.byref(address), self._flag, 0)
        )
        driver.check(driver.cuStreamWaitValue32(stream, address, 1, 0))
        self.let_go_after(HOLD_LIMIT)

    @property
    def is_over(self) -> bool:
        return self._word.value == 1

    def let_go_after(self, seconds: float) -> None:
        """Replaces the time after which the stream is let go."""
        self.stop_timer()
        self._timer = threading.Timer(seconds, self._let_go)
        self._timer.daemon = True
        self._timer.start()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    def _let_go(self) -> None:
        self._word.value = 1

    def let_go(self) -> None:
        self.stop_timer()
        self._let_go()

    def close(self) -> None:
        """Lets go, waits for everything and gives the word back."""
        self.let_go()
        self._driver.check(self._driver.cuCtxSynchronize())
        self._driver.check(self._driver.cuMemFreeHost(self._flag))


@contextmanager
def held(driver: Driver, stream: int) -> Iterator[Hold]:
    """Holds a stream inside a ``with`` block that must end before the hold runs out."""
    hold = Hold(driver, stream)
    try:
        yield hold
        hold.stop_timer()
        if hold.is_over:
            raise HoldRanOutError(f"the block took longer than {HOLD_LIMIT} s")
    finally:
        hold.close()


# ---- the program ---------------------------------------------------------------------


def operations(library: type[Library], kind: str) -> tuple[str, ...]:
    """What a library can do with memory of a kind: the driver fills only managed."""
    return tuple(
        operation
        for operation in library.operations
        if operation != "fill" or kind == "managed"
    )


def rows(
    library: type[Library], reuse: str, sizes: tuple[int, ...]
) -> Iterator[tuple[str, str, str, int]]:
    """The kinds, operations, rooms and sizes to run, each on every stream.

    Left out is what takes long and shows nothing new: the calls that name a direction
    meet full pools only, and so do the largest arrays under immediate reuse; these do
    not wait either.
    """
    for kind in KINDS:
        for operation in operations(library, kind):
            for room in ROOMS:
                for nbytes in sizes:
                    is_large = nbytes >= 256 * MIB
                    skips = (
                        (library is TypedDriverCopies and room != "full")
                        or (is_large and room == "waiting")
                        or (is_large and room == "below" and reuse == "immediate")
                    )
                    if not skips:
                        yield kind, operation, room, nbytes


def has_managed(driver: Driver) -> bool:
    """Whether the CPU may touch managed memory while the device works."""
    value = ctypes.c_int()
    driver.check(
        driver.cuDeviceGetAttribute(ctypes.byref(value), _CONCURRENT_MANAGED_ACCESS, 0)
    )
    return value.value == 1


def make_pool(
    kind: str, reuse: str, room: str, nbytes: int, wait_limit: float | None = None
) -> numpy_rmm.mr.PoolMemoryResource:
    """A pool for arrays of `nbytes` bytes."""
    source: numpy_rmm.mr.MemoryResource = (
        numpy_rmm.mr.PinnedHostMemoryResource()
        if kind == "pinned"
        else numpy_rmm.mr.ManagedMemoryResource()
    )
    n_arrays = ROOMS[room]
    return numpy_rmm.mr.PoolMemoryResource(
        source,
        maximum_pool_size=None if n_arrays is None else n_arrays * nbytes,
        reuse=reuse,
        wait_limit=wait_limit,
        on_exhausted="wait" if room == "waiting" else "error",
    )


class Program:
    """One run of the hazard."""

    def __init__(self, library: Library, case: Case) -> None:
        self.library, self.driver, self.case = library, library.driver, case
        self.original = pattern(case.nbytes)
        pool = make_pool(case.kind, case.reuse, case.room, case.nbytes)
        self.handler = numpy_rmm.use_handler(pool).handler
        self.fresh: list[tuple[np.ndarray, int]] = []  # and the byte in all of it
        self.lane = library.open(case.stream)
        self.device = library.device(case.nbytes, self.lane)
        self.is_upload = case.operation in ("H2D", "cuda()")

    def make(self) -> np.ndarray:
        return self.handler.run(np.empty, self.case.nbytes, np.uint8)

    def synchronize(self) -> None:
        self.driver.check(self.driver.cuCtxSynchronize())

    def set_device(self) -> None:
        """Gives the device bytes that a copy to the host shall bring."""
        address = self.library.address(self.device)
        source, nbytes = self.original, self.case.nbytes
        if self.is_upload:
            self.driver.check(self.driver.cuMemsetD8(address, FILL_BYTE, nbytes))
        else:
            self.driver.check(
                self.driver.cuMemcpyHtoD(address, address_of(source), nbytes)
            )
        self.synchronize()

    def make_first(self) -> np.ndarray:
        """The array that is to die."""
        array = self.make()
        array[:] = self.original if self.is_upload else 0
        return array

    def queue(self, array: np.ndarray) -> None:
        self.device = self.library.queue(
            self.case.operation, self.device, array, self.lane
        )

    def overwrite(self) -> None:
        """Makes arrays, as many as there is room for, and writes all over them."""
        for number in range(len(FRESH_BYTES)):
            try:
                array = self.make()
            except MemoryError:
                continue
            byte = FRESH_BYTES[number]
            array.fill(byte)
            self.fresh.append((array, byte))

    def count(self) -> int:
        wrong = sum(count_wrong(array, byte) for array, byte in self.fresh)
        if self.is_upload:
            copy = scratch(self.case.nbytes)
            address = self.library.address(self.device)
            self.driver.check(
                self.driver.cuMemcpyDtoH(address_of(copy), address, copy.nbytes)
            )
            wrong += count_wrong(copy, self.original)
        return wrong

    def can_make(self) -> bool:
        try:
            self.make()
        except MemoryError:
            return False
        return True

    def run(self) -> Outcome:
        self.queue(self.make_first())  # in peace: libraries load code at the first use
        self.synchronize()
        self.set_device()
        first = [self.make_first()]
        hold = Hold(self.driver, self.lane.handle)
        try:
            waited = self.run_held(hold, first)
        finally:
            hold.close()
        n_fresh = len(self.fresh)
        return Outcome(self.count(), waited, n_fresh, self.can_make())

    def run_held(self, hold: Hold, first: list[np.ndarray]) -> bool:
        """The part while the stream is held; whether the driver waited for it.

        The only reference to the array is the one in the list.
        """
        hold.let_go_after(QUEUE_LIMIT)
        self.queue(first.pop())
        hold.stop_timer()
        waited = hold.is_over
        if self.case.stream == "destroyed":
            self.lane.close()
        is_waiting = self.case.room == "waiting"
        hold.let_go_after(WAIT_TIME if is_waiting else HOLD_LIMIT)
        self.overwrite()
        hold.stop_timer()
        if hold.is_over and not (waited or is_waiting):
            raise HoldRanOutError(
                f"{self.library.name}, {self.case}: the allocations took longer than "
                f"{HOLD_LIMIT} s behind the held stream"
            )
        return waited

    def close(self) -> None:
        self.fresh.clear()
        self.device = None
        self.lane.close()


def run(library: Library, case: Case) -> Outcome:
    """Run the program once; what it made is given back before and after."""
    program = Program(library, case)
    try:
        return program.run()
    finally:
        program.close()
        del program
        numpy_rmm.trim()
