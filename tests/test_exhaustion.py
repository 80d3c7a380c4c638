"""When memory gets short: garbage that owns blocks goes first; idle pools give back."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr

MIB = 1 << 20


class Owner:
    """A block of a resource, in a cycle that only the collector finds."""

    def __init__(self, resource: mr.MemoryResource, nbytes: int) -> None:
        self.me = self
        self.resource = resource
        self.ptr = resource.allocate(nbytes)

    def __del__(self) -> None:
        self.resource.deallocate(self.ptr, 0)


def pool(nbytes: int) -> mr.PoolMemoryResource:
    return mr.PoolMemoryResource(mr.HostMemoryResource(), maximum_pool_size=nbytes)


def limited(nbytes: int) -> mr.LimitingResourceAdaptor:
    return mr.LimitingResourceAdaptor(mr.HostMemoryResource(), nbytes)


def fixed(nbytes: int) -> mr.LimitingResourceAdaptor:
    return mr.LimitingResourceAdaptor(
        mr.FixedSizeMemoryResource(mr.HostMemoryResource(), nbytes, 1), nbytes
    )


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Grows by an entry for each collection; none runs by itself."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(phase)

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.enable()


@pytest.mark.parametrize("make", [pool, limited, fixed])
def test_garbage_makes_room_for_a_request(
    make: Callable[[int], mr.MemoryResource], collections: list[str]
) -> None:
    made = make(8 * MIB)
    Owner(made, 8 * MIB)  # garbage at once
    assert made.statistics().current_count == 1
    ptr = made.allocate(8 * MIB)
    assert len(collections) == 1
    made.deallocate(ptr, 8 * MIB)


def test_garbage_arrays_make_room_too(collections: list[str]) -> None:
    made = pool(8 * MIB)
    with numpy_rmm.use_handler(made):
        cycle: list[object] = [np.ones(100_000) for _ in range(9)]
    cycle.append(cycle)
    del cycle
    ptr = made.allocate(8 * MIB)
    made.deallocate(ptr, 8 * MIB)


def test_a_request_that_finds_memory_collects_nothing(collections: list[str]) -> None:
    made = pool(8 * MIB)
    for _ in range(10):
        made.deallocate(made.allocate(8 * MIB), 8 * MIB)
    assert collections == []


def test_a_failing_request_collects_once_and_says_why(collections: list[str]) -> None:
    made = pool(8 * MIB)
    ptr = made.allocate(6 * MIB)
    with pytest.raises(
        numpy_rmm.OutOfMemoryError,
        match=r"the pool is full: 4 MiB asked, limit 8 MiB, .* reserved, 6 MiB in use, "
        r"largest free block [12] MiB, 0 B freed",
    ):
        made.allocate(4 * MIB)
    assert len(collections) == 1
    made.deallocate(ptr, 6 * MIB)
    assert made.statistics().current_count == 0


def test_an_array_never_collects(collections: list[str]) -> None:
    made = pool(8 * MIB)
    Owner(made, 8 * MIB)
    with numpy_rmm.use_handler(made), pytest.raises(MemoryError):
        np.ones(MIB)
    assert collections == []
    gc.collect()
    with numpy_rmm.use_handler(made):
        assert np.ones(MIB // 2).all()


def test_other_errors_collect_nothing(collections: list[str]) -> None:
    def allocate(nbytes: int, stream: object) -> int:
        raise KeyError("mine")

    made = mr.CallbackMemoryResource(allocate, print, kind="host")
    with pytest.raises(KeyError, match="mine"):
        made.allocate(100)
    assert collections == []


def test_a_callback_is_asked_again_after_the_collection(collections: list[str]) -> None:
    host = mr.HostMemoryResource()
    asked: list[int] = []

    def allocate(nbytes: int, stream: object) -> int:
        asked.append(nbytes)
        if not collections:
            raise MemoryError("not yet")
        return host.allocate(nbytes)

    made = mr.CallbackMemoryResource(allocate, host.deallocate, kind="host")
    made.deallocate(made.allocate(1000), 1000)
    assert asked == [1000, 1000]


def test_the_exception_of_a_callback_survives_the_collection(
    collections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryError("told")
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: shown.append(it.exc_type))

    def allocate(nbytes: int, stream: object) -> int:
        raise error

    class Noisy:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            raise ValueError("in a finalizer")

    made = mr.CallbackMemoryResource(allocate, print, kind="host")
    Noisy()
    with pytest.raises(MemoryError, match="told") as caught:
        made.allocate(1000)
    assert caught.value is error
    assert shown == [ValueError]
    assert len(collections) == 1


def test_a_finalizer_may_allocate_and_fail_itself(collections: list[str]) -> None:
    made = pool(8 * MIB)
    failures: list[str] = []

    class Greedy:
        def __init__(self) -> None:
            self.me = self
            self.ptr = made.allocate(2 * MIB)

        def __del__(self) -> None:
            try:
                made.allocate(16 * MIB)
            except MemoryError as error:
                failures.append(str(error))
            made.deallocate(self.ptr, 0)

    for _ in range(3):
        Greedy()
    ptr = made.allocate(8 * MIB)
    assert len(failures) == 3
    made.deallocate(ptr, 8 * MIB)


# ---- decay ---------------------------------------------------------------------------

COUNT = """
import os, time
import numpy as np, numpy_rmm
def n_threads():
    return len(os.listdir("/proc/self/task"))
def waits():  # of all other threads, for anything
    return sum(
        int(line.split()[1])
        for task in os.listdir("/proc/self/task")
        if int(task) != os.getpid()
        for line in open(f"/proc/self/task/{task}/status")
        if "ctxt_switches" in line
    )
def reserved():
    return pool.statistics().reserved_bytes
before = n_threads()
numpy_rmm.options["decay"] = "100 ms"
pool = numpy_rmm.mr.PoolMemoryResource(numpy_rmm.mr.HostMemoryResource())
numpy_rmm.set_handler(pool)
"""


def test_an_import_and_small_arrays_start_no_thread(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        COUNT
        + """
for _ in range(1000):
    np.ones(10_000)
time.sleep(0.3)
assert n_threads() == before
assert reserved() == 8 << 20
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_idle_memory_goes_back_and_then_nothing_wakes(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        COUNT
        + """
arrays = [np.ones(500_000) for _ in range(50)]
full = reserved()
assert full > 200_000_000
del arrays
assert reserved() == full  # not in the calls of the program
assert n_threads() == before + 1
deadline = time.monotonic() + 10
while reserved() > 8 << 20 and time.monotonic() < deadline:
    time.sleep(0.01)
assert reserved() == 8 << 20
time.sleep(0.3)
seen = waits()
time.sleep(0.5)
assert waits() == seen
assert np.zeros(1_000_000).sum() == 0
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_gives_back_by_itself(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        COUNT
        + """
np.ones(20_000_000)
child = os.fork()
if child == 0:
    np.ones(20_000_000)
    deadline = time.monotonic() + 10
    while reserved() and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(reserved() != 0)
assert os.waitpid(child, 0)[1] == 0
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
