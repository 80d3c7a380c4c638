"""Contexts that a program makes beside the primary one, on a real GPU.

Work in them is not seen by the events of the primary context, so each use is told of.
The same program with ``reuse="immediate"`` must show wrong bytes, or it proves nothing.
tests/test_foreign_contexts.py has what the simulated driver can show too, and
tests/gpu/rules/foreign_contexts.c what is taken for granted here.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

import numpy_rmm
from numpy_rmm import mr, record_use
from numpy_rmm.testing import Driver

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20
OLD, DEVICE, FRESH = 7, 3, 9  # what the dead array, the device and new arrays hold
STREAMS = {"legacy": 0, "per-thread": 2, "blocking": None, "non-blocking": None}


@pytest.fixture(scope="module")
def driver() -> Driver:
    if os.environ.get("NUMPY_RMM_TEST_GPU") != "1":
        pytest.skip("needs a GPU: set NUMPY_RMM_TEST_GPU=1 on a machine that has one")
    driver = Driver()
    driver.activate()
    return driver


@pytest.fixture
def foreign(driver: Driver) -> Iterator[int]:
    """A context of the program's own, which is current."""
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxCreate(ctypes.byref(context), 0, 0))
    yield context.value or 0
    driver.check(driver.cuCtxSynchronize())
    driver.check(driver.cuCtxDestroy(context))


def n_wrong(
    driver: Driver, reuse: str, stream: int, to_device: bool, nbytes: int
) -> int:
    """Bytes that are wrong after an array died behind a copy that was held."""
    pool = mr.PoolMemoryResource(
        mr.PinnedHostMemoryResource(), reuse=reuse, wait_limit=0.001
    )

    def new(value: int) -> np.ndarray:
        with numpy_rmm.use_handler(pool, threshold=0):
            return np.full(nbytes, value, np.uint8)

    target, array = driver.allocate(nbytes), new(OLD)
    driver.check(driver.cuMemsetD8(target, DEVICE, nbytes))
    driver.check(driver.cuCtxSynchronize())
    with driver.held(stream):
        data = array.ctypes.data
        result = (
            driver.cuMemcpyHtoDAsync(target, data, nbytes, stream)
            if to_device
            else driver.cuMemcpyDtoHAsync(data, target, nbytes, stream)
        )
        driver.check(result)
        record_use(array, stream)
        del array
        fresh = [new(FRESH) for _ in range(6)]
    driver.check(driver.cuCtxSynchronize())
    device = np.frombuffer(driver.read(target, nbytes), np.uint8)
    driver.check(driver.cuMemFree(target))
    if to_device:
        return int((device != OLD).sum())
    return sum(int((each != FRESH).sum()) for each in fresh)


@pytest.mark.parametrize("nbytes", [64 * KIB, MIB, 32 * MIB])
@pytest.mark.parametrize("to_device", [True, False], ids=["to_device", "to_host"])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("reuse", ["context", "recorded", "immediate"])
def test_the_hazard_in_another_context(
    driver: Driver, foreign: int, reuse: str, kind: str, to_device: bool, nbytes: int
) -> None:
    handle = STREAMS[kind]
    stream = driver.create_stream(kind == "non-blocking") if handle is None else handle
    wrong = n_wrong(driver, reuse, stream, to_device, nbytes)
    if handle is None:
        driver.check(driver.cuStreamDestroy(stream))
    assert (wrong != 0) == (reuse == "immediate")


# ---- what may end a process, in one of its own ---------------------------------------

PREPARED = """
import ctypes, gc
import numpy as np
import numpy_rmm
from numpy_rmm import Event, Stream, copyto, pin, record_use
from numpy_rmm.testing import Driver

driver = Driver()
driver.check(driver.cuInit(0))

def create():
    context = ctypes.c_void_p()
    driver.check(driver.cuCtxCreate(ctypes.byref(context), 0, 0))
    return context

def is_active():
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.check(driver.cuDevicePrimaryCtxGetState(
        0, ctypes.byref(flags), ctypes.byref(active)))
    return bool(active.value)

def new(value=1):
    with numpy_rmm.pinned():
        return np.full(1 << 20, value, np.uint8)
"""


def passes(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PREPARED + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_context_that_ends_with_uses_and_copies_pending(driver: Driver) -> None:
    passes(
        """
        driver.activate()
        for _ in range(20):
            context = create()
            stream, target = driver.create_stream(), driver.allocate(1 << 20)
            array, event = new(), Event()
            pending = copyto(target, array, stream=stream, blocking=False)
            record_use(array, stream)
            event.record(Stream(stream))
            del array
            driver.check(driver.cuCtxDestroy(context))
            theirs = [driver.create_event() for _ in range(8)]
            del pending, event
            gc.collect()
            others = [new(2) for _ in range(8)]
            numpy_rmm.trim()
            for each in theirs:
                driver.check(driver.cuEventQuery(each))
                driver.check(driver.cuEventDestroy(each))
        """
    )


def test_a_program_with_no_primary_context(driver: Driver) -> None:
    passes(
        """
        context = create()
        stream, target = driver.create_stream(), driver.allocate(1 << 20)
        back, array = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
        copyto(target, new(5), stream=stream)
        copyto(back, target, stream=stream)
        assert (back == 5).all()
        locked = pin(array)
        assert numpy_rmm.is_pinned(array)
        locked.close()
        assert not numpy_rmm.is_pinned(array)
        assert not is_active()
        locked = pin(array)
        driver.check(driver.cuCtxDestroy(context))
        locked.close()
        numpy_rmm.trim()
        assert not is_active()
        """
    )


@pytest.mark.parametrize("ends", ["after", "before"])
@pytest.mark.parametrize("on", ["default", "theirs", "ours"])
@pytest.mark.parametrize("upstream", ["mapped", "allocated"])
def test_device_memory_with_no_primary_context(
    driver: Driver, upstream: str, on: str, ends: str
) -> None:
    """It comes back behind the work there, and nobody waits for work that is not."""
    passes(
        f"""
        import time
        upstream, on, ends = {upstream!r}, {on!r}, {ends!r}
        """
        """
        nbytes = 1 << 20
        context = create()
        seen, theirs = driver.allocate(nbytes), Stream(driver.create_stream())
        other = Stream(driver.create_stream())
        source = numpy_rmm.mr.CudaMemoryResource()
        if upstream == "allocated":
            source = numpy_rmm.mr.StatisticsResourceAdaptor(source)
        pool = numpy_rmm.mr.PoolMemoryResource(source)
        stream = numpy_rmm.DEFAULT_STREAM if on == "default" else theirs
        if on == "ours":
            stream = Stream(flags=1)

        def take(on):
            return numpy_rmm.DeviceBuffer(size=nbytes, stream=on, mr=pool)

        buffer = numpy_rmm.DeviceBuffer.to_device(bytes([7]) * nbytes, stream, pool)
        address = buffer.ptr
        with driver.held(stream):
            driver.check(driver.cuMemcpyAsync(seen, address, nbytes, stream.handle))
            del buffer
            assert address not in [take(other).ptr for _ in range(3)]
            others = [take(other) for _ in range(3)]
            for each in others:
                driver.check(driver.cuMemsetD8Async(each.ptr, 9, nbytes, other.handle))
            driver.check(driver.cuStreamSynchronize(other.handle))
        driver.check(driver.cuCtxSynchronize())
        assert set(driver.read(seen, nbytes)) == {7}
        del others, each
        if ends == "before":
            driver.check(driver.cuCtxDestroy(context))
        before = time.monotonic()
        assert pool.trim() != 0
        del pool
        gc.collect()
        assert time.monotonic() - before < 5
        assert not is_active()
        """
    )


def test_a_context_that_another_thread_destroyed(driver: Driver) -> None:
    passes(
        """
        import threading
        driver.activate()
        context = create()
        thread = threading.Thread(
            target=lambda: driver.check(driver.cuCtxDestroy(context)))
        thread.start()
        thread.join()
        array = new()
        record_use(array, numpy_rmm.DEFAULT_STREAM)
        del array
        with pin(np.zeros(1 << 20)):
            new()
        numpy_rmm.trim()
        """
    )
